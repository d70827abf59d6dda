"""Every row a factor of its own, where q is a product of families and moments are matched.

A group's site is the product of its rows'. The rows of a group are visited in parallel, from the q that the group was sent, so
that a visit of a group stays one message; rows stand in the slots of the chunks that groups have anyhow, and one compiled program
visits all of them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..expectations import Chains, ImportanceMoments, Tilted, grid_of, with_settings
from ..factors import GroupMasks, Packing
from ..families import ProductNatural
from ..sites import MAX_HALVINGS, SiteStack, back_off, damp, posterior, select, take
from ..solvers import LocalResult, MatchState, first_match_state, trouble_sentence
from ._product_plan import touched
from ._product_problem import ProductProblem
from ._product_rounds import Settings
from ._product_sweeps import MatchStates, Outcome, Visits, order_of, outcome_of, together, visit_prior
from ._product_tilted import TOGETHER, ProductTilted

_NO_TROUBLE = jnp.iinfo(jnp.int32).max


class RowMatches(NamedTuple):
    """What rows remember, each of which is a factor: first by slot, then what their group's last visit found."""

    # Sites: what they do not account for of their group's is shared equally.
    sites: Any
    rows: MatchState
    # Smallest effective sample size (NaN where nothing is sampled), standard error of the group's full step in sds of q, and
    # smallest share of the power.
    ess: Float[Array, "M"]
    noise: Float[Array, "M"]
    temper: Float[Array, "M"]
    # What went wrong worst (0: nothing), and in how many rows.
    trouble: Int[Array, "M"]
    troubled: Int[Array, "M"]

    def sentence(self) -> str | None:
        """What went wrong in one group's last visit, and the remedy, without the group's name; None where nothing did."""
        found = trouble_sentence(int(self.trouble), float(self.ess), float(self.temper))
        return None if found is None else f"of {int(self.troubled)} of its rows, each a factor: {found}"


@dataclasses.dataclass(frozen=True)
class RowFactors(ProductProblem):
    """A problem whose "groups" are slots of rows, those of one group side by side.

    Args:
        full: the problem of the groups.
        owner: position of each slot's group.
        counted: whether a row is in the slot.
        offsets: first block of slots of each group, and the number of blocks at the end.
        block: slots of a block.
    """

    full: ProductProblem
    owner: Int[Array, "S"]
    counted: Bool[Array, "S"]
    offsets: Int[Array, "G"]
    block: int

    @property
    def num_groups(self) -> int:
        """S."""
        return self.owner.shape[0]

    def sums(self, slots: Any) -> Any:
        """Sums over every group's rows, of arrays with a leading axis of slots."""
        num = self.full.num_groups
        return jax.tree.map(lambda x: jax.ops.segment_sum(self.kept(x), self.owner, num), slots)

    def kept(self, slots: Any) -> Any:
        """Zero where no row is."""

        def keep(x: Array) -> Array:
            return jnp.where(self.counted.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)

        return jax.tree.map(keep, slots)

    def site_of_rows(self, groups: ProductNatural, rows: ProductNatural) -> ProductNatural:
        """The rows' sites, whose products are the groups'.

        Args:
            groups: all groups' sites.
            rows: sites by slot; what they lack of their group's, after a start or a change from outside, is shared equally.

        Returns:
            Sites by slot.
        """
        counts = jnp.maximum(self.sums(jnp.ones(self.owner.shape, jnp.result_type(float))), 1.0)
        left = jax.tree.map(
            lambda a, b: ((a - b) / counts.reshape((-1,) + (1,) * (a.ndim - 1)))[self.owner], groups, self.sums(rows)
        )
        return rows + self.kept(left)


def by_rows(problem: ProductProblem) -> RowFactors:
    """The problem in which every row is a factor.

    Args:
        problem: the problem of the groups.

    Returns:
        The problem; where rows cannot be taken each costs a pass over all of them.
    """
    packing, num = problem.packing, problem.num_groups
    if isinstance(packing, GroupMasks):
        everyone = jnp.concatenate(list(packing.group_of_row.values()))
        order, numbers = jnp.argsort(everyone, stable=True), jnp.arange(everyone.shape[0] + 1, dtype=jnp.int32)
        owner, places, begin = everyone[order], jnp.argsort(order).astype(jnp.int32), 0
        own = {}
        for key, index in packing.group_of_row.items():
            own[key], begin = places[begin : begin + index.shape[0]], begin + index.shape[0]
        # Rows of nobody stand in front of all groups.
        offsets = jnp.searchsorted(owner, jnp.arange(num + 1)).astype(jnp.int32)
        slots, counted = GroupMasks(own, numbers[:-1], numbers), owner >= 0
        owner, block = jnp.maximum(owner, 0), 1
    else:
        block = packing.rows.shape[1]
        owner, counted = jnp.repeat(packing.chunk_group, block), packing.mask.reshape(-1)
        numbers, offsets = jnp.arange(owner.shape[0] + 1, dtype=jnp.int32), packing.offsets
        slots = Packing(packing.rows.reshape(-1, 1), packing.mask.reshape(-1, 1), numbers[:-1], numbers)
    plan = problem.plan
    plan = dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, chunk_rows=1))
    settings = problem.call, slots, problem.prior, problem.num_draws, problem.together
    return RowFactors(plan, *settings, problem, owner, counted, offsets, block)


class _RowTilted(ProductTilted):
    """Tilted moments of rows; slots without one ask for nothing."""

    problem: RowFactors

    def group(
        self,
        index: Int[Array, ""],
        q: ProductNatural,
        site: ProductNatural,
        shared: Any,
        chains: Chains | None = None,
        power: Any = None,
    ) -> Tilted:
        """One row's tilted moments: see :meth:`ProductTilted.group`."""
        found, there = super().group(index, q, site, shared, chains, power), self.problem.counted[index]
        change = jax.tree.map(lambda x: jnp.where(there, x, 0.0), found.change)
        quiet = {name: jnp.where(there, getattr(found, name), 0.0) for name in ("value", "variance", "noise")}
        temper = jnp.where(there, found.temper, 1.0)
        return found._replace(
            change=change, temper=temper, finite=found.finite | ~there, valid=found.valid | ~there, **quiet
        )


def factors_of(problem: ProductProblem, solver: Any) -> ProductProblem:
    """The problem whose "groups" are the factors of a solver: itself, or :func:`by_rows`.

    Args:
        problem: the problem of the groups.
        solver: whose ``factors`` count.

    Returns:
        The problem.
    """
    return by_rows(problem) if solver.factors == "row" else problem


def tilted_of(problem: ProductProblem, solver: Any, key: Any) -> ProductTilted:
    """Takes the tilted moments of the factors of one round.

    Args:
        problem: the problem of the groups.
        solver: whose ``factors``, ``power`` and ``moments`` count.
        key: of the round's draws.

    Returns:
        What takes them; its ``problem`` is that of :func:`factors_of`.
    """
    own = factors_of(problem, solver)
    return (_RowTilted if isinstance(own, RowFactors) else ProductTilted)(own, solver, key)


def first_row_matches(problem: ProductProblem, solver: Any, dtype: Any) -> RowMatches:
    """The memory of rows that nobody has visited.

    Args:
        problem: of the groups.
        solver: whose ``damping`` counts.
        dtype: floating dtype.

    Returns:
        The memory.
    """
    rows, num = by_rows(problem), problem.num_groups
    one = first_match_state(jax.tree.map(jnp.zeros_like, problem.prior), float(solver.damping), dtype)
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows.num_groups, *jnp.shape(x))), one)
    zero, none = jnp.zeros((num,), dtype), jnp.zeros((num,), jnp.int32)
    return RowMatches(states.last, states, zero + jnp.nan, zero, zero + 1.0, none, none)


def rows_together(tilted: Any, sites: SiteStack, states: MatchStates, share: Any) -> Outcome:
    """All rows see one q: see :func:`numpyro_pvi.runtime._product_sweeps.together`."""
    problem: RowFactors = tilted.problem
    own = problem.site_of_rows(sites.groups, states.groups.sites)
    found = together(
        tilted,
        dataclasses.replace(sites, groups=own),
        MatchStates(states.groups.rows, states.prior),
        share,
        _batch(tilted, problem.num_groups),
    )
    swept, rows = found.swept, found.visits.groups
    extra = len(swept.backoffs) - problem.num_groups
    rows = rows._replace(site=swept.sites.groups, backoffs=swept.backoffs[extra:])
    groups = _folded(tilted, rows)
    prior = None if found.visits.prior is None else found.visits.prior._replace(backoffs=swept.backoffs[0])
    return outcome_of(Visits(groups, prior), dataclasses.replace(swept.sites, groups=groups.site), found.step)


class _Turn(NamedTuple):
    """Where a sweep in turn stands: q, and the last visit to every slot."""

    q: ProductNatural
    rows: LocalResult


def rows_in_turn(
    tilted: Any, sites: SiteStack, states: MatchStates, settings: Settings, share: Any, key: Any
) -> Outcome:
    """One group after another, the rows of each from one q: see :func:`numpyro_pvi.runtime._product_sweeps.in_turn`."""
    problem: RowFactors = tilted.problem
    family, q = problem.family, posterior(problem.prior, sites)
    order = order_of(settings, problem.full.num_groups, key)
    first = tilted.shared(q) if problem.plan.tilted[0] == "exact" else None
    old = problem.site_of_rows(sites.groups, states.groups.sites)
    q, prior = visit_prior(tilted, q, sites.prior, states.prior, share)
    batch = _batch(tilted, problem.block)

    def visit(turn: _Turn, group: Int[Array, ""]) -> tuple[_Turn, None]:
        shared = first if first is not None else tilted.shared(turn.q)
        span = problem.offsets[group], problem.offsets[group + 1]

        def look(block: Int[Array, ""], carry: tuple) -> tuple:
            rows, total = carry
            at = block * problem.block + jnp.arange(problem.block)
            before = take(old, at)

            def one(operands: tuple) -> LocalResult:
                index, site, state = operands
                return tilted.visit(index, turn.q, site, state, shared)

            done = jax.lax.map(one, (at, before, take(states.groups.rows, at)), batch_size=batch)
            total = total + jax.tree.map(lambda x: jnp.sum(x, axis=0), done.site - before)
            return jax.tree.map(lambda all_, own: all_.at[at].set(own), rows, done), total

        rows, total = jax.lax.fori_loop(*span, look, (turn.rows, jax.tree.map(jnp.zeros_like, q)))
        # Each row's step leaves q normalisable; their sum need not.
        step, halvings = back_off(lambda s: family.in_domain(turn.q + total * s), share)
        step = jnp.where(halvings < MAX_HALVINGS, step, 0.0)

        def shorten(block: Int[Array, ""], rows: LocalResult) -> LocalResult:
            at = block * problem.block + jnp.arange(problem.block)
            own, before = take(rows.site, at), take(old, at)
            new = select(step == 1.0, own, damp(before, own, step))
            site = jax.tree.map(lambda all_, x: all_.at[at].set(x), rows.site, new)
            counts = rows.backoffs.at[at].add(halvings)
            return rows._replace(site=site, backoffs=counts, step=rows.step.at[at].multiply(step))

        return _Turn(turn.q + total * step, jax.lax.fori_loop(*span, shorten, rows)), None

    none, zero = jnp.zeros(problem.owner.shape, jnp.int32), jnp.zeros(problem.owner.shape, share.dtype)
    unvisited = LocalResult(old, states.groups.rows, none, none > 0, zero)
    (_, rows), _ = jax.lax.scan(visit, _Turn(q, unvisited), order)
    new = SiteStack(problem.sums(rows.site), None if prior is None else prior.site)
    good = family.in_domain(posterior(problem.prior, new))
    groups = _folded(tilted, rows._replace(site=select(good, rows.site, old)))
    new = dataclasses.replace(select(good, new, sites), groups=groups.site)
    return outcome_of(Visits(groups, prior), new, jnp.where(good, 1.0, 0.0))


def _batch(tilted: Any, most: int) -> int | None:
    """Rows that are visited at a time."""
    problem, method = tilted.problem, tilted.problem.plan.tilted[0]
    if not problem.together:
        return None
    points = 1
    if method in ("importance", "laplace"):
        points = getattr(with_settings(tilted.solver.moments), "num_draws", ImportanceMoments().num_draws)
    elif method == "quadrature":
        grid = grid_of(touched(problem.family, problem.plan.likelihood))
        points = 1 if grid is None else math.prod(grid.counts)
    return max(1, min(most, TOGETHER // points))


def _folded(tilted: Any, rows: LocalResult) -> LocalResult:
    """What visits of rows were for their groups."""
    problem, alike = tilted.problem, tilted.methods[0] == "importance"
    num, owner, states = problem.full.num_groups, problem.owner, rows.state

    def least(x: Array, unseen: Any) -> Array:
        return jax.ops.segment_min(jnp.where(problem.counted, x, unseen), owner, num)

    count = jnp.maximum(problem.sums(jnp.ones(owner.shape, states.step.dtype)), 1.0)
    ess = least(jnp.where(jnp.isnan(states.ess), jnp.inf, states.ess), jnp.inf)
    worst = least(jnp.where(states.trouble > 0, states.trouble, _NO_TROUBLE), _NO_TROUBLE)
    summary = RowMatches(
        problem.kept(rows.site),
        states,
        jnp.where(jnp.isfinite(ess), ess, jnp.nan),
        # Rows that are weighed by the same draws err together.
        problem.sums(states.noise) if alike else jnp.sqrt(problem.sums(states.noise**2)),
        least(states.temper, 1.0),
        jnp.where(worst == _NO_TROUBLE, 0, worst),
        problem.sums((states.trouble == worst[owner]).astype(jnp.int32)),
    )
    backoffs = jax.ops.segment_max(jnp.where(problem.counted, rows.backoffs, 0), owner, num)
    moved = problem.sums(rows.moved.astype(jnp.int32)) > 0
    return LocalResult(problem.sums(rows.site), summary, backoffs, moved, problem.sums(rows.step) / count)
