"""The integral of a row's factor over latents of the row's own, given the shared latents.

Where the factor f(z) is affine in the statistics T of the row's latents, ``f = c + <eta, T> + log h`` is a member, whose integral
``c + A(eta)`` and mean statistics are in closed form. So f over q is regressed on T over some draws of q, which is exact for any
draws. Elsewhere it is summed over a grid that finds where its mass is, of one or two numbers a row: weights of draws from q
would miss a row that says much more than q knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._numerics import scaled_cholesky, solve_lower, solve_root
from ..families import ProductFamily, ProductMean, ProductNatural
from ._product_moments import ProductGrid, Window, grid_of, laid_over, paired, weighable

# Smallest pivot of draws that determine a slope, as a share of the largest: white over all of them, halves nearly are.
_LEAST_PIVOT = 1e-3
# Nats of rounding from which on a row's integral says nothing.
_LOST = 0.1
# Points of a row's grid along every coordinate, where there is one, or two; and nats that two halves of them, each with twice the
# distance between its points, may differ by: the error of all of them is of the order of the square.
_POINTS, _APART = {0: 1, 1: 32, 2: 32}, 0.01
# Nats below a row's peak that the border of its grid must lie: a step of few points is some nats long out there.
_BORDER = 12.0
# Points of a grid over the shared latents, at each of which every row has a grid of its own.
OVER_GRIDS = {0: 1, 1: 96, 2: 56}


class OwnDraws(NamedTuple):
    """Draws of one row's own latents from q, which serve all values of the shared latents."""

    q: ProductNatural
    # By component, with a leading axis of draws.
    statistics: dict[str, Any]
    # The same in coordinates of mean 0 and covariance 1 over the draws, and what makes a slope there one in minimal ones.
    white: Float[Array, "K P"]
    back: Float[Array, "P P"]
    # Least squares on these of all draws, and of two halves of them: values at the draws to a slope.
    reach: Float[Array, "3 P K"]
    # ``<eta_q, T> + log h`` at the draws, nats: the log density of q less its normaliser.
    log_q: Float[Array, "K"]


def own_draws(family: ProductFamily, q: ProductNatural, statistics: dict, log_h: Float[Array, "K"]) -> OwnDraws:
    """Draws of q, ready for :func:`own_integral`.

    Args:
        family: of one row's own latents.
        q: natural parameters of the row's members.
        statistics: of draws of them, by component, with a leading axis.
        log_h: log base measure of the draws, nats.

    Returns:
        The draws.
    """
    ready = weighable(family, q, {}, statistics)
    count, half = ready.white.shape[0], ready.white.shape[0] // 2
    # At once for all values of the shared latents, of which nothing here knows.
    taken = np.ones((3, count), bool)
    taken[1, half:], taken[2, :half] = False, False
    reach = _least_squares(ready.white, jnp.asarray(taken))
    back = solve_root(ready.root, jnp.eye(ready.root.shape[0], dtype=ready.root.dtype))
    return OwnDraws(q, statistics, ready.white, back, reach, paired(family, q, statistics) + log_h)


def _least_squares(white: Float[Array, "K P"], taken: Bool[Array, "3 K"]) -> Float[Array, "3 P K"]:
    """What takes values at some of the draws to their slope; NaN where these do not determine one."""
    share = taken / jnp.sum(taken, axis=1, keepdims=True)
    about = jnp.where(taken[..., None], white - jnp.einsum("hk,kp->hp", share, white)[:, None], 0.0)
    root, good = scaled_cholesky(jnp.einsum("hkp,hkq->hpq", about, about))
    found = solve_root(root, solve_lower(root, jnp.swapaxes(about, -1, -2)))
    pivots = jnp.diagonal(root, axis1=-2, axis2=-1)
    good = good & (jnp.min(pivots, axis=-1) > _LEAST_PIVOT * jnp.max(pivots, axis=-1))
    return jnp.where(good[:, None, None], found, jnp.nan)


def own_integral(
    family: ProductFamily, draws: OwnDraws, factor: Float[Array, "K"]
) -> tuple[Float[Array, ""], ProductMean]:
    """``log int exp f(z) dz`` in nats, and the mean statistics of z in proportion to ``exp f``.

    Args:
        family: of one row's own latents.
        draws: as of :func:`own_draws`.
        factor: f at the draws, with the density of the latents, nats.

    Returns:
        Both, exact for any draws. Where rounding leaves too little, for shared latents or a member far out, the integral is NaN.
    """
    ratio = factor - draws.log_q
    (member, change), *halves = [_member(family, draws, _slope(draws.white, reach, ratio)) for reach in draws.reach]
    value = _integral(family, draws, ratio, member, change)
    # What rounding leaves of a member far from the draws shows in what either half of them makes of it.
    one, other = (_integral(family, draws, ratio, *found) for found in halves)
    rest = ratio - paired(family, change, draws.statistics)
    bent, lost = jnp.max(jnp.abs(rest - jnp.mean(rest))), jnp.max(jnp.abs(ratio)) * jnp.finfo(ratio.dtype).eps
    # A NaN is close to nothing.
    close = (jnp.abs(one - other) < _LOST) & (bent < _LOST) & (lost < _LOST)
    known = close & jnp.isfinite(value) & family.in_domain(member)
    return _known(known, value, factor), family.natural_to_mean(member)


def _known(known: Bool[Array, "*R"], value: Float[Array, "*R"], logs: Float[Array, "*R K"]) -> Float[Array, "*R"]:
    """Integrals; of densities that are 0 everywhere -inf, and NaN where they are not known."""
    return jnp.where(known, value, jnp.where(jnp.all(logs == -jnp.inf, axis=-1), -jnp.inf, jnp.nan))


def _slope(white: Float[Array, "K P"], reach: Float[Array, "P K"], ratio: Float[Array, "K"]) -> Float[Array, "P"]:
    """Least squares of the ratio on the whitened statistics, with one step against the rounding of the first."""
    ratio = ratio - jnp.mean(ratio)
    slope = reach @ ratio
    return slope + reach @ (ratio - white @ slope)


def _member(family: ProductFamily, draws: OwnDraws, slope: Float[Array, "P"]) -> tuple[ProductNatural, ProductNatural]:
    """The member whose log density over q's has this slope in whitened statistics, and its change from q."""
    change = family.from_minimal(draws.back @ slope)
    return draws.q + change, change


def _integral(
    family: ProductFamily, draws: OwnDraws, ratio: Float[Array, "K"], member: ProductNatural, change: ProductNatural
) -> Float[Array, ""]:
    """The integral in nats, where the ratio is affine in the statistics."""
    rest = ratio - paired(family, change, draws.statistics)
    return jnp.mean(rest) + family.log_partition(member)


# ---------------------------------------------------------------------------------------------------------------- grids


def own_grid(family: ProductFamily) -> ProductGrid | None:
    """The grid of one row's own latents; None where they have more than two numbers, or no coordinates."""
    return grid_of(family, _POINTS)


@dataclasses.dataclass(frozen=True)
class OwnGrids:
    """Sums of the factors of some rows, each over a grid of its own.

    Args:
        grid: of one row: see :func:`own_grid`.
        q: natural parameters of the rows' members, where the search for the mass begins, with a leading axis of rows.
        counted: which rows count; of the others everything is 0.
    """

    grid: ProductGrid
    q: ProductNatural
    counted: Bool[Array, "R"]

    def windows(self, factor: Callable[[dict], Float[Array, "R K"]]) -> Window:
        """Where the mass of every row is.

        Args:
            factor: f at values by component with axes of rows and points in front, with the density of the latents, nats.

        Returns:
            Windows with a leading axis of rows.
        """
        first = jax.vmap(self.grid.first_window)(self.q)
        dtype, shape = first.centre.dtype, jax.eval_shape(lambda: self._seen(first, factor)[1]).shape
        nothing = (jnp.zeros(shape, dtype),)

        def look(at: Window) -> tuple[Array]:
            logs = self._seen(at, factor)[1]
            return (jnp.where(jnp.isnan(logs), -jnp.inf, logs),)

        found = laid_over(self.grid, first, look, nothing, _BORDER, self.counted)[0]
        # Of a row that does not count the points stay near, where its factor has a number and a derivative.
        near = first._replace(low=-jnp.ones_like(first.low), high=jnp.ones_like(first.high))
        return jax.tree.map(lambda a, b: jnp.where(self.counted[:, None], a, b), found, near)

    def _seen(self, windows: Window, factor: Callable) -> tuple[Any, Float[Array, "R K"]]:
        """Points, and the logarithms of the mass at them."""
        at = jax.vmap(self.grid.points)(self.q, windows)
        logs = at.mass + factor(at.values)
        # Of rows that do not count nothing is asked.
        places = [np.linspace(-10.0, 10.0, count) for count in self.grid.counts]
        mound = -0.5 * sum(x.ravel() ** 2 for x in np.meshgrid(*places, indexing="ij"))
        return at, jnp.where(self.counted[:, None], logs, jnp.asarray(mound, logs.dtype))

    def integrals(self, windows: Window, factor: Callable) -> tuple[Float[Array, "R"], dict[str, Any]]:
        """``log int exp f(z) dz`` of every row in nats, and the mean statistics of z in proportion to ``exp f``.

        Args:
            windows: as of :meth:`windows`, which need not be differentiated: sums hardly depend on where their points are.
            factor: likewise.

        Returns:
            Both. Where mass is beyond the grid, or its points are too far apart, the integral is NaN.
        """
        at, logs = self._seen(windows, factor)
        # Points at which the factor is no number, far from all mass, count for nothing; elsewhere the integral is not known.
        logs = jnp.where(jnp.isnan(logs) & jax.vmap(self.grid.seen)(logs)[:, None], -jnp.inf, logs)
        value = jax.nn.logsumexp(logs, axis=1)
        inside = jax.vmap(lambda own: self.grid.inside(own, _BORDER))(logs)
        known = jnp.isfinite(value) & inside & (self._apart(logs) < _APART)
        weights = jnp.where(known[:, None], jnp.exp(logs - value[:, None]), 0.0)
        means = jax.tree.map(lambda t: jnp.einsum("rk,rk...->r...", weights, t), at.statistics)
        return jnp.where(self.counted, _known(known, value, logs), 0.0), means

    def _apart(self, logs: Float[Array, "R K"]) -> Float[Array, "R"]:
        """How far the sums over two halves of the points are apart, along every coordinate, nats."""
        whole, gaps = logs.reshape(-1, *self.grid.counts), [jnp.zeros(logs.shape[:1], logs.dtype)]
        for i in self.grid.continuous:
            lines = jnp.moveaxis(whole, i + 1, 1)
            halves = [jax.nn.logsumexp(lines[:, k::2].reshape(lines.shape[0], -1), axis=1) for k in (0, 1)]
            gaps.append(jnp.abs(halves[0] - halves[1]))
        return jnp.max(jnp.stack(gaps), axis=0)
