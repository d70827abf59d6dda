"""Gaussian expectations of rows that depend on two affine predictors (a location and a scale, say), with their error.

Rows are integrated in whitened coordinates z = (z1, z2), both standard normal: v = mean_v + s_v z2 outside, and
u = mean_u + r z2 + s_c z1 inside, where s_v^2 = cov_vv, r = cov_uv / s_v and s_c^2 = cov_uu - r^2.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._mapping import locate_features
from ._rules import node_table

RowFn2D = Callable[[Array, Array], Array]

_NUM_OUTER = {"float64": 96, "float32": 64}
_NUM_INNER = {"float64": 112, "float32": 72}


class RowMoments2D(NamedTuple):
    """Expectations of psi_n and its derivatives over two predictors, in nats per unit of the predictors."""

    value: Float[Array, "*rows"]  # E psi
    grad: Float[Array, "*rows 2"]  # E psi_u, E psi_v
    hess: Float[Array, "*rows 3"]  # E psi_uu, E psi_uv, E psi_vv
    error: Float[Array, "*rows"]  # estimated relative error of the worst, in whitened coordinates; inf where not finite
    absolute: Float[Array, "*rows"]  # estimated error of the whitened hess, in nats; inf where not known


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


def gaussian_law(mean_u: Array, mean_v: Array, cov_uu: Array, cov_uv: Array, cov_vv: Array) -> Law:
    """Factors the 2x2 covariance; predictors that do not vary keep a tiny sd so that nothing is divided by zero."""
    floor = jnp.asarray(1e-15, mean_u.dtype)
    sd_v = jnp.sqrt(jnp.maximum(cov_vv, floor**2))
    slope = jnp.where(cov_vv > 0, cov_uv / sd_v, 0.0)
    rounding = 4 * jnp.finfo(mean_u.dtype).eps * cov_uu
    sd_u = jnp.sqrt(jnp.maximum(cov_uu - slope**2, jnp.maximum(floor**2, rounding)))
    return Law(mean_u, mean_v, slope, sd_u, sd_v)


def _derivatives(row_fn: RowFn2D, u: Array, v: Array) -> tuple[Array, ...]:
    """psi and its first and second derivatives, by two nested forward passes."""
    ones, zeros = jnp.ones_like(u), jnp.zeros_like(u)

    def first(x: Array, y: Array) -> tuple[Array, Array, Array]:
        value, along_u = jax.jvp(row_fn, (x, y), (ones, zeros))
        return value, along_u, jax.jvp(row_fn, (x, y), (zeros, ones))[1]

    value, (_, uu, uv) = jax.jvp(first, (u, v), (ones, zeros))
    vv = jax.jvp(first, (u, v), (zeros, ones))[1][2]
    return (*value, uu, uv, vv)


def _terms(row_fn: RowFn2D, law: Law, u: Array, v: Array, z: tuple[Array, Array], weight: Array) -> Sums2D:
    plain = tuple(weight * t for t in _derivatives(row_fn, u, v))
    grad, hess = law.whiten(list(plain[1:3]), list(plain[3:]))
    stein = (z[0] * grad[0], z[1] * grad[0], z[1] * grad[1], z[0] * plain[0], z[1] * plain[0])
    size = tuple(jnp.abs(t) for t in (plain[0], *grad, *hess))
    return Sums2D(plain, stein, size, tuple(jnp.abs(t) for t in stein))


def _zeros(like: Array) -> Sums2D:
    zero = jnp.zeros_like(like)
    return Sums2D((zero,) * 6, (zero,) * 5, (zero,) * 6, (zero,) * 5)


def _add(left: Sums2D, right: Sums2D) -> Sums2D:
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
    return RowMoments2D(sums.plain[0], jnp.stack(sums.plain[1:3], -1), jnp.stack(hess, -1), error, absolute)


def fixed_2d(row_fn: RowFn2D, law: Law, index: int | Array) -> RowMoments2D:
    """Tensor product of a fixed rule; the error is the gap between direct and Stein forms, as in one dimension.

    Few rows take a block of nodes at a time, as in one dimension.
    """
    dtype = law.mean_u.dtype
    table = node_table(2, dtype.name)
    width = table.width(law.mean_u.size)
    inner, outer, weights = (jnp.asarray(a, dtype).reshape(-1, width) for a in (*table.nodes, table.weights))
    start, stop, per_axis = table.span(index)

    def at(z1: Array, z2: Array, weight: Array) -> Sums2D:
        u, v = law.mean_u + law.slope * z2 + law.sd_u * z1, law.mean_v + law.sd_v * z2
        return _terms(row_fn, law, u, v, (z1, z2), weight)

    def step(k: Array, sums: Sums2D) -> Sums2D:
        if width > 1:
            block = jax.vmap(at)(inner[k], outer[k], weights[k])
            return _add(sums, jax.tree.map(lambda x: jnp.sum(x, axis=0), block))
        return _add(sums, at(inner[k, 0], outer[k, 0], weights[k, 0]))

    sums = jax.lax.fori_loop(start // width, stop // width, step, _zeros(law.mean_u))
    _, _, gaps = _gaps(sums, law)
    # What is not a number is no small gap.
    gaps = [
        jnp.where(g <= n, 0.0, jnp.nan_to_num(g, nan=jnp.inf)) for g, n in zip(gaps, _noise(sums, law), strict=True)
    ]
    first = (gaps[3] + gaps[4]) * per_axis**0.5
    second = gaps[0] + gaps[1] + gaps[2] + first
    error = _worst([second] * 6, sums.size)
    return _moments(sums, list(sums.plain[3:]), error, second)


def mapped_2d(row_fn: RowFn2D, law: Law) -> RowMoments2D:
    """Nested trapezoids, each on its own change of variable; the inner one is found anew at every outer node."""
    dtype = law.mean_u.dtype
    num_outer, num_inner = _NUM_OUTER[dtype.name] // 2, _NUM_INNER[dtype.name] // 2
    outer = locate_features(_outer_slope(row_fn, law), law.mean_u)
    low, high = outer.forward(outer.low), outer.forward(outer.high)
    step = (high - low) / (2 * num_outer - 1)

    def inner(index: Array) -> tuple[Sums2D, Sums2D]:
        offset, rate = outer.inverse(low + step * index)
        z2 = outer.anchor + offset
        weight = step * rate * jnp.exp(-0.5 * z2**2) / (2 * np.pi)
        v = law.mean_v + law.sd_v * outer.anchor + law.sd_v * offset
        return _inner_sums(row_fn, law, v, z2, weight, num_inner)

    def pair(carry: tuple[Sums2D, Sums2D], first: Array) -> tuple[tuple[Sums2D, Sums2D], None]:
        """An even and an odd outer node, on a leading axis of two."""
        sums, split = carry
        even, odd = jax.vmap(inner)(first + jnp.arange(2, dtype=dtype))
        split = jax.tree.map(lambda s, a, b: s + jnp.abs(a - b), split, even, odd)
        return (jax.tree.map(lambda s, a, b: s + a + b, sums, even, odd), split), None

    start = _zeros(jnp.zeros((2, *law.mean_u.shape), dtype))
    (sums, split), _ = jax.lax.scan(pair, (start, start), 2.0 * jnp.arange(num_outer, dtype=dtype))
    halves = jax.tree.map(lambda a, s: jnp.maximum(jnp.abs(a[0] - a[1]), s[0] + s[1]), sums, split)
    return _mapped_moments(jax.tree.map(lambda a: a[0] + a[1], sums), halves, outer.cut, law)


def _outer_slope(row_fn: RowFn2D, law: Law) -> Callable[[Array, Array], tuple[Array, Array, Array]]:
    """A stand-in for the inner integral as a function of z2: three inner Gauss-Hermite nodes."""
    nodes, weights = (-(3**0.5), 0.0, 3**0.5), (1 / 6, 2 / 3, 1 / 6)

    def slope_fn(center: Array, offset: Array) -> tuple[Array, Array, Array]:
        def integral(z: Array) -> Array:
            v = law.mean_v + law.sd_v * z
            parts = [
                w * row_fn(law.mean_u + law.slope * z + law.sd_u * x, v) for x, w in zip(nodes, weights, strict=True)
            ]
            return parts[0] + parts[1] + parts[2]

        z, ones = center + offset, jnp.ones_like(center)
        (value, grad), (_, hess) = jax.jvp(lambda x: jax.jvp(integral, (x,), (ones,)), (z,), (ones,))
        return value, grad, hess

    return slope_fn


def _inner_sums(row_fn: RowFn2D, law: Law, v: Array, z2: Array, weight: Array, half: int) -> tuple[Sums2D, Sums2D]:
    """Even and odd half of the inner rule at one outer node per row."""
    mean = law.mean_u + law.slope * z2

    def slope_fn(center: Array, offset: Array) -> tuple[Array, Array, Array]:
        ones = jnp.ones_like(center)
        along = lambda x: jax.jvp(lambda t: row_fn(t, v), (x,), (ones,))  # noqa: E731
        u = (mean + law.sd_u * center) + law.sd_u * offset
        (value, grad), (_, hess) = jax.jvp(along, (u,), (ones,))
        return value, law.sd_u * grad, law.sd_u**2 * hess

    rows = locate_features(slope_fn, mean)
    low, high = rows.forward(rows.low), rows.forward(rows.high)
    step = (high - low) / (2 * half - 1)
    base = mean + law.sd_u * rows.anchor

    def node(index: Array) -> Sums2D:
        offset, rate = rows.inverse(low + step * index)
        z1 = rows.anchor + offset
        return _terms(row_fn, law, base + law.sd_u * offset, v, (z1, z2), weight * step * rate * jnp.exp(-0.5 * z1**2))

    def pair(sums: Sums2D, first: Array) -> tuple[Sums2D, None]:
        return _add(sums, jax.vmap(node)(first + jnp.arange(2, dtype=mean.dtype))), None

    start = _zeros(jnp.zeros((2, *mean.shape), mean.dtype))
    sums, _ = jax.lax.scan(pair, start, 2.0 * jnp.arange(half, dtype=mean.dtype))
    return tuple(jax.tree.map(lambda a, k=k: a[k], sums) for k in (0, 1))


def _mapped_moments(sums: Sums2D, halves: Sums2D, cut: Array, law: Law) -> RowMoments2D:
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
