"""Where a row's log-likelihood bends, and a change of variable that puts quadrature nodes there.

A log-likelihood psi(u) seen through a Gaussian of sd s has two scales: s, and the width w of the places where psi' turns
(a logit's shoulder, a Student-t's core, a Laplace kink with w = 0). Both are resolved by one smooth map of a uniform grid,

    z = c + asinh(b * sinh(x)),    z = (u - mean) / sd,

whose step is b near the feature at c, grows geometrically away from it and settles at 1; a second feature is put in by
composing a second map. The trapezoid rule in x converges exponentially because the map is analytic.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._rules import core_limit, tail_limit

NUM_FEATURES = 3
_NUM_CELLS = 24
_STRAIGHT = 0.05
_WIDTH_FACTOR = 0.5

SlopeFn = Callable[[Array, Array], tuple[Array, Array, Array]]
"""slope_fn(center, offset): psi, d psi/dz, d2 psi/dz2 at z = center + offset (kept apart so that u is exact near a feature)."""


class Feature(NamedTuple):
    """One place per row where the slope turns, in the coordinate that the features before it leave."""

    center: Float[Array, "*rows"]  # in this coordinate
    width: Float[Array, "*rows"]  # in this coordinate, in (0, 1]; 1 makes the map the identity


class RowMap(NamedTuple):
    """A change of variable per row: the range to cover, and the features to be fine at."""

    low: Float[Array, "*rows"]  # smallest z that matters
    high: Float[Array, "*rows"]  # largest z that matters
    features: tuple[Feature, ...]

    @property
    def anchor(self) -> Array:
        """Point from which `inverse` measures: the first feature's center, or 0."""
        return self.features[0].center if self.features else jnp.zeros_like(self.low)

    def forward(self, z: Array) -> Array:
        """Coordinate x of the standardised point z."""
        for center, width in self.features:
            z = jnp.arcsinh(jnp.sinh(z - center) / width)
        return z

    def inverse(self, x: Array) -> tuple[Array, Array]:
        """Offset of z from `anchor`, and dz/dx, at coordinate x."""
        rate = jnp.ones_like(x)
        for index, (center, width) in reversed(list(enumerate(self.features))):
            scaled = width * jnp.sinh(x)
            rate = rate * width * jnp.cosh(x) / jnp.sqrt(1 + scaled**2)
            x = jnp.arcsinh(scaled) + (center if index else 0.0)
        return x, rate


class _Point(NamedTuple):
    """The slope at one point per row."""

    x: Array
    offset: Array  # z measured from the map's anchor
    slope: Array
    curve: Array


def _mass_range(slope_fn: SlopeFn, like: Array) -> tuple[Array, Array]:
    """Range of z outside which psi times the Gaussian density is below rounding; ends where psi stops being finite."""
    core, tail = core_limit(like.dtype), tail_limit(like.dtype)
    outer = np.linspace(core, tail, 8)[1:]
    probes = np.concatenate([-outer[::-1], np.linspace(-core, core, 13), outer])
    zero = jnp.zeros_like(like)
    terms = jax.vmap(lambda z: slope_fn(zero, zero + z))(jnp.asarray(probes, like.dtype))
    finite = jnp.isfinite(terms[0]) & jnp.isfinite(terms[1]) & jnp.isfinite(terms[2])
    density = jnp.exp(-0.5 * jnp.asarray(probes, like.dtype) ** 2).reshape((-1,) + (1,) * like.ndim)
    share = jnp.where(finite, sum(jnp.abs(t) for t in terms) * density, 0.0)
    needed = share > 0.1 * jnp.finfo(like.dtype).eps * jnp.max(share, axis=0)

    def end(side: np.ndarray) -> Array:
        reached = zero + side[0].astype(like.dtype)
        usable = jnp.ones(like.shape, bool)
        for i in range(1, len(side)):
            index = int(np.nonzero(probes == side[i])[0][0])
            before = int(np.nonzero(probes == side[i - 1])[0][0])
            usable = usable & finite[index]
            reached = jnp.where(usable & (needed[index] | needed[before]), side[i].astype(like.dtype), reached)
        return reached

    return end(probes[: len(outer) + 1][::-1]), end(probes[-len(outer) - 1 :])


def _bend(left: _Point, middle: _Point, right: _Point) -> tuple[Array, Array]:
    """How far the slope is from a cubic on a cell: absolute, and relative to its variation there.

    Two defects, since either alone can vanish by symmetry: Simpson's rule for the slope's change, and Hermite's
    interpolation of the slope at the middle.
    """
    width = right.offset - left.offset
    simpson = right.slope - left.slope - width * (left.curve + 4 * middle.curve + right.curve) / 6
    hermite = middle.slope - 0.5 * (left.slope + right.slope) - width * (left.curve - right.curve) / 8
    bend = jnp.abs(simpson) + jnp.abs(hermite)
    change = jnp.abs(middle.slope - left.slope) + jnp.abs(right.slope - middle.slope)
    return bend, bend / (change + jnp.finfo(bend.dtype).tiny)


def _worst_cell(point: Callable[[Array], _Point], anchor: Array, low: Array, high: Array) -> tuple[_Point, ...]:
    """Coarse scan: left, middle and right point of the cell whose bend weighs most."""
    steps = jnp.linspace(0.0, 1.0, 2 * _NUM_CELLS + 1, dtype=low.dtype).reshape((-1,) + (1,) * low.ndim)
    points = jax.vmap(point)(low + (high - low) * steps)
    cells = [jax.tree.map(lambda a, k=k: a[k : k + 2 * _NUM_CELLS : 2], points) for k in (0, 1)]
    cells.append(jax.tree.map(lambda a: a[2::2], points))
    weight = (cells[2].offset - cells[0].offset) * jnp.exp(-0.25 * (anchor + cells[1].offset) ** 2)
    worst = jnp.argmax(jnp.nan_to_num(_bend(*cells)[0] * weight), axis=0)[None]
    return tuple(jax.tree.map(lambda a: jnp.take_along_axis(a, worst, axis=0)[0], cell) for cell in cells)


def _next_feature(slope_fn: SlopeFn, rows: RowMap) -> Feature:
    """Finds the strongest unresolved bend of the slope by a coarse scan and bisection."""
    dtype = rows.low.dtype
    smallest, rounds = (1e-9, 34) if dtype == jnp.float64 else (1e-6, 22)

    def point(x: Array) -> _Point:
        offset, _ = rows.inverse(x)
        _, slope, curve = slope_fn(rows.anchor, offset)
        return _Point(x, offset, slope, curve)

    def crooked(cell: tuple[_Point, ...]) -> Array:
        return (_bend(*cell)[1] > _STRAIGHT) & (cell[2].offset - cell[0].offset > smallest)

    def halve(cell: tuple[_Point, ...]) -> tuple[_Point, ...]:
        left, middle, right = cell
        first = (left, point(0.5 * (left.x + middle.x)), middle)
        second = (middle, point(0.5 * (middle.x + right.x)), right)
        go, take_first = crooked(cell), _bend(*first)[0] >= _bend(*second)[0]
        return jax.tree.map(lambda a, b, old: jnp.where(go, jnp.where(take_first, a, b), old), first, second, cell)

    start = _worst_cell(point, rows.anchor, rows.forward(rows.low), rows.forward(rows.high))
    _, (left, middle, right) = jax.lax.while_loop(
        lambda carry: (carry[0] < rounds) & jnp.any(crooked(carry[1])),
        lambda carry: (carry[0] + 1, halve(carry[1])),
        (0, start),
    )
    span = right.x - left.x
    zoomed = span < 0.75 * (start[2].x - start[0].x)
    width = jnp.clip(_WIDTH_FACTOR * span, 0.5 * smallest, 1.0)
    return Feature(jnp.where(zoomed, middle.x, jnp.zeros_like(span)), jnp.where(zoomed, width, jnp.ones_like(span)))


def locate_features(slope_fn: SlopeFn, like: Array) -> RowMap:
    """Finds, per row, where the integrand has mass and where the slope of psi bends.

    Args:
        slope_fn: psi and its first two derivatives in standardised units at (center, offset).
        like: array whose shape and dtype the rows have.

    Returns:
        The change of variable; constant under differentiation.
    """
    low, high = _mass_range(slope_fn, like)
    rows = RowMap(low, high, ())
    for _ in range(NUM_FEATURES):
        rows = rows._replace(features=(*rows.features, _next_feature(slope_fn, rows)))
    return jax.tree.map(jax.lax.stop_gradient, rows)
