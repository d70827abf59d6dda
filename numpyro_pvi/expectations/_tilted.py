"""Moments of the tilted distribution ``q (p / t)^alpha`` from weighted points, and what every way to take them returns."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, inverse_root, scaled_cholesky, symmetrise
from ..families import GaussianFamily, GaussianMoments, GaussianNatural

# Powers are halved so often before a group's moments are given up: 2^-12 of its power.
TEMPERINGS = 12
# A weighted set of points is believed from this share of its size on, and from twice as many as there are latents.
LEAST_SHARE, LEAST_PER_LATENT = 0.05, 2.0
# Nats below the heaviest point that the border of a grid must lie.
_BORDER = 16.0


class Tilted(NamedTuple):
    """What moment matching one factor asks for, at the power alpha (or a smaller one, ``temper`` times it)."""

    # (eta_qhat - eta_q) / alpha: what a full step adds to the site.
    change: Any
    # (1 / alpha) log E_q[(p / t)^alpha], nats: the factor's share of the evidence; and its Monte Carlo variance.
    value: Float[Array, "*M"]
    variance: Float[Array, "*M"]
    # Effective sample size at the full power, NaN where nothing is sampled.
    ess: Float[Array, "*M"]
    # Standard error of the change of q's mean that a full step makes, in sds, largest coordinate; 0 where nothing is sampled.
    noise: Float[Array, "*M"]
    # Share of the power that was used: 1 unless the cavity was improper or the weights had collapsed.
    temper: Float[Array, "*M"]
    # Rows that kept their sites because their moments were not finite.
    held: Int[Array, "*M"]
    # Whether a finer quadrature rule is needed than was compiled in.
    missed: Bool[Array, "*M"]
    # Whether the factor is finite where q is, and whether a tilted distribution with moments was found.
    finite: Bool[Array, "*M"]
    valid: Bool[Array, "*M"]
    # What to hand to the factor's next visit: where its chains stand; None where nothing is kept.
    memory: Any = None


def least_ess(count: int, size: int) -> float:
    """The smallest effective sample size of weighted draws that is believed.

    Args:
        count: draws.
        size: numbers that are matched.

    Returns:
        A twentieth of the draws, or twice as many as there are numbers.
    """
    return max(LEAST_SHARE * count, LEAST_PER_LATENT * size)


def proper_share(family: Any, q: Any, site: Any, power: Any, dtype: Any) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """The largest share 1, 1/2, 1/4, ... of the power at which the cavity can be normalised, and whether there is any."""
    shares = 0.5 ** jnp.arange(TEMPERINGS + 1, dtype=dtype)
    good = jax.vmap(lambda share: family.in_domain(q - site * (power * share)))(shares)
    return shares[jnp.argmax(good)], jnp.any(good)


class PointCloud(NamedTuple):
    """Points in the whitened coordinates of a proposal, with their log weights under it."""

    eps: Float[Array, "S D"]
    # Log of the proposal's density over the points' own, up to a constant: zero for draws.
    log_weight: Float[Array, "S"]
    # Points on the border of a grid; none for draws.
    border: Bool[Array, "S"]


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A Gaussian to weigh points from: q itself, or a Laplace approximation of the tilted distribution."""

    natural: GaussianNatural
    moments: GaussianMoments


def from_points(
    family: GaussianFamily,
    cloud: PointCloud,
    factor: Float[Array, "S"],
    q: GaussianNatural,
    site: GaussianNatural,
    proposal: Proposal,
    power: float | Float[Array, ""],
) -> Tilted:
    """Moments by self-normalised weights ``w_s ~ q(theta_s) / proposal(theta_s) (p / t)^alpha``, power halved as needed.

    In the proposal's whitened coordinates, where the points' own mean is 0 and their covariance the identity to the last
    digit (their moments as control variates: where weights are equal, the moments are the proposal's), with normalised w

        mu = sum_s w_s eps_s,    C = sum_s w_s eps_s eps_s^T - mu mu^T,

    and the natural parameters of the tilted distribution's match follow from ``C^-1 - 1`` and mu without a difference of
    large numbers. The power is halved while the cavity ``eta_q - alpha eta_m`` is not normalisable (a grid that sees its
    mass within its border needs no proper cavity) or the effective sample size is below a twentieth of the points.

    Args:
        family: the Gaussian family of q.
        cloud: the points.
        factor: log density of the factor at them, nats.
        q: natural parameters of q.
        site: the factor's site.
        proposal: where the points come from.
        power: alpha.

    Returns:
        What moment matching asks for.
    """
    points = family.draw(proposal.moments, cloud.eps)
    ratio = factor - log_site(family, site, points)
    base = cloud.log_weight + log_gap(family, q, family.moments(q), proposal, points)
    is_grid = jnp.any(cloud.border)
    count = points.shape[0]
    least = jnp.where(is_grid, 0.0, jnp.maximum(LEAST_SHARE * count, LEAST_PER_LATENT * family.dim))
    shares = 0.5 ** jnp.arange(TEMPERINGS + 1, dtype=ratio.dtype)

    def look(share):
        logs = base + power * share * ratio
        top = jnp.max(logs)
        weights = jnp.exp(logs - top)
        ess = jnp.sum(weights) ** 2 / jnp.sum(weights**2)
        # Mass beyond the border is what an improper tilted distribution has.
        inside = jnp.max(jnp.where(cloud.border, logs, -jnp.inf)) < top - _BORDER
        proper = jnp.where(is_grid, inside, family.in_domain(q - site * (power * share)))
        return ess, proper & (ess >= least)

    ess, good = jax.vmap(look)(shares)
    finite = jnp.all(~jnp.isnan(ratio)) & jnp.any(jnp.isfinite(ratio))
    share = shares[jnp.argmax(good)]
    used = power * share
    change, noise, fits = _matched(family, cloud, base + used * ratio, q, proposal, is_grid)
    change = change * (1.0 / used)
    whole = base + power * ratio
    log_mean = jax.nn.logsumexp(whole) - jax.nn.logsumexp(cloud.log_weight)
    spread = jnp.where(is_grid, 0.0, jnp.maximum(1.0 / ess[0] - 1.0 / count, 0.0)) / power**2
    counted = jnp.where(is_grid, jnp.nan, ess[0])
    valid = finite & jnp.any(good) & fits
    return Tilted(
        change, log_mean / power, spread, counted, noise / used, share, jnp.int32(0), jnp.array(False), finite, valid
    )


def _matched(family, cloud: PointCloud, logs, q, proposal: Proposal, is_grid):
    """``eta_qhat - eta_q`` from weighted points, the mean's standard error in sds, and whether the covariance is one."""
    weights = jax.nn.softmax(logs)
    eps = cloud.eps
    mean = weights @ eps
    error = jnp.sqrt(jnp.max((weights - 1.0 / eps.shape[0]) ** 2 @ (eps - mean) ** 2))
    if not family.full:
        variance = weights @ eps**2 - mean**2
        change = matched_change(family, mean, variance, q, proposal)
        return change, jnp.where(is_grid, 0.0, error), jnp.all(variance > 0)
    covariance = symmetrise((weights[:, None] * eps).T @ eps - mean[:, None] * mean)
    fits = scaled_cholesky(covariance)[1]
    return matched_change(family, mean, covariance, q, proposal), jnp.where(is_grid, 0.0, error), fits


def matched_change(
    family: GaussianFamily, mean: Float[Array, "D"], covariance: Array, q: GaussianNatural, proposal: Proposal
) -> GaussianNatural:
    """``eta_qhat - eta_q`` of moments in a proposal's whitened coordinates, without a difference of large numbers.

    Args:
        family: the Gaussian family of q.
        mean: of the tilted distribution.
        covariance: its covariance, or (mean-field) variances.
        q: natural parameters of q.
        proposal: whose coordinates these are.

    Returns:
        The change of the natural parameters.
    """
    start, moments = proposal.natural - q, proposal.moments
    if not family.full:
        precision = (1.0 / covariance - 1.0) / moments.scale**2
        located = moments.loc + moments.scale * mean
        return start + GaussianNatural(precision * located + mean / moments.scale, precision)
    root = inverse_root(scaled_cholesky(covariance)[0])
    # S^-T of the proposal's covariance root S.
    back = proposal.natural.precision @ moments.scale
    inner = root @ root.T - jnp.eye(mean.shape[0], dtype=mean.dtype)
    precision = symmetrise(back @ inner @ back.T)
    vector = precision @ (moments.loc + moments.scale @ mean) + back @ mean
    return start + GaussianNatural(vector, precision)


def log_site(family: GaussianFamily, site: GaussianNatural, points: Float[Array, "S D"]) -> Float[Array, "S"]:
    """``log t_m`` at points, nats."""
    image = jax.vmap(lambda point: family.precision_product(site, point))(points)
    return points @ site.precision_mean - 0.5 * jnp.sum(points * image, axis=-1)


def log_gap(family, q: GaussianNatural, moments: GaussianMoments, proposal: Proposal, points) -> Float[Array, "S"]:
    """``log q - log proposal`` at points, both normalised, nats; exactly zero where they are the same."""
    gap = q - proposal.natural
    own, other = (
        0.5 * jnp.vdot(n.precision_mean, m.loc) - 0.5 * m.log_det_precision
        for n, m in ((q, moments), (proposal.natural, proposal.moments))
    )
    return log_site(family, gap, points) - (own - other)


def exact_tilted(
    family: GaussianFamily, factor: GaussianNatural, constant: Any, q: GaussianNatural, site: GaussianNatural, power
) -> Tilted:
    """The closed form for a quadratic factor ``f = c + h^T theta - 1/2 theta^T P theta``.

    Under full covariance ``(eta_qhat - eta_q) / alpha = eta_f - eta_m`` whatever alpha. Under a mean-field q the tilted
    Gaussian keeps its correlations and its marginals are matched.

    Args:
        family: the Gaussian family of q.
        factor: dense natural parameters ``(h, P)``.
        constant: c, nats.
        q: natural parameters of q.
        site: the factor's site.
        power: alpha.

    Returns:
        What moment matching asks for.
    """
    moments = family.moments(q)
    own = 0.5 * jnp.vdot(q.precision_mean, moments.loc) - 0.5 * moments.log_det_precision
    rest = q - site * power
    precision = rest.precision if family.full else jnp.diag(rest.precision)
    matrix, proper = scaled_cholesky(precision + power * factor.precision)
    root = inverse_root(matrix)
    vector = rest.precision_mean + power * factor.precision_mean
    loc = root @ (root.T @ vector)
    tilted = 0.5 * jnp.vdot(vector, loc) - jnp.sum(jnp.log(jnp.diagonal(matrix)))
    if family.full:
        change = factor - site
    else:
        found = 1.0 / jnp.sum(root**2, axis=-1)
        change = (GaussianNatural(found * loc, found) - q) * (1.0 / power)
    finite = jnp.isfinite(constant) & jnp.all(jnp.isfinite(factor.precision)) & jnp.all(jnp.isfinite(vector))
    # Full covariance needs no tilted distribution for its step: the difference is the factor itself.
    usable = finite & (proper | family.full)
    zero, value = jnp.zeros_like(own), jnp.where(proper, (tilted - own) / power + constant, jnp.nan)
    return Tilted(change, value, zero, zero + jnp.nan, zero, zero + 1.0, jnp.int32(0), jnp.array(False), finite, usable)


def linear_tilted(family: Any, factor: Any, constant: Float[Array, ""], q: Any, site: Any, power: Any) -> Tilted:
    """The closed form for a factor ``f = c + <eta_f, T(theta)>``, affine in the statistics of any family jointly.

    The tilted distribution is a member of the family, and ``(eta_qhat - eta_q) / alpha = eta_f - eta_m`` whatever alpha: no
    tilted distribution is needed for the step.

    Args:
        family: of q.
        factor: natural parameters eta_f.
        constant: c, nats.
        q: natural parameters of q.
        site: the factor's site.
        power: alpha.

    Returns:
        What moment matching asks for; the value is NaN where there is no tilted distribution.
    """
    change = factor - site
    tilted = q + change * power
    gap = family.log_partition(tilted) - family.log_partition(q)
    value = jnp.where(family.in_domain(tilted), gap / power + constant, jnp.nan)
    zero, one = jnp.zeros_like(value), jnp.ones_like(value)
    finite = jnp.isfinite(constant) & all_finite(change)
    return Tilted(change, value, zero, zero + jnp.nan, zero, one, jnp.int32(0), jnp.array(False), finite, finite)
