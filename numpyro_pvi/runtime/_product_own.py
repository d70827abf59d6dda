"""Rows' own latents integrated out of the factors of a product of families, and matched to what is then known of them.

A group's factor is ``p(y_m | theta) = prod_n int p(z_n | theta) p(y_n | theta, z_n) dz_n`` at every theta that tilted moments ask
for, before any power of it is taken, as under Gaussian guides. Finitely many values are summed over; a continuous latent
goes in closed form, read off draws from q, or over a grid (:mod:`numpyro_pvi.expectations._own_integrals`). The member of z_n in
q has the mean statistics of ``q(theta) p(z_n | theta, y_n)``, and never enters a site.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, in_batches
from ..expectations import OwnDraws, OwnGrids, ProductGrid, ThetaPoints, own_draws, own_grid, own_integral
from ..factors import rows_log_likelihood, take_rows
from ..families import ProductFamily, ProductNatural, member_family, support_of
from ..sites import MemberSites, take
from ._product_plan import along
from ._product_problem import ProductProblem

# Values of latents and draws that are evaluated together: rows, times points, times what is tried at each.
TOGETHER = 1 << 16


class _Tried(NamedTuple):
    """What is tried of a chunk's own latents: draws of the continuous ones by component, as values and row by row; or grids."""

    values: dict[str, Array]
    rows: OwnDraws | None
    counted: Bool[Array, "R"]
    grids: OwnGrids | None = None


@dataclasses.dataclass(frozen=True)
class OwnLatents:
    """The factors' integrals over rows' own latents.

    Args:
        problem: the factors.
        members: natural parameters of all rows' own latents in q, where their draws are from.
        key: of the draws.
    """

    problem: ProductProblem
    members: ProductNatural
    key: Any

    @functools.cached_property
    def _continuous(self) -> ProductFamily:
        """Of one row."""
        return ProductFamily([(n, f) for n, f in self.problem.plan.row_family.components if support_of(f) is None])

    @property
    def _grid(self) -> ProductGrid | None:
        """Of one row, where there is no closed form."""
        return own_grid(self._continuous) if self.problem.plan.own_without_form else None

    @property
    def tries(self) -> int:
        """How often a row's terms are looked at at once for one value of the shared latents."""
        grid = self._grid
        points = self.problem.plan.own_draws if grid is None else math.prod(grid.counts)
        return len(self.problem.plan.own_cells[1]) * max(1, points)

    def _row_axes_first(self, tree: Any, name: str, ahead: int = 0) -> Any:
        """Arrays of a latent with the rows' axis in front, behind which ``ahead`` other axes stood before those of members."""
        axis = self.problem.plan.row_axes[name]
        return jax.tree.map(lambda x: jnp.moveaxis(x, axis + ahead, 0), tree)

    def tried(self, chunk: Any) -> _Tried:
        """Draws of the own latents of one chunk's rows."""
        plan, problem, family = self.problem.plan, self.problem, self._continuous
        counted, count = problem._counted(chunk), plan.own_draws
        if not count:
            return _Tried({}, None, counted)
        q = take_rows(self.members.parts, plan.row_axes, plan.partition.reading, chunk)
        if (grid := self._grid) is not None:
            return _Tried({}, None, counted, OwnGrids(grid, ProductNatural(self._by_row(q)), counted))
        key, values, statistics, log_h = problem._rows_key(self.key, chunk), {}, {}, 0.0
        key = self.key if key is None else key
        for i, (name, row) in enumerate(family.components):
            member, natural = member_family(dict(plan.family.components)[name], q[name])
            drawn = member.sample_with_statistics(natural, jax.random.fold_in(key, i), (count,))
            values[name], mean = drawn[0], jax.tree.structure(jax.eval_shape(row.natural_to_mean, row.zeros()))
            statistics[name] = _as(mean, self._row_axes_first(drawn[1], name, 1))
            first = self._row_axes_first(drawn[0], name, 1)
            log_h = log_h + jnp.broadcast_to(row.log_base_measure(first), first.shape[:2])
        made = jax.vmap(lambda *own: own_draws(family, *own))(ProductNatural(self._by_row(q)), statistics, log_h)
        return _Tried(values, made, counted)

    def _by_row(self, q: dict) -> dict[str, Any]:
        """Natural parameters of the continuous latents, as of one row's with a leading axis of rows."""
        return {
            n: _as(jax.tree.structure(f.zeros()), self._row_axes_first(q[n], n)) for n, f in self._continuous.components
        }

    def _at_cell(self, chunk: Any, tried: _Tried, values: dict) -> Callable[[Int[Array, "J"], dict], Float[Array, "R"]]:
        """Every row's log density with that of its own latents, in nats, at some values of the finite and of the other ones."""
        problem, plan, rows = self.problem, self.problem.plan, tried.counted.shape[0]
        names, _ = plan.own_cells
        exact = tuple(n for n in plan.exact_latents if n not in plan.row_axes)
        given = plan.partition.rows, plan.partition.reading, problem.packing, chunk, exact

        def at(cell: Int[Array, "J"], drawn: dict) -> Float[Array, "R"]:
            own, begin = dict(drawn), 0
            for name in names:
                shape, axis = plan.row_shape(name), plan.row_axes[name]
                one = cell[begin : (begin := begin + math.prod(shape))].reshape(shape)
                whole = (*shape[:axis], rows, *shape[axis:])
                own[name] = jnp.broadcast_to(jnp.expand_dims(one, axis), whole)
            return rows_log_likelihood(problem.call, plan.latent_values(values | own), *given)

        return at

    def _factor(self, chunk: Any, tried: _Tried, values: dict) -> Float[Array, "C K R"]:
        """The same at all that is tried."""
        at, cells = self._at_cell(chunk, tried, values), self.problem.plan.own_cells[1]
        over_draws = jax.vmap(at, (None, 0)) if tried.values else lambda cell, drawn: at(cell, drawn)[None]
        return jax.vmap(lambda cell: over_draws(cell, tried.values))(jnp.asarray(cells))

    def _rows(self, chunk: Any, tried: _Tried, values: dict) -> tuple[Float[Array, "C R"], Any]:
        """Every row's ``log int p(z, y | theta) dz`` in nats by its finite latents' values, and means of the others there."""
        if tried.grids is not None:
            return self._over_grids(chunk, tried, tried.grids, values)
        factor = self._factor(chunk, tried, values)
        if tried.rows is None:
            return factor[:, 0], {}
        of_rows = jax.vmap(lambda own, f: own_integral(self._continuous, own, f), (0, 1))
        logs, means = jax.vmap(lambda f: of_rows(tried.rows, f))(factor)
        return jnp.where(tried.counted, logs, 0.0), means.parts

    def _over_grids(self, chunk: Any, tried: _Tried, grids: OwnGrids, values: dict) -> tuple[Float[Array, "C R"], Any]:
        """:meth:`_rows` where there is no closed form."""
        held = dataclasses.replace(self, problem=self.problem.held_still())

        def one(cell: Int[Array, "J"]) -> tuple[Float[Array, "R"], Any]:
            def factor(own: OwnLatents, values: dict) -> Callable[[dict], Float[Array, "R K"]]:
                at = own._at_cell(chunk, tried, values)
                return lambda drawn: jax.vmap(lambda z: at(cell, z))(self._points_first(drawn)).T

            # Where the points are is no part of a derivative: a search has none in reverse.
            windows = grids.windows(factor(held, jax.lax.stop_gradient(values)))
            return grids.integrals(windows, factor(self, values))

        return jax.vmap(one)(jnp.asarray(self.problem.plan.own_cells[1]))

    def _points_first(self, drawn: dict[str, Array]) -> dict[str, Array]:
        """Values with axes of rows and points in front, in the places of the model's, with an axis of points in front."""
        axes = self.problem.plan.row_axes
        return {n: jnp.moveaxis(x, 0, axes[n] + 1) for n, x in drawn.items()}

    def log_marginal(self, chunk: Any) -> Callable[[dict], Float[Array, ""]]:
        """One chunk's ``log p(y | theta)`` in nats, a function of the values of the shared components."""
        tried = self.tried(chunk)

        def of(values: dict) -> Array:
            rows = jax.nn.logsumexp(self._rows(chunk, tried, values)[0], axis=0)
            return jnp.sum(jnp.where(tried.counted, rows, 0.0))

        return of

    # ---------------------------------------------------------------------------------------------- matched to q(theta)

    def matched(self, theta: ThetaPoints, chunk: Any) -> dict[str, Any]:
        """Of one chunk's rows, the members with the mean statistics of ``q(theta) p(z | theta, y)``.

        Args:
            theta: points of q(theta).
            chunk: what identifies it.

        Returns:
            Natural parameters by latent, in the places of the chunk's rows.
        """
        plan, tried = self.problem.plan, self.tried(chunk)
        batch = TOGETHER // max(1, tried.counted.shape[0] * self.tries)
        logs, means = in_batches(lambda v: self._rows(chunk, tried, v), theta.values, batch)
        joint = theta.logs[:, None, None] + jax.nn.log_softmax(logs, axis=1)
        # Of points where a row's integral is unknown nothing is known.
        joint = jnp.where(jnp.isnan(joint), -jnp.inf, joint)
        joint = joint - jax.nn.logsumexp(joint, axis=(0, 1))
        means = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), means)
        found = self._finite_members(jax.nn.logsumexp(joint, axis=0))
        for name, family in self._continuous.components:
            average = jax.tree.map(lambda t: jnp.einsum("scr,scr...->r...", jnp.exp(joint), t), means[name])
            found[name] = jax.vmap(family.mean_to_natural)(average)
        parts = {}
        for name, own in found.items():
            axis, whole = plan.row_axes[name], jax.tree.structure(self.members.parts[name])
            parts[name] = _as(whole, jax.tree.map(lambda x, axis=axis: jnp.moveaxis(x, 0, axis), own))
        return parts

    def _finite_members(self, logs: Float[Array, "C R"]) -> dict[str, Any]:
        """Members of the latents that are summed over, rows first, of the log probabilities of all combinations."""
        plan, found, begin = self.problem.plan, {}, 0
        names, cells = plan.own_cells
        for name in names:
            shape, support = plan.row_shape(name), support_of(dict(plan.family.components)[name])
            assert support is not None  # the cells are of these
            own = jnp.asarray(cells)[:, begin : (begin := begin + math.prod(shape))]
            each = own[:, None, :, None] == jnp.arange(support.size)
            marginal = jax.nn.logsumexp(jnp.where(each, logs[:, :, None, None], -jnp.inf), axis=0)
            # Values of which nothing is left are as unlikely as floats can say.
            marginal = jnp.maximum(marginal, jnp.log(jnp.finfo(marginal.dtype).tiny))
            found[name] = support.message(marginal.reshape(-1, *shape, support.size))
        return found

    def settled(self, theta: ThetaPoints, moved: Bool[Array, "M"]) -> ProductNatural:
        """The members matched to q(theta) in the rows of the groups that moved; others, and those without a member, as they are."""
        plan, problem = self.problem.plan, self.problem

        def one(own: tuple) -> dict[str, Any]:
            counted = problem._counted(own[0])
            return {n: plan.masked(n, x, counted) for n, x in self.matched(theta, own[0]).items()}

        parts, new = problem._map_chunks(one), {}
        for name, old in self.members.parts.items():
            found = problem._rows_of_all(parts[name], old, name)
            rows = jax.tree.leaves(old)[0].shape[plan.row_axes[name]]
            owner = problem.owners(rows)
            new[name] = self._kept(name, found, old, (owner >= 0) & moved[owner])
        return ProductNatural(new)

    def settled_group(self, theta: ThetaPoints, group: Int[Array, ""]) -> ProductNatural:
        """The same of one group."""
        problem, chunks = self.problem, self.problem.chunks

        def settle(chunk: Any, parts: dict) -> dict:
            here = take(chunks, chunk)
            found = self.matched(theta, here)
            return {n: problem.with_rows(n, x, found[n], here) for n, x in parts.items()}

        if problem.one_chunk_each:
            parts = settle(group, self.members.parts)
        else:
            parts = jax.lax.fori_loop(*problem.span(group), settle, self.members.parts)
        held: Any = problem._of_all(MemberSites(parts))
        old, everywhere = self.members.parts, jnp.array(True)
        return ProductNatural({n: self._kept(n, x, old[n], everywhere) for n, x in held.parts.items()})

    def _kept(self, name: str, new: Any, old: Any, where: Bool[Array, "*N"]) -> Any:
        """New members in some rows, where they are normalisable."""
        row, plan = dict(self.problem.plan.row_family.components)[name], self.problem.plan
        structure = jax.tree.structure(row.zeros())
        rows = _as(structure, self._row_axes_first(new, name))
        good = where & jax.vmap(lambda x: row.in_domain(x) & all_finite(x))(rows)
        return jax.tree.map(lambda a, b: jnp.where(along(good, plan.row_axes[name], a.ndim), a, b), new, old)


def _as(structure: Any, tree: Any) -> Any:
    """The leaves of parameters of one family as those of another with the same numbers."""
    return jax.tree.unflatten(structure, jax.tree.leaves(tree))
