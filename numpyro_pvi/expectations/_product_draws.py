"""Moments of a tilted distribution of a product of families, from weighted draws of q.

Weighted means of the statistics T are noisy even where the factor is conjugate and nothing need be estimated. So they are matched
*on the draws*: the draws theta_s, with weights in proportion to ``exp <d, T(theta_s)>``, are a family of their own, whose log
partition function is ``log sum_s exp <d, T(theta_s)>``, and d is the member with the mean statistics of the weights
``w_s = (p / t)^alpha``. Where ``log w`` is affine in T this is its slope to rounding, whatever the draws; elsewhere the draws'
noise is that of what ``exp <d, T>`` leaves of w. The same holds for the normaliser.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import all_finite, scaled_cholesky
from ..families import ProductFamily, ProductMean, ProductNatural, base_family
from ._tilted import LEAST_PER_LATENT, LEAST_SHARE, TEMPERINGS, Tilted

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
    point = family.to_minimal(q)
    like = jax.tree.structure(q)

    def coordinates(leaves: list) -> Array:
        return jax.linear_transpose(family.from_minimal, point)(jax.tree.unflatten(like, leaves))[0]

    rows = jax.vmap(coordinates)(jax.tree.leaves(ProductMean(statistics)))
    rows = rows - jnp.mean(rows, axis=0)
    root, _ = scaled_cholesky(rows.T @ rows / count)
    white = jax.scipy.linalg.solve_triangular(root, rows.T, lower=True).T
    return WeightedDraws(values, statistics, white, root)


def tilted_by_draws(
    family: ProductFamily,
    draws: WeightedDraws,
    factor: Float[Array, "S"],
    q: ProductNatural,
    site: ProductNatural,
    power: float | Float[Array, ""],
) -> Tilted:
    """What matching the moments of ``q (p / t)^power`` asks for, from weighted draws of q; the power is halved as needed.

    It is halved while the cavity is improper, or the effective sample size below a twentieth of the draws or twice the number of
    statistics.

    Args:
        family: of q.
        draws: as of :func:`draw`, from this q.
        factor: log density of the factor at them, nats.
        q: natural parameters of q.
        site: the factor's site.
        power: alpha.

    Returns:
        What moment matching asks for: ``(eta_qhat - eta_q) / power``, and ``(1 / power) log E_q[(p / t)^power]`` in nats.
    """
    parts = [_paired(own, site.parts[n], draws.statistics[n]) for n, own in family.components]
    ratio = factor - sum(parts, start=jnp.zeros(()))
    count, size = draws.white.shape
    least = max(LEAST_SHARE * count, LEAST_PER_LATENT * size)
    shares = 0.5 ** jnp.arange(TEMPERINGS + 1, dtype=ratio.dtype)

    def look(share: Array) -> tuple[Array, Array]:
        weights = jax.nn.softmax(power * share * ratio)
        ess = 1.0 / jnp.sum(weights**2)
        return ess, family.in_domain(q - site * (power * share)) & (ess >= least)

    ess, good = jax.vmap(look)(shares)
    finite = jnp.all(~jnp.isnan(ratio)) & jnp.any(jnp.isfinite(ratio)) & jnp.all(ratio < jnp.inf)
    share = shares[jnp.argmax(good)]
    used = power * share
    weights = jax.nn.softmax(used * ratio)
    slope, fits = _matched_slope(draws.white, weights)
    change = family.from_minimal(jax.scipy.linalg.solve_triangular(draws.root, slope, trans=1, lower=True))
    own = jax.nn.softmax(draws.white @ slope)
    about = draws.white - own @ draws.white
    bent = about.T @ (own[:, None] * about)
    root, _ = scaled_cholesky(bent)
    reach = jax.scipy.linalg.cho_solve((root, True), about.T).T
    noise = jnp.sqrt(jnp.sum((weights - own)[:, None] ** 2 * reach**2)) / used
    valid = finite & jnp.any(good) & fits & all_finite(change)
    value, variance = _log_mean(family, draws, ratio, q, change, share, power)
    return Tilted(
        change * (1.0 / used), value, variance, ess[0], noise, share, jnp.int32(0), jnp.array(False), finite, valid
    )


def _paired(family: Any, natural: Any, statistics: Any) -> Float[Array, "S"]:
    return jax.vmap(lambda t: jnp.asarray(family.inner(natural, t)))(statistics)


def _log_mean(
    family: ProductFamily,
    draws: WeightedDraws,
    ratio: Array,
    q: ProductNatural,
    change: ProductNatural,
    share: Array,
    power: Any,
) -> tuple[Array, Array]:
    """``(1 / power) log E_q[(p / t)^power]``, with ``exp <change, T>`` for control where it has a mean; and its variance."""
    logs, count = power * ratio, ratio.shape[0]
    parts = [_paired(own, change.parts[n], draws.statistics[n]) for n, own in family.components]
    line: Any = sum(parts, start=jnp.zeros(()))
    gap = family.log_partition(q + change) - family.log_partition(q)
    known = gap - jax.nn.logsumexp(line)
    good = (share == 1.0) & family.in_domain(q + change) & jnp.isfinite(known)
    weights = jax.nn.softmax(logs)
    apart = weights - jnp.where(good, jax.nn.softmax(line), 1.0 / count)
    value = jax.nn.logsumexp(logs) + jnp.where(good, known, -jnp.log(1.0 * count))
    return value / power, jnp.sum(apart**2) / power**2


def _matched_slope(white: Float[Array, "S P"], weights: Float[Array, "S"]) -> tuple[Float[Array, "P"], Bool[Array, ""]]:
    """d with ``sum_s w_s T_s`` the mean of the draws' own family at d: a convex problem, by Newton's method."""
    target, size = weights @ white, white.shape[1]
    eps = float(jnp.finfo(white.dtype).eps)
    # The error after a step is about the square of what it moved by.
    enough = 0.1 * eps**0.5

    def gap(lines: Array, slope: Array) -> Array:
        return jax.nn.logsumexp(lines, axis=-1) - slope @ target

    def unfinished(carry: tuple) -> Array:
        _, size, step = carry
        return (step < _STEPS) & (size > enough)

    def newton(carry: tuple) -> tuple:
        slope, _, step = carry
        line = white @ slope
        own = jax.nn.softmax(line)
        middle = own @ white
        about = white - middle
        root, _ = scaled_cholesky(about.T @ (own[:, None] * about) + eps * jnp.eye(size, dtype=white.dtype))
        move = jax.scipy.linalg.cho_solve((root, True), target - middle)
        shares = 0.5 ** jnp.arange(_SHARES, dtype=white.dtype)
        tried = slope + shares[:, None] * move
        values = gap(line + shares[:, None] * (white @ move), tried)
        # Within rounding of each other the longest counts.
        best = jnp.argmax(values <= jnp.min(values) + 4 * eps * (1 + jnp.abs(jnp.min(values))))
        return tried[best], jnp.sqrt(jnp.maximum((target - middle) @ move, 0.0)), step + 1

    first = jnp.zeros((size,), white.dtype), jnp.ones((), white.dtype), jnp.int32(0)
    slope, left, _ = jax.lax.while_loop(unfinished, newton, first)
    return slope, left <= enough
