"""Moments of a tilted distribution of a product of families, from weighted draws of q.

Weighted means of the statistics T are noisy even where the factor is conjugate and nothing need be estimated. So they are matched
*on the draws*: the draws theta_s, with weights in proportion to ``exp <d, T(theta_s)>``, are a family of their own, whose log
partition function is ``log sum_s exp <d, T(theta_s)>``, and d is the member with the mean statistics of the weights
``w_s = (p / t)^alpha``. Where ``log w`` is affine in T this is its slope to rounding, whatever the draws; elsewhere the draws'
noise is that of what ``exp <d, T>`` leaves of w. The same holds for the normaliser.

Draws need not be of q: with base weights ``b_s ~ q / g`` of draws of another density g the members are ``b_s exp <d, T(theta_s)>``.
Draws of the tilted distribution itself have ``b_s = 1 / w_s`` and are all worth the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import all_finite, scaled_cholesky
from ..families import ProductFamily, ProductMean, ProductNatural, base_family, fisher_matrix, minimal_mean
from ._tilted import TEMPERINGS, Tilted, least_ess

# Newton steps, and shares of one that are compared.
_STEPS, _SHARES = 40, 8


class WeightedDraws(NamedTuple):
    """Draws of q, ready to be weighted: those of one round serve all groups."""

    # By component, with a leading axis of draws.
    values: dict[str, Any]
    statistics: dict[str, Any]
    # Statistics in minimal coordinates, of mean 0 and covariance 1 over the draws; the root of their covariance.
    white: Float[Array, "S P"]
    root: Float[Array, "P P"]


def draw(family: ProductFamily, q: ProductNatural, key: Any, count: int) -> WeightedDraws:
    """Draw from q.

    Args:
        family: of q.
        q: natural parameters.
        key: a random key.
        count: S.

    Returns:
        The draws with their statistics.
    """
    values, statistics = {}, {}
    for i, (name, own) in enumerate(family.components):
        base: Any = base_family(own)
        found = base.sample_with_statistics(q.parts[name], jax.random.fold_in(key, i), (count,))
        values[name], statistics[name] = found
    return weighable(family, q, values, statistics)


def weighable(
    family: ProductFamily,
    q: ProductNatural,
    values: dict,
    statistics: dict,
    weights: Float[Array, "S"] | None = None,
) -> WeightedDraws:
    """Draws of any density, ready to be weighted.

    Args:
        family: of q.
        q: natural parameters.
        values: by component, with a leading axis of draws.
        statistics: of the values; all finite.
        weights: what each counts towards the mean and covariance that whiten them, adding up to 1; None is as much as any other.

    Returns:
        The draws.
    """
    rows = jax.vmap(lambda *leaves: minimal_mean(family, q, leaves))(*jax.tree.leaves(ProductMean(statistics)))
    if weights is None:
        rows = rows - jnp.mean(rows, axis=0)
        root, _ = scaled_cholesky(rows.T @ rows / rows.shape[0])
    else:
        rows = jnp.where(weights[:, None] > 0, rows - weights @ rows, 0.0)
        root, _ = scaled_cholesky(rows.T @ (weights[:, None] * rows))
    white = jax.scipy.linalg.solve_triangular(root, rows.T, lower=True).T
    return WeightedDraws(values, statistics, white, root)


def _metric(family: ProductFamily, q: ProductNatural, root: Float[Array, "P P"]) -> Float[Array, "P P"]:
    """L with ``|L^T d|`` the Fisher norm at q, its sds, of a change that is d in whitened coordinates."""
    half = jax.scipy.linalg.solve_triangular(root, fisher_matrix(family, q), lower=True)
    return scaled_cholesky(jax.scipy.linalg.solve_triangular(root, half.T, lower=True))[0]


class Matching(NamedTuple):
    """The member with the mean statistics of weighted draws, and how each draw's noise enters."""

    # eta_qhat - eta_q, and whether it was found.
    change: Any
    fits: Bool[Array, ""]
    # What each draw adds to the error of the change, in sds of q, and to that of the value times the power.
    influence: Float[Array, "S P"]
    apart: Float[Array, "S"]
    # (1 / power) log E_q[(p / t)^power], nats.
    value: Float[Array, ""]


def tilted_by_draws(
    family: ProductFamily,
    draws: WeightedDraws,
    factor: Float[Array, "S"],
    q: ProductNatural,
    site: ProductNatural,
    power: float | Float[Array, ""],
    log_base: Float[Array, "S"] | None = None,
) -> Tilted:
    """What matching the moments of ``q (p / t)^power`` asks for, from weighted draws; the power is halved as needed.

    It is halved while the cavity is improper, or the effective sample size below a twentieth of the draws or twice the number of
    statistics.

    Args:
        family: of q.
        draws: as of :func:`draw`, from this q, or of another density.
        factor: log density of the factor at them, nats.
        q: natural parameters of q.
        site: the factor's site.
        power: alpha.
        log_base: log of q over the draws' density at them; None for draws of q.

    Returns:
        What moment matching asks for: ``(eta_qhat - eta_q) / power``, and ``(1 / power) log E_q[(p / t)^power]`` in nats.
    """
    ratio = factor - paired(family, site, draws.statistics)
    base = jnp.zeros_like(ratio) if log_base is None else log_base
    count, size = draws.white.shape
    least = least_ess(count, size)
    shares = 0.5 ** jnp.arange(TEMPERINGS + 1, dtype=ratio.dtype)

    def look(share: Array) -> tuple[Array, Array]:
        weights = jax.nn.softmax(base + power * share * ratio)
        ess = 1.0 / jnp.sum(weights**2)
        return ess, family.in_domain(q - site * (power * share)) & (ess >= least)

    ess, good = jax.vmap(look)(shares)
    finite = jnp.all(~jnp.isnan(ratio)) & jnp.any(jnp.isfinite(ratio)) & jnp.all(ratio < jnp.inf)
    share = shares[jnp.argmax(good)]
    found = matched(family, draws, base, ratio, q, share, power)
    used = power * share
    noise, variance = jnp.sqrt(jnp.sum(found.influence**2)) / used, jnp.sum(found.apart**2) / power**2
    valid = finite & jnp.any(good) & found.fits & all_finite(found.change)
    change, none = found.change * (1.0 / used), jnp.int32(0)
    return Tilted(change, found.value, variance, ess[0], noise, share, none, jnp.array(False), finite, valid)


def paired(family: ProductFamily, natural: ProductNatural, statistics: dict) -> Float[Array, "S"]:
    """``<natural, T>`` of every draw, nats."""
    parts = [
        jax.vmap(lambda t, n=n, own=own: jnp.asarray(own.inner(natural.parts[n], t)))(statistics[n])
        for n, own in family.components
    ]
    return sum(parts, start=jnp.zeros(()))


def matched(
    family: ProductFamily,
    draws: WeightedDraws,
    base: Float[Array, "S"],
    ratio: Float[Array, "S"],
    q: ProductNatural,
    share: Float[Array, ""],
    power: float | Float[Array, ""],
    normalised: bool = True,
) -> Matching:
    """The member with the mean statistics of draws in proportion to ``exp(base + power share ratio)``.

    Args:
        family: of q.
        draws: the draws.
        base: log of q over their density.
        ratio: log of the factor over the site, nats.
        q: natural parameters of q.
        share: of the power that is used.
        power: alpha; the value is at the whole of it.
        normalised: whether ``base`` is exact, and not up to a constant. Where it is, the value uses the member for control only
            at the full power; else it needs the member, and is NaN where that is none.

    Returns:
        The member.
    """
    used = power * share
    slope, fits = _matched_slope(draws.white, base, used * ratio)
    change = family.from_minimal(jax.scipy.linalg.solve_triangular(draws.root, slope, trans=1, lower=True))
    own = jax.nn.softmax(base + draws.white @ slope)
    about = draws.white - own @ draws.white
    root, _ = scaled_cholesky(about.T @ (own[:, None] * about))
    reach = jax.scipy.linalg.cho_solve((root, True), about.T).T
    influence = (jax.nn.softmax(base + used * ratio) - own)[:, None] * (reach @ _metric(family, q, draws.root))
    # The normaliser, with exp <change, T> for control where it has a mean.
    logs, line = base + power * ratio, base + paired(family, change, draws.statistics)
    known = family.log_partition(q + change) - family.log_partition(q) - jax.nn.logsumexp(line)
    good = ((share == 1.0) | (not normalised)) & family.in_domain(q + change) & jnp.isfinite(known)
    count = ratio.shape[0]
    apart = jax.nn.softmax(logs) - jnp.where(good, jax.nn.softmax(line), 1.0 / count)
    value = jax.nn.logsumexp(logs) + jnp.where(good, known, -jnp.log(1.0 * count))
    value = value if normalised else jnp.where(good, value, jnp.nan)
    return Matching(change, fits, influence, apart, value / power)


def _matched_slope(
    white: Float[Array, "S P"], base: Float[Array, "S"], logs: Float[Array, "S"]
) -> tuple[Float[Array, "P"], Bool[Array, ""]]:
    """d for which ``b_s exp <d, T_s>`` has the mean statistics of ``b_s exp(logs_s)``: a convex problem, by Newton's method."""
    weights = jax.nn.softmax(base + logs)
    target, size = weights @ white, white.shape[1]
    eps = float(jnp.finfo(white.dtype).eps)
    # The error after a step is about the square of what it moved by.
    enough = 0.1 * eps**0.5

    def gap(lines: Array, slope: Array) -> Array:
        return jax.nn.logsumexp(lines, axis=-1) - slope @ target

    def solved(own: Array, mean: Array, wanted: Array) -> Array:
        about = white - mean
        root, _ = scaled_cholesky(about.T @ (own[:, None] * about) + eps * jnp.eye(size, dtype=white.dtype))
        return jax.scipy.linalg.cho_solve((root, True), wanted)

    def unfinished(carry: tuple) -> Array:
        _, size, step = carry
        return (step < _STEPS) & (size > enough)

    def newton(carry: tuple) -> tuple:
        slope, _, step = carry
        line = base + white @ slope
        own = jax.nn.softmax(line)
        middle = own @ white
        move = solved(own, middle, target - middle)
        shares = 0.5 ** jnp.arange(_SHARES, dtype=white.dtype)
        tried = slope + shares[:, None] * move
        values = gap(line + shares[:, None] * (white @ move), tried)
        # Within rounding of each other the longest counts.
        best = jnp.argmax(values <= jnp.min(values) + 4 * eps * (1 + jnp.abs(jnp.min(values))))
        return tried[best], jnp.sqrt(jnp.maximum((target - middle) @ move, 0.0)), step + 1

    # The regression of the logs is the answer where they are affine; q itself may be far from all draws.
    seen = jnp.where(weights > 0, logs, 0.0)
    first = solved(weights, target, (weights * (seen - weights @ seen)) @ (white - target))
    starts = jnp.stack([jnp.zeros_like(first), jnp.where(jnp.all(jnp.isfinite(first)), first, 0.0)])
    start = starts[jnp.argmin(gap(base + starts @ white.T, starts))]
    slope, left, _ = jax.lax.while_loop(unfinished, newton, (start, jnp.ones((), white.dtype), jnp.int32(0)))
    return slope, left <= enough
