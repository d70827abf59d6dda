"""Moments of a tilted distribution of a product of families, summed over a grid that finds where its mass is.

Every component is reached by coordinates in which its densities are smooth and fall off on both sides
(:mod:`numpyro_pvi.families._grids`), or has finitely many values. Of a coordinate evenly spaced points in v are taken,
``u = c + w sinh v``: dense where the mass is, and far out on both sides. The first pass looks ten thousand widths of q around; each
later one is laid over what the last one found to matter, so that tilted distributions much narrower than q, or far
from it, are resolved as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._numerics import all_finite
from ..families import Family, ProductFamily, ProductNatural, grid_rule, support_of
from ._clouds import GRID_DIM
from ._tilted import TEMPERINGS, Tilted

# Points per coordinate where there is one, or two; most passes, of which the last one counts, and the share of a window that the
# next one would have to fill for there to be none.
_POINTS, _PASSES, _ALIKE = {0: 1, 1: 256, 2: 96}, 6, 0.8
# Cells of all values of the components that have finitely many.
_MOST_CELLS = 1024
# Widths of q that the first pass looks to either side, and nats below the peak that still matter beside rounding.
_REACH, _SPARE = 1e4, 5.0
# Nats below the peak that the border of the last pass must lie.
_BORDER = 16.0


class Axis(NamedTuple):
    """One coordinate of a component: a "line", a "circle", or finitely many "values"."""

    name: str
    kind: str
    count: int


class Window(NamedTuple):
    """Where the points of the lines and circles are: between ``low`` and ``high`` in v, about a centre."""

    centre: Float[Array, "k"]
    width: Float[Array, "k"]
    low: Float[Array, "k"]
    high: Float[Array, "k"]

    @property
    def length(self) -> Float[Array, "k"]:
        """How far from one end to the other, in u were all axes lines."""
        return self.width * (jnp.sinh(self.high) - jnp.sinh(self.low))


class _Look(NamedTuple):
    """A tilted distribution on the points of its last pass: where these are, the factor over the site there, and how it went."""

    window: Window
    ratio: Float[Array, "S"]
    share: Float[Array, ""]
    tries: Array
    proper: Bool[Array, ""]


class _Points(NamedTuple):
    """Points of a grid, by component."""

    values: dict[str, Any]
    statistics: dict[str, Any]
    # Statistics of the values as they are rounded, and whether some differ from those of the point.
    held: dict[str, Any]
    mass: Float[Array, "S"]
    far: Bool[Array, "S"]


@dataclasses.dataclass(frozen=True)
class ProductGrid:
    """A grid over all components of a product.

    Args:
        family: the product.
        axes: its coordinates, those of one component side by side.
    """

    family: ProductFamily
    axes: tuple[Axis, ...]

    @property
    def continuous(self) -> tuple[int, ...]:
        """Positions of the axes that are not finitely many values."""
        return tuple(i for i, axis in enumerate(self.axes) if axis.kind != "values")

    @property
    def counts(self) -> tuple[int, ...]:
        """Points along every axis."""
        return tuple(axis.count for axis in self.axes)

    def first_window(self, q: ProductNatural) -> Window:
        """Where q's mass is, and ten thousand widths to either side."""
        centres, widths = [jnp.zeros((0,))], [jnp.zeros((0,))]
        for name, family in self.family.components:
            rule = grid_rule(family)
            if rule is not None:
                centre, width = rule.around(q.parts[name])
                centres, widths = [*centres, jnp.ravel(centre)], [*widths, jnp.ravel(width)]
        centre, circle = jnp.concatenate(centres), jnp.asarray(self._circles())
        half = jnp.where(circle, jnp.pi, math.asinh(_REACH)).astype(centre.dtype)
        return Window(centre, jnp.concatenate(widths).astype(centre.dtype), -half, half)

    def _circles(self) -> np.ndarray:
        return np.array([self.axes[i].kind == "circle" for i in self.continuous], bool)

    def coordinates(self, window: Window) -> tuple[Float[Array, "k n"], Float[Array, "k n"], Float[Array, "k n"]]:
        """Points of every continuous axis: v, u, and the logarithm of the length in u that each stands for."""
        number = _POINTS[len(self.continuous)]
        step = (window.high - window.low) / number
        v = window.low[:, None] + step[:, None] * (jnp.arange(number) + 0.5)
        width, circle = window.width[:, None], self._circles()[:, None]
        u = window.centre[:, None] + jnp.where(circle, v, width * jnp.sinh(v))
        slope = jnp.where(circle, 0.0, jnp.log(width) + jnp.logaddexp(v, -v) - math.log(2))
        return v, u, slope + jnp.log(step)[:, None]

    def points(self, q: ProductNatural, window: Window) -> _Points:
        """All points."""
        place = dict(zip(self.continuous, range(len(self.continuous)), strict=True))
        _, u, log_cell = self.coordinates(window)
        index = [x.reshape(-1) for x in np.indices(self.counts)]
        mass: Any = sum((log_cell[place[i]][index[i]] for i in place), start=jnp.zeros((len(index[0]),), u.dtype))
        values, statistics, held, begin = {}, {}, {}, 0
        far = jnp.zeros(mass.shape, bool)
        for name, family in self.family.components:
            own = range(begin, begin := begin + sum(axis.name == name for axis in self.axes))
            rule, shape = grid_rule(family), _coordinates(family)
            if rule is None:
                picked = [jnp.asarray(index[i]) for i in own]
            else:
                picked = [u[place[i]][index[i]] for i in own]
            at = jnp.stack(picked, axis=-1).reshape(-1, *shape)
            values[name] = at if rule is None else rule.value(q.parts[name], at)
            if rule is None:
                statistics[name] = held[name] = family.sufficient_statistics(at)
                continue
            near = rule.held(at)
            statistics[name], held[name] = (rule.statistics(q.parts[name], x) for x in (at, near))
            far = far | jnp.any((near != at).reshape(len(index[0]), -1), axis=-1)
            mass = mass + jnp.sum(rule.log_slope(q.parts[name], at).reshape(len(index[0]), -1), axis=-1)
        return _Points(values, statistics, held, mass, far)

    def zoomed(self, window: Window, logs: Float[Array, "S"]) -> Window:
        """The window that covers what matters of a density seen on another's points, a point beyond it on either side."""
        drop = _SPARE - math.log(float(jnp.finfo(logs.dtype).eps))
        v, u, cells = self.coordinates(window)
        mass, found = logs.reshape(self.counts), []
        density = mass
        for k, i in enumerate(self.continuous):
            density = density - jnp.expand_dims(cells[k], tuple(j for j in range(mass.ndim) if j != i))
        for k, i in enumerate(self.continuous):
            profiles = [jnp.max(x, axis=tuple(j for j in range(x.ndim) if j != i)) for x in (mass, density)]
            one = jax.tree.map(lambda x, k=k: x[k], window)
            closer = _around_circle if self.axes[i].kind == "circle" else _along_line
            found.append(closer(one, v[k], u[k], *profiles, drop))
        if not found:
            return window
        # Where nothing at all is finite the window stays where it was.
        new = jax.tree.map(lambda *x: jnp.stack(x), *found)
        return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(jnp.max(logs)), a, b), new, window)

    def inside(self, logs: Float[Array, "S"]) -> Bool[Array, ""]:
        """Whether the mass lies within the border of all lines."""
        whole, top = logs.reshape(self.counts), jnp.max(logs)
        edges = [jnp.full((), -jnp.inf, logs.dtype)]
        for i in self.continuous:
            if self.axes[i].kind == "line":
                edges.append(jnp.max(jnp.take(whole, np.array([0, -1]), axis=i)))
        return jnp.max(jnp.stack(edges)) < top - _BORDER

    def matched(self, q: ProductNatural, statistics: dict, logs: Float[Array, "S"]) -> ProductNatural:
        """The member with the mean statistics of a density on the points."""
        weights, parts, begin = jax.nn.softmax(logs), {}, 0
        whole = jax.nn.log_softmax(logs).reshape(self.counts)
        for name, family in self.family.components:
            own = range(begin, begin := begin + sum(axis.name == name for axis in self.axes))
            support = support_of(family)
            if support is None:
                average = jax.tree.map(lambda t: jnp.tensordot(weights, t, axes=1), statistics[name])
                parts[name] = family.mean_to_natural(average)
                continue
            rows = [jax.nn.logsumexp(whole, axis=tuple(j for j in range(whole.ndim) if j != i)) for i in own]
            parts[name] = support.message(jnp.stack(rows).reshape(*family.event_shape, support.size))
        return ProductNatural(parts)


def _coordinates(family: Family) -> tuple[int, ...]:
    """Shape of one theta's coordinates."""
    rule, shape = grid_rule(family), tuple(family.event_shape)
    return (*shape[:-1], shape[-1] - rule.lacks) if rule is not None and rule.lacks else shape


def _spacing(u: Array, best: Array) -> Array:
    last = u.shape[0] - 1
    return jnp.maximum(u[jnp.minimum(best + 1, last)] - u[best], u[best] - u[jnp.maximum(best - 1, 0)])


def _along_line(window: Window, v: Array, u: Array, mass: Array, density: Array, drop: float) -> Window:
    # Centred where the density in u is highest: far points stand for long stretches.
    number, best = u.shape[0], jnp.argmax(density)
    matters = mass > jnp.max(mass) - drop
    # A step beyond the outermost points that matter, of the window itself where they are its first or last.
    step = (window.high - window.low) / number
    ends = v[jnp.argmax(matters)] - step, v[number - 1 - jnp.argmax(matters[::-1])] + step
    # The narrowest scale on either side: the steeper flank has to be resolved, too.
    away = jnp.where(density < density[best] - 1.5, jnp.abs(u - u[best]), jnp.inf)
    width = jnp.maximum(jnp.min(away), _spacing(u, best))
    width = jnp.where(jnp.isfinite(width), width, window.width)
    reach = [jnp.arcsinh((window.centre + window.width * jnp.sinh(end) - u[best]) / width) for end in ends]
    return Window(u[best], width, *reach)


def _around_circle(window: Window, v: Array, u: Array, mass: Array, density: Array, drop: float) -> Window:
    best, step = jnp.argmax(density), (window.high - window.low) / v.shape[0]
    away = jnp.mod(v - v[best] + jnp.pi, 2 * jnp.pi) - jnp.pi
    matters = mass > jnp.max(mass) - drop
    low, high = jnp.min(jnp.where(matters, away, 0.0)) - step, jnp.max(jnp.where(matters, away, 0.0)) + step
    all_ = high - low >= 2 * jnp.pi - step
    return Window(u[best], window.width, jnp.where(all_, -jnp.pi, low), jnp.where(all_, jnp.pi, high))


def grid_of(family: ProductFamily) -> ProductGrid | None:
    """A grid over a product.

    Args:
        family: the product of the components that a factor sees.

    Returns:
        The grid; None where a component has no coordinates, or where there are more than two, or too many values.
    """
    axes, lines, cells = [], 0, 1
    for name, own in family.components:
        rule, support, count = grid_rule(own), support_of(own), math.prod(_coordinates(own))
        if rule is None and support is None:
            return None
        lines += count if rule is not None else 0
        cells *= support.size**count if support is not None else 1
        kind = "values" if rule is None else "circle" if rule.circle else "line"
        axes += [Axis(name, kind, support.size if support is not None else 0)] * count
    if not axes or lines > GRID_DIM or cells > _MOST_CELLS:
        return None
    return ProductGrid(family, tuple(a if a.count else a._replace(count=_POINTS[lines]) for a in axes))


def tilted_on_grid(
    grid: ProductGrid,
    factor: Callable[[dict], Float[Array, "S"]],
    q: ProductNatural,
    site: ProductNatural,
    power: float | Float[Array, ""],
) -> Tilted:
    """What matching the moments of ``q (p / t)^power`` asks for, by sums over the grid; the power is halved as needed.

    Args:
        grid: over the components that the factor sees.
        factor: log density of the factor at values by component with a leading axis of points, nats.
        q: natural parameters of q, of these components.
        site: the factor's site.
        power: alpha.

    Returns:
        What moment matching asks for: ``(eta_qhat - eta_q) / power``, and ``(1 / power) log E_q[(p / t)^power]`` in nats.
    """
    family = grid.family

    def ratio_at(window: Window) -> tuple[Array, Array]:
        at, base = _based(grid, q, window)
        # Of values at the end of the floats the factor knows no more than the site is asked for.
        known: Any = sum(own.inner(site.parts[n], at.held[n]) for n, own in family.components)
        return base, factor(at.values) - known

    def look(share: Array, tries: Array) -> _Look:
        def unsettled(carry: tuple) -> Array:
            window, used, _, logs, count = carry
            stays = jnp.all(window.length > _ALIKE * used.length) & grid.inside(logs)
            return (count < 2) | ((count < _PASSES) & ~stays)

        def one_pass(carry: tuple) -> tuple:
            window, *_, count = carry
            base, ratio = ratio_at(window)
            logs = _or_nothing(base + power * share * ratio)
            return grid.zoomed(window, logs), window, ratio, logs, count + 1

        first = grid.first_window(q)
        nothing = jnp.zeros((math.prod(grid.counts),), first.centre.dtype)
        start = first, first, nothing, nothing, jnp.int32(0)
        _, window, ratio, logs, _ = jax.lax.while_loop(unsettled, one_pass, start)
        # Mass at the end of the floats may be q's own; where the cavity is improper it has no end.
        far = jnp.max(jnp.where(grid.points(q, window).far, logs, -jnp.inf)) >= jnp.max(logs) - _BORDER
        ends = ~far | family.in_domain(q - site * (power * share))
        return _Look(window, ratio, share, tries, grid.inside(logs) & jnp.isfinite(jnp.max(logs)) & ends)

    def unfinished(last: _Look) -> Array:
        return (last.tries < 0) | (~last.proper & (last.tries < TEMPERINGS))

    def attempt(last: _Look) -> _Look:
        return look(jnp.where(last.tries < 0, 1.0, 0.5) * last.share, last.tries + 1)

    first = grid.first_window(q)
    one = jnp.ones((), first.centre.dtype)
    nothing = jnp.zeros((math.prod(grid.counts),), one.dtype)
    found = jax.lax.while_loop(unfinished, attempt, _Look(first, nothing, one, jnp.int32(-1), jnp.array(False)))
    return _asked_for(grid, q, found, power)


def _based(grid: ProductGrid, q: ProductNatural, window: Window) -> tuple[_Points, Array]:
    """Points, and the logarithms of the shares of q's mass that they stand for."""
    at = grid.points(q, window)
    terms = [
        own.inner(q.parts[n], at.statistics[n]) + own.log_base_measure(at.values[n]) - own.log_partition(q.parts[n])
        for n, own in grid.family.components
    ]
    return at, at.mass + sum(terms)


def _asked_for(grid: ProductGrid, q: ProductNatural, found: _Look, power: Any) -> Tilted:
    """What matching the moments of a tilted distribution as it was seen last asks for."""
    used = power * found.share
    at, base = _based(grid, q, found.window)
    target = grid.matched(q, at.statistics, _or_nothing(base + used * found.ratio))
    change = (target - q) * (1.0 / used)
    value = jax.nn.logsumexp(_or_nothing(base + power * found.ratio)) / power
    finite = jnp.any(jnp.isfinite(found.ratio))
    valid = found.proper & all_finite(change)
    zero = jnp.zeros_like(value)
    return Tilted(change, value, zero, zero + jnp.nan, zero, found.share, jnp.int32(0), jnp.array(False), finite, valid)


def _or_nothing(logs: Array) -> Array:
    """Points where a density cannot be told, far out, count for nothing."""
    return jnp.where(jnp.isnan(logs), -jnp.inf, logs)
