"""Moments of a tilted distribution of a product of families: from weighted draws, chains, or a grid over its mass.

Weighted means of the statistics T are noisy even where the factor is conjugate and nothing need be estimated. So they are matched
*on the draws*: the draws theta_s, with weights in proportion to ``exp <d, T(theta_s)>``, are a family of their own, whose log
partition function is ``log sum_s exp <d, T(theta_s)>``, and d is the member with the mean statistics of the weights
``w_s = (p / t)^alpha``. Where ``log w`` is affine in T this is its slope to rounding, whatever the draws; elsewhere the draws'
noise is that of what ``exp <d, T>`` leaves of w. The same holds for the normaliser.

Draws need not be of q: with base weights ``b_s ~ q / g`` of draws of another density g the members are ``b_s exp <d, T(theta_s)>``.
Draws of the tilted distribution itself have ``b_s = 1 / w_s`` and are all worth the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpyro.distributions.transforms import biject_to

from .._numerics import all_finite, scaled_cholesky, solve_lower, solve_root
from ..families import (
    Family,
    ProductFamily,
    ProductMean,
    ProductNatural,
    base_family,
    fisher_matrix,
    grid_rule,
    minimal_mean,
    support_of,
)
from ._chains import ChainDraws, Chains, batch_variance, effective_size, kept_chains, no_chains, run_chains
from ._tilted import GRID_DIM, TEMPERINGS, MCMCMoments, Tilted, believed, least_ess, proper_share, unsampled

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

    ``family``: of q; ``q``: natural parameters; ``key``: a random key; ``count``: S. Returns the draws with their statistics.
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

    ``family``: of q; ``q``: natural parameters; ``values``: by component, with a leading axis of draws; ``statistics``: of the
    values; all finite; ``weights``: what each counts towards the mean and covariance that whiten them, adding up to 1; None is
    as much as any other. Returns the draws.
    """
    rows = jax.vmap(lambda *leaves: minimal_mean(family, q, leaves))(*jax.tree.leaves(ProductMean(statistics)))
    if weights is None:
        rows = rows - jnp.mean(rows, axis=0)
        root, _ = scaled_cholesky(rows.T @ rows / rows.shape[0])
    else:
        rows = jnp.where(weights[:, None] > 0, rows - weights @ rows, 0.0)
        root, _ = scaled_cholesky(rows.T @ (weights[:, None] * rows))
    white = solve_lower(root, rows.T).T
    return WeightedDraws(values, statistics, white, root)


def _metric(family: ProductFamily, q: ProductNatural, root: Float[Array, "P P"]) -> Float[Array, "P P"]:
    """L with ``|L^T d|`` the Fisher norm at q, its sds, of a change that is d in whitened coordinates."""
    half = solve_lower(root, fisher_matrix(family, q))
    return scaled_cholesky(solve_lower(root, half.T))[0]


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

    It is halved while the cavity is improper, or the effective sample size below a twentieth of the draws or twice the number
    of statistics. ``family``: of q; ``draws``: as of :func:`draw`, from this q, or of another density; ``factor``: log density
    of the factor at them, nats; ``q``: natural parameters of q; ``site``: the factor's site; ``power``: alpha; ``log_base``:
    log of q over the draws' density at them; None for draws of q. Returns what moment matching asks for: ``(eta_qhat - eta_q) /
    power``, and ``(1 / power) log E_q[(p / t)^power]`` in nats.
    """
    ratio = factor - paired(family, site, draws.statistics)
    base = jnp.zeros_like(ratio) if log_base is None else log_base
    count, size = draws.white.shape

    def proper(share: Array, _: Array) -> Array:
        return family.in_domain(q - site * (power * share))

    share, good, ess, finite = believed(base, ratio, power, least_ess(count, size), proper)
    found = matched(family, draws, base, ratio, q, share, power)
    used, finite = power * share, finite & jnp.all(ratio < jnp.inf)
    noise, variance = jnp.sqrt(jnp.sum(found.influence**2)) / used, jnp.sum(found.apart**2) / power**2
    valid = finite & good & found.fits & all_finite(found.change)
    change, none = found.change * (1.0 / used), jnp.int32(0)
    return Tilted(change, found.value, variance, ess, noise, share, none, jnp.array(False), finite, valid)


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

    ``base``: log of q over their density; ``ratio``: log of the factor over the site, nats; ``share``: of the power that is
    used; ``power``: alpha; the value is at the whole of it; ``normalised``: whether ``base`` is exact, and not up to a
    constant. Where it is, the value uses the member for control only at the full power; else it needs the member, and is NaN
    where that is none.
    """
    used = power * share
    slope, fits = _matched_slope(draws.white, base, used * ratio)
    change = family.from_minimal(solve_root(draws.root, slope))
    own = jax.nn.softmax(base + draws.white @ slope)
    about = draws.white - own @ draws.white
    root, _ = scaled_cholesky(about.T @ (own[:, None] * about))
    reach = solve_root(root, solve_lower(root, about.T)).T
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
        return solve_root(root, solve_lower(root, wanted))

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


# -------------------------------------------------------------------------------------------- all of R^D as coordinates
# All of R^D as coordinates of a product of continuous families: where chains move, and where a Gaussian is laid over a
# mode.

# Draws of q that its coordinates are whitened by, at least, and per coordinate.
_DRAWS, _PER_COORDINATE = 512, 8


class Whitening(NamedTuple):
    """``u = loc + scale @ eps``, with eps about standard normal under q."""

    loc: Float[Array, "D"]
    scale: Float[Array, "D D"]

    def at(self, eps: Float[Array, "D"]) -> Float[Array, "D"]:
        """The coordinates u of eps."""
        return self.loc + self.scale @ eps

    def back(self, u: Float[Array, "D"]) -> Float[Array, "D"]:
        """The eps of coordinates u."""
        return solve_lower(self.scale, u - self.loc)


class _Part(NamedTuple):
    """One component's transform from the reals, the shape of its coordinates, and the angle that 0 stands for."""

    name: str
    transform: Any
    shape: tuple[int, ...]
    turn: Any


@dataclasses.dataclass(frozen=True)
class Unconstrained:
    """Coordinates u of every component, one after another, by NumPyro's bijections to their supports.

    Args:
        family: the product; none of its components may have finitely many values (:func:`discrete_of`).
        q: natural parameters; circles are cut opposite its direction. None cuts them at pi.
    """

    family: ProductFamily
    q: ProductNatural | None = None

    @property
    def parts(self) -> list[_Part]:
        """The components."""
        found = []
        for name, family in self.family.components:
            law, turn = jax.eval_shape(family.to_distribution, family.zeros()), None
            transform = biject_to(law.support)
            if self.q is not None and base_family(family).periodic:
                angles = family.to_distribution(self.q.parts[name])
                turn = getattr(angles, "base_dist", angles).loc
            found.append(_Part(name, transform, transform.inverse_shape(tuple(family.event_shape)), turn))
        return found

    @property
    def dim(self) -> int:
        """D."""
        return sum(math.prod(part.shape) for part in self.parts)

    def values(self, u: Float[Array, "D"]) -> tuple[dict[str, Array], Float[Array, ""]]:
        """Values by component, and the logarithm of the Jacobian of all of them in u."""
        found, total, begin = {}, jnp.zeros((), u.dtype), 0
        for name, transform, shape, turn in self.parts:
            own = u[begin : begin + math.prod(shape)].reshape(shape)
            begin += math.prod(shape)
            value = transform(own)
            total = total + jnp.sum(transform.log_abs_det_jacobian(own, value))
            found[name] = value if turn is None else _wrapped(value + turn)
        return found, total

    def coordinates(self, values: dict[str, Array]) -> Float[Array, "D"]:
        """The u of values by component, within what floating point can tell from the border."""
        found = []
        for name, transform, _, turn in self.parts:
            value = values[name] if turn is None else _wrapped(values[name] - turn)
            found.append(jnp.ravel(transform.inv(value)))
        u = jnp.concatenate(found)
        most = 0.5 * math.log(float(jnp.finfo(u.dtype).max))
        return jnp.nan_to_num(u, nan=0.0, posinf=most, neginf=-most)

    def log_member(self, natural: ProductNatural, u: Float[Array, "D"]) -> Float[Array, ""]:
        """``<natural, T> + log h`` of the values at u with their Jacobian, nats: a density in u up to its normaliser."""
        values, log_slope = self.values(u)
        for name, family in self.family.components:
            statistics = family.sufficient_statistics(values[name])
            log_slope = log_slope + family.inner(natural.parts[name], statistics)
            log_slope = log_slope + family.log_base_measure(values[name])
        return log_slope

    def whitening(self, q: ProductNatural, key: Any) -> Whitening:
        """Coordinates in which q is about standard normal, by its draws.

        ``q``: natural parameters; ``key``: a random key. Returns mean and Cholesky factor of u under q; coordinates that hardly
        move are given a width of rounding.
        """
        count = max(_DRAWS, _PER_COORDINATE * self.dim)
        u = jax.vmap(self.coordinates)(self.family.sample(q, key, (count,)))
        loc = jnp.mean(u, axis=0)
        spread = (u - loc).T @ (u - loc) / count
        least = float(jnp.finfo(u.dtype).eps) ** 0.5 * (1 + jnp.abs(loc))
        scale, _ = scaled_cholesky(spread + jnp.diag(least**2))
        return Whitening(loc, scale)


def _wrapped(angle: Array) -> Array:
    """The same angle between -pi and pi."""
    return jnp.mod(angle + jnp.pi, 2 * jnp.pi) - jnp.pi


def discrete_of(family: ProductFamily) -> list[str]:
    """Components with finitely many values, which have no such coordinates."""
    return [name for name, own in family.components if support_of(own) is not None]


# --------------------------------------------------------------------------------------------------------------- chains
# Moments of a tilted distribution of a product of families from Markov chains.
#
# Chains move in unconstrained coordinates whitened by q. Their draws are matched on themselves
# (:mod:`numpyro_pvi.expectations._product_moments`): with ``b_s = 1 / w_s`` in place of q, the members ``b_s exp <d, T>``
# include the tilted distribution where ``log w`` is affine in T, and the match is then exact, whatever the draws;
# elsewhere its noise is that of what an affine function leaves of ``log w``.


def tilted_by_chains(
    space: Unconstrained,
    look: Callable[[Float[Array, "D"]], tuple[Float[Array, ""], Float[Array, "D"]]],
    q: ProductNatural,
    site: ProductNatural,
    power: float | Float[Array, ""],
    key: Any,
    settings: MCMCMoments,
    memory: Chains | None = None,
) -> Tilted:
    """What matching the moments of ``q (p / t)^power`` asks for, from chains; the power is halved while the cavity is improper.

    ``space``: coordinates of the components that the factor sees; ``look``: coordinates to the factor's log density, nats, and
    its gradient in them; ``q``: natural parameters of q, of these components; ``site``: the factor's site; ``power``: alpha;
    ``key``: a random key; ``settings``: lengths and kernel; ``memory``: where the chains stood; None starts them anew. Returns
    what moment matching asks for, and the chains after this visit as its ``memory``. ``value`` is ``(1 / power) log E_q[(p /
    t)^power]`` in nats, by the mean of ``exp <d, T> / w`` over the draws, which q knows.
    """
    family, dtype = space.family, jax.tree.leaves(q)[0].dtype
    memory = no_chains(settings, space.dim, dtype, True) if memory is None else memory
    share, proper = proper_share(family, q, site, power, dtype)
    used = power * share
    cavity = q - site * used
    white_key, chain_key = jax.random.split(key)
    white = space.whitening(q, white_key)

    def energy(eps: Array) -> tuple[Array, Array]:
        u = white.at(eps)
        value, slope = look(u)
        rest, pulled = jax.value_and_grad(lambda u: space.log_member(cavity, u))(u)
        return -(rest + used * value), -(white.scale.T @ (pulled + used * slope))

    warm = jax.vmap(white.back)(memory.positions)
    fresh = (memory.visits == 0) | ~jnp.all(jnp.isfinite(warm))
    draws = run_chains(settings, energy, chain_key, warm, memory.step_size, fresh)
    kept = proper & draws.finite & jnp.all(jnp.isfinite(draws.score)) & jnp.all(jnp.isfinite(draws.eps))
    found, moving = _matched_chains(space, white, draws, q, site, share, power)
    shape = draws.log_density.shape
    error = batch_variance((found.influence * found.influence.shape[0]).reshape(*shape, -1))
    spread = batch_variance((found.apart * found.apart.shape[0]).reshape(*shape, 1))[0]
    after = kept_chains(memory, jax.vmap(white.at)(draws.last), draws, kept)
    return Tilted(
        found.change * (1.0 / used),
        found.value,
        spread / power**2,
        effective_size(moving.reshape(*shape, -1)),
        jnp.sqrt(jnp.sum(error)) / used,
        share,
        jnp.int32(0),
        jnp.array(False),
        draws.finite,
        kept & found.fits & all_finite(found.change),
        after,
    )


def _matched_chains(
    space: Unconstrained, white: Whitening, draws: ChainDraws, q: Any, site: Any, share: Any, power: Any
) -> tuple[Matching, Float[Array, "S P"]]:
    """The member with the chains' mean statistics, and the statistics in whitened coordinates."""
    family, used = space.family, power * share
    u = jax.vmap(white.at)(draws.eps.reshape(-1, space.dim))
    values = jax.vmap(lambda point: space.values(point)[0])(u)
    statistics = {n: own.sufficient_statistics(values[n]) for n, own in family.components}
    rest = jax.vmap(lambda point: space.log_member(q - site * used, point))(u)
    factor = (draws.log_density.reshape(-1) - rest) / used
    ready = weighable(family, q, values, statistics)
    ratio = factor - paired(family, site, statistics)
    return matched(family, ready, -used * ratio, ratio, q, share, power, normalised=False), ready.white


# ---------------------------------------------------------------------------------------------------------------- grids
# Moments of a tilted distribution of a product of families, summed over a grid that finds where its mass is.
#
# Every component is reached by coordinates in which its densities are smooth and fall off on both sides
# (:mod:`numpyro_pvi.families._grids`), or has finitely many values. Of a coordinate evenly spaced points in v are
# taken, ``u = c + w sinh v``: dense where the mass is, and far out on both sides. The first pass looks ten thousand
# widths of q around; each later one is laid over what the last one found to matter, so that tilted distributions much
# narrower than q, or far from it, are resolved as well.

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

    centre: Float[Array, "*R k"]
    width: Float[Array, "*R k"]
    low: Float[Array, "*R k"]
    high: Float[Array, "*R k"]

    @property
    def length(self) -> Float[Array, "*R k"]:
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
    """A grid over all components of a product. ``axes``: its coordinates, those of one component side by side."""

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
        number = max((self.axes[i].count for i in self.continuous), default=1)
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

    def inside(self, logs: Float[Array, "S"], border: float = _BORDER) -> Bool[Array, ""]:
        """Whether the mass lies within the border of all lines, which is so many nats below the peak."""
        whole, top = logs.reshape(self.counts), jnp.max(logs)
        edges = [jnp.full((), -jnp.inf, logs.dtype)]
        for i in self.continuous:
            if self.axes[i].kind == "line":
                edges.append(jnp.max(jnp.take(whole, np.array([0, -1]), axis=i)))
        return jnp.max(jnp.stack(edges)) < top - border

    def seen(self, logs: Float[Array, "S"]) -> Bool[Array, ""]:
        """Whether there is no mass to speak of beside points at which a density is not known."""
        whole, unknown = _or_nothing(logs).reshape(self.counts), jnp.isnan(logs).reshape(self.counts)
        beside = [jnp.full((), -jnp.inf, logs.dtype)]
        for i in self.continuous:
            lines, lost = jnp.moveaxis(whole, i, 0), jnp.moveaxis(unknown, i, 0)
            beside += [
                jnp.max(jnp.where(lost[1:], lines[:-1], -jnp.inf)),
                jnp.max(jnp.where(lost[:-1], lines[1:], -jnp.inf)),
            ]
        return jnp.max(jnp.stack(beside)) < jnp.max(whole) - _BORDER

    def member(self, q: ProductNatural) -> ThetaPoints:
        """A member's own points, laid over its mass."""

        def closer(_: Any, window: Window) -> Window:
            return self.zoomed(window, _or_nothing(_based(self, q, window)[1]))

        at, logs = _based(self, q, jax.lax.fori_loop(0, _PASSES, closer, self.first_window(q)))
        return ThetaPoints(at.values, jax.nn.log_softmax(_or_nothing(logs)))

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


class ThetaPoints(NamedTuple):
    """Weighted points: values by component with a leading axis, and logarithms of weights that add up to 1."""

    values: dict[str, Any]
    logs: Float[Array, "S"]


def grid_of(family: ProductFamily, points: Mapping[int, int] = _POINTS) -> ProductGrid | None:
    """A grid over a product.

    ``family``: the product of the components that a factor sees; ``points``: along every coordinate, by how many there are.
    Returns the grid; None where a component has no coordinates, or where there are more than two, or too many values.
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
    return ProductGrid(family, tuple(a if a.count else a._replace(count=points[lines]) for a in axes))


def laid_over(
    grid: ProductGrid,
    first: Window,
    look: Callable[[Window], Any],
    nothing: Any,
    border: float = _BORDER,
    counted: Any = True,
) -> tuple[Window, Any]:
    """The window of the last of a few passes over a density, each laid over what the last one found to matter.

    ``first``: that of the first pass; with a leading axis for as many densities side by side; ``look``: what is seen in a window,
    in front the logarithms of the mass at its points; ``nothing``: of the same shapes; ``border``: nats below the peak that the
    border of the last pass must lie; ``counted``: for which of the densities side by side the passes go on. Returns the window,
    and what is seen in it.
    """
    many = first.centre.ndim > 1
    closer, inside = (jax.vmap(f) if many else f for f in (grid.zoomed, partial(grid.inside, border=border)))

    def unsettled(carry: tuple) -> Array:
        window, used, (logs, *_), count = carry
        stays = jnp.all(window.length > _ALIKE * used.length, axis=-1) & inside(logs)
        stays = jnp.all(stays | ~jnp.asarray(counted))
        return (count < 2) | ((count < _PASSES) & ~stays)

    def one_pass(carry: tuple) -> tuple:
        window, *_, count = carry
        seen = look(window)
        return closer(window, seen[0]), window, seen, count + 1

    _, window, seen, _ = jax.lax.while_loop(unsettled, one_pass, (first, first, nothing, jnp.int32(0)))
    return window, seen


def tilted_on_grid(
    grid: ProductGrid,
    factor: Callable[[dict], Float[Array, "S"]],
    q: ProductNatural,
    site: ProductNatural,
    power: float | Float[Array, ""],
) -> Tilted:
    """What matching the moments of ``q (p / t)^power`` asks for, by sums over the grid; the power is halved as needed.

    ``grid``: over the components that the factor sees; ``factor``: log density of the factor at values by component with a
    leading axis of points, nats; ``q``: natural parameters of q, of these components; ``site``: the factor's site; ``power``:
    alpha. Returns what moment matching asks for: ``(eta_qhat - eta_q) / power``, and ``(1 / power) log E_q[(p / t)^power]`` in
    nats.
    """
    family, dtype = grid.family, grid.first_window(q).centre.dtype

    def ratio_at(window: Window) -> tuple[Array, Array]:
        at, base = _based(grid, q, window)
        # Of values at the end of the floats the factor knows no more than the site is asked for.
        known: Any = sum(own.inner(site.parts[n], at.held[n]) for n, own in family.components)
        return base, factor(at.values) - known

    def look(share: Array, tries: Array) -> _Look:
        def seen(window: Window) -> tuple[Array, Array, Array]:
            base, ratio = ratio_at(window)
            return _or_nothing(base + power * share * ratio), ratio, base

        nothing = jnp.zeros((math.prod(grid.counts),), dtype)
        window, (logs, ratio, base) = laid_over(grid, grid.first_window(q), seen, (nothing, nothing, nothing))
        # Where q's own mass cannot be told there is none.
        known = grid.seen(jnp.where(jnp.isnan(base), -jnp.inf, base + power * share * ratio))
        # Mass at the end of the floats may be q's own; where the cavity is improper it has no end.
        far = jnp.max(jnp.where(grid.points(q, window).far, logs, -jnp.inf)) >= jnp.max(logs) - _BORDER
        ends = ~far | family.in_domain(q - site * (power * share))
        return _Look(window, ratio, share, tries, grid.inside(logs) & jnp.isfinite(jnp.max(logs)) & ends & known)

    def unfinished(last: _Look) -> Array:
        return (last.tries < 0) | (~last.proper & (last.tries < TEMPERINGS))

    def attempt(last: _Look) -> _Look:
        return look(jnp.where(last.tries < 0, 1.0, 0.5) * last.share, last.tries + 1)

    nothing, one = jnp.zeros((math.prod(grid.counts),), dtype), jnp.ones((), dtype)
    start = _Look(grid.first_window(q), nothing, one, jnp.int32(-1), jnp.array(False))
    found = jax.lax.while_loop(unfinished, attempt, start)
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
    asked = unsampled(change, value, finite, found.proper & all_finite(change), found.share)
    return asked._replace(unknown=~asked.valid & jnp.any(jnp.isnan(found.ratio)))


def _or_nothing(logs: Array) -> Array:
    """Points where a density cannot be told, far out, count for nothing."""
    return jnp.where(jnp.isnan(logs), -jnp.inf, logs)
