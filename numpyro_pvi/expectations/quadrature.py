"""Gaussian expectations of rows that depend on one or two affine predictors, with an error estimate.

For each row n with log-likelihood psi_n(u), u ~ N(mean_n, sd_n^2):

    value = E psi_n,    grad = E psi_n' = d value / d mean,    hess = E psi_n'' = d2 value / d mean2.

Nothing here decides on concrete values, so everything runs under jit, vmap and loops.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ._rules import NEGLIGIBLE, OVERFLOWN, RULES, SD_LIMITS, TARGET, locate_features, node_table

# ------------------------------------------------------------------------------------------------------- two predictors
# Gaussian expectations of rows that depend on two affine predictors (a location and a scale, say), with their error.
#
# Rows are integrated in whitened coordinates z = (z1, z2), both standard normal: v = mean_v + s_v z2 outside, and
# u = mean_u + r z2 + s_c z1 inside, where s_v^2 = cov_vv, r = cov_uv / s_v and s_c^2 = cov_uu - r^2.

RowFn2D = Callable[[Array, Array], Array]


class Share(NamedTuple):
    """What rows' expectations count in an average that they are taken for, and which nodes are then looked at.

    Densities overflow far out, where nodes count next to nothing: of fixed rules those are left out. Where a density still is not
    finite, ``careful`` leaves out those that count little. The finest rule, whose nodes lie where the mass is, leaves out the
    latter only, and only where the density is not finite. A density of 0 at such nodes goes unnoticed with them: the expectation
    of its logarithm is then finite where it is minus infinity.
    """

    # At most, of any row, where the mean of the average's weights is 1.
    most: Float[Array, ""]
    careful: Bool[Array, ""] | bool = False

    def that_count(self, z: tuple[Array, ...], weight: Array) -> tuple[tuple[Array, ...], Array]:
        """Nodes and weights with those that are left out in the middle and of no weight."""
        dtype = self.most.dtype.name
        count = weight * self.most > jnp.where(self.careful, OVERFLOWN[dtype], NEGLIGIBLE[dtype])
        return tuple(jnp.where(count, x, 0.0) for x in z), jnp.where(count, weight, 0.0)

    def finite(
        self, parts: tuple[Array, ...], weight: Array, beside: tuple[Array, ...] = ()
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """A density and its derivatives with zeros at nodes that count little where one of them is not finite.

        ``beside``: functions that go without those nodes too, and each without those where it is not finite itself, of which the
        density is none the wiser.
        """
        little = weight * self.most < OVERFLOWN[self.most.dtype.name]
        # A sum is finite where all of its terms are: infinities of two signs make a NaN.
        lost = little & ~jnp.isfinite(sum(parts))
        own = tuple(jnp.where(lost | (little & ~jnp.isfinite(t)), 0.0, t) for t in beside)
        return tuple(jnp.where(lost, 0.0, t) for t in parts), own


class Rows(NamedTuple):
    """What is integrated: psi, whose curvature says how fine a rule has to be, and functions that share its nodes.

    The latter are for derivatives of psi in numbers that it depends on beside its predictors. As functions of a predictor they
    have the singularities of psi, each stronger by one order, and psi'' by two: where a rule is fine enough for E psi'', it is for
    them. Nothing is estimated of their errors, and a singularity that psi has not at the very value of such a number goes unseen:
    that of |u|^p in p, at p = 2.
    """

    psi: Callable[..., Array]
    beside: tuple[Callable[..., Array], ...] = ()


_HALF_LOG_2PI = 0.5 * np.log(2 * np.pi)
_NUM_OUTER = {"float64": 96, "float32": 64}
_NUM_INNER = {"float64": 112, "float32": 72}


class RowMoments2D(NamedTuple):
    """Expectations of psi_n and its derivatives over two predictors, in nats per unit of the predictors."""

    value: Float[Array, "*rows"]  # E psi
    grad: Float[Array, "*rows 2"]  # E psi_u, E psi_v
    hess: Float[Array, "*rows 3"]  # E psi_uu, E psi_uv, E psi_vv
    error: Float[Array, "*rows"]  # estimated relative error of the worst, in whitened coordinates; inf where not finite
    absolute: Float[Array, "*rows"]  # estimated error of the whitened hess, in nats; inf where not known
    beside: tuple[Float[Array, "*rows"], ...] = ()  # of the functions beside psi


class Law(NamedTuple):
    """The Gaussian law of (u, v) in the form it is integrated in."""

    mean_u: Array
    mean_v: Array
    slope: Array  # r: how u moves with z2
    sd_u: Array  # s_c: sd of u given v
    sd_v: Array

    def whiten(self, grad: list[Array], hess: list[Array]) -> tuple[list[Array], list[Array]]:
        """Derivatives in z from those in (u, v)."""
        r, s, t = self.slope, self.sd_u, self.sd_v
        uu, uv, vv = hess
        second = [s * s * uu, s * (t * uv + r * uu), t * t * vv + 2 * r * t * uv + r * r * uu]
        return [s * grad[0], t * grad[1] + r * grad[0]], second

    def unwhiten_hess(self, hess: list[Array]) -> list[Array]:
        """Second derivatives in (u, v) from those in z."""
        uu = hess[0] / self.sd_u**2
        uv = (hess[1] / self.sd_u - self.slope * uu) / self.sd_v
        return [uu, uv, (hess[2] - 2 * self.slope * self.sd_v * uv - self.slope**2 * uu) / self.sd_v**2]


class Sums2D(NamedTuple):
    """Weighted sums over nodes; `plain` in (u, v), the others in z."""

    plain: tuple[Array, ...]  # psi, psi_u, psi_v, psi_uu, psi_uv, psi_vv
    stein: tuple[Array, ...]  # z1 g1, z2 g1, z2 g2, z1 psi, z2 psi
    size: tuple[Array, ...]  # sums of |.|: psi, g1, g2, h11, h12, h22
    stein_size: tuple[Array, ...]  # sums of |.| of `stein`
    beside: tuple[Array, ...] = ()  # the functions beside psi


def gaussian_law(mean_u: Array, mean_v: Array, cov_uu: Array, cov_uv: Array, cov_vv: Array) -> Law:
    """Factors the 2x2 covariance; predictors that do not vary keep a tiny sd so that nothing is divided by zero."""
    floor = jnp.asarray(1e-15, mean_u.dtype)
    sd_v = jnp.sqrt(jnp.maximum(cov_vv, floor**2))
    slope = jnp.where(cov_vv > 0, cov_uv / sd_v, 0.0)
    rounding = 4 * jnp.finfo(mean_u.dtype).eps * cov_uu
    sd_u = jnp.sqrt(jnp.maximum(cov_uu - slope**2, jnp.maximum(floor**2, rounding)))
    return Law(mean_u, mean_v, slope, sd_u, sd_v)


def _derivatives(row_fn: RowFn2D, u: Array, v: Array) -> tuple[Array, ...]:
    """psi and its first and second derivatives, by two nested linearisations: what is not linear is written down once."""
    ones, zeros = jnp.ones_like(u), jnp.zeros_like(u)

    def first(x: Array, y: Array) -> tuple[Array, Array, Array]:
        value, along = jax.linearize(row_fn, x, y)
        return value, along(ones, zeros), along(zeros, ones)

    value, along = jax.linearize(first, u, v)
    _, uu, uv = along(ones, zeros)
    return (*value, uu, uv, along(zeros, ones)[2])


def _terms_2d(
    rows: Rows, law: Law, u: Array, v: Array, z: tuple[Array, Array], weight: Array, share: Share | None = None
) -> Sums2D:
    found, own = _derivatives(rows.psi, u, v), tuple(f(u, v) for f in rows.beside)
    if share is not None:
        found, own = share.finite(found, weight, own)
    plain, beside = tuple(weight * t for t in found), tuple(weight * t for t in own)
    grad, hess = law.whiten(list(plain[1:3]), list(plain[3:]))
    stein = (z[0] * grad[0], z[1] * grad[0], z[1] * grad[1], z[0] * plain[0], z[1] * plain[0])
    size = tuple(jnp.abs(t) for t in (plain[0], *grad, *hess))
    return Sums2D(plain, stein, size, tuple(jnp.abs(t) for t in stein), beside)


def _zeros_2d(like: Array, beside: int) -> Sums2D:
    zero = jnp.zeros_like(like)
    return Sums2D((zero,) * 6, (zero,) * 5, (zero,) * 6, (zero,) * 5, (zero,) * beside)


def _add_2d(left: Sums2D, right: Sums2D) -> Sums2D:
    return jax.tree.map(jnp.add, left, right)


def _worst(errors: list[Array], scales: tuple[Array, ...]) -> Array:
    ratios = [e / jnp.maximum(s, jnp.finfo(s.dtype).tiny) for e, s in zip(errors, scales, strict=True)]
    worst = jnp.max(jnp.stack(ratios), axis=0)
    return jnp.where(jnp.isfinite(worst), worst, jnp.inf)


def _noise(sums: Sums2D, law: Law) -> list[Array]:
    """What rounding alone can put between direct and Stein forms of h11, h12, h22, g1, g2."""
    unit = 16 * jnp.finfo(law.mean_u.dtype).eps
    wobble = 1 + jnp.abs(law.mean_u) / law.sd_u + jnp.abs(law.mean_v) / law.sd_v
    direct = (*sums.size[3:], *sums.size[1:3])
    return [unit * (s + wobble * d) for s, d in zip(sums.stein_size, direct, strict=True)]


def _gaps(sums: Sums2D, law: Law) -> tuple[list[Array], list[Array], list[Array]]:
    """Whitened grad and hess, and the distance of hess (3) and grad (2) from their Stein forms."""
    grad, hess = law.whiten(list(sums.plain[1:3]), list(sums.plain[3:]))
    return grad, hess, [jnp.abs(a - b) for a, b in zip((*hess, *grad), sums.stein, strict=True)]


def _moments(sums: Sums2D, hess: list[Array], error: Array, absolute: Array) -> RowMoments2D:
    grad = jnp.stack(sums.plain[1:3], -1)
    return RowMoments2D(sums.plain[0], grad, jnp.stack(hess, -1), error, absolute, sums.beside)


def fixed_2d(rows: Rows, law: Law, index: int | Array, share: Share | None = None) -> RowMoments2D:
    """Tensor product of a fixed rule; the error is the gap between direct and Stein forms, as in one dimension.

    Few rows take a block of nodes at a time, as in one dimension. ``share``: as of :func:`expect_2d`.
    """
    dtype = law.mean_u.dtype
    table = node_table(2, dtype.name)
    width = table.width(law.mean_u.size)
    inner, outer, weights = (jnp.asarray(a, dtype).reshape(-1, width) for a in (*table.nodes, table.weights))
    start, stop, per_axis = table.span(index)

    def at(z1: Array, z2: Array, weight: Array) -> Sums2D:
        if share is not None:
            (z1, z2), weight = share.that_count((z1, z2), weight)
        u, v = law.mean_u + law.slope * z2 + law.sd_u * z1, law.mean_v + law.sd_v * z2
        return _terms_2d(rows, law, u, v, (z1, z2), weight)

    def step(k: Array, sums: Sums2D) -> Sums2D:
        if width > 1:
            block = jax.vmap(at)(inner[k], outer[k], weights[k])
            return _add_2d(sums, jax.tree.map(lambda x: jnp.sum(x, axis=0), block))
        return _add_2d(sums, at(inner[k, 0], outer[k, 0], weights[k, 0]))

    sums = jax.lax.fori_loop(start // width, stop // width, step, _zeros_2d(law.mean_u, len(rows.beside)))
    _, _, gaps = _gaps(sums, law)
    # What is not a number is no small gap.
    gaps = [
        jnp.where(g <= n, 0.0, jnp.nan_to_num(g, nan=jnp.inf)) for g, n in zip(gaps, _noise(sums, law), strict=True)
    ]
    first = (gaps[3] + gaps[4]) * per_axis**0.5
    second = gaps[0] + gaps[1] + gaps[2] + first
    error = _worst([second] * 6, sums.size)
    return _moments(sums, list(sums.plain[3:]), error, second)


def mapped_2d(rows: Rows, law: Law, share: Share | None = None) -> RowMoments2D:
    """Nested trapezoids, each on its own change of variable; the inner one is found anew at every outer node.

    ``share``: as of :func:`expect_2d`.
    """
    dtype = law.mean_u.dtype
    num_outer, num_inner = _NUM_OUTER[dtype.name] // 2, _NUM_INNER[dtype.name] // 2
    outer = locate_features(_outer_slope(rows.psi, law), law.mean_u)
    low, high = outer.forward(outer.low), outer.forward(outer.high)
    step = (high - low) / (2 * num_outer - 1)

    def inner(index: Array) -> tuple[Sums2D, Sums2D]:
        offset, rate = outer.inverse(low + step * index)
        z2 = outer.anchor + offset
        weight = step * rate * jnp.exp(-0.5 * z2**2) / (2 * np.pi)
        v = law.mean_v + law.sd_v * outer.anchor + law.sd_v * offset
        return _inner_sums(rows, law, v, z2, weight, num_inner, share)

    def pair(carry: tuple[Sums2D, Sums2D], first: Array) -> tuple[tuple[Sums2D, Sums2D], None]:
        """An even and an odd outer node, on a leading axis of two."""
        sums, split = carry
        even, odd = jax.vmap(inner)(first + jnp.arange(2, dtype=dtype))
        split = jax.tree.map(lambda s, a, b: s + jnp.abs(a - b), split, even, odd)
        return (jax.tree.map(lambda s, a, b: s + a + b, sums, even, odd), split), None

    start = _zeros_2d(jnp.zeros((2, *law.mean_u.shape), dtype), len(rows.beside))
    (sums, split), _ = jax.lax.scan(pair, (start, start), 2.0 * jnp.arange(num_outer, dtype=dtype))
    halves = jax.tree.map(lambda a, s: jnp.maximum(jnp.abs(a[0] - a[1]), s[0] + s[1]), sums, split)
    return _mapped_moments_2d(jax.tree.map(lambda a: a[0] + a[1], sums), halves, outer.cut, law)


def _outer_slope(row_fn: RowFn2D, law: Law) -> Callable[[Array, Array], tuple[Array, Array, Array]]:
    """A stand-in for the inner integral as a function of z2: three inner Gauss-Hermite nodes."""
    nodes = jnp.asarray((-(3**0.5), 0.0, 3**0.5), law.mean_u.dtype)

    def slope_fn(center: Array, offset: Array) -> tuple[Array, Array, Array]:
        z, ones = center + offset, jnp.ones_like(center)

        def at(node: Array) -> tuple[Array, Array, Array]:
            def along(x: Array) -> Array:
                return row_fn(law.mean_u + law.slope * x + law.sd_u * node, law.mean_v + law.sd_v * x)

            (value, grad), (_, hess) = jax.jvp(lambda x: jax.jvp(along, (x,), (ones,)), (z,), (ones,))
            return value, grad, hess

        # One place for all three: the density is most of what is compiled.
        value, grad, hess = ((low + 4 * middle + high) / 6 for low, middle, high in jax.vmap(at)(nodes))
        return value, grad, hess

    return slope_fn


def _inner_sums(
    rows: Rows, law: Law, v: Array, z2: Array, weight: Array, half: int, share: Share | None
) -> tuple[Sums2D, Sums2D]:
    """Even and odd half of the inner rule at one outer node per row."""
    mean = law.mean_u + law.slope * z2

    def slope_fn(center: Array, offset: Array) -> tuple[Array, Array, Array]:
        ones = jnp.ones_like(center)
        along = lambda x: jax.jvp(lambda t: rows.psi(t, v), (x,), (ones,))  # noqa: E731
        u = (mean + law.sd_u * center) + law.sd_u * offset
        (value, grad), (_, hess) = jax.jvp(along, (u,), (ones,))
        return value, law.sd_u * grad, law.sd_u**2 * hess

    change = locate_features(slope_fn, mean)
    low, high = change.forward(change.low), change.forward(change.high)
    step = (high - low) / (2 * half - 1)
    base = mean + law.sd_u * change.anchor

    def node(index: Array) -> Sums2D:
        offset, rate = change.inverse(low + step * index)
        z1 = change.anchor + offset
        density = weight * step * rate * jnp.exp(-0.5 * z1**2)
        return _terms_2d(rows, law, base + law.sd_u * offset, v, (z1, z2), density, share)

    def pair(sums: Sums2D, first: Array) -> tuple[Sums2D, None]:
        return _add_2d(sums, jax.vmap(node)(first + jnp.arange(2, dtype=mean.dtype))), None

    start = _zeros_2d(jnp.zeros((2, *mean.shape), mean.dtype), len(rows.beside))
    sums, _ = jax.lax.scan(pair, start, 2.0 * jnp.arange(half, dtype=mean.dtype))
    return tuple(jax.tree.map(lambda a, k=k: a[k], sums) for k in (0, 1))


def _mapped_moments_2d(sums: Sums2D, halves: Sums2D, cut: Array, law: Law) -> RowMoments2D:
    """Decides per second derivative between the direct and the Stein form, and estimates the error."""
    _, hess, gaps = _gaps(sums, law)
    noise = _noise(sums, law)
    use_stein = [gaps[i] > 10 * (halves.size[3 + i] + halves.stein[i] + noise[i]) for i in range(3)]
    # A feature far narrower than the spread makes the direct form a difference of huge terms; Stein's stays tame.
    use_stein = [k | (s < 0.1 * h) for k, s, h in zip(use_stein, sums.stein_size[:3], sums.size[3:], strict=True)]
    # Far in a tail the second derivative of a clamped probability is 0 * inf in float32: Stein's form does without it.
    use_stein = [k | (jnp.isnan(h) & ~jnp.isnan(s)) for k, s, h in zip(use_stein, sums.stein[:3], hess, strict=True)]
    any_stein = use_stein[0] | use_stein[1] | use_stein[2]
    chosen = [jnp.where(k, s, h) for k, s, h in zip(use_stein, sums.stein[:3], hess, strict=True)]
    hess_out = [jnp.where(any_stein, a, b) for a, b in zip(law.unwhiten_hess(chosen), sums.plain[3:], strict=True)]
    gaps = [jnp.where(g > n, g, 0.0) for g, n in zip(gaps, noise, strict=True)]
    gap = gaps[3] + gaps[4] + sum(jnp.where(k, 0.0, g) for k, g in zip(use_stein, gaps[:3], strict=True))
    scales = [*sums.size[:3]]
    scales += [jnp.where(k, s, h) for k, s, h in zip(use_stein, sums.stein_size[:3], sums.size[3:], strict=True)]
    half = [*halves.size[:3]]
    half += [jnp.where(k, s, h) for k, s, h in zip(use_stein, halves.stein[:3], halves.size[3:], strict=True)]
    eps = jnp.finfo(law.mean_u.dtype).eps

    def refine(difference: Array, scale: Array) -> Array:
        # Halving the step of an analytic trapezoid raises its relative error to the power 2 (poles) to 4 (Gaussians);
        # where there is no kink the Stein gaps already see the poles.
        coarse = difference / jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)
        fine = jnp.where(any_stein, 10 * coarse**2, coarse**4)
        return scale * (jnp.minimum(coarse, fine) + 4 * eps) + gap

    refined = [refine(h, s) for h, s in zip(half, scales, strict=True)]
    error = _worst(refined, tuple(scales))
    lost = refined[3] + refined[4] + refined[5]
    return _moments(sums, hess_out, jnp.where(cut, jnp.inf, error), jnp.where(cut, jnp.inf, lost))


# -------------------------------------------------------------------------------------------------------- one predictor

RowFn = Callable[[Array], Array]

_NUM_MAPPED = {"float64": 176, "float32": 96}


class RowMoments1D(NamedTuple):
    """Expectations of psi_n and its derivatives over one predictor, in nats per unit of the predictor."""

    value: Float[Array, "*rows"]  # E psi
    grad: Float[Array, "*rows"]  # E psi'
    hess: Float[Array, "*rows"]  # E psi''
    error: Float[Array, "*rows"]  # estimated relative error of the worst of the three; inf where psi is not finite
    absolute: Float[Array, "*rows"]  # estimated error of hess times the variance, in nats; inf where not known
    beside: tuple[Float[Array, "*rows"], ...] = ()  # of the functions beside psi


class _Sums(NamedTuple):
    """Weighted sums over nodes; `stein_*` are the same quantities by E[f'] = E[z f] / sd, `abs_*` sums of sizes."""

    value: Array
    grad: Array
    hess: Array
    stein_grad: Array
    stein_hess: Array
    abs_value: Array
    abs_grad: Array
    abs_hess: Array
    abs_stein_grad: Array
    abs_stein_hess: Array
    beside: tuple[Array, ...] = ()  # the functions beside psi


def derivatives(row_fn: RowFn, u: Array) -> tuple[Array, Array, Array]:
    """psi, psi' and psi'' of an elementwise function, by two forward passes."""
    ones = jnp.ones_like(u)
    (value, grad), (_, hess) = jax.jvp(lambda x: jax.jvp(row_fn, (x,), (ones,)), (u,), (ones,))
    return value, grad, hess


def _terms_1d(rows: Rows, u: Array, z: Array, weight: Array, sd: Array, share: Share | None = None) -> _Sums:
    found, own = derivatives(rows.psi, u), tuple(f(u) for f in rows.beside)
    if share is not None:
        found, own = share.finite(found, weight, own)
    value, grad, hess = (weight * t for t in found)
    tilt = z / sd
    parts = (value, grad, hess, tilt * value, tilt * grad)
    return _Sums(*parts, *(jnp.abs(part) for part in parts), tuple(weight * t for t in own))


def _block_terms(rows: Rows, mean: Array, sd: Array, z: Array, weight: Array) -> _Sums:
    """The sums over a block of nodes that all rows share, as two matrix products."""
    points = mean + sd * z.reshape((-1,) + (1,) * mean.ndim)
    parts = *derivatives(jax.vmap(rows.psi), points), *(jax.vmap(f)(points) for f in rows.beside)
    found = jnp.concatenate([t.reshape(len(z), -1) for t in parts], axis=1)
    exact = jax.lax.Precision.HIGHEST
    plain, own = found[:, : 3 * mean.size], jnp.matmul(weight, found[:, 3 * mean.size :], precision=exact)
    sums = jnp.matmul(weight * jnp.stack([jnp.ones_like(z), z]), plain, precision=exact)
    sizes = jnp.matmul(weight * jnp.stack([jnp.ones_like(z), jnp.abs(z)]), jnp.abs(plain), precision=exact)
    (direct, tilted), (direct_size, tilted_size) = (x.reshape(2, 3, *mean.shape) for x in (sums, sizes))
    beside = tuple(own.reshape(len(rows.beside), *mean.shape))
    return _Sums(*direct, *(tilted[:2] / sd), *direct_size, *(tilted_size[:2] / sd), beside)


def _zeros_1d(like: Array, beside: int) -> _Sums:
    zero = jnp.zeros_like(like)
    return _Sums(*([zero] * 10), (zero,) * beside)


def _add_1d(left: _Sums, right: _Sums) -> _Sums:
    return jax.tree.map(jnp.add, left, right)


def _floor_sd(sd: Array) -> Array:
    """A row whose predictor does not vary still has a z / sd: keep it finite; rounding then hides the Stein forms."""
    return jnp.maximum(sd, jnp.asarray(1e-15, sd.dtype))


def _relative(error: Array, scale: Array) -> Array:
    """error / scale with 0 / 0 = 0, and inf for anything that is not a number."""
    ratio = error / jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)
    return jnp.where(jnp.isfinite(ratio), ratio, jnp.inf)


def _rounding(sums: _Sums, mean: Array, sd: Array) -> tuple[Array, Array]:
    """What rounding alone can put between the direct and the Stein form of grad and hess."""
    unit = 16 * jnp.finfo(mean.dtype).eps
    wobble = jnp.abs(mean) / sd
    return (
        2 * unit * (sums.abs_stein_grad + sums.abs_grad * (1 + wobble)),
        unit * (sums.abs_stein_hess + sums.abs_hess * (1 + wobble)),
    )


def _fixed(rows: Rows, mean: Array, sd: Array, index: int | Array, share: Share | None = None) -> RowMoments1D:
    """A rule with the same standardised nodes in every row; one loop in the program, whichever rule the index means.

    Few rows take a block of nodes at a time: node by node they would wait for the loop more than for their densities.
    ``share``: as of :func:`expect_1d`.
    """
    sd = _floor_sd(sd)
    table = node_table(1, mean.dtype.name)
    width = table.width(mean.size)
    nodes, weights = (jnp.asarray(a, mean.dtype).reshape(-1, width) for a in (*table.nodes, table.weights))
    start, stop, per_axis = table.span(index)

    def step(k: Array, sums: _Sums) -> _Sums:
        z, weight = nodes[k], weights[k]
        if share is not None:
            (z,), weight = share.that_count((z,), weight)
        if width > 1:
            return _add_1d(sums, _block_terms(rows, mean, sd, z, weight))
        return _add_1d(sums, _terms_1d(rows, mean + sd * z[0], z[0], weight[0], sd))

    sums = jax.lax.fori_loop(start // width, stop // width, step, _zeros_1d(mean, len(rows.beside)))
    return RowMoments1D(sums.value, sums.grad, sums.hess, *_fixed_error(sums, mean, sd, per_axis), sums.beside)


def _fixed_error(sums: _Sums, mean: Array, sd: Array, num_nodes: int | np.integer | Array) -> tuple[Array, Array]:
    """Relative error, and error of hess times the variance, from the gap between direct and Stein forms.

    The two forms differ first in the polynomial degree the rule itself fails at, so the gap has the size of the error,
    not of a coarser rule's error. The gap of grad sees the even part of the failure, that of hess the odd part.
    What lies beyond the outermost node (4.1 sd for gh8) and the rounding inside psi are not seen.
    """
    noise_grad, noise_hess = _rounding(sums, mean, sd)
    gap_grad = jnp.abs(sums.grad - sums.stein_grad)
    gap_hess = jnp.abs(sums.hess - sums.stein_hess)
    # What is not a number is no small gap.
    gap_grad = jnp.where(gap_grad <= noise_grad, 0.0, jnp.nan_to_num(gap_grad, nan=jnp.inf))
    gap_hess = jnp.where(gap_hess <= noise_hess, 0.0, jnp.nan_to_num(gap_hess, nan=jnp.inf))
    error = gap_hess + gap_grad / sd * num_nodes**0.5
    relative = [
        _relative(error, jnp.maximum(sums.abs_hess, noise_hess)),
        _relative(error * sd, sums.abs_grad),
        _relative(error * sd**2, sums.abs_value),
    ]
    return jnp.maximum(jnp.maximum(relative[0], relative[1]), relative[2]), error * sd**2


def _standardised(row_fn: RowFn, mean: Array, sd: Array) -> Callable[[Array, Array], tuple[Array, Array, Array]]:
    def slope_fn(center: Array, offset: Array) -> tuple[Array, Array, Array]:
        value, grad, hess = derivatives(row_fn, (mean + sd * center) + sd * offset)
        return value, sd * grad, sd**2 * hess

    return slope_fn


def _mapped(rows: Rows, mean: Array, sd: Array, share: Share | None = None) -> RowMoments1D:
    """Trapezoid on the row's own change of variable: fine at its features, wide enough for its mass.

    ``share``: as of :func:`expect_1d`.
    """
    sd = _floor_sd(sd)
    change = locate_features(_standardised(rows.psi, mean, sd), mean)
    low, high = change.forward(change.low), change.forward(change.high)
    half = _NUM_MAPPED[mean.dtype.name] // 2
    step = (high - low) / (2 * half - 1)
    base = mean + sd * change.anchor
    norm = step / (2 * np.pi) ** 0.5

    def pair(sums: _Sums, first: Array) -> tuple[_Sums, None]:
        """An even and an odd node, on a leading axis of two."""
        x = low + step * (first + jnp.arange(2, dtype=mean.dtype).reshape((2,) + (1,) * mean.ndim))
        offset, rate = change.inverse(x)
        z = change.anchor + offset
        density = norm * rate * jnp.exp(-0.5 * z**2)
        new = jax.vmap(lambda u, z, own: _terms_1d(rows, u, z, own, sd, share))(base + sd * offset, z, density)
        return _add_1d(sums, new), None

    start = _zeros_1d(jnp.zeros((2, *mean.shape), mean.dtype), len(rows.beside))
    sums, _ = jax.lax.scan(pair, start, 2.0 * jnp.arange(half, dtype=mean.dtype))
    even, odd = (jax.tree.map(lambda a, k=k: a[k], sums) for k in (0, 1))
    return _mapped_moments_1d(even, odd, change.cut, mean, sd)


def _mapped_moments_1d(even: _Sums, odd: _Sums, cut: Array, mean: Array, sd: Array) -> RowMoments1D:
    """Joins the two half rules, decides between E psi'' and its Stein form, and estimates the error."""
    sums = _add_1d(even, odd)
    halves = jax.tree.map(lambda a, b: jnp.abs(a - b), even, odd)
    noise_grad, noise_hess = _rounding(sums, mean, sd)
    gap_grad, gap_hess = jnp.abs(sums.grad - sums.stein_grad), jnp.abs(sums.hess - sums.stein_hess)
    kink = gap_hess > 10 * (halves.hess + halves.stein_hess + noise_hess)
    # Far in a tail the second derivative of a clamped probability is 0 * inf in float32: the Stein form does without it.
    unseen = jnp.isnan(sums.hess) & ~jnp.isnan(sums.stein_hess)
    gap_grad = jnp.where(gap_grad > noise_grad, gap_grad, 0.0)
    gap_hess = jnp.where(kink | unseen | (gap_hess <= noise_hess), 0.0, gap_hess)
    eps = jnp.finfo(mean.dtype).eps

    def error(half: Array, scale: Array) -> Array:
        # Halving the step of an analytic trapezoid raises its relative error to the power 2 (poles) to 4 (Gaussians);
        # where there is no kink the Stein gaps already see the poles.
        coarse = half / jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)
        fine = jnp.where(kink, 10 * coarse**2, coarse**3)
        return scale * (jnp.minimum(coarse, fine) + 4 * eps)

    direct = error(halves.hess, sums.abs_hess)
    stein = error(halves.stein_hess, sums.abs_stein_hess)
    use_stein = kink | unseen | (stein < direct)
    hess = jnp.where(use_stein, sums.stein_hess, sums.hess)
    hess_error = jnp.where(use_stein, stein, direct) + gap_hess + gap_grad / sd
    scale = jnp.maximum(jnp.where(use_stein, sums.abs_stein_hess, sums.abs_hess), noise_hess)
    relative = [
        _relative(hess_error, scale),
        _relative(error(halves.grad, sums.abs_grad) + gap_grad, sums.abs_grad),
        _relative(error(halves.value, sums.abs_value) + sd * gap_grad, sums.abs_value),
    ]
    worst = jnp.maximum(jnp.maximum(relative[0], relative[1]), relative[2])
    lost = jnp.where(cut, jnp.inf, hess_error * sd**2)
    return RowMoments1D(sums.value, sums.grad, hess, jnp.where(cut, jnp.inf, worst), lost, sums.beside)


def _apply(row_fn: RowFn, mean: Array, sd: Array, name: str) -> RowMoments1D:
    rows = Rows(row_fn)
    return _mapped(rows, mean, sd) if name == "mapped" else _fixed(rows, mean, sd, RULES.index(name))


def rule_index(max_sd: Float[Array, ""]) -> Int[Array, ""]:
    """Index of the cheapest rule for a largest predictor sd in units of the link's own scale.

    ``max_sd``: largest sd of any row's predictor (for a Student-t: divided by scale * sqrt(df)). Returns index into `RULES`.
    Only a first guess: `choose_rule` measures.
    """
    max_sd = jnp.asarray(max_sd)
    limits = jnp.asarray(SD_LIMITS[max_sd.dtype.name], max_sd.dtype)
    return jnp.sum(max_sd > limits).astype(jnp.int32)


def choose_rule(
    row_fn: RowFn, mean: Float[Array, "*rows"], sd: Float[Array, "*rows"], *, target: float | None = None
) -> Int[Array, ""]:
    """Index of the cheapest rule whose estimated error meets the target in every row.

    Rules are tried in order and only as far as needed, so where the first one serves it costs one pass of it. Call it once a
    round, outside any vmap, and hand the index to `expect_1d`. ``sd``: standard deviation of each row's predictor; ``target``:
    relative error wanted; default 1e-8 in float64, 1e-6 in float32. Returns index into `RULES`.
    """
    mean, sd = jnp.broadcast_arrays(mean, sd)
    return _cheapest(lambda name: _apply(row_fn, mean, sd, name).error, mean.dtype.name, target)


def choose_rule_2d(
    row_fn: RowFn2D,
    mean_u: Float[Array, "*rows"],
    mean_v: Float[Array, "*rows"],
    cov_uu: Float[Array, "*rows"],
    cov_uv: Float[Array, "*rows"],
    cov_vv: Float[Array, "*rows"],
    *,
    target: float | None = None,
) -> Int[Array, ""]:
    """`choose_rule` for two predictors; arguments as in `expect_2d`."""
    moments = jnp.broadcast_arrays(mean_u, mean_v, cov_uu, cov_uv, cov_vv)
    return _cheapest(lambda name: _apply_2d(row_fn, name, *moments).error, moments[0].dtype.name, target)


def _cheapest(error_of: Callable[[str], Array], dtype: str, target: float | None) -> Array:
    target = TARGET[dtype] if target is None else target

    def attempt(index: int) -> Array:
        here = jnp.asarray(index, jnp.int32)
        if index == len(RULES) - 1:
            return here
        good = jnp.max(error_of(RULES[index]), initial=0.0) <= target
        return jax.lax.cond(good, lambda: here, lambda: attempt(index + 1))

    return attempt(0)


def refined(
    evaluate: Callable[[Any], tuple[Any, Float[Array, ""]]], first: Any, tolerance: Any, num_rules: int
) -> tuple[Any, Int[Array, ""], Float[Array, ""]]:
    """Evaluate with a quadrature rule, and again with finer ones while the error is above a tolerance.

    ``evaluate``: the index of a quadrature rule to ``(result, relative error)``; ``first``: index of the rule to start with;
    ``tolerance``: largest relative error; ``num_rules``: how many rules there are. Returns ``(result, rule used, relative
    error)``; the error is above the tolerance only where the finest rule missed it.
    """
    # One trace serves for the shapes and for the loop.
    evaluate = jax.jit(evaluate, inline=True)
    result, error = jax.eval_shape(evaluate, jnp.int32(0))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), result)
    first = jnp.minimum(jnp.asarray(first, jnp.int32), num_rules - 1)

    def unfinished(state):
        _, used, error = state
        return (used < first) | ((error > tolerance) & (used < num_rules - 1))

    def attempt(state):
        _, used, _ = state
        result, error = evaluate(used + 1)
        return result, used + 1, error

    return jax.lax.while_loop(unfinished, attempt, (zero, first - 1, jnp.asarray(jnp.inf, error.dtype)))


def expect_1d(
    row_fn: RowFn,
    mean: Float[Array, "*rows"],
    sd: Float[Array, "*rows"],
    *,
    rule: str | int | Int[Array, ""] | None = None,
    num_rules: int | None = None,
    share: Share | None = None,
    beside: Sequence[RowFn] = (),
) -> RowMoments1D:
    """E psi, E psi' and E psi'' of every row under u ~ N(mean, sd^2).

    ``row_fn``: elementwise psi, rows to rows, in nats; may close over data and parameters; ``sd``: standard deviation of each
    row's predictor, >= 0; ``rule``: a name in `RULES`, an index into it (traced or not), or None for `choose_rule` on these
    rows; ``num_rules``: how many of `RULES` a traced index can mean; the finest one is costly to compile; ``share``: what the
    rows count in an average that they are taken for, which leaves out nodes that count for nothing in that; None leaves none
    out; ``beside``: functions whose expectations are taken at the same nodes (see :class:`Rows`). Returns the expectations
    and the estimated relative error of the worst of psi's three per row. A kink of psi (Laplace) is in hess under the rule
    "mapped"; the others ask for that rule by a large error. Raises ValueError for an unknown rule
    name.
    """
    mean, sd = jnp.broadcast_arrays(mean, sd)
    if rule is None:
        rule = choose_rule(row_fn, mean, sd)
    rows = Rows(row_fn, tuple(beside))
    fixed, mapped = partial(_fixed, rows, share=share), partial(_mapped, rows, share=share)
    return _dispatch(fixed, mapped, rule, num_rules, (mean, sd))


# Where the largest value of an integrand is looked for: so many prior sds to both sides, then ever finer about the best.
_FARTHEST, _LOOKS, _ZOOMS = 40.0, 81, 8
# Nodes along t, of distances ``width sinh(t)`` from it, out to so many prior sds or widths.
_STRETCHED, _REACH = 161, 12.0
# The width is the largest distance, of the prior sd halved again and again, at which the log of the integrand has fallen by this.
_FALL, _HALVINGS = 0.5, 24


def log_expectation_1d(row_fn: RowFn, mean: Float[Array, "*rows"], sd: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """``log E exp(psi)`` of every row under u ~ N(mean, sd^2), in nats, wherever the mass of the product is and however narrow.

    The trapezoidal rule about the largest value of ``psi(u) + log N(u)``, in ``t`` with ``u = mode + width sinh(t)``: nodes as
    close as the product is narrow there, and as far as its tails go. The largest term is taken off before any is exponentiated.
    For products with one peak that matters; a second one is met if it is not narrow beside its distance from the first. A kink
    costs about 1e-4 nats. ``row_fn``: elementwise psi, rows to rows, in nats; minus infinity where the density is 0; ``mean``:
    mean of each row's predictor; ``sd``: standard deviation of each row's predictor, > 0. Returns one number a row; minus
    infinity where the density is 0 at every place that was looked at.
    """
    mean, sd = jnp.broadcast_arrays(mean, sd)

    def log_product(u: Array) -> Array:
        value = row_fn(u) - 0.5 * ((u - mean) / sd) ** 2
        return jnp.where(jnp.isnan(value), -jnp.inf, value)

    def values(offsets: Array, about: Array) -> Array:
        return jax.lax.map(lambda offset: log_product(about + offset), offsets)

    grid = jnp.linspace(-1.0, 1.0, _LOOKS, dtype=mean.dtype)

    def zoom(_: Any, at: tuple[Array, Array]) -> tuple[Array, Array]:
        mode, span = at
        found = values(grid.reshape(-1, *(1,) * mean.ndim) * span, mode)
        # Between the best and its neighbours on both sides.
        return mode + grid[jnp.argmax(found, axis=0)] * span, span * (4.0 / (_LOOKS - 1))

    mode, _ = jax.lax.fori_loop(0, _ZOOMS, zoom, (mean, _FARTHEST * sd))
    top = log_product(mode)
    distances = 2.0 ** -jnp.arange(_HALVINGS, dtype=mean.dtype).reshape(-1, *(1,) * mean.ndim) * sd
    near = jnp.minimum(values(distances, mode), values(-distances, mode)) > top - _FALL
    width = jnp.max(jnp.where(near, distances, distances[-1]), axis=0)
    reach = jnp.arcsinh(_REACH * jnp.maximum(sd / width, 1.0) + jnp.abs(mode - mean) / width)
    t = jnp.linspace(-1.0, 1.0, _STRETCHED, dtype=mean.dtype).reshape(-1, *(1,) * mean.ndim) * reach
    step = 2.0 * reach / (_STRETCHED - 1)
    terms = values(width * jnp.sinh(t), mode) - top + jnp.log(jnp.cosh(t))
    scale = jnp.log(width * step) - jnp.log(sd) - _HALF_LOG_2PI
    return jnp.where(jnp.isfinite(top), top + jax.nn.logsumexp(terms, axis=0) + scale, top)


def expect_2d(
    row_fn: RowFn2D,
    mean_u: Float[Array, "*rows"],
    mean_v: Float[Array, "*rows"],
    cov_uu: Float[Array, "*rows"],
    cov_uv: Float[Array, "*rows"],
    cov_vv: Float[Array, "*rows"],
    *,
    rule: str | int | Int[Array, ""] | None = None,
    num_rules: int | None = None,
    share: Share | None = None,
    beside: Sequence[RowFn2D] = (),
) -> RowMoments2D:
    """E psi, its gradient and its Hessian for every row under (u, v) jointly Gaussian.

    ``row_fn``: elementwise psi(u, v), rows to rows, in nats; ``cov_uu``: variance of the first predictor, >= 0; ``cov_uv``:
    covariance; ``cov_vv``: variance of the second predictor, >= 0; ``rule``: a name in `RULES`, an index into it (traced or
    not), or None for the cheapest that meets the target; ``num_rules``: how many of `RULES` a traced index can mean; the finest
    one is costly to compile; ``share``, ``beside``: as of `expect_1d`. Returns the expectations and the estimated relative error of
    the worst of them per row. Raises ValueError unknown rule name.
    """
    moments = jnp.broadcast_arrays(mean_u, mean_v, cov_uu, cov_uv, cov_vv)
    if rule is None:
        rule = choose_rule_2d(row_fn, *moments)
    law = gaussian_law(*moments)
    rows = Rows(row_fn, tuple(beside))
    fixed, mapped = partial(fixed_2d, rows, share=share), partial(mapped_2d, rows, share=share)
    return _dispatch(fixed, mapped, rule, num_rules, (law,))


def _dispatch(fixed: Callable, mapped: Callable, rule: str | int | Array, num_rules: int | None, args: tuple):
    """Runs one rule; a traced index costs one loop over nodes, and a branch where the finest rule is compiled in."""
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule={rule!r} is not one of {', '.join(RULES)}")
        rule = RULES.index(rule)
    last = len(RULES) - 1
    if isinstance(rule, int):
        return mapped(*args) if rule == last else fixed(*args, rule)
    coarse = jnp.minimum(rule, last - 1)
    if num_rules is not None and num_rules <= last:
        return fixed(*args, coarse)
    return jax.lax.cond(rule == last, lambda: mapped(*args), lambda: fixed(*args, coarse))


def _apply_2d(row_fn: RowFn2D, name: str, *moments: Array) -> RowMoments2D:
    law = gaussian_law(*moments)
    rows = Rows(row_fn)
    return mapped_2d(rows, law) if name == "mapped" else fixed_2d(rows, law, RULES.index(name))
