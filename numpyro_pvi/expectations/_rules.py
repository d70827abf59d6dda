"""Fixed node sets for Gaussian expectations, and a change of variable that puts nodes where a row bends.

Nodes live in standardised units, u = mean + sd * z. Everything here is NumPy, computed on first use and cached.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy.polynomial.hermite_e import hermegauss

RULES: tuple[str, ...] = ("gh8", "gh20", "coarse", "trapezoid", "mapped")
"""Rules for expectations over one or two predictors, cheapest first; a rule's index is its place here."""

SD_LIMITS: dict[str, tuple[float, ...]] = {"float64": (0.1, 0.9, 1.7, 4.0), "float32": (0.35, 1.5, 2.2, 5.0)}
"""Largest predictor sd, in units of the link's own scale, up to which each rule but the last meets the target."""

TARGET: dict[str, float] = {"float64": 1e-8, "float32": 1e-6}
"""Relative error aimed at on the value and both derivatives."""

TOLERANCE: dict[str, float] = {"float64": 1e-8, "float32": 1e-5}
"""Error of all rows' curvature, relative to its sum or to q's precision, that a finer rule is tried for."""

NEGLIGIBLE: dict[str, float] = {"float64": 1e-18, "float32": 1e-10}
"""Weight, in averages whose weights add up to 1, below which a node of several dimensions is left out."""

OVERFLOWN: dict[str, float] = {"float64": 1e-9, "float32": 1e-7}
"""The same where a density or a derivative of it is not finite, of which nobody tells failed arithmetic from a density of 0."""

# Range in sds and number of nodes of the coarse trapezoid: an even number, as of the fine one (see `fixed_nodes`).
_COARSE = {"float64": (7.5, 40), "float32": (6.0, 30)}
# Nodes of one and of two predictors that a pass over few rows takes at once, and the number of rows up to which it does.
BLOCKS, FEW_ROWS = (10, 40), (2048, 512)


def core_limit(dtype: np.dtype) -> float:
    """Standard deviations beyond which a Gaussian has no mass the dtype could see (unless the integrand grows)."""
    return 9.0 if np.dtype(dtype) == np.float64 else 6.5


def tail_limit(dtype: np.dtype) -> float:
    """Standard deviations beyond which the Gaussian density itself leaves the dtype's range."""
    return 37.0 if np.dtype(dtype) == np.float64 else 12.5


FIXED_RULES: tuple[str, ...] = RULES[:-1]
"""Rules with the same standardised nodes in every row."""


class NodeTable(NamedTuple):
    """Nodes of all fixed rules end to end, so that one loop serves whichever rule a traced index means."""

    nodes: tuple[np.ndarray, ...]  # one array per axis
    weights: np.ndarray
    starts: np.ndarray  # first node of each rule, and the total
    per_axis: np.ndarray  # nodes of each rule along one axis

    def width(self, num_rows: int) -> int:
        """Nodes that a pass over so many rows takes at once."""
        last = len(self.nodes) - 1
        return BLOCKS[last] if num_rows <= FEW_ROWS[last] else 1

    def span(self, index: int | Array) -> tuple[int | Array, int | Array, int | Array]:
        """First node, end and nodes per axis of a rule; Python ints for an index known while tracing."""
        if isinstance(index, int):
            return int(self.starts[index]), int(self.starts[index + 1]), int(self.per_axis[index])
        starts = jnp.asarray(self.starts)
        return starts[index], starts[index + 1], jnp.asarray(self.per_axis)[index]


@cache
def node_table(num_axes: int, dtype_name: str) -> NodeTable:
    """Tensor-product nodes of every fixed rule in one or two dimensions, each rule in whole blocks of nodes.

    ``num_axes``: 1 or 2; ``dtype_name``: "float32" or "float64". Returns the table; nodes of negligible weight are left out in
    two dimensions.
    """
    parts, weights, per_axis = [], [], []
    for name in FIXED_RULES:
        nodes, weight = fixed_nodes(name, dtype_name)
        per_axis.append(len(nodes))
        product = np.prod(np.meshgrid(*[weight] * num_axes), axis=0).ravel()
        kept = product > (0.0 if num_axes == 1 else NEGLIGIBLE[dtype_name])
        grid = [g.ravel()[kept] for g in np.meshgrid(*[nodes] * num_axes)]
        grid, product = _whole_blocks(grid, product[kept], BLOCKS[num_axes - 1])
        parts.append(grid)
        weights.append(product)
    starts = np.concatenate([[0], np.cumsum([len(w) for w in weights])])
    axes = tuple(np.concatenate([p[k] for p in parts]) for k in range(num_axes))
    return NodeTable(axes, np.concatenate(weights), starts, np.asarray(per_axis))


def _whole_blocks(nodes: list[np.ndarray], weights: np.ndarray, block: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The same rule with some middle nodes taken twice at half their weight, for a multiple of a number of nodes.

    Nodes of no weight would not do: nothing times infinity is no number.
    """
    missing = -len(weights) % block
    twice = np.zeros(len(weights), bool)
    twice[(len(weights) - missing) // 2 :][:missing] = True
    times = 1 + twice
    return [np.repeat(axis, times) for axis in nodes], np.repeat(weights / times, times)


@cache
def fixed_nodes(name: str, dtype_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a fixed rule for E[f(z)], z standard normal.

    ``name``: "gh8", "gh20", or one of the two trapezoids, "coarse" (for predictors a little wider than the link) and
    "trapezoid"; ``dtype_name``: "float32" or "float64"; the trapezoids' range and step follow it. Returns nodes (ascending) and
    weights that sum to one, both float64.
    """
    if name.startswith("gh"):
        nodes, weights = hermegauss(int(name[2:]))
        return nodes, weights / weights.sum()
    limit, step = core_limit(np.dtype(dtype_name)), 0.2 if dtype_name == "float64" else 0.22
    # An even number: no node falls on the mean. NumPyro's densities have the wrong derivative exactly at a logit of 0.
    count = 2 * int(np.ceil(limit / step))
    if name == "coarse":
        limit, count = _COARSE[dtype_name]
    nodes = np.linspace(-limit, limit, count)
    weights = np.exp(-0.5 * nodes**2)
    return nodes, weights / weights.sum()


# ------------------------------------------------------------------------------------------------------ where rows bend
# Where a row's log-likelihood bends, and a change of variable that puts quadrature nodes there.
#
# A log-likelihood psi(u) seen through a Gaussian of sd s has two scales: s, and the width w of the places where psi'
# turns (a logit's shoulder, a Student-t's core, a Laplace kink with w = 0). One smooth map of a uniform grid serves
# both,
#
#     z = c + asinh(b * sinh(x)),    z = (u - mean) / sd,
#
# whose step is b near the feature at c, grows geometrically away from it and settles at 1; a second feature is put in
# by composing a second map. The trapezoid rule in x converges exponentially because the map is analytic.

_NUM_FEATURES = {"float64": 3, "float32": 2}
_NUM_CELLS = 24
_STRAIGHT = 0.05
_WIDTH_FACTOR = 0.5

SlopeFn = Callable[[Array, Array], tuple[Array, Array, Array]]
"""slope_fn(center, offset): psi, d psi/dz, d2 psi/dz2 at z = center + offset (apart: u stays exact near features)."""


class RowMap(NamedTuple):
    """A change of variable per row: the range to cover, and the features to be fine at.

    Feature k lives in the coordinate that features 0..k-1 leave; a width of 1 at center 0 is the identity.
    """

    low: Float[Array, "*rows"]  # smallest z that matters
    high: Float[Array, "*rows"]  # largest z that matters
    cut: Bool[Array, "*rows"]  # mass was left outside because psi or the density leaves the dtype's range there
    center: Float[Array, "K *rows"]
    width: Float[Array, "K *rows"]  # in (0, 1]

    @property
    def anchor(self) -> Array:
        """Point from which `inverse` measures: the first feature's center."""
        return self.center[0]

    def forward(self, z: Array) -> Array:
        """Coordinate x of the standardised point z."""
        for k in range(len(self.center)):
            z = _arcsinh(_sinh(z - self.center[k]) / self.width[k])
        return z

    def inverse(self, x: Array) -> tuple[Array, Array]:
        """Offset of z from `anchor`, and dz/dx, at coordinate x (rows, or a leading axis of points by rows)."""
        rate = jnp.ones_like(x)
        for k in reversed(range(len(self.center))):
            scaled = self.width[k] * _sinh(x)
            rate = rate * jnp.sqrt((self.width[k] ** 2 + scaled**2) / (1 + scaled**2))
            x = _arcsinh(scaled) + (self.center[k] if k else 0.0)
        return x, rate


def _sinh(x: Array) -> Array:
    grown = jnp.expm1(jnp.abs(x))
    return jnp.sign(x) * 0.5 * (grown + grown / (1 + grown))


def _arcsinh(x: Array) -> Array:
    size = jnp.abs(x)
    return jnp.sign(x) * jnp.log1p(size + size * (size / (1 + jnp.sqrt(1 + size * size))))


class _Point(NamedTuple):
    """The slope at one point per row."""

    x: Array
    offset: Array  # z measured from the map's anchor
    slope: Array
    curve: Array


def _mass_range(slope_fn: SlopeFn, like: Array) -> tuple[Array, Array, Array]:
    """Range of z outside which psi times the Gaussian density is below rounding, and whether it had to be cut short."""
    core, tail = core_limit(like.dtype), tail_limit(like.dtype)
    outer = np.linspace(core, tail, 8)[1:]
    probes = np.concatenate([-outer[::-1], np.linspace(-core, core, 13), outer])
    zero = jnp.zeros_like(like)
    terms = jax.vmap(lambda z: slope_fn(zero, zero + z))(jnp.asarray(probes, like.dtype))
    finite = jnp.isfinite(terms[0]) & jnp.isfinite(terms[1]) & jnp.isfinite(terms[2])
    density = jnp.exp(-0.5 * jnp.asarray(probes, like.dtype) ** 2).reshape((-1,) + (1,) * like.ndim)
    share = jnp.where(finite, sum(jnp.abs(t) for t in terms) * density, 0.0)
    share = share / (jnp.max(share, axis=0) + jnp.finfo(like.dtype).tiny)
    tiny = 0.1 * jnp.finfo(like.dtype).eps

    def end(order: np.ndarray) -> tuple[Array, Array]:
        """Walks outwards from the core while the integrand is finite and still matters."""
        side, usable = probes[order], jnp.cumprod(finite[order], axis=0).astype(bool)
        needed = jnp.concatenate([usable[:1], usable[1:] & ((share[order][1:] > tiny) | (share[order][:-1] > tiny))])
        index = jnp.max(jnp.where(needed, jnp.arange(len(side)).reshape((-1,) + (1,) * like.ndim), 0), axis=0)
        left_over = jnp.take_along_axis(share[order], index[None], axis=0)[0]
        return jnp.asarray(side, like.dtype)[index], left_over > 1e4 * tiny

    num_outer = len(outer)
    low, low_cut = end(np.arange(num_outer, -1, -1))
    high, high_cut = end(np.arange(len(probes) - num_outer - 1, len(probes)))
    return low, high, low_cut | high_cut


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
    # A bend within the rounding of slope and curve is none; the factor makes it fall below the threshold.
    curve = jnp.maximum(jnp.maximum(jnp.abs(left.curve), jnp.abs(right.curve)), jnp.abs(middle.curve))
    rounding = jnp.abs(left.slope) + jnp.abs(right.slope) + width * curve
    info = jnp.finfo(bend.dtype)
    return bend, bend / (change + 32 * info.eps / _STRAIGHT * rounding + info.tiny)


def _worst_cell(points: _Point, anchor: Array) -> tuple[_Point, _Point, _Point]:
    """Left, middle and right point of the cell (two grid intervals) whose bend weighs most."""
    cells = [jax.tree.map(lambda a, k=k: a[k : k + 2 * _NUM_CELLS : 2], points) for k in (0, 1)]
    cells.append(jax.tree.map(lambda a: a[2::2], points))
    weight = (cells[2].offset - cells[0].offset) * jnp.exp(-0.25 * (anchor + cells[1].offset) ** 2)
    worst = jnp.argmax(jnp.nan_to_num(_bend(*cells)[0] * weight), axis=0)[None]
    return tuple(jax.tree.map(lambda a: jnp.take_along_axis(a, worst, axis=0)[0], cell) for cell in cells)


def _next_feature(slope_fn: SlopeFn, rows: RowMap) -> tuple[Array, Array]:
    """Center and width of the strongest unresolved bend of the slope: a coarse scan, then bisection."""
    dtype = rows.low.dtype
    smallest, rounds = (1e-9, 34) if dtype == jnp.float64 else (1e-6, 22)

    def points(x: Array) -> _Point:
        offset, _ = rows.inverse(x)
        _, slope, curve = jax.vmap(lambda o: slope_fn(rows.anchor, o))(offset)
        return _Point(x, offset, slope, curve)

    def crooked(cell: tuple[_Point, ...]) -> Array:
        return (_bend(*cell)[1] > _STRAIGHT) & (cell[2].offset - cell[0].offset > smallest)

    def between(cell: tuple[_Point, ...]) -> _Point:
        left, middle, right = cell
        return points(0.5 * (jnp.stack([left.x, right.x]) + middle.x))

    def halve(carry: tuple) -> tuple:
        # New points are evaluated last and used in the next turn: used at once, the compiler would repeat their
        # evaluation in every array that the choice between the halves produces. The first turn has none to use, and moves no row.
        count, (left, middle, right), inner, go = carry
        first, second = (jax.tree.map(lambda a, k=k: a[k], inner) for k in (0, 1))
        first, second = (left, first, middle), (middle, second, right)
        take_first = _bend(*first)[0] >= _bend(*second)[0]
        cell = jax.tree.map(
            lambda a, b, old: jnp.where(go, jnp.where(take_first, a, b), old), first, second, (left, middle, right)
        )
        return count + 1, cell, between(cell), crooked(cell)

    low, high = rows.forward(rows.low), rows.forward(rows.high)
    steps = jnp.linspace(0.0, 1.0, 2 * _NUM_CELLS + 1, dtype=dtype).reshape((-1,) + (1,) * low.ndim)
    start = _worst_cell(points(low + (high - low) * steps), rows.anchor)
    none = jax.tree.map(lambda a: jnp.stack([a, a]), start[1])
    _, (left, middle, right), _, _ = jax.lax.while_loop(
        lambda carry: (carry[0] <= rounds) & ((carry[0] == 0) | jnp.any(carry[3])),
        halve,
        (0, start, none, jnp.zeros(low.shape, bool)),
    )
    span = right.x - left.x
    zoomed = span < 0.75 * (start[2].x - start[0].x)
    width = jnp.clip(_WIDTH_FACTOR * span, 0.5 * smallest, 1.0)
    return jnp.where(zoomed, middle.x, jnp.zeros_like(span)), jnp.where(zoomed, width, jnp.ones_like(span))


def locate_features(slope_fn: SlopeFn, like: Array) -> RowMap:
    """Finds, per row, where the integrand has mass and where the slope of psi bends.

    ``slope_fn``: psi and its first two derivatives in standardised units at (center, offset); ``like``: array whose shape and
    dtype the rows have. Returns the change of variable; constant under differentiation.
    """
    low, high, cut = _mass_range(slope_fn, like)
    shape = (_NUM_FEATURES[like.dtype.name], *like.shape)
    start = RowMap(low, high, cut, jnp.zeros(shape, like.dtype), jnp.ones(shape, like.dtype))

    def add(k: Array, rows: RowMap) -> RowMap:
        center, width = _next_feature(slope_fn, rows)
        return rows._replace(center=rows.center.at[k].set(center), width=rows.width.at[k].set(width))

    return jax.tree.map(jax.lax.stop_gradient, jax.lax.fori_loop(0, shape[0], add, start))
