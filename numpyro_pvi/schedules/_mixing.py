"""Extrapolation over rounds where sites are two numbers per row: Anderson mixing of their last targets."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import mixing_shares
from ..families import GaussianNatural
from ..sites import SiteStack

# Rounds remembered; rows from which on a round costs so much that fewer rounds matter; and the residual, in posterior sds and
# their like for the precision, beyond which steps say too little of one another.
WINDOW, LEAST_ROWS, NEAR = 6, 128, 5.0


class Mixing(NamedTuple):
    """The last rounds' sites and what they asked for, oldest first; a leading axis of :data:`WINDOW`."""

    points: GaussianNatural
    targets: GaussianNatural
    filled: Int[Array, ""]
    # Whether the last mixture was refused: the next round then takes its plain step.
    refused: Bool[Array, ""]


def no_mixing(problem: Any, whole: bool, dtype: Any) -> Mixing | None:
    """An empty memory, or None where rounds are not extrapolated.

    Args:
        problem: the factors.
        whole: whether the schedule takes full steps of its own accord.
        dtype: of q.

    Returns:
        The memory: only for sites by rows, from :data:`LEAST_ROWS` rows on, under a solver of one full step a visit.
    """
    solver = problem.solver
    if not (problem.flat and whole) or not solver.immediate or solver.step_size != 1.0:
        return None
    rows = problem.prior_natural.precision.shape[0]
    if rows < LEAST_ROWS:
        return None
    zeros = jnp.zeros((WINDOW, rows), dtype)
    empty = GaussianNatural(zeros, zeros)
    return Mixing(empty, empty, jnp.int32(0), jnp.array(False))


def mixture(problem: Any, mixing: Mixing, carry: Any, proposal: SiteStack) -> tuple[Mixing, SiteStack, Bool[Array, ""]]:
    """Remember a round's sites and targets, and extrapolate from those remembered.

    Args:
        problem: the factors, with sites by rows.
        mixing: the memory.
        carry: where things stand.
        proposal: what every row asks for there.

    Returns:
        The memory, the mixture of targets whose residuals are least in q's Fisher metric (Anderson 1965), and whether to try it.
    """

    def push(stack, new):
        return jnp.roll(stack, -1, axis=0).at[-1].set(new[0])

    points = jax.tree.map(push, mixing.points, carry.sites.groups)
    targets = jax.tree.map(push, mixing.targets, proposal.groups)
    filled = jnp.minimum(mixing.filled + 1, WINDOW)
    residuals = targets - points
    change = jax.tree.map(lambda r: jnp.append(r[-1] - r[:-1], r[-1:], axis=0), residuals)
    gram = problem.family.inner_products(carry.evaluation.moments, change)
    shares = mixing_shares(gram, filled)
    mixed = jax.tree.map(lambda t: jnp.tensordot(shares, t, 1)[None], targets)
    attempt = (filled > 1) & ~mixing.refused & (_length(gram) <= NEAR) & carry.evaluation.moments.valid
    return Mixing(points, targets, filled, mixing.refused), SiteStack(mixed, proposal.prior), attempt


def _length(gram: Float[Array, "W W"]) -> Float[Array, ""]:
    """Of the newest residual; infinity where it is no number."""
    square = gram[-1, -1]
    return jnp.where(jnp.isfinite(square), jnp.sqrt(jnp.maximum(square, 0.0)), jnp.inf)
