"""The integral of a row's factor over latents of the row's own, from draws of q in which the factor is looked at.

Given the shared latents a row's factor f(z) is affine in the statistics T of its own latents: ``f = c + <eta, T> + log h`` is a
member, whose integral ``c + A(eta)`` and mean statistics are in closed form. So f over q is regressed on T over the draws, which is
exact for any draws. Factors that are not affine are not taken: weights of draws from q miss a row that says much more than q knows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families import ProductFamily, ProductMean, ProductNatural
from ._product_moments import paired, weighable

# Nats of rounding from which on a row's integral says nothing.
_LOST = 0.1


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
        Both, exact for any draws. Where rounding leaves too little, for shared latents or a member far out, the integral is -inf.
    """
    white, ratio, half = draws.white, factor - draws.log_q, factor.shape[0] // 2
    member, change = _member(family, draws, _slope(white, ratio))
    value = _integral(family, draws, ratio, member, change)
    # What rounding leaves of a member far from the draws shows in what either half of them makes of it.
    halves = [_member(family, draws, _slope(white[at], ratio[at])) for at in (slice(half), slice(half, None))]
    one, other = (_integral(family, draws, ratio, *found) for found in halves)
    rest = ratio - paired(family, change, draws.statistics)
    bent, lost = jnp.max(jnp.abs(rest - jnp.mean(rest))), jnp.max(jnp.abs(ratio)) * jnp.finfo(ratio.dtype).eps
    # A NaN is close to nothing.
    close = (jnp.abs(one - other) < _LOST) & (bent < _LOST) & (lost < _LOST)
    known = close & jnp.isfinite(value) & family.in_domain(member)
    return jnp.where(known, value, -jnp.inf), family.natural_to_mean(member)


def _slope(white: Float[Array, "J P"], ratio: Float[Array, "J"]) -> Float[Array, "P"]:
    """Least squares of the ratio on the whitened statistics, with one step against the rounding of the first."""
    white, ratio = white - jnp.mean(white, axis=0), ratio - jnp.mean(ratio)
    gram = white.T @ white
    slope = jnp.linalg.solve(gram, white.T @ ratio)
    return slope + jnp.linalg.solve(gram, white.T @ (ratio - white @ slope))


def _member(family: ProductFamily, draws: OwnDraws, slope: Float[Array, "P"]) -> tuple[ProductNatural, ProductNatural]:
    """The member whose log density over q's has this slope in whitened statistics, and its change from q."""
    change = family.from_minimal(jax.scipy.linalg.solve_triangular(draws.root, slope, trans=1, lower=True))
    return draws.q + change, change


def _integral(
    family: ProductFamily, draws: OwnDraws, ratio: Float[Array, "K"], member: ProductNatural, change: ProductNatural
) -> Float[Array, ""]:
    """The integral in nats, where the ratio is affine in the statistics."""
    rest = ratio - paired(family, change, draws.statistics)
    return jnp.mean(rest) + family.log_partition(member)
