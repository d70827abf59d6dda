"""Moment matching of one factor per row, where rows see the latents through one or two affine predictors.

With q and every row's site Gaussian, a row's tilted distribution differs from its cavity in the predictors only, so that
moments are 1-D or 2-D integrals: ``Z = E[p^alpha]`` under the cavity and its first two derivatives in the cavity's mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..factors import TermData, TermSpec, term_log_prob
from ..families import GaussianMoments, GaussianNatural
from ..sites import RowSites
from ._affine import AffineProgram, _clip_weights, _gram, _pull, _row_expectations
from ._expected import Expected
from .quadrature import expect_1d, expect_2d

# A row's Gaussian to integrate under is at most so many times as wide as q, in variance: a narrow integrand under a wide
# cavity would cost all digits.
_WIDEST = 9.0
# Places, in sds, at which the integrand is looked at so that it neither over- nor underflows.
_LOOKS = (-8.0, -6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 8.0)


class RowReport(NamedTuple):
    """Sums over rows that travel with :class:`Expected`: its ``target``."""

    # What full steps add to the site, and the sum of the rows' sites as they are.
    change: GaussianNatural
    old: GaussianNatural
    # Rows whose moments were not finite, and rows whose cavity was improper at the full power.
    held: Float[Array, ""]
    tempered: Float[Array, ""]


class _Law(NamedTuple):
    """A row's Gaussian over its predictors, and what is left of the integrand: ``exp(power f - linear + quadratic)``."""

    mean: Float[Array, "E K"]
    covariance: Float[Array, "E K K"]
    # log of its weight in E_q[...], nats.
    log_weight: Float[Array, "E"]


def row_sites_zero(program: AffineProgram, chunk: tuple, dtype: Any) -> RowSites:
    """Unit sites for one chunk's rows."""
    shapes = []
    for (data, mask), _ in zip(chunk, program.terms, strict=True):
        size, count, dim = mask.shape[-1], len(data.design), program.family.dim
        if program.family.full:
            shapes.append((jnp.zeros((size, count), dtype), jnp.zeros((size, count, count), dtype)))
        else:
            shapes.append((jnp.zeros((size, dim), dtype), jnp.zeros((size, dim), dtype)))
    return RowSites(tuple(shapes))


def tilted_rows(
    program: AffineProgram,
    chunk: tuple,
    sites: RowSites,
    moments: GaussianMoments,
    power: float | Float[Array, ""],
    level: Any,
    num_rules: int,
) -> Expected:
    """Match the moments of every row of a chunk, in parallel, from the same q.

    ``program``: the chunk's structure; ``chunk``: its arrays; ``sites``: its rows' sites; ``moments``: q; ``power``: alpha;
    ``level``: quadrature rule; ``num_rules``: how many rules are compiled in. Returns ``value`` the sum of ``(1/alpha) log
    E_q[(p/t)^alpha]``, ``target`` a :class:`RowReport`, ``local`` what full steps add to the rows' sites, and the quadrature's
    error as for any expectation.
    """
    one = _full_term if program.family.full else _diagonal_term
    found = [
        one(program, spec, data, mask, site, moments, power, (level, num_rules))
        for spec, (data, mask), site in zip(program.terms, chunk, sites.terms, strict=True)
    ]
    rows = RowSites(tuple(f[0] for f in found))
    total = [sum(column[1:], start=column[0]) for column in zip(*(f[1] for f in found), strict=True)]
    value, change, old, held, tempered, error, weight = total
    spread = jnp.max(jnp.stack([f[2] for f in found]))
    return Expected(
        value, RowReport(change, old, held, tempered), jnp.zeros_like(moments.loc), error, weight, spread, rows
    )


def _full_term(program, spec: TermSpec, data: TermData, mask, site: tuple, moments, power, rules):
    size = mask.shape[-1]
    design = [jnp.broadcast_to(a, (size, moments.loc.shape[0])) for a in data.design]
    vector, precision = site
    mean = jnp.stack([a @ moments.loc for a in design], axis=-1)
    spreads = [a @ moments.scale for a in design]
    covariance = jnp.stack([jnp.stack([jnp.sum(a * b, axis=-1) for b in spreads], -1) for a in spreads], -2)
    largest = _largest_share(precision, covariance)
    # The cavity is proper up to a power of 1 / largest; the reference Gaussian is never much wider than q.
    unit = 1.0 - jnp.sqrt(jnp.finfo(mean.dtype).eps)
    used = jnp.minimum(power, unit / jnp.maximum(largest, jnp.finfo(mean.dtype).tiny))
    share = jnp.minimum(used, (1.0 - 1.0 / _WIDEST) / jnp.maximum(largest, jnp.finfo(mean.dtype).tiny))
    law = _reference(mean, covariance, vector, precision, share)
    left = (used - share)[:, None] * vector, (used - share)[:, None, None] * precision
    log_z, slope, curve, error = _integrate(program, spec, data, law, used, left, rules)
    gain = _matched_precision(curve, law.covariance)
    moved = law.mean + jnp.einsum("eij,ej->ei", law.covariance, slope)
    new_vector = slope + jnp.einsum("eij,ej->ei", gain, moved)
    scale = 1.0 / used
    change = (
        (new_vector - share[:, None] * vector) * scale[:, None],
        (gain - share[:, None, None] * precision) * scale[:, None, None],
    )
    value = (log_z + law.log_weight) * scale
    good = mask & _finite(*change, value)
    change = tuple(jnp.where(good.reshape(good.shape + (1,) * (c.ndim - 1)), c, 0.0) for c in change)
    weights = jnp.abs(jnp.einsum("eij,eji->e", curve, law.covariance)) * scale
    numbers = _numbers(mask, good, value, used < power, error * scale, weights, spread=covariance)
    pulled = [_pull_full(data.design, mask, *pair) for pair in (change, site)]
    return change, (numbers[0], *pulled, *numbers[1:5]), numbers[5]


def _diagonal_term(program, spec: TermSpec, data: TermData, mask, site: tuple, moments, power, rules):
    size, variance = mask.shape[-1], moments.scale**2
    design = jnp.stack([jnp.broadcast_to(a, (size, moments.loc.shape[0])) for a in data.design], axis=1)
    vector, precision = site
    largest = jnp.max(precision * variance, axis=-1)
    unit = 1.0 - jnp.sqrt(jnp.finfo(variance.dtype).eps)
    used = jnp.minimum(power, unit / jnp.maximum(largest, jnp.finfo(variance.dtype).tiny))[:, None]
    shrink = 1.0 / (1.0 - used * precision * variance)
    wide = variance * shrink
    force = vector - precision * moments.loc
    loc = moments.loc - used * wide * force
    log_weight = 0.5 * jnp.sum(jnp.log(shrink) + used**2 * wide * force**2, axis=-1) - used[:, 0] * jnp.sum(
        vector * moments.loc - 0.5 * precision * moments.loc**2, axis=-1
    )
    covariance = jnp.einsum("eid,ed,ejd->eij", design, wide, design)
    law = _Law(jnp.einsum("eid,ed->ei", design, loc), covariance, log_weight)
    none = jnp.zeros_like(law.mean), jnp.zeros_like(covariance)
    log_z, slope, curve, error = _integrate(program, spec, data, law, used[:, 0], none, rules)
    bend = jnp.einsum("eid,eij,ejd->ed", design, curve, design)
    gain = bend / (1.0 - wide * bend)
    pulled_slope = jnp.einsum("eid,ei->ed", design, slope)
    new_vector = pulled_slope + gain * (loc + wide * pulled_slope)
    change = (new_vector - used * vector) / used, (gain - used * precision) / used
    value = (log_z + law.log_weight) / used[:, 0]
    good = mask & _finite(*change, value) & jnp.all(1.0 - wide * bend > 0, axis=-1)
    change = tuple(jnp.where(good[:, None], c, 0.0) for c in change)
    weights = jnp.abs(jnp.einsum("eij,eji->e", curve, covariance)) / used[:, 0]
    numbers = _numbers(mask, good, value, used[:, 0] < power, error / used[:, 0], weights, spread=covariance)
    kept = [jnp.where(mask[:, None], x, 0.0) for x in site]
    pulled = [GaussianNatural(jnp.sum(h, axis=0), jnp.sum(p, axis=0)) for h, p in (change, kept)]
    return change, (numbers[0], *pulled, *numbers[1:5]), numbers[5]


def _numbers(mask, good, value, tempered, error, weight, spread):
    """Sums over a term's rows: value, held, tempered, error, weight; and the largest predictor sd."""
    dtype = value.dtype
    lost = jnp.where(jnp.isfinite(error), error, jnp.inf)
    held = jnp.sum(mask & ~good).astype(dtype)
    sd = jnp.sqrt(jnp.max(jnp.stack([spread[:, i, i] for i in range(spread.shape[-1])])))
    weight = jnp.where(mask & jnp.isfinite(weight), weight, 0.0)
    return (
        jnp.sum(jnp.where(mask, value, 0.0)),
        held,
        jnp.sum(mask & tempered).astype(dtype),
        jnp.sum(jnp.where(mask, lost, 0.0)),
        jnp.sum(weight),
        sd,
    )


def _largest_share(precision: Float[Array, "E K K"], covariance: Float[Array, "E K K"]) -> Float[Array, "E"]:
    """Largest eigenvalue of ``precision @ covariance``: the site's share of q's precision along the worst direction."""
    product = precision @ covariance
    if product.shape[-1] == 1:
        return product[:, 0, 0]
    half = 0.5 * jnp.trace(product, axis1=-2, axis2=-1)
    determinant = product[:, 0, 0] * product[:, 1, 1] - product[:, 0, 1] * product[:, 1, 0]
    return half + jnp.sqrt(jnp.maximum(half**2 - determinant, 0.0))


def _solve(matrix: Float[Array, "E K K"], right: Float[Array, "E K L"]) -> Float[Array, "E K L"]:
    """``matrix^-1 right`` for K of 1 or 2."""
    if matrix.shape[-1] == 1:
        return right / matrix
    a, b, c, d = matrix[:, 0, 0], matrix[:, 0, 1], matrix[:, 1, 0], matrix[:, 1, 1]
    adjugate = jnp.stack([jnp.stack([d, -b], -1), jnp.stack([-c, a], -1)], -2)
    return (adjugate @ right) / (a * d - b * c)[:, None, None]


def _determinant(matrix: Float[Array, "E K K"]) -> Float[Array, "E"]:
    if matrix.shape[-1] == 1:
        return matrix[:, 0, 0]
    return matrix[:, 0, 0] * matrix[:, 1, 1] - matrix[:, 0, 1] * matrix[:, 1, 0]


def _reference(mean, covariance, vector, precision, share) -> _Law:
    """q over the predictors without a ``share`` of the row's site: no inverse of a covariance that may be singular."""
    share_matrix = share[:, None, None]
    inner = jnp.eye(mean.shape[-1], dtype=mean.dtype) - share_matrix * (precision @ covariance)
    # V (1 - share L V)^-1, symmetric.
    wide = jnp.swapaxes(_solve(jnp.swapaxes(inner, -1, -2), covariance), -1, -2)
    wide = 0.5 * (wide + jnp.swapaxes(wide, -1, -2))
    force = vector - jnp.einsum("eij,ej->ei", precision, mean)
    push = jnp.einsum("eij,ej->ei", wide, force)
    at_mean = jnp.sum(vector * mean, -1) - 0.5 * jnp.einsum("ei,eij,ej->e", mean, precision, mean)
    log_weight = 0.5 * (share**2 * jnp.sum(force * push, -1) - jnp.log(_determinant(inner))) - share * at_mean
    return _Law(mean - share[:, None] * push, wide, log_weight)


def _integrate(program: AffineProgram, spec: TermSpec, data: TermData, law: _Law, used, left: tuple, rules: tuple):
    """``log Z`` and the first two derivatives (the second with its sign turned) of it in the law's mean, with the error."""
    count = law.mean.shape[-1]
    offset = [jnp.broadcast_to(c, law.mean.shape[:1]) for c in data.offset]
    vector, precision = left

    def exponent(*z):
        values = used * term_log_prob(spec, data, tuple(x + c for x, c in zip(z, offset, strict=True)))
        for i in range(count):
            values = values - vector[:, i] * z[i]
            for j in range(count):
                values = values + 0.5 * precision[:, i, j] * z[i] * z[j]
        return values

    sd = jnp.sqrt(jnp.stack([law.covariance[:, i, i] for i in range(count)], -1))
    top = jnp.full(law.mean.shape[:1], -jnp.inf, law.mean.dtype)
    for z in _LOOKS:
        here = exponent(*(law.mean[:, i] + z * sd[:, i] for i in range(count))) - 0.5 * z**2
        top = jnp.maximum(top, jnp.where(jnp.isfinite(here), here, -jnp.inf))
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))

    def integrand(*z):
        return jnp.exp(exponent(*z) - top)

    options = {"rule": rules[0], "num_rules": rules[1]}
    if count == 1:
        found = expect_1d(integrand, law.mean[:, 0], sd[:, 0], **options)
        slope = (found.grad / found.value)[:, None]
        second = (found.hess / found.value)[:, None, None]
    else:
        c = law.covariance
        found = expect_2d(integrand, law.mean[:, 0], law.mean[:, 1], c[:, 0, 0], c[:, 0, 1], c[:, 1, 1], **options)
        slope = found.grad / found.value[:, None]
        uu, uv, vv = (found.hess[:, k] / found.value for k in range(3))
        second = jnp.stack([jnp.stack([uu, uv], -1), jnp.stack([uv, vv], -1)], -2)
    curve = slope[:, :, None] * slope[:, None, :] - second
    return jnp.log(found.value) + top, slope, curve, found.absolute / found.value


def _matched_precision(curve: Float[Array, "E K K"], covariance: Float[Array, "E K K"]) -> Float[Array, "E K K"]:
    """``V_hat^-1 - V^-1`` of ``V_hat = V - V S V``: ``S (1 - V S)^-1``; NaN where the tilted covariance is none."""
    inner = jnp.eye(curve.shape[-1], dtype=curve.dtype) - curve @ covariance
    # (1 - S V)^-1 S is the same matrix.
    gain = _solve(inner, curve)
    proper = _determinant(inner) > 0
    return jnp.where(proper[:, None, None], 0.5 * (gain + jnp.swapaxes(gain, -1, -2)), jnp.nan)


def _finite(vector, precision, value) -> Bool[Array, "E"]:
    size = vector.shape[0]
    return (
        jnp.all(jnp.isfinite(vector.reshape(size, -1)), -1)
        & jnp.all(jnp.isfinite(precision.reshape(size, -1)), -1)
        & jnp.isfinite(value)
    )


def _pull_full(design: tuple, mask, vector, precision) -> GaussianNatural:
    """Rows' naturals over their predictors, summed, over theta."""
    size, dim = mask.shape[-1], design[0].shape[-1]
    rows = [jnp.broadcast_to(a, (size, dim)) for a in design]
    vector = jnp.where(mask[:, None], vector, 0.0)
    precision = jnp.where(mask[:, None, None], precision, 0.0)
    head = sum(_pull(a, vector[:, i]) for i, a in enumerate(rows))
    matrix = sum(_gram(a, precision[:, i, j], b) for i, a in enumerate(rows) for j, b in enumerate(rows))
    return GaussianNatural(head, matrix)


def row_targets(program: AffineProgram, chunk: tuple, moments: GaussianMoments, level: Any) -> Expected:
    """Natural-gradient targets of single rows with their curvature clipped: where rows' sites start.

    ``program``: the chunk's structure; ``chunk``: its arrays; ``moments``: the Gaussian to look from; ``level``: quadrature
    rule. Returns ``local`` the rows' sites and ``target`` a :class:`RowReport` whose ``old`` is their sum.
    """
    rows, totals = [], []
    for spec, (data, mask) in zip(program.terms, chunk, strict=True):
        center = [a @ moments.loc for a in data.design]
        mean = tuple(m + c for m, c in zip(center, data.offset, strict=True))
        _, grad, hess, _ = _row_expectations(
            spec, data, mean, program._covariances(data, moments), level, program.num_rules
        )
        weight = _clip_weights({pair: -h for pair, h in hess.items()})
        count, size = len(data.design), mask.shape[-1]
        matrix = jnp.stack(
            [
                jnp.stack([jnp.broadcast_to(weight[min(i, j), max(i, j)], (size,)) for j in range(count)], -1)
                for i in range(count)
            ],
            -2,
        )
        located = jnp.stack([jnp.broadcast_to(c, (size,)) for c in center], -1)
        vector = jnp.stack([jnp.broadcast_to(g, (size,)) for g in grad], -1)
        if program.family.full:
            pair = vector + jnp.einsum("eij,ej->ei", matrix, located), matrix
        else:
            design = jnp.stack([jnp.broadcast_to(a, (size, moments.loc.shape[0])) for a in data.design], axis=1)
            diagonal = jnp.einsum("eid,eij,ejd->ed", design, matrix, design)
            pair = jnp.einsum("eid,ei->ed", design, vector) + diagonal * moments.loc, diagonal
        good = mask & _finite(*pair, jnp.zeros((size,), moments.loc.dtype))
        pair = tuple(jnp.where(good.reshape(good.shape + (1,) * (x.ndim - 1)), x, 0.0) for x in pair)
        rows.append(pair)
        if program.family.full:
            totals.append(_pull_full(data.design, mask, *pair))
        else:
            totals.append(GaussianNatural(jnp.sum(pair[0], axis=0), jnp.sum(pair[1], axis=0)))
    total, zero = sum(totals[1:], start=totals[0]), jnp.zeros((), moments.loc.dtype)
    report = RowReport(total, total, zero, zero)
    return Expected(zero, report, jnp.zeros_like(moments.loc), zero, zero, zero, RowSites(tuple(rows)))
