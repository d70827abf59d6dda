"""Rounds of some groups, and steps by mini-batches of rows, where q is a product of families.

``StochasticSubset`` moves a random few of the groups; ``StochasticNaturalGradient`` gives every group that moves a batch of its
rows. Both together are doubly stochastic variational inference, whose round costs what its rows cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._state import PVIState
from ..families import ProductFamily, ProductNatural
from ..schedules import BY_FACTOR, UNHEARD_MOVE, RoundReport, asked_by_move, sound
from ..sites import MAX_HALVINGS, SiteStack, back_off, late_share, select
from ..solvers import StochasticNaturalGradient, plan_batches, resolve
from ._engine import RoundsDone
from ._product_loop import run_rounds, stepped
from ._product_problem import ProductProblem
from ._product_rounds import ProductMemory, one_round, step_in_turns, with_progress, with_turn
from ._product_view import (
    Chosen,
    batch_rows,
    local_of,
    others,
    own_groups,
    row_ids,
    rows_of,
    view_of,
    whole_groups,
    with_groups,
    with_local,
)

# Rows are drawn one by one, not by shuffling a group's, where there are at least so many for each that is drawn.
_SPARSE = 8


class _Round(NamedTuple):
    sites: SiteStack
    memory: ProductMemory
    report: RoundReport


class Labels(NamedTuple):
    """What settings by label read: :class:`numpyro_pvi.solvers._settings.Labelled`."""

    num_groups: int
    labels: tuple
    continued: bool = False


class _Rows(NamedTuple):
    """What dealing out batches reads of a group."""

    num_rows: Any
    max_rows: int


def is_partial(solver: Any, schedule: Any) -> bool:
    """Whether rounds see some groups, or some rows, only."""
    return schedule.partial or solver.stochastic


def partial_rounds(
    engine: Any,
    state: PVIState,
    factors: Callable[[PVIState], ProductProblem],
    with_params: Callable[[PVIState], PVIState],
    count: Int[Array, ""],
    tol: Float[Array, ""],
    length: int,
) -> RoundsDone:
    """Run up to ``count`` rounds: see :meth:`numpyro_pvi.runtime.ProductEngine.rounds`.

    The global ELBO, a pass over all rows, is taken after every ``engine.loss_every``-th round; losses of the others are NaN.

    Args:
        engine: of the fit.
        state: where they start.
        factors: of all groups, at a state.
        with_params: the state with the model's params moved, by a pass over all rows.
        count: most rounds.
        tol: largest move of a round that ends them.
        length: rounds that there is room for.

    Returns:
        The rounds.
    """
    one = _stochastic_round if engine.solver.stochastic else _subset_round

    dtype = state.report.move.dtype

    def loss_of(state: PVIState) -> Array:
        due = _due(engine, state)

        def found() -> Array:
            return -factors(state).objective(state.sites, engine.noise(state.rng_key)).elbo

        return found() if engine.loss_every == 1 else jax.lax.cond(due, found, lambda: jnp.full((), jnp.nan, dtype))

    def again(state: PVIState, carry: tuple) -> tuple[PVIState, tuple, Array]:
        next_key, key = jax.random.split(state.rng_key)
        done = one(engine, factors(state), state, key, engine.noise(state.rng_key))
        state = with_params(stepped(state, next_key, done))
        loss = loss_of(state)
        # A loss that nobody has looked at is NaN as well.
        report = state.report._replace(finite=sound(loss) | ~_due(engine, state))
        return dataclasses.replace(state, report=report), carry, loss

    return run_rounds(state, (), again, count, tol, length, engine.solver)


def _due(engine: Any, state: PVIState) -> Bool[Array, ""]:
    """Whether the loss of all rows is taken after this round."""
    return (state.step - state.schedule_state.loss_from) % engine.loss_every == 0


# ------------------------------------------------------------------------------------------------------- who takes part


def _taking_part(
    schedule: Any, problem: ProductProblem, key: Any
) -> tuple[Int[Array, "K"], Bool[Array, "K"], Bool[Array, "M"]]:
    """Positions of the groups of a round, which of them are there, and the same by group."""
    num = problem.num_groups
    labels = Labels(num, problem.plan.partition.table.labels)
    if not schedule.partial:
        everyone = jnp.ones((num,), bool)
        return jnp.arange(num, dtype=jnp.int32), everyone, everyone
    count, there_key = most_groups(schedule, num), jax.random.fold_in(key, 1)
    there = jnp.ones((num,), bool)
    if schedule.rates is not None:
        rates = jnp.asarray(resolve(schedule.rates, "StochasticSubset(rates)", labels, 1.0))
        there = jax.random.uniform(there_key, rates.shape) < rates
    groups = jnp.arange(num, dtype=jnp.int32)
    if count < num:
        scores = jnp.where(there, jax.random.uniform(key, there.shape), -1.0)
        groups = jnp.sort(jax.lax.top_k(scores, count)[1]).astype(jnp.int32)
    own = there[groups]
    return groups, own, jnp.zeros((num,), bool).at[groups].set(own)


def most_groups(schedule: Any, count: int) -> int:
    """How many of some groups take part in a round at most."""
    if not schedule.partial:
        return count
    k = schedule.k
    return count if k is None else math.ceil(k * count) if isinstance(k, float) else k


def _merged(last: RoundReport, own: RoundReport, chosen: Chosen, heard: Bool[Array, "M"]) -> RoundReport:
    """The report of some groups among those of all; groups that took no part keep their last move."""
    extra = last.move.shape[0] - heard.shape[0]
    part = jnp.concatenate([jnp.ones((extra,), bool), heard])

    def put(old: Array, new: Array, keep: bool) -> Array:
        groups = old[extra:].at[chosen.groups].set(new[extra:])
        return jnp.where(part, jnp.concatenate([new[:extra], groups]), old if keep else jnp.zeros_like(old))

    move = put(last.move, own.move, True)
    waiting = jnp.max(jnp.where(part, 0.0, move), initial=0.0)
    unheard = jnp.minimum(waiting, UNHEARD_MOVE).astype(own.left.dtype)
    return own._replace(
        move=move,
        asked=put(last.asked, own.asked, True),
        left=jnp.maximum(own.left, unheard),
        step=put(last.step, own.step, False),
        backoffs=put(last.backoffs, own.backoffs, False),
        skipped=put(last.skipped, own.skipped, False),
        skip_run=put(last.skip_run, own.skip_run, True),
        staleness=last.staleness,
        total_move=jnp.maximum(own.total_move, unheard),
    )


def _of_some(last: RoundReport, chosen: Chosen, extra: int) -> RoundReport:
    """What a report says of some groups, after that of the prior factor, if there is one."""
    places = jnp.concatenate([jnp.arange(extra, dtype=jnp.int32), extra + chosen.groups])
    return last._replace(**{name: getattr(last, name)[places] for name in BY_FACTOR})


def _own_prior(problem: ProductProblem, chosen: Chosen, prior: Any) -> Any:
    """The prior factor's site beside some rows."""
    if prior is None:
        return None
    return ProductNatural(prior.parts | rows_of(problem.plan, prior.parts, row_ids(chosen)))


def _whole_prior(problem: ProductProblem, prior: Any, new: Any) -> Any:
    """The same beside all rows, of whose own latents it says nothing."""
    if prior is None:
        return None
    return ProductNatural(new.parts | {n: prior.parts[n] for n in problem.plan.row_axes})


# ---------------------------------------------------------------------------------------------------------- some groups


def _subset_round(engine: Any, problem: ProductProblem, state: PVIState, key: Any, noise: Any) -> _Round:
    """A round of some groups, as if there were no others: accepted by their local free energy."""
    who_key, round_key = jax.random.split(key)
    sites, memory, last = state.sites, state.schedule_state, state.report
    groups, there, heard = _taking_part(engine.schedule, problem, who_key)
    chosen = whole_groups(problem, groups, there)
    view = view_of(problem, chosen, others(problem, sites, chosen))
    prior = _own_prior(problem, chosen, sites.prior)
    own = SiteStack(own_groups(sites, chosen), prior, local_of(problem, chosen, sites.local))
    if memory.last is not None:
        near = rows_of(problem.plan, memory.last.parts, row_ids(chosen))
        memory = memory._replace(last=ProductNatural(memory.last.parts | near))
    before = view.objective(own, noise)
    own_last = _of_some(last, chosen, int(sites.prior is not None))
    done = one_round(view, own, before, memory, own_last, engine.settings, round_key, noise)
    memory = done.memory
    if memory.last is not None:
        memory = memory._replace(last=with_local(problem, chosen, state.schedule_state.last, memory.last))
    # Only those that are there get a q and send a site.
    each = (done.report.messages - last.messages) // groups.shape[0]
    report = done.report._replace(messages=last.messages + jnp.sum(there, dtype=jnp.int32) * each)
    new = SiteStack(
        with_groups(sites, chosen, done.sites.groups),
        _whole_prior(problem, sites.prior, done.sites.prior),
        with_local(problem, chosen, sites.local, done.sites.local),
    )
    return _Round(new, memory, _merged(last, report, chosen, heard))


# ------------------------------------------------------------------------------------------------------------ some rows


class _Walk(NamedTuple):
    """Where a visit stands: the sites of the groups that take part and of the prior factor, and the average of late ones."""

    groups: Any
    prior: Any
    local: Any
    mean_groups: Any
    mean_prior: Any
    backoffs: Int[Array, ""]
    # Which factors have made a step, the prior factor (if any) first.
    moved: Bool[Array, "F"]


def _stochastic_round(engine: Any, problem: ProductProblem, state: PVIState, key: Any, noise: Any) -> _Round:
    """Steps of all groups that take part, together, each by a batch of its rows."""
    del noise
    solver, sites = engine.solver, state.sites
    # Small steps, not small shares of large ones: q would go astray in every visit, and messages there are of another q.
    step_size = solver.step_size * _late(engine, state.schedule_state)
    who_key, rows_key, draws_key = jax.random.split(key, 3)
    groups, there, heard = _taking_part(engine.schedule, problem, who_key)
    chosen = Chosen(groups, there, problem.packing, None)
    rows, steps = _deal(problem, solver, groups, rows_key)
    few = dataclasses.replace(problem, num_draws=solver.num_particles)
    base, own = others(problem, sites, chosen), own_groups(sites, chosen)
    windows = jnp.concatenate([jnp.max(steps)[None], steps]) if sites.prior is not None else steps
    first = jnp.minimum(windows - 1, jnp.ceil((1.0 - solver.average) * windows).astype(jnp.int32))

    def step(k: Int[Array, ""], walk: _Walk) -> _Walk:
        here = whole_groups(few, groups, there) if rows is None else batch_rows(few, groups, there, rows[:, k])
        view, active = view_of(few, here, base), there & (k < steps)
        stack = SiteStack(walk.groups, _own_prior(few, here, walk.prior), local_of(few, here, walk.local))
        stack, halvings, good = step_in_turns(view, stack, active, step_size, jax.random.fold_in(draws_key, k))
        late = jnp.maximum(k - first + 1, 0)
        weight = jnp.where((late > 0) & (k < windows), 1.0 / jnp.maximum(late, 1), 0.0)
        prior = _whole_prior(few, walk.prior, stack.prior)
        mean_prior = prior
        if prior is not None:
            mean_prior, weight = walk.mean_prior + (prior - walk.mean_prior) * weight[0], weight[1:]
        mean_groups = walk.mean_groups + (stack.groups - walk.mean_groups) * weight
        local = with_local(few, here, walk.local, stack.local)
        return _Walk(stack.groups, prior, local, mean_groups, mean_prior, walk.backoffs + halvings, walk.moved | good)

    nobody = jnp.zeros(windows.shape, bool)
    start = _Walk(own, sites.prior, sites.local, own, sites.prior, jnp.int32(0), nobody)
    walk = jax.lax.fori_loop(0, jnp.max(steps), step, start)
    most = jnp.max(steps)
    exchanges = jnp.sum(there, dtype=jnp.int32) * most
    return _absorbed(engine, problem, state, chosen, heard, base, walk, exchanges, most)


def _late(engine: Any, memory: ProductMemory) -> Any:
    """What late steps are shortened by, so that noise averages out; 1 under a damping that was given."""
    return late_share(memory.turns, memory.step.dtype) if engine.schedule.damping == "auto" else 1.0


def _deal(
    problem: ProductProblem, solver: StochasticNaturalGradient, groups: Int[Array, "K"], key: Any
) -> tuple[Int[Array, "K S B"] | None, Int[Array, "K"]]:
    """Rows of every step, by position within their group (None where all are taken), and how many steps a group makes."""
    sizes = problem.plan.partition.table.sizes
    most, (size, num_steps, epochs) = max(sizes), (solver.batch_size, solver.num_steps, solver.epochs)
    longest = plan_batches(_Rows(most, most), key, size, num_steps, epochs).num_steps
    total = (size or 0) * (num_steps or 0)

    def own(group: Int[Array, ""]) -> tuple:
        count, own_key = jnp.asarray(sizes)[group], jax.random.fold_in(key, group)
        if 0 < _SPARSE * total <= min(sizes):
            return some_of(own_key, count, total).reshape(num_steps, size), jnp.int32(num_steps)
        found = plan_batches(_Rows(count, most), own_key, size, num_steps, epochs)
        dealt = None if found.rows is None else jax.vmap(found.rows)(jnp.arange(longest))
        return dealt, jnp.asarray(found.num_steps, jnp.int32)

    return jax.vmap(own)(groups)


def some_of(key: Any, count: Any, size: int) -> Int[Array, "size"]:
    """Some different numbers below a count, each of which is as likely in every place; what it costs depends on their number alone.

    The first different ones of twice as many draws. They are drawn anew where there are too few, which depends on which draws
    are equal and not on their numbers, so that all orders of all numbers stay equally likely.

    Args:
        key: a random key.
        count: the numbers are 0 to count - 1; several times ``size``.
        size: how many are drawn.

    Returns:
        The numbers.
    """

    def draw(tried: tuple) -> tuple:
        key, _, _ = tried
        key, own = jax.random.split(key)
        drawn = jax.random.randint(own, (2 * size,), 0, count, jnp.int32)
        order = jnp.argsort(drawn, stable=True)
        again = jnp.concatenate([jnp.zeros((1,), bool), jnp.diff(drawn[order]) == 0])
        later = jnp.zeros((2 * size,), bool).at[order].set(again)
        return key, drawn[jnp.argsort(later, stable=True)[:size]], jnp.sum(~later) >= size

    first = key, jnp.zeros((size,), jnp.int32), jnp.array(False)
    return jax.lax.while_loop(lambda tried: ~tried[2], draw, first)[1]


def _absorbed(
    engine: Any,
    problem: ProductProblem,
    state: PVIState,
    chosen: Chosen,
    heard: Bool[Array, "M"],
    base: ProductNatural,
    walk: _Walk,
    exchanges: Any,
    steps: Any,
) -> _Round:
    """The sites after a visit, damped; no ELBO is looked at, which would take all rows."""
    sites, memory, last = state.sites, state.schedule_state, state.report
    shared = ProductFamily([(n, f) for n, f in problem.family.components if n in base.parts])
    own, dtype = own_groups(sites, chosen), last.move.dtype
    share = jnp.asarray(1.0 if engine.schedule.damping == "auto" else engine.schedule.damping, dtype)

    def q_of(groups: Any, prior: Any) -> ProductNatural:
        total = base + jax.tree.map(lambda x: jnp.sum(x, axis=0), groups)
        return total if prior is None else total + ProductNatural({n: prior.parts[n] for n in total.parts})

    def at(share: Any) -> tuple:
        prior = None if sites.prior is None else sites.prior + (walk.mean_prior - sites.prior) * share
        return own + (walk.mean_groups - own) * share, prior

    # A mean of normalisable q's is normalisable, but groups that make unequal numbers of steps average over others.
    share, halvings = back_off(lambda share: shared.in_domain(q_of(*at(share))), share)
    share = jnp.where(halvings < MAX_HALVINGS, share, 0.0)
    groups, prior = at(share)
    # A full step to the letter, without the rounding of a difference.
    groups, prior = select(share == 1.0, (walk.mean_groups, walk.mean_prior), (groups, prior))
    q, old = q_of(groups, prior), q_of(own, sites.prior)
    moved = q - old
    memory = with_turn(shared, memory, q, moved)
    move = jax.vmap(lambda x: problem.size(q, x))(groups - own)
    if prior is not None:
        change = ProductNatural({n: x for n, x in (prior - sites.prior).parts.items() if n in base.parts})
        move = jnp.concatenate([problem.size(q, change)[None], move])
    skipped = ~walk.moved
    before = _of_some(last, chosen, int(sites.prior is not None))
    report = before._replace(
        move=move,
        step=jnp.where(skipped, 0.0, share * _late(engine, memory)).astype(move.dtype),
        backoffs=jnp.full(skipped.shape, walk.backoffs + halvings, jnp.int32),
        skipped=skipped,
        skip_run=jnp.where(skipped, before.skip_run + 1, 0),
        total_move=problem.size(q, moved),
        valid=shared.in_domain(q),
        clock=last.clock + 1,
        messages=last.messages + exchanges,
    )
    # Of what rows ask for, steps take this share by the solver's own settings; batches and late steps average the rest.
    full = 1.0 - (1.0 - engine.solver.step_size * _late(engine, memory)) ** steps
    asked = asked_by_move(move, report.total_move, full * jnp.maximum(share, 2.0**-MAX_HALVINGS), share > 0, before)
    report = with_progress(problem, report, before, moved, q, asked, share > 0, None, _late(engine, memory))
    new = SiteStack(with_groups(sites, chosen, groups), prior, walk.local)
    return _Round(new, memory, _merged(last, report, chosen, heard))


def first_partial_memory(
    solver: Any, schedule: Any, q: ProductNatural, shared: tuple[str, ...], memory: ProductMemory
) -> ProductMemory:
    """A schedule's memory before the first round: steps by batches are noisy whatever the factors.

    Args:
        solver: of the fit.
        schedule: of the fit.
        q: natural parameters.
        shared: components outside the partitioned plate.
        memory: that of rounds of all groups and rows.

    Returns:
        The memory.
    """
    if is_partial(solver, schedule):
        memory = memory._replace(loss_from=jnp.int32(0))
    if not solver.stochastic:
        return memory
    return memory._replace(last=ProductNatural({n: jax.tree.map(jnp.zeros_like, q.parts[n]) for n in shared}))
