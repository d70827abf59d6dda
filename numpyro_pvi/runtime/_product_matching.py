"""Rounds that match moments of products of families, by groups or by rows, and the evidence that goes with them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..expectations import (
    Chains,
    ImportanceMoments,
    MCMCMoments,
    Tilted,
    Unconstrained,
    grid_of,
    no_chains,
    with_settings,
)
from ..factors import GroupMasks, Packing
from ..families import ProductNatural
from ..schedules import Asked, RoundReport, asked_by_move
from ..sites import MAX_HALVINGS, SiteStack, back_off, damp, late_share, posterior, select, take, tied_site
from ..solvers import LocalResult, MatchState, first_match_state, trouble_sentence
from ._product_plan import SAMPLED_WAYS, touched
from ._product_problem import Objective, ProductProblem
from ._product_rounds import ProductMemory, Round, Settings, Swept, report_of, with_progress, with_turn
from ._product_tilted import TOGETHER, ProductTilted
from ._tilted import lanes_pay

# --------------------------------------------------------------------------------------------------------------- sweeps
# One visit to every factor of a product of families that matches moments: all from one q, or one after another.


class MatchStates(NamedTuple):
    """What the factors remember of their visits."""

    # Of every group; or of its rows, where each is a factor.
    groups: Any
    # None without a prior factor.
    prior: MatchState | None


class Visits(NamedTuple):
    """The last visit to every factor."""

    groups: LocalResult
    # None without a prior factor.
    prior: LocalResult | None


class Outcome(NamedTuple):
    """What a sweep made of the sites, and how much of the joint step was taken."""

    visits: Visits
    swept: Swept
    step: Any


def outcome_of(visits: Visits, sites: SiteStack, step: Any, halvings: Any = 0) -> Outcome:
    """A sweep in the terms of a round.

    Args:
        visits: the visits.
        sites: after them.
        step: how much of the joint step was taken.
        halvings: of the joint step.

    Returns:
        The outcome, the prior factor (if any) first.
    """
    backoffs, moved = visits.groups.backoffs + halvings, visits.groups.moved
    if visits.prior is not None:
        backoffs = jnp.concatenate([(visits.prior.backoffs + halvings)[None], backoffs])
        moved = jnp.concatenate([visits.prior.moved[None], moved])
    return Outcome(visits, Swept(sites, backoffs, ~moved), step)


def together(
    tilted: ProductTilted, sites: SiteStack, states: MatchStates, share: Any, batch: int | None = None
) -> Outcome:
    """All factors see one q, and one joint step is shortened until q is normalisable.

    Args:
        tilted: takes the moments.
        sites: before the sweep.
        states: what factors remember.
        share: of each change that is taken.
        batch: factors that are visited at a time; None is one.

    Returns:
        The outcome.
    """
    problem = tilted.problem
    family, q = problem.family, posterior(problem.prior, sites)
    shared = tilted.shared(q)

    def visit(operands: tuple) -> LocalResult:
        index, site, state = operands
        return tilted.visit(index, q, site, state, shared)

    operands = jnp.arange(problem.num_groups), sites.groups, states.groups
    visits = Visits(jax.lax.map(visit, operands, batch_size=batch), None)
    proposal = SiteStack(visits.groups.site, sites.prior)
    if sites.prior is not None:
        assert states.prior is not None  # there is a prior factor
        own = tilted.visit_prior(q, sites.prior, states.prior)
        visits, proposal = visits._replace(prior=own), SiteStack(visits.groups.site, own.site)

    def at(step: Any) -> SiteStack:
        new = damp(sites, proposal, step)
        # A full step to the letter, without the rounding of a difference.
        return jax.tree.map(lambda a, b: jnp.where(step == 1.0, b, a), new, proposal)

    step, halvings = back_off(lambda s: family.in_domain(posterior(problem.prior, at(s))), share)
    good = family.in_domain(posterior(problem.prior, at(step)))
    new = select(good, at(step), sites)
    return outcome_of(visits, new, jnp.where(good, step, 0.0), jnp.minimum(halvings, MAX_HALVINGS))


def order_of(settings: Settings, count: int, key: Any) -> Int[Array, "M"]:
    """The order in which groups are visited in turn."""
    order = jnp.arange(count)
    return jax.random.permutation(key, order) if settings.random else order


def visit_prior(
    tilted: ProductTilted, q: ProductNatural, site: Any, state: Any, share: Any
) -> tuple[ProductNatural, LocalResult | None]:
    """The prior factor's visit, the first of a sweep in turn.

    Args:
        tilted: takes the moments.
        q: natural parameters.
        site: the prior factor's; None where there is none.
        state: what it remembers.
        share: of its change that is taken.

    Returns:
        q afterwards, and the visit.
    """
    if site is None:
        return q, None
    return _taken(q, site, tilted.visit_prior(q, site, state), share)


def _taken(q: ProductNatural, site: Any, done: LocalResult, share: Any) -> tuple[ProductNatural, LocalResult]:
    new = select(share == 1.0, done.site, damp(site, done.site, share))
    return q - site + new, done._replace(site=new)


def in_turn(
    tilted: ProductTilted, sites: SiteStack, states: MatchStates, settings: Settings, share: Any, key: Any
) -> Outcome:
    """One factor after another, each from the q that the last one left.

    Args:
        tilted: takes the moments.
        sites: before the sweep.
        states: what factors remember.
        settings: whether the order is random.
        share: of each change that is taken.
        key: for the order.

    Returns:
        The outcome.
    """
    problem = tilted.problem
    family, q = problem.family, posterior(problem.prior, sites)
    order = order_of(settings, problem.num_groups, key)
    first = tilted.shared(q) if problem.plan.tilted[0] == "exact" else None
    q, prior = visit_prior(tilted, q, sites.prior, states.prior, share)

    def scanned(q: Any, operands: tuple) -> tuple[Any, LocalResult]:
        index, site, state = operands
        shared = first if first is not None else tilted.shared(q)
        return _taken(q, site, tilted.visit(index, q, site, state, shared), share)

    q, groups = jax.lax.scan(scanned, q, (order, *take((sites.groups, states.groups), order)))
    groups = take(groups, jnp.argsort(order))
    new = SiteStack(groups.site, None if prior is None else prior.site)
    good = family.in_domain(posterior(problem.prior, new))
    return outcome_of(Visits(groups, prior), select(good, new, sites), jnp.where(good, share, 0.0))


# --------------------------------------------------------------------------------------------------- every row a factor
# Every row a factor of its own, where q is a product of families and moments are matched.
#
# A group's site is the product of its rows'. The rows of a group are visited in parallel, from the q that the group was
# sent, so that a visit of a group stays one message; rows stand in the slots of the chunks that groups have anyhow, and
# one compiled program visits all of them.

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
    """All rows see one q: see :func:`numpyro_pvi.runtime._product_matching.together`."""
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
    """One group after another, the rows of each from one q: see :func:`numpyro_pvi.runtime._product_matching.in_turn`."""
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


# ----------------------------------------------------------------------------------------------------- product matching


def first_match_states(problem: ProductProblem, solver: Any, dtype: Any) -> MatchStates:
    """The memory of factors that nobody has visited.

    Args:
        problem: of the groups; its plan says how moments are taken.
        solver: the solver.
        dtype: floating dtype.

    Returns:
        The memory.
    """
    plan = problem.plan

    def first(who: Any, factor: Any, method: str, count: int) -> MatchState:
        chains, settings = None, with_settings(solver.moments)
        if method == "mcmc":
            assert isinstance(settings, MCMCMoments)  # the plan says so
            chains = no_chains(settings, Unconstrained(touched(plan.family, factor)).dim, dtype, True)
        return who.init_families(jax.tree.map(jnp.zeros_like, problem.prior), dtype, chains, count)

    if solver.factors == "row":
        groups: Any = first_row_matches(problem, solver, dtype)
    else:
        one = first(solver, plan.likelihood, plan.tilted[0], problem.num_groups)
        groups = jax.tree.map(lambda x: jnp.broadcast_to(x, (problem.num_groups, *jnp.shape(x))), one)
    prior = plan.prior_factor
    return MatchStates(groups, None if prior is None else first(solver.for_prior, prior, plan.tilted[1], 1))


class Matched(NamedTuple):
    """The outcome of :func:`matching_round`."""

    round: Round
    states: MatchStates


def matching_round(
    problem: ProductProblem,
    sites: SiteStack,
    states: MatchStates,
    before: Objective,
    memory: ProductMemory,
    last: RoundReport,
    settings: Settings,
    solver: Any,
    key: Any,
    noise: Any,
) -> Matched:
    """Match every factor's tilted moments; what is asked for is taken as far as q stays normalisable.

    Neither the ELBO nor the evidence has to rise. Where moments are by draws, steps are c / (c + k) of full ones after k rounds in
    which q turned back, as in natural-gradient rounds.

    Args:
        problem: the factors.
        sites: before the round.
        states: what factors remember.
        before: the ELBO at the sites.
        memory: the schedule's.
        last: the last round's report.
        settings: how far, in which order.
        solver: whose ``power``, ``moments`` and ``damping`` count.
        key: for the order.
        noise: key of this round's draws.

    Returns:
        Sites after the round, and the memories.
    """
    sampled = not SAMPLED_WAYS.isdisjoint(problem.plan.tilted)
    late = late_share(memory.turns, before.elbo.dtype) if sampled else 1.0
    share = jnp.asarray(settings.damping * late, before.elbo.dtype)
    visits, swept, step = _sweep(tilted_of(problem, solver, noise), sites, states, settings, share, key)
    taken, old = swept.sites, posterior(problem.prior, sites)
    q = posterior(problem.prior, taken)
    memory = with_turn(problem.family, memory, q, q - old) if sampled else memory
    # Of draws the engine takes the ELBO again, on the next round's.
    found = before if problem.plan.noisy else problem.objective(taken, noise)
    report = report_of(problem, sites, taken, q, old, swept, step, jnp.int32(0), last)
    steps = visits.groups.step
    if visits.prior is not None:
        steps = jnp.concatenate([visits.prior.step[None], steps])
    report = report._replace(step=jnp.where(swept.skipped, 0.0, step * steps).astype(report.move.dtype))
    asked = _asked(problem, states, visits, q, report, last)
    report = with_progress(problem, report, last, q - old, q, asked, step > 0, found.elbo, late)
    new = MatchStates(visits.groups.state, None if visits.prior is None else visits.prior.state)
    return Matched(Round(taken, found, ProductMemory(memory.step, memory.turns, memory.last), report), new)


def _asked(
    problem: ProductProblem, before: MatchStates, visits: Any, q: Any, report: RoundReport, last: RoundReport
) -> Asked:
    """What the visits asked for: the change that every factor remembers, or the moves undone by the steps that were taken."""
    del before
    states = visits.groups.state
    if not isinstance(states, MatchState):
        return asked_by_move(report.move, report.total_move, report.step, jnp.all(report.step > 0), last)
    own = jax.vmap(lambda change: problem.size(q, change))(states.last)
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0), states.last)
    if visits.prior is not None:
        own = jnp.concatenate([problem.size(q, visits.prior.state.last)[None], own])
        total = total + visits.prior.state.last
    return Asked(own, problem.size(q, total))


def _sweep(
    tilted: ProductTilted, sites: SiteStack, states: MatchStates, settings: Settings, share: Any, key: Any
) -> Outcome:
    if isinstance(tilted.problem, RowFactors):
        if settings.sequential:
            return rows_in_turn(tilted, sites, states, settings, share, key)
        return rows_together(tilted, sites, states, share)
    if settings.sequential:
        return in_turn(tilted, sites, states, settings, share, key)
    return together(tilted, sites, states, share, _lanes(tilted))


def _lanes(tilted: ProductTilted) -> int | None:
    """Groups whose chains run side by side: all of them where that pays."""
    problem = tilted.problem
    alike = problem.packing.chunk_group.shape[0] == problem.num_groups
    pays = problem.together and alike and lanes_pay(problem.plan.partition.chunk_rows)
    return problem.num_groups if tilted.methods[0] == "mcmc" and pays else None


def product_evidence(
    problem: ProductProblem, sites: SiteStack, states: MatchStates, solver: Any, key: Any
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Power EP's estimate of log p(y) and its Monte Carlo standard error, in nats.

    ``A(eta_q) - A(eta_0) + sum_m (1/alpha) log E_q[(p(y_m | theta) / t_m)^alpha]``, where A of the prior counts the components
    whose prior is held exactly; see :func:`numpyro_pvi.runtime._moments.evidence`, also for tied sites and anchors.

    Args:
        problem: the factors.
        sites: all sites.
        states: what factors remember.
        solver: whose ``factors``, ``power`` and ``moments`` count.
        key: of draws.

    Returns:
        ``(value, standard error, False)``: no finer rule is ever needed.
    """
    q, tilted, family = posterior(problem.prior, sites), tilted_of(problem, solver, key), problem.family
    shared, factors, own = tilted.shared(q), tilted.problem, sites.groups
    if isinstance(factors, RowFactors):
        own = factors.site_of_rows(own, states.groups.sites)

    def look(operands: tuple) -> tuple[Array, Array]:
        index, state, chains = operands
        at, power = solver.vantage(state, q)
        site = tied_site(own, factors.num_groups) if problem.plan.tied else take(own, index)
        found = tilted.group(index, at, site, tilted.fresh(index, at, shared), chains, power)
        return found.value, found.variance

    chains, anchored = getattr(states.groups, "chains", None), states.groups if solver.anchored else ()
    values, variances = jax.lax.map(look, (jnp.arange(factors.num_groups), anchored, chains))
    value, variance = jnp.sum(values), jnp.sum(variances)
    if sites.prior is not None:
        at, power = solver.for_prior.vantage(states.prior, q)
        own = tilted.prior(at, sites.prior, getattr(states.prior, "chains", None), power)
        value, variance = value + own.value, variance + own.variance
    exact = [f.log_partition(problem.prior.parts[n]) for n, f in family.components if n in problem.plan.exact]
    base = sum((jnp.asarray(x) for x in exact), start=jnp.zeros(()))
    return family.log_partition(q) - base + value, jnp.sqrt(variance), jnp.array(False)
