"""Rows that come to a state: checked, packed, made the present groups, and fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._driver import Progress
from ._group_lifecycle import all_absent, position, refuse_absent, refuse_tied, rows_of
from ._saving import prepare_guide
from ._state import Plan, PVIState
from ._user_inputs import check_run, check_state
from ._warnings import warn
from .errors import NonFiniteLossError, PartitionError, SkippedGroupError, StateError
from .factors import Arrival, check_data, count_rows, positional_names, signature_of
from .handlers import GroupTable, known_labels, labels_table, one_group_table, plain
from .sites import SiteStack, keep_slots, stack_sites


def arriving_table(state: PVIState, labels: Any, num_rows: int) -> GroupTable:
    """Groups of rows that come back.

    ``labels``: one label for all rows, or a list or array of one label per row. Raises PartitionError for an unknown label, or
    a number of labels that is not that of the rows.
    """
    if not (isinstance(labels, list) or (hasattr(labels, "__array__") and np.ndim(labels) > 0)):
        return one_group_table(state.plan.groups[position(state.plan, labels)], num_rows)
    table = labels_table(labels)
    for label in table.labels:
        position(state.plan, label)
    if table.num_rows != num_rows:
        raise PartitionError(
            f"{table.num_rows} labels were given for {num_rows} rows: give one label per row, or one label for all of them."
        )
    return table


def newcomers_table(state: PVIState, label: Hashable, num_rows: int) -> GroupTable:
    """The group of rows that come for the first time.

    Raises PartitionError for a label that is already there, or that cannot be one.
    """
    table = one_group_table(label, num_rows)
    if table.labels[0] in state.plan.groups:
        raise PartitionError(
            f"there is a group {label!r} already. To fit its rows again, revisit(state, {label!r}, *args); to replace them by "
            f"others, forget_group(state, {label!r}) first; rows of a new group need a label of their own."
        )
    return table


@dataclasses.dataclass(frozen=True)
class Newcomers:
    """Brings rows to states."""

    pvi: Any

    def add(self, state: PVIState, label: Hashable, args: tuple, kwargs: dict, num_steps: int, tol: Any) -> PVIState:
        """See :meth:`numpyro_pvi.PVI.add_group`."""
        refuse_tied(state, "add_group")
        rows = self.count(state, f"group {label!r}", args, kwargs)
        table = newcomers_table(state, label, sum(rows.values()))
        return self._fit(state, table, rows, args, kwargs, num_steps, tol)

    def join(
        self, fresh: PVIState, state: PVIState, label: Hashable, rows: tuple[list, tuple], num_steps: int, tol: Any
    ) -> PVIState:
        """Bring in a client that has its own rows, where all others are there as well: see :meth:`numpyro_pvi.PVI.add_group`.

        ``fresh``: a state of all clients that there are now, as ``init`` makes it; ``label``: of the one that has come;
        ``rows``: what stands for the rows of all, arrays and static leaves; ``tol``: posterior sds below which they stop.
        Raises PartitionError for a label that a group has already; StateError where the clients are not those of the state and
        the new one.
        """
        refuse_tied(state, "add_group")
        refuse_absent(state, "add_group goes on with all clients")
        check_run(num_steps, tol, least=0)
        before, here = state.groups, fresh.groups
        if plain(label) in before:
            raise PartitionError(f"there is a group {label!r} already: a client that comes needs a label of its own.")
        if set(here) != {*before, plain(label)}:
            raise StateError(
                f"add_group(state, {label!r}) with clients that have their own rows: the clients are {known_labels(here)}, and the "
                f"state has {known_labels(before)}. Make the PVI with a runtime of the state's clients and {label!r}, no others."
            )
        _refuse_other_client(fresh, state)
        joined = _with_client(fresh, state, curved=self.pvi.init_sites == "curvature")
        if num_steps == 0:
            return joined
        return self._driven(joined, *rows, num_steps, tol)

    def rejoin(
        self, fresh: PVIState, state: PVIState, labels: Any, rows: tuple[list, tuple], num_steps: int, tol: Any
    ) -> PVIState:
        """Go on with clients that have their own rows, after one of them was forgotten: see :meth:`numpyro_pvi.PVI.revisit`.

        ``fresh``: a state of all clients that there are now, as ``init`` makes it; ``labels``: theirs; ``rows``: what stands for
        the rows of all, arrays and static leaves; ``tol``: posterior sds below which they stop. Raises StateError where the
        clients, the labels and the state's groups are not the same, or clients have latents of their own.
        """
        refuse_tied(state, "revisit")
        check_run(num_steps, tol, least=0)
        several = isinstance(labels, list | tuple) or (hasattr(labels, "__array__") and np.ndim(labels) > 0)
        named = {plain(label) for label in (labels if several else [labels])}
        if not named == set(fresh.groups) == set(state.groups):
            raise StateError(
                f"revisit with clients that have their own rows is of all groups: the clients are {known_labels(fresh.groups)}, "
                f"the state has {known_labels(state.groups)}, and labels are {known_labels(tuple(sorted(named, key=str)))}. Make "
                "the PVI with a runtime of the state's clients, no others, and name them all; add_group is for one that comes."
            )
        if fresh.sites.local is not None:
            raise StateError(
                "revisit: what clients hold of latents of their own went with the state that had all of them: fit the clients that "
                "are left from the beginning, with init."
            )
        for compare in (_other_latents, _other_structure):
            if told := compare(fresh, state):
                raise StateError(told)
        every = state.sites.groups
        if state.plan.absent:
            away = stack_sites(state.sites.others, np.arange(len(state.plan.absent)))
            every = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), away, every)
        places = np.asarray([state.groups.index(label) for label in fresh.groups])
        sites = SiteStack(jax.tree.map(lambda x: x[places], every), state.sites.prior)
        kept = {n: getattr(state, n) for n in ("rng_key", "prior", "exact", "optim_state", "step")}
        state = dataclasses.replace(fresh, sites=sites, **kept)
        return state if num_steps == 0 else self._driven(state, *rows, num_steps, tol)

    def revisit(self, state: PVIState, labels: Any, args: tuple, kwargs: dict, num_steps: int, tol: Any) -> PVIState:
        """See :meth:`numpyro_pvi.PVI.revisit`."""
        refuse_tied(state, "revisit")
        rows = self.count(state, "the rows to revisit", args, kwargs)
        table = arriving_table(state, labels, sum(rows.values()))
        return self._fit(state, table, rows, args, kwargs, num_steps, tol)

    def count(self, state: PVIState, who: str, args: tuple, kwargs: dict) -> dict[str, int]:
        """Rows by partitioned axis, checked: see :func:`numpyro_pvi.factors.count_rows`."""
        check_state(state)
        model, plan = self.pvi.model, state.plan
        check_data(model, args, kwargs, positional_names(model))
        return count_rows(plan.partition, model, plan.signature, self._signature(plan, args, kwargs), args, kwargs, who)

    def _signature(self, plan: Plan, args: tuple, kwargs: dict) -> Any:
        return signature_of(args, kwargs, positional_names(self.pvi.model), plan.signature.by_value)

    def _fit(
        self, state: PVIState, table: GroupTable, rows: dict, args: tuple, kwargs: dict, num_steps: int, tol: Any
    ) -> PVIState:
        check_run(num_steps, tol, least=0)
        state, dynamic, static = self._bring(state, table, rows, args, kwargs)
        return state if num_steps == 0 else self._driven(state, dynamic, static, num_steps, tol)

    def _driven(self, state: PVIState, dynamic: list, static: tuple, num_steps: int, tol: Any) -> PVIState:
        """The state after rounds, every group of which has been absorbed in one."""
        try:
            run = self.pvi._drive(Progress(state), dynamic, static, int(num_steps), tol, None, False)
        except NonFiniteLossError as error:
            # A group that no round has absorbed is named as such.
            refuse_skipped(error.state, int(error.state.step) - int(state.step))
            raise
        refuse_skipped(run.state, len(run.losses))
        return run.state

    def _bring(
        self, state: PVIState, table: GroupTable, rows: dict[str, int], args: tuple, kwargs: dict
    ) -> tuple[PVIState, list, tuple]:
        """Make the groups of these rows the present ones; known ones keep their sites, others start at 1."""
        plan = state.plan
        if plan.partition.table.labels and bool(jnp.isinf(state.report.total_move)):
            warn(
                f"group(s) {known_labels(plan.partition.table.labels)} have not been updated since their rows came, so their sites "
                "are still where they started: run a round (update or run) before their rows are put away.",
            )
        pvi, mechanism = self.pvi, plan.partition.mechanism
        arrival = pvi._fit.arrival(pvi.solver, plan, table, rows)
        laid = pvi.runtime.lay_out(arrival.packing, pvi._engine.whole_groups, mechanism)
        arrival = dataclasses.replace(arrival, packing=laid)
        pvi.solver.check_groups(dict(zip(table.labels, table.sizes, strict=True)), mechanism)
        slots = [position(plan, label) if label in plan.groups else -1 for label in table.labels]
        signature = self._signature(plan, args, kwargs)
        state = _with_groups(all_absent(state), arrival, np.asarray(slots), signature)
        dynamic, static = rows_of(state.plan, args, kwargs)
        fields, comparison = pvi._fit.arrived(pvi, state, dynamic, static, jnp.asarray(np.asarray(slots) >= 0))
        if comparison is not None and (pvi.partition is None or pvi.partition.check):
            _check_structure(state.plan, jax.device_get(comparison))
        sites = dataclasses.replace(fields["sites"], others=state.sites.others)
        state = dataclasses.replace(state, **{**fields, "sites": sites})
        # A PVI of this process may have seen no rows before these.
        prepare_guide(pvi, state, args, kwargs)
        return state, dynamic, static


def _with_groups(state: PVIState, arrival: Arrival, slots: np.ndarray, signature: Any) -> PVIState:
    """Move the groups in these slots (-1 where a group has none) from the absent to the present."""
    known = slots[slots >= 0]
    kept = np.setdiff1d(np.arange(len(state.plan.absent)), known)
    others, empty = state.sites.others, state.sites.groups
    groups = jax.tree.map(lambda x: jnp.zeros((len(slots), *x.shape[1:]), x.dtype), empty)
    if len(known):
        found = stack_sites(others, np.maximum(slots, 0))
        groups = jax.tree.map(lambda x: jnp.where((slots >= 0).reshape(-1, *(1,) * (x.ndim - 1)), x, 0), found)
        others = keep_slots(others, kept)
    plan = dataclasses.replace(
        state.plan,
        partition=arrival.plan,
        signature=signature,
        absent=tuple(state.plan.absent[i] for i in kept),
        padded_rows=arrival.padded_rows,
        arrived=True,
    )
    sites = SiteStack(groups, state.sites.prior, None, others)
    return dataclasses.replace(state, sites=sites, packing=arrival.packing, plan=plan)


def _other_latents(fresh: PVIState, state: PVIState) -> str | None:
    # Of latents of rows' own there are as many as there are rows.
    was, now = (
        {n: "one a row" if n in x.plan.own_latents else shape for n, shape in x.plan.latent_shapes.items()}
        for x in (state, fresh)
    )
    if was == now:
        return None
    told = [", ".join(f"{name} {shape}" for name, shape in x.items()) for x in (was, now)]
    return f"the state has the latents {told[0]}, and the clients {told[1]}: they are of another model."


def _other_rows(fresh: PVIState, state: PVIState) -> str | None:
    was, now = (
        dict(zip(x.plan.partition.table.labels, x.plan.partition.table.sizes, strict=True)) for x in (state, fresh)
    )
    other = tuple(n for n in was if was[n] != now[n])
    if not other:
        return None
    return (
        f"client(s) {known_labels(other)} have other numbers of rows than when the state was made: give them those, or begin anew "
        "with init."
    )


def _other_structure(fresh: PVIState, state: PVIState) -> str | None:
    one, other = (jax.tree.structure((x.prior, x.sites.prior, x.sites.groups)) for x in (fresh, state))
    if one == other:
        return None
    return (
        "the clients' structure is agreed on anew, and is not what the state has, of which a part was given up in its "
        "rounds: fit all clients from the beginning, with init."
    )


def _other_holders(fresh: PVIState, state: PVIState) -> str | None:
    if type(fresh.sites.local) is type(state.sites.local):
        return None
    return (
        "add_group: what groups hold beside their sites is held elsewhere than with these clients: the state was made with another "
        "runtime. Fit all clients from the beginning, with init."
    )


# What a state that a client is to join is compared by: each says what is other, or nothing.
_COMPARED = (_other_latents, _other_rows, _other_structure, _other_holders)


def _refuse_other_client(fresh: PVIState, state: PVIState) -> None:
    """Raise where those that were there are not what they were, or what they are taken for is not what the state has."""
    for compare in _COMPARED:
        if told := compare(fresh, state):
            raise StateError(told)


def _with_client(fresh: PVIState, state: PVIState, curved: bool) -> PVIState:
    """A fresh state of more clients, which is left where another one was: their sites, memories, params and rounds."""
    places = {label: i for i, label in enumerate(state.groups)}
    slots = np.asarray([places.get(label, -1) for label in fresh.groups])

    def woven(new: Any, old: Any) -> Any:
        """By group, the old where there was one."""
        shapes = [[x.shape[1:] for x in jax.tree.leaves(tree)] for tree in (new, old)]
        if jax.tree.structure(new) != jax.tree.structure(old) or shapes[0] != shapes[1]:
            # What solvers remember has another shape once there are chains, which begin anew.
            return new

        def leaf(a: Any, b: Any) -> Any:
            known = (slots >= 0).reshape(-1, *(1,) * (a.ndim - 1))
            return jnp.where(known, jnp.asarray(b)[np.maximum(slots, 0)], a)

        return jax.tree.map(leaf, new, old)

    first = fresh.sites.groups if curved else jax.tree.map(jnp.zeros_like, fresh.sites.groups)
    sites = SiteStack(woven(first, state.sites.groups), state.sites.prior, woven(fresh.sites.local, state.sites.local))
    kept = {n: getattr(state, n) for n in ("rng_key", "prior", "exact", "optim_state", "prior_solver_state", "step")}
    memory = woven(fresh.solver_state, state.solver_state)
    return dataclasses.replace(fresh, sites=sites, solver_state=memory, **kept)


def _check_structure(plan: Plan, found: Any) -> None:
    """Refuse rows whose likelihood is not what was found at ``init``: the additive law, and the structure."""
    part, single = plan.partition, found.model.dtype == np.float32
    who = f"the rows of group(s) {known_labels(part.table.labels)}"
    usable = np.isfinite(found.model) & np.isfinite(found.size)
    apart = usable & ~(found.split <= (1e-5 if single else 1e-10) * found.size)
    if np.any(apart):
        raise PartitionError(
            f"{who} do not add up: a row's log-likelihood changes by {found.split[apart].max():.3g} nats when fewer rows stand "
            "beside it, so rows are coupled through the arguments (a mean over rows, say). Compute such statistics outside of "
            "the model and pass them as arguments."
        )
    # Both may be infinite: visits then skip the group, which says more.
    with np.errstate(invalid="ignore"):
        gap = np.abs(found.model - found.program)
    # Quadratics are told by third differences at rounding level; the same allowance as when the structure was found.
    other = usable & ~(gap <= (1e-3 if single else 1e-8) * found.size)
    if np.any(other):
        raise PartitionError(
            f"the likelihood of {who} is not {part.likelihood!r} in the latents as that of the first rows was: it differs by "
            f"{gap[other].max():.3g} nats at a draw from q. Call `init` on rows that show all of the model's terms, or pass "
            "NaturalGradient(expectation='monte_carlo')."
        )


def refuse_skipped(state: PVIState, rounds: int) -> None:
    """Raise when an arriving group could not be absorbed in any round.

    ``state``: the state after its first rounds. Raises SkippedGroupError naming the groups; its ``.state`` holds them at their
    starting sites.
    """
    part = state.plan.partition
    runs = np.asarray(state.report.skip_run)[int(part.has_prior_factor) :]
    stuck = [label for label, run in zip(part.table.labels, runs, strict=True) if run >= rounds]
    if rounds and stuck:
        raise SkippedGroupError(
            f"group(s) {known_labels(stuck)} could not be absorbed: their log density or its gradient in latent(s) "
            f"{', '.join(part.layout.names)} is not finite under q, or no step left q normalisable. Look for an observation "
            "outside the likelihood's support, or a link that overflows. The exception's .state holds them at their starting "
            "sites.",
            state,
        )
