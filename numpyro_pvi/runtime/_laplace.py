"""The Gaussian at a tilted distribution's mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._numerics import all_finite
from ..expectations import Proposal
from ..families import GaussianFamily
from ..sites import cavity, select

# Step of Newton's search, in sds of q, below which it has arrived; halvings of a step.
_ARRIVED = 1e-3
_HALVINGS = 12


def laplace_proposal(
    family: GaussianFamily,
    look: Callable[[Float[Array, "D"]], tuple],
    q: Any,
    site: Any,
    power: float | Float[Array, ""],
    num_steps: int,
) -> Proposal:
    """Search the mode of ``q (p / t)^power`` by Newton's method, and take the curvature there.

    Args:
        family: the Gaussian family of q.
        look: a point to value, gradient and Hessian of the factor's log density.
        q: natural parameters of q.
        site: the factor's site.
        power: alpha.
        num_steps: most steps.

    Returns:
        The Gaussian of the last point's curvature (q's own precision where that is not positive definite); q itself
        where the factor is not finite.
    """
    rest, own = cavity(q, site, power), family.moments(q)
    sd = family.sds(own)

    def at(point):
        value, slope, bend = look(point)
        curvature = -bend if family.full else -jnp.diagonal(bend)
        image = family.precision_product(rest, point)
        total = power * value + point @ (rest.precision_mean - 0.5 * image)
        slope = power * slope + rest.precision_mean - image
        precision = rest.precision + power * 0.5 * (curvature + curvature.T)
        proper = family.in_domain(family.natural(slope, precision))
        precision = select(proper, precision, q.precision)
        gaussian = family.natural(family.precision_product(family.natural(slope, precision), point) + slope, precision)
        return total, family.moments(gaussian).loc, precision

    def unfinished(carry):
        _, count, (_, aim, _), gain = carry
        return (count < num_steps) & (gain > _ARRIVED) & all_finite(aim)

    def step(carry):
        point, count, (total, aim, precision), _ = carry

        def worse(state):
            share, (now, *_), tries = state
            return ~(now >= total - 1e-6 * jnp.abs(total)) & (tries < _HALVINGS)

        def shorten(state):
            share, _, tries = state
            return 0.5 * share, at(point + 0.5 * share * (aim - point)), tries + 1

        first = jnp.ones((), point.dtype), at(aim), jnp.int32(0)
        share, found, tries = jax.lax.while_loop(worse, shorten, first)
        moved = share * (aim - point)
        good = tries < _HALVINGS
        kept = jax.tree.map(
            lambda a, b: jnp.where(good, a, b), (point + moved, found), (point, (total, aim, precision))
        )
        gain = jnp.where(good, jnp.max(jnp.abs(moved) / sd), 0.0)
        return kept[0], count + 1, kept[1], gain

    start = own.loc, jnp.int32(0), at(own.loc), jnp.asarray(jnp.inf, own.loc.dtype)
    point, _, (_, _, precision), _ = jax.lax.while_loop(unfinished, step, start)
    vector = family.precision_product(family.natural(point, precision), point)
    natural = family.natural(vector, precision)
    natural = select(family.in_domain(natural), natural, q)
    return Proposal(natural, family.moments(natural))
