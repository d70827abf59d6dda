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
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._state import PVIState
from ..factors import GroupMasks, Packing, ValueCall
from ..families import ProductFamily, ProductNatural, members_of, repeated
from ..schedules import (
    BY_FACTOR,
    FELL,
    NOT_FINITE,
    UNHEARD_MOVE,
    Asked,
    Part,
    RoundCarry,
    RoundReport,
    asked_by_move,
    pace,
    refusals,
    rounding,
    sketch,
    sound,
)
from ..sites import MAX_HALVINGS, MemberSites, SiteStack, back_off, late_share, select
from ..solvers import StochasticNaturalGradient, plan_batches
from ._engine import RoundsDone
from ._product_plan import ProductPlan
from ._product_problem import ProductProblem
from ._product_rounds import run_rounds, step_in_turns

# ----------------------------------------------------------------------------------------------- some rows as a problem
# Some rows of some groups as a problem of their own: what a round of a few groups sees, and a step by a mini-batch.
#
# The sites of all other groups count as a prior, and of latents inside the partitioned plate only the rows at hand are
# looked up, so that what is done with them costs as much as these rows.


class Chosen(NamedTuple):
    """K groups, and some of the rows of each in chunks."""

    # Positions of different groups, and which of them take part; the others' sites stay as they are.
    groups: Int[Array, "K"]
    there: Bool[Array, "K"]
    # Plate indices of the rows, as a packing has them; all groups' masks where rows cannot be taken.
    packing: Packing | GroupMasks
    # What a sum over a group's rows is multiplied by; None is 1.
    weights: Float[Array, "K"] | None
    # Where the rows stand on this device, and which of them are here; None where all of them are, at their plate indices.
    here: tuple[Int[Array, "C R"], Bool[Array, "C R"]] | None = None


@dataclasses.dataclass(frozen=True)
class _Gathered(ValueCall):
    """A model whose chunks name places in a list of rows."""

    ids: Int[Array, "P"]

    def rows(self, reading: Any, chunk: Any) -> ValueCall:
        """The model on one chunk's rows."""
        return super().rows(reading, (self.ids[chunk[0]], chunk[1]))


@dataclasses.dataclass(frozen=True)
class Beside(ProductProblem):
    """A problem whose prior holds the sites of other groups, and need not be normalisable."""

    def divergences(self, q: ProductNatural) -> Float[Array, "C"]:
        """Of every component ``A(q) - <q - prior, mu>``, nats: minus a divergence to a prior that need not be normalisable."""
        found = []
        for name, family in self.family.components:
            own = q.parts[name]
            gap = own - self.prior.parts[name]
            found.append(family.log_partition(own) - family.inner(gap, family.natural_to_mean(own)))
        return jnp.stack([jnp.asarray(x) for x in found])


@dataclasses.dataclass(frozen=True)
class SomeRows(Beside):
    """A problem of K groups, or of a batch of the rows of each.

    Its ELBO is the local free energy of these groups and the prior factor, ``sum_S E_q[log f_m] - KL(q || q without the sites of
    S)`` with an unnormalised second argument (PVI eq. 2). Under ``weights`` a message about shared latents is ``N_m / B`` times
    the batch's; a row's own latents get their own.

    Args:
        full: the problem of all groups.
        chosen: the groups and rows, by plate index.
    """

    full: ProductProblem
    chosen: Chosen

    @property
    def num_groups(self) -> int:
        """K."""
        return self.chosen.groups.shape[0]

    def largest_by_group(self, name: str, found: Any) -> Float[Array, "K"]:
        """See :meth:`ProductPlan.largest_by_group`."""
        rows = jax.tree.leaves(found)[0].shape[self.plan.row_axes[name]]
        return self.plan.largest_by_group(name, found, self.owners(rows), self.num_groups)

    def _by_group(self, results: Any) -> Any:
        found, weights = super()._by_group(results), self.chosen.weights
        if weights is None:
            return found
        return jax.tree.map(lambda x: x * weights.reshape((-1,) + (1,) * (x.ndim - 1)), found)

    def _known(self, sites: SiteStack | None, chunk: Any, group: Any, place: Any, counts: Any) -> dict[str, Any]:
        found, weights = super()._known(sites, chunk, group, place, counts), self.chosen.weights
        if self.chosen.here is not None:
            # Of what is known of a chunk as much as there is of its rows here.
            packing = self.chosen.packing
            assert isinstance(packing, Packing)  # rows have places
            rows = jnp.sum(packing.mask.reshape(-1)[chunk[0]])
            found = jax.tree.map(lambda x: x * (jnp.sum(chunk[1]) / jnp.maximum(rows, 1)), found)
        if weights is None:
            return found
        # A batch's share of what its group's site says, so that the whole is what the batch's total is compared with.
        inside, share = self.plan.row_axes, 1.0 / weights[group]
        return {n: x if n in inside else jax.tree.map(lambda a: a * share, x) for n, x in found.items()}

    def _rows_key(self, key: Any, chunk: Any) -> Any:
        if isinstance(self.packing, GroupMasks):
            return None
        ids = row_ids(self.chosen)
        assert ids is not None
        return self.full._rows_key(key, (ids[chunk[0]], chunk[1]))

    def _prior_density(self, values: dict, weights: Any = None, laws: Any = None) -> Array:
        # The prior factor reads the model's own arguments; it says nothing of rows' latents, whose values are of no account.
        count, axes = self.plan.partition.table.num_rows, self.plan.row_axes
        if not isinstance(self.packing, GroupMasks):
            first = jnp.zeros((count,), jnp.int32)
            values = {n: jnp.take(x, first, axis=axes[n]) if n in axes else x for n, x in values.items()}
        return self.full._prior_density(values, weights, laws)


def whole_groups(problem: ProductProblem, groups: Int[Array, "K"], there: Bool[Array, "K"]) -> Chosen:
    """All rows of some groups, in as many chunks as the K largest groups have.

    Args:
        problem: of all groups.
        groups: positions of the groups, all different.
        there: which of them take part.

    Returns:
        The rows.
    """
    packing, count = problem.packing, groups.shape[0]
    if isinstance(packing, GroupMasks):
        place = jnp.full((problem.num_groups,), -1, jnp.int32)
        place = place.at[groups].set(jnp.where(there, jnp.arange(count, dtype=jnp.int32), -1))
        own = {key: jnp.where(index >= 0, place[index], -1) for key, index in packing.group_of_row.items()}
        numbers = jnp.arange(count + 1, dtype=jnp.int32)
        return Chosen(groups, there, GroupMasks(own, numbers[:-1], numbers), None)
    length = packing.rows.shape[1]
    chunks = np.sort(-(-np.asarray(problem.plan.partition.table.sizes) // length))[::-1]
    most = int(chunks[:count].sum())
    counts = problem.chunk_counts()[groups]
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    numbers = jnp.arange(most, dtype=jnp.int32)
    slot = jnp.minimum(jnp.searchsorted(ends, numbers, side="right"), count - 1).astype(jnp.int32)
    spare = numbers >= ends[-1]
    found = problem.look_up(groups[slot], jnp.where(spare, 0, numbers - (ends[slot] - counts[slot])))
    take_part = (~spare & there[slot])[:, None]
    # Spare chunks belong to the last group and hold no row.
    offsets = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1], jnp.full((1,), most, ends.dtype)])
    packed = Packing(found.rows, found.mask & take_part, slot, offsets)
    return Chosen(groups, there, packed, None, _here(problem, found.stands, found.here & take_part))


def _here(problem: ProductProblem, stands: Array, here: Array) -> tuple[Array, Array] | None:
    return None if problem.placed is None else (stands, here)


def batch_rows(
    problem: ProductProblem, groups: Int[Array, "K"], there: Bool[Array, "K"], positions: Int[Array, "K B"]
) -> Chosen:
    """A batch of B rows of each of some groups, weighted by ``N_m / B``.

    Args:
        problem: of all groups.
        groups: positions of the groups, all different.
        there: which of them take part.
        positions: of the rows within their groups, all different.

    Returns:
        The rows.
    """
    packing, (count, size) = problem.packing, positions.shape
    assert isinstance(packing, Packing)  # batches are refused where rows cannot be taken
    length = packing.rows.shape[1]
    found = problem.look_up(groups[:, None], positions // length, positions % length)
    # In the order of the plate: a model that reads a whole plate by its indices has to find them in order.
    rows, stands, here = jnp.sort(found.rows, axis=1), found.stands, found.here
    if problem.placed is not None:
        order = jnp.argsort(found.rows, axis=1)
        stands, here = (jnp.take_along_axis(x, order, axis=1) for x in (stands, here))
    each = min(size, length)
    chunks = -(-size // each)
    slots = jnp.arange(chunks * each)
    mask = jnp.broadcast_to(slots < size, (count, chunks * each)) & there[:, None]
    rows, stands, here = (x[:, jnp.where(slots < size, slots, 0)] for x in (rows, stands, here))
    numbers = jnp.arange(count + 1, dtype=jnp.int32)
    shape = (count * chunks, each)
    packed = Packing(rows.reshape(shape), mask.reshape(shape), jnp.repeat(numbers[:-1], chunks), numbers * chunks)
    sizes = jnp.asarray(problem.plan.partition.table.sizes, jnp.result_type(float))
    own = _here(problem, stands.reshape(shape), (here & mask).reshape(shape))
    return Chosen(groups, there, packed, sizes[groups] / size, own)


def others(problem: ProductProblem, sites: SiteStack, chosen: Chosen) -> ProductNatural:
    """The exact prior times the sites of all groups that take no part, of shared components.

    Args:
        problem: of all groups.
        sites: all sites.
        chosen: who takes part.

    Returns:
        Natural parameters.
    """
    rest = jnp.ones((problem.num_groups,), bool).at[chosen.groups].set(~chosen.there)
    parts = {}
    for name, site in sites.groups.parts.items():

        def add(prior: Array, x: Array) -> Array:
            return prior + jnp.sum(jnp.where(rest.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0.0), axis=0)

        parts[name] = jax.tree.map(add, problem.prior.parts[name], site)
    return ProductNatural(parts)


def own_groups(sites: SiteStack, chosen: Chosen) -> ProductNatural:
    """The groups' own sites, zero (the unit factor) of those that take no part."""

    def kept(x: Array) -> Array:
        there = chosen.there.reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.where(there, x[chosen.groups], 0.0)

    return jax.tree.map(kept, sites.groups)


def view_of(problem: ProductProblem, chosen: Chosen, base: ProductNatural) -> SomeRows:
    """The problem of some rows.

    Args:
        problem: of all groups.
        chosen: the rows.
        base: as of :func:`others`.

    Returns:
        The problem; its prior is ``base``, with the rows' part of the prior of their own latents.
    """
    plan, call, packing, ids = problem.plan, problem.call, chosen.packing, row_ids(chosen)
    if isinstance(packing, Packing) and ids is not None:
        stands, mask = (packing.rows, packing.mask) if chosen.here is None else chosen.here
        call = _Gathered(call.model, call.args, call.kwargs, stands.reshape(-1), params=call.params)
        places = jnp.arange(ids.shape[0], dtype=jnp.int32).reshape(packing.rows.shape)
        packing = Packing(places, mask, packing.chunk_group, packing.offsets)
        plan = _resized(plan, ids.shape[0])
    prior = ProductNatural(base.parts | rows_of(problem.plan, problem.prior.parts, ids))
    return SomeRows(plan, call, packing, prior, problem.num_draws, problem.runtime.side_by_side, problem, chosen)


def row_ids(chosen: Chosen) -> Int[Array, "P"] | None:
    """Plate indices of the places of some rows; None where all rows have their own place."""
    return chosen.packing.rows.reshape(-1) if isinstance(chosen.packing, Packing) else None


def rows_of(plan: ProductPlan, parts: dict[str, Any], ids: Any) -> dict[str, Any]:
    """Of latents inside the partitioned plate, the members of some rows; of all rows where ``ids`` is None."""
    axes = plan.row_axes
    own = {n: x for n, x in parts.items() if n in axes}
    if ids is None:
        return own
    return {n: jax.tree.map(lambda x, n=n: jnp.take(x, ids, axis=axes[n]), part) for n, part in own.items()}


def local_of(problem: ProductProblem, chosen: Chosen, local: MemberSites | None) -> MemberSites | None:
    """The sites of the rows' own latents."""
    if local is None:
        return None
    return MemberSites(rows_of(problem.plan, local.parts, row_ids(chosen)))


def with_local(problem: ProductProblem, chosen: Chosen, local: Any, new: Any) -> Any:
    """Sites of all rows' own latents (or any natural parameters by latent) with those of some rows replaced.

    Args:
        problem: of all groups.
        chosen: the rows.
        local: of all rows, or None.
        new: of these rows.

    Returns:
        Of all rows.
    """
    if local is None or not isinstance(chosen.packing, Packing):
        return new
    packing, axes = chosen.packing, problem.plan.row_axes
    # A row that is not there is left out.
    ids = jnp.where(packing.mask, packing.rows, np.iinfo(np.int32).max).reshape(-1)

    def put(axis: int, old: Array, x: Array) -> Array:
        moved = jnp.moveaxis(old, axis, 0).at[ids].set(jnp.moveaxis(x, axis, 0), mode="drop")
        return jnp.moveaxis(moved, 0, axis)

    parts = {
        n: jax.tree.map(lambda a, b, n=n: put(axes[n], a, b), local.parts[n], x) if n in axes else x
        for n, x in new.parts.items()
    }
    return type(local)(parts)


def with_groups(sites: SiteStack, chosen: Chosen, new: ProductNatural) -> ProductNatural:
    """All groups' sites with those that take part replaced."""

    def put(x: Array, own: Array) -> Array:
        there = chosen.there.reshape((-1,) + (1,) * (own.ndim - 1))
        return x.at[chosen.groups].set(jnp.where(there, own, x[chosen.groups]))

    return jax.tree.map(put, sites.groups, new)


def _resized(plan: ProductPlan, count: int) -> ProductPlan:
    """A plan whose latents inside the plate have a given number of rows."""
    families = dict(plan.family.components)
    for latent in plan.inside:
        members = list(members_of(families[latent.name]))
        members[latent.axis] = count
        # The last axes are those of one event, which its family has already.
        batch = members[: len(members) - len(members_of(latent.family))]
        families[latent.name] = repeated(latent.family, tuple(batch))
    return dataclasses.replace(plan, family=ProductFamily(families))


# ------------------------------------------------------------------------------------------------------- product subset

# Rows are drawn one by one, not by shuffling a group's, where there are at least so many for each that is drawn.
_SPARSE = 8


class ProductMemory(NamedTuple):
    """What rounds of steps by batches remember."""

    # Rounds in which q turned back, and its last change.
    turns: Int[Array, ""]
    last: Any
    # What remains of the rounds after which losses are due.
    loss_from: Int[Array, ""]


def first_memory(q: ProductNatural, shared: tuple[str, ...]) -> ProductMemory:
    """The memory before the first round.

    Args:
        q: natural parameters.
        shared: components outside the partitioned plate.

    Returns:
        The memory.
    """
    last = ProductNatural({n: jax.tree.map(jnp.zeros_like, q.parts[n]) for n in shared})
    return ProductMemory(jnp.int32(0), last, jnp.int32(0))


class _Round(NamedTuple):
    sites: SiteStack
    memory: ProductMemory
    report: RoundReport


class Labels(NamedTuple):
    """What settings by label read: :class:`numpyro_pvi.solvers._base.Labelled`."""

    num_groups: int
    labels: tuple
    continued: bool = False


class _Rows(NamedTuple):
    """What dealing out batches reads of a group."""

    num_rows: Any
    max_rows: int
    fresh_batches: bool = False


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

    def again(state: PVIState, carry: tuple) -> tuple[PVIState, tuple, Array]:
        next_key, key = jax.random.split(state.rng_key)
        done = _stochastic_round(engine, factors(state), state, key)
        found = {"sites": done.sites, "schedule_state": done.memory, "report": done.report}
        state = with_params(dataclasses.replace(state, rng_key=next_key, step=state.step + 1, **found))
        key = engine.noise(state.rng_key)
        state, loss = loss_when_due(engine, state, lambda: -factors(state).elbo(state.sites, key))
        return state, carry, loss

    return run_rounds(state, (), again, count, tol, length, engine.solver)


def loss_when_due(engine: Any, state: PVIState, loss: Callable[[], Array]) -> tuple[PVIState, Array]:
    """The loss of all rows, which rounds of some do not know, where somebody asks for it.

    Args:
        engine: of the fit; its ``loss_every`` says after which rounds.
        state: after a round.
        loss: a pass over all rows.

    Returns:
        The state, whose report says whether the loss is a number, and the loss; NaN where it is not due.
    """
    due = (state.step - state.schedule_state.loss_from) % engine.loss_every == 0
    nobody = jnp.full((), jnp.nan, state.report.move.dtype)
    found = loss() if engine.loss_every == 1 else jax.lax.cond(due, loss, lambda: nobody)
    # A loss that nobody has looked at is NaN as well.
    report = state.report._replace(finite=sound(found) | ~due)
    return dataclasses.replace(state, report=report), found


# ------------------------------------------------------------------------------------------------------- who takes part


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


def few_of(
    problem: ProductProblem, sites: SiteStack, groups: Int[Array, "K"], there: Bool[Array, "K"]
) -> tuple[Chosen, ProductProblem]:
    """Some groups, and the problem of their rows beside the sites of all others; arguments as of :func:`part_of`."""
    chosen = whole_groups(problem, groups, there)
    return chosen, view_of(problem, chosen, others(problem, sites, chosen))


def part_of(factors: Any, carry: RoundCarry, groups: Int[Array, "K"], there: Bool[Array, "K"], noise: Any) -> Part:
    """Some groups as a problem of their own: see :class:`numpyro_pvi.schedules.Part`.

    Args:
        factors: those of all groups, as schedules see them.
        carry: where things stand.
        groups: positions of the groups, all different.
        there: which of them take part; the others stay.
        noise: key of the draws.

    Returns:
        The part; of rows' own latents it has those of its rows.
    """
    problem, sites, last = factors.problem, carry.sites, carry.report
    chosen, view = factors.few(sites, groups, there)
    ids = row_ids(chosen)
    prior = _own_prior(problem, chosen, sites.prior)
    own = SiteStack(own_groups(sites, chosen), prior, local_of(problem, chosen, sites.local))
    here = dataclasses.replace(factors, problem=view, beside=own)
    report = _of_some(last, chosen, int(prior is not None))
    begun = carry._replace(sites=own, evaluation=here.evaluate(own, None, noise), report=report)

    def near(whole: Array) -> Array:
        if not (factors.noisy and problem.plan.row_axes):
            return whole
        parts = problem.family.unflat(whole).parts
        return view.family.flat(ProductNatural(parts | rows_of(problem.plan, parts, ids)))

    def far(whole: Array, some: Array) -> Array:
        if not (factors.noisy and problem.plan.row_axes):
            return some
        return problem.family.flat(with_local(problem, chosen, problem.family.unflat(whole), view.family.unflat(some)))

    def whole(done: RoundCarry) -> RoundCarry:
        new = SiteStack(
            with_groups(sites, chosen, done.sites.groups),
            _whole_prior(problem, sites.prior, done.sites.prior),
            with_local(problem, chosen, sites.local, done.sites.local),
        )
        # Only those that are there get a q and send a site.
        each = (done.report.messages - last.messages) // groups.shape[0]
        report = done.report._replace(messages=last.messages + jnp.sum(there, dtype=jnp.int32) * each)
        heard = jnp.zeros((problem.num_groups,), bool).at[groups].set(there)
        return carry._replace(sites=new, evaluation=None, report=_merged(last, report, chosen, heard))

    return Part(here, begun, near, far, whole)


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


def _stochastic_round(engine: Any, problem: ProductProblem, state: PVIState, key: Any) -> _Round:
    """Steps of all groups that take part, together, each by a batch of its rows."""
    solver, sites = engine.solver, state.sites
    # Small steps, not small shares of large ones: q would go astray in every visit, and messages there are of another q.
    step_size = solver.step_size * _late(engine, state.schedule_state, state.report.move.dtype)
    who_key, rows_key, draws_key = jax.random.split(key, 3)
    groups, there = engine.schedule.who(Labels(problem.num_groups, problem.plan.partition.table.labels), who_key)
    heard = jnp.zeros((problem.num_groups,), bool).at[groups].set(there)
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


def _late(engine: Any, memory: ProductMemory, dtype: Any) -> Any:
    """What late steps are shortened by, so that noise averages out; 1 under a damping that was given."""
    return late_share(memory.turns, dtype) if engine.schedule.damping == "auto" else 1.0


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
    turned = shared.inner(moved, shared.fisher_product(q, memory.last)) < 0
    memory = memory._replace(turns=memory.turns + turned, last=moved)
    late = _late(engine, memory, dtype)
    move = jax.vmap(lambda x: problem.size(q, x))(groups - own)
    if prior is not None:
        change = ProductNatural({n: x for n, x in (prior - sites.prior).parts.items() if n in base.parts})
        move = jnp.concatenate([problem.size(q, change)[None], move])
    skipped = ~walk.moved
    before = _of_some(last, chosen, int(sites.prior is not None))
    report = before._replace(
        move=move,
        step=jnp.where(skipped, 0.0, share * late).astype(move.dtype),
        backoffs=jnp.full(skipped.shape, walk.backoffs + halvings, jnp.int32),
        skipped=skipped,
        skip_run=jnp.where(skipped, before.skip_run + 1, 0),
        total_move=problem.size(q, moved),
        valid=shared.in_domain(q),
        clock=last.clock + 1,
        messages=last.messages + exchanges,
    )
    # Of what rows ask for, steps take this share by the solver's own settings; batches and late steps average the rest.
    full = 1.0 - (1.0 - engine.solver.step_size * late) ** steps
    asked = asked_by_move(move, report.total_move, full * jnp.maximum(share, 2.0**-MAX_HALVINGS), share > 0, before)
    report = _with_progress(problem, report, before, moved, q, asked, share > 0, late)
    new = SiteStack(with_groups(sites, chosen, groups), prior, walk.local)
    return _Round(new, memory, _merged(last, report, chosen, heard))


def _with_progress(
    problem: ProductProblem,
    report: RoundReport,
    last: RoundReport,
    moved: Any,
    q: Any,
    asked: Asked,
    taken: Bool[Array, ""],
    late: Any,
) -> RoundReport:
    """A report with what is left to move: see :mod:`numpyro_pvi.schedules._convergence`.

    Args:
        problem: the factors.
        report: without it.
        last: the report of the round before.
        moved: change of q, natural parameters.
        q: after the round.
        asked: what the factors asked for.
        taken: whether a step was taken.
        late: weight of the round where steps shrink to average noise.

    Returns:
        The report.
    """
    trail, step = _trail(problem, q, moved), jnp.where(taken, jnp.max(report.step), 0.0)
    noisy = bool(problem.plan.noisy) or not isinstance(late, float)
    ahead = pace(last, trail, report.total_move, asked.together, step, noisy, late, rounding(moved, q))
    refused, why = refusals(last, taken, jnp.where(jnp.all(jnp.isfinite(asked.factors)), FELL, NOT_FINITE))
    factors = jnp.where(jnp.isnan(asked.factors), jnp.inf, asked.factors).astype(report.move.dtype)
    return report._replace(asked=factors, **ahead._asdict(), refused=refused, why=why, finite=jnp.array(True))


def _trail(problem: ProductProblem, q: Any, moved: Any) -> Float[Array, "16"]:
    """A sketch of a move: of every natural parameter, the root of what it adds to the move's length, with its sign."""
    families, parts = dict(problem.family.components), []
    for name, step in moved.parts.items():
        image = families[name].fisher_product(q.parts[name], step)
        for a, b in zip(jax.tree.leaves(step), jax.tree.leaves(image), strict=True):
            parts.append((jnp.sign(a) * jnp.sqrt(jnp.abs(a * b))).reshape(-1))
    return sketch(jnp.concatenate(parts))
