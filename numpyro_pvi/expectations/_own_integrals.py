"""The integral of a row's factor over latents of the row's own, from draws of q in which the factor is looked at.

Given the shared latents a row's factor f(z) is often affine in the statistics T of its own latents: ``f = c + <eta, T> + log h``
is a member, whose integral ``c + A(eta)`` and mean statistics are in closed form. So f over q is regressed on T over the draws,
exactly where it is affine, and what is left of it is weighed: the member is a control variate, as in :mod:`._product_moments`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families import ProductFamily, ProductMean, ProductNatural
from ._product_moments import paired, weighable

# Nats of a factor's rounding from which on its integral says nothing.
_LOST = 1.0


class OwnDraws(NamedTuple):
    """Draws of one row's own latents from q, which serve all values of the shared latents."""

    q: ProductNatural
    # By component, with a leading axis of draws.
    statistics: dict[str, Any]
    # The same in coordinates of mean 0 and covariance 1 over the draws, and the root of their covariance.
    white: Float[Array, "K P"]
    root: Float[Array, "P P"]
    # ``<eta_q, T> + log h`` at the draws, nats: the log density of q less its normaliser.
    log_q: Float[Array, "K"]


def own_draws(family: ProductFamily, q: ProductNatural, statistics: dict, log_h: Float[Array, "K"]) -> OwnDraws:
    """Draws of q, ready for :func:`own_integral`.

    Args:
        family: of one row's own latents.
        q: natural parameters of the row's members.
        statistics: of draws of them, by component, with a leading axis.
        log_h: log base measure of the draws, nats.

    Returns:
        The draws.
    """
    ready = weighable(family, q, {}, statistics)
    return OwnDraws(q, statistics, ready.white, ready.root, paired(family, q, statistics) + log_h)


def own_integral(
    family: ProductFamily, draws: OwnDraws, factor: Float[Array, "K"]
) -> tuple[Float[Array, ""], ProductMean]:
    """``log int exp f(z) dz`` in nats, and the mean statistics of z in proportion to ``exp f``.

    Args:
        family: of one row's own latents.
        draws: as of :func:`own_draws`.
        factor: f at the draws, with the density of the latents, nats.

    Returns:
        Both; exact for any draws where f less log h is affine in the statistics, else of their noise. Where rounding leaves nothing
        of f, for shared latents far out, the integral is -inf.
    """
    white, ratio, count = draws.white, factor - draws.log_q, factor.shape[0]
    slope = white.T @ (ratio - jnp.mean(ratio)) / count
    # The whitening's own rounding.
    slope = slope + white.T @ (ratio - jnp.mean(ratio) - white @ slope) / count
    change = family.from_minimal(jax.scipy.linalg.solve_triangular(draws.root, slope, trans=1, lower=True))
    # Outside the domain q itself stands for the member.
    inside = family.in_domain(draws.q + change)
    change = jax.tree.map(lambda x: jnp.where(inside, x, 0.0), change)
    line = jnp.where(inside, white @ slope, 0.0)
    first = paired(family, change, jax.tree.map(lambda x: x[:1], draws.statistics))[0]
    member, gap = draws.q + change, line - line[0] + first
    value = jax.nn.logsumexp(ratio) - jax.nn.logsumexp(gap) + family.log_partition(member)
    lost = jnp.max(jnp.where(jnp.isfinite(ratio), jnp.abs(ratio), 0.0)) * jnp.finfo(ratio.dtype).eps
    value = jnp.where(jnp.isfinite(value) & (lost < _LOST), value, -jnp.inf)
    apart = jax.nn.softmax(ratio) - jax.nn.softmax(line)
    known = family.natural_to_mean(member)
    leaves = [
        x + jnp.tensordot(apart, t, axes=1)
        for x, t in zip(jax.tree.leaves(known), jax.tree.leaves(draws.statistics), strict=True)
    ]
    return value, jax.tree.unflatten(jax.tree.structure(known), leaves)
