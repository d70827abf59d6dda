"""Groups that come, come back, and leave: which sites belong to rows at hand, and which stand alone."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Hashable
from typing import Any

import jax
import jax.core
import numpy as np

from ._state import Plan, PVIState
from ._warnings import warn
from .errors import ImproperError, PartitionError, PVIError, StateError
from .factors import (
    check_same_signature,
    nobody,
    pad_rows,
    signature_of,
    split_arguments,
)
from .handlers import PRIOR, known_labels, plain
from .runtime import by_chains, chains_wanted, site_with_rows, with_chains
from .schedules import BY_FACTOR
from .sites import MemberSites, SiteStack, add_slots, keep_slots, posterior, take, tie, tied_site

# ---------------------------------------------------------------------------------- what compiled programs see of a state


def reduced(state: PVIState, engine: Any) -> PVIState:
    """The state as compiled programs take it: no labels, and all absent groups as one factor.

    A program's key then depends on shapes alone, and adding a group of rows that there was a program for compiles nothing.
    ``engine``: the fit's choices: programs of a stochastic solver, of chains, or of a schedule that takes rows as they come,
    read the groups' sizes (and so do ``engine.reads_sizes``), and those of a schedule with settings by label read the labels.
    Returns a state to be handed back to :func:`restored`.
    """
    plan = state.plan
    by_label = engine.schedule.by_label or engine.solver.by_label or engine.runtime.by_label
    reads_sizes = engine.solver.stochastic or engine.schedule.streams or by_chains(engine.solver)
    # A visit of one group takes its rows' members, room for those of the largest group; q's shapes depend on the rows anyway.
    reads_sizes = reads_sizes or isinstance(state.sites.local, MemberSites)
    plan = plan.reduced(bool(reads_sizes or engine.reads_sizes), bool(by_label))
    sites = state.sites
    if sites.others is not None:
        sites = dataclasses.replace(sites, others=_total(sites.others))
    return dataclasses.replace(state, plan=plan, sites=sites)


def restored(done: PVIState, before: PVIState) -> PVIState:
    """What a compiled program made of a reduced state, with labels, absent groups and the places of the rows put back.

    ``before``: the state that was reduced.
    """
    sites = done.sites
    if before.sites.others is not None:
        sites = dataclasses.replace(sites, others=before.sites.others)
    return dataclasses.replace(done, plan=before.plan, sites=sites, packing=before.packing)


def begin_chains(solver: Any, state: PVIState) -> PVIState:
    """The state with room for chains from its next round on, where some group's weights have collapsed too often.

    ``state``: a state after rounds. Returns the state; as it is where none are wanted, and under a trace, which cannot look at
    values.
    """
    if state.plan.chained or isinstance(state.step, jax.core.Tracer):
        return state
    if not bool(chains_wanted(solver, state.solver_state)):
        return state
    dtype = jax.tree.leaves(state.sites.groups)[0].dtype
    plan = dataclasses.replace(state.plan, chained=True)
    return dataclasses.replace(
        state, plan=plan, solver_state=with_chains(solver, state.solver_state, plan.chain_dim, dtype)
    )


_total = jax.jit(tie)


def refuse_other_rows(partition: Any, state: PVIState | None) -> None:
    """Raise where a state is to go on under labels that are not its rows'.

    Raises StateError naming the first row, or the labels.
    """
    differs = other_rows(partition, state) if isinstance(state, PVIState) else ""
    if differs:
        raise StateError(
            f"init_state was made for other rows: {differs}. Make the Partition with the labels of the state's rows, in their "
            "order, and give the rows in that order; rows of other groups come with revisit or add_group."
        )


def other_rows(partition: Any, state: PVIState) -> str:
    """Why labels that a Partition has for as many rows as a state has cannot be those of the state's rows.

    A state goes by its own labels. Rows in another order, or under other labels, would be taken for its groups' without a word.
    Returns a sentence without its end; empty where they agree, and where they are about other rows: of another number, of groups
    none of which is present, or that came with labels of their own.
    """
    own, table = None if partition is None else partition.labelled(), state.plan.partition.table
    if own is None or state.plan.arrived or own.num_rows != table.num_rows or not set(own.labels) & set(table.labels):
        return ""
    if own.labels != table.labels:
        gone, new = ([x for x in a.labels if x not in b] for a, b in ((table, own), (own, table)))
        told = [f"the state has group(s) {known_labels(gone)}"] * bool(gone)
        told += [f"this PVI's Partition has {known_labels(new)}"] * bool(new)
        return " and ".join(told)
    rows = np.flatnonzero(own.index_of_row != table.index_of_row)
    if not rows.size:
        return ""
    here, there = (t.labels[t.index_of_row[rows[0]]] for t in (own, table))
    return (
        f"row {int(rows[0])} belongs to group {there!r} in the state and to {here!r} in this PVI's Partition ({rows.size} of "
        f"{own.num_rows} rows differ)"
    )


def check_rows(state: PVIState, args: tuple, kwargs: dict, names: tuple[str, ...]) -> None:
    """Refuse arguments that are not the rows of the groups that are present.

    Raises StateError naming the present groups, and the argument that does not fit.
    """
    plan = state.plan
    if not plan.partition.table.labels:
        raise StateError(
            "no group's rows are at hand: after forget_group the state holds sites only. Bring rows back with "
            "revisit(state, labels, *args), or add_group(state, label, *args)."
        )
    try:
        check_same_signature(plan.signature, signature_of(args, kwargs, names, plan.signature.by_value))
    except StateError as error:
        if not plan.absent:
            raise
        raise StateError(
            f"{error} The rows at hand are those of group(s) {known_labels(plan.partition.table.labels)}, which were added or "
            f"revisited last; {len(plan.absent)} other group(s) are held by their sites alone. To fit other rows, name their "
            "groups: add_group(state, label, *args) or revisit(state, labels, *args)."
        ) from error


def rows_of(plan: Plan, args: tuple, kwargs: dict) -> tuple[list, tuple]:
    """Arguments as compiled programs take them: filled up where the plan says so, arrays apart from static leaves."""
    axes = plan.partition.reading.axes
    return split_arguments(*pad_rows(axes, args, kwargs, plan.padded_rows))


def refuse_absent(state: PVIState, what: str) -> None:
    """Raise for what needs every group's rows.

    ``what``: what was asked for, and why it needs them. Raises StateError naming the groups whose rows are not at hand.
    """
    if state.plan.absent:
        raise StateError(
            f"{what}, but the rows of group(s) {known_labels(state.plan.absent)} are not at hand. Bring all of them back first: "
            "revisit(state, labels, *args) with one label per row."
        )


def refuse_tied(state: PVIState, call: str) -> None:
    """Raise for what needs a group's own site where all groups share one. Raises PVIError naming the solver to use."""
    if isinstance(state, PVIState) and state.plan.tied:
        raise PVIError(
            f"{call} is not possible with StochasticEP: its one site stands for the average group, and what a single group said "
            "cannot be told from it. Use solver=PowerEP(...), which keeps a site per group, or fit all rows afresh."
        )


# --------------------------------------------------------------------------------------------------- labels and their sites


def site_of(state: PVIState, label: Hashable) -> Any:
    """One group's site, present or absent. Raises PartitionError for an unknown label, naming near ones."""
    place = position(state.plan, label)
    slots = len(state.plan.absent)
    if state.plan.tied:
        return tied_site(state.sites.groups, len(state.plan.groups))
    if place < slots:
        site = take(state.sites.others, place)
        # Of the members of rows that are at hand it says nothing.
        return site.combine(state.plan.family.zeros()) if isinstance(state.sites.local, MemberSites) else site
    if isinstance(state.sites.local, MemberSites):
        plan: Any = state.plan
        return site_with_rows(plan, state.sites, place - slots)
    return take(state.sites.groups, place - slots)


def position(plan: Plan, label: Any) -> int:
    """Where a label stands among all groups'. Raises PartitionError for an unknown label, naming near ones."""
    groups = plan.groups
    try:
        return groups.index(plain(label))
    except ValueError:
        pass
    names = {str(known): known for known in groups}
    near = [repr(names[name]) for name in difflib.get_close_matches(str(label), names, 2)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise PartitionError(f"there is no group {label!r}; the groups are: {known_labels(groups) or 'none'}.{hint}")


def all_absent(state: PVIState) -> PVIState:
    """Take every group's rows away: sites stay, local latents and solver states go. Returns the state with no group present."""
    plan, sites = state.plan, state.sites
    others = add_slots(sites.others, len(plan.absent), sites.groups)
    return _settled(state, others, plan.groups)


def _settled(state: PVIState, others: Any, absent: tuple) -> PVIState:
    """A state of absent groups only."""
    arrival = nobody(state.plan.partition, state.packing)
    bare, prior = state.plan.without_members(state.prior)
    plan = dataclasses.replace(bare, partition=arrival.plan, absent=absent, padded_rows=0)
    none = jax.tree.map(lambda x: x[:0], (state.sites.groups, state.solver_state))
    first = int(state.plan.partition.has_prior_factor)
    report = state.report._replace(**{n: getattr(state.report, n)[:first] for n in BY_FACTOR})
    local = state.sites.local
    local = None if isinstance(local, MemberSites) else jax.tree.map(lambda x: x[:0], local)
    return dataclasses.replace(
        state,
        sites=SiteStack(none[0], state.plan.without_members(state.sites.prior)[1], local, others),
        prior=prior,
        solver_state=none[1],
        report=report,
        packing=arrival.packing,
        plan=plan,
    )


# --------------------------------------------------------------------------------------------------------- rows that leave


def forgotten(state: PVIState, label: Hashable, solver: Any) -> PVIState:
    """The state without one group.

    ``solver``: of the fit; says whether its sites depend on their own rows alone. Returns the state. Where the group was
    present, no group is afterwards. Raises PVIError where groups share a site; PartitionError for an unknown label, or PRIOR;
    ImproperError when q is not normalisable without the group.
    """
    refuse_tied(state, "forget_group")
    if label is PRIOR:
        raise PartitionError(
            "PRIOR is the prior factor, which cannot be forgotten: forget_group takes a group's label."
        )
    place = position(state.plan, label)
    if place >= len(state.plan.absent):
        state = all_absent(state)
    kept = np.delete(np.arange(len(state.plan.absent)), place)
    others = keep_slots(state.sites.others, kept)
    plan = dataclasses.replace(state.plan, absent=tuple(state.plan.absent[i] for i in kept))
    left = dataclasses.replace(state, plan=plan, sites=dataclasses.replace(state.sites, others=others))
    if not bool(plan.family.in_domain(posterior(left.prior, left.sites))):
        raise ImproperError(
            f"without group {label!r} q is not normalisable: what is left does not determine every latent (the other groups' sites "
            "were fitted beside it). Revisit other groups first, or use a proper prior."
        )
    reason = approximate_because(plan, solver)
    if reason and left.plan.groups:
        warn(
            f"forget_group({label!r}) took its site out, but {reason}, so what is left may be approximate until they are "
            "fitted again, and far from a fit without it: revisit(state, labels, *args) with the other groups' rows.",
        )
    elif reason and left.sites.prior is not None:
        warn(
            f"forget_group({label!r}) took the last group's site out. What is left beside priors that the guide's family holds is "
            "the prior factor's site, which was fitted where the data had q, so q may be far from the prior: to go on with other "
            "rows, begin anew with init(rng_key, *args) on them.",
        )
    return left


def approximate_because(plan: Plan, solver: Any) -> str | None:
    """Why taking a site out is not the same as never having seen the group; None where it is (law 10)."""
    near = f"{type(solver).__name__} nears the other groups' sites from a q that had it in"
    return plan.coupled or (None if solver.exact_sites else near)
