"""What a user gives to PVI: checks, compiled entry points, and what every kind of fit looks at first."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import RenyiELBO

from ._compiling import Program, Programs, is_traced, level_of, owned_jit
from ._group_lifecycle import reduced, rows_of
from ._initial import first_that_fits, warn_of_choice
from ._numerics import Flat
from ._saving import harmless
from ._state import Plan, PVIState
from .errors import GuideError, PVIError, StateError, lacking
from .factors import (
    Enumeration,
    KeyWatch,
    Planned,
    check_data,
    check_observed_shapes,
    enumerated,
    explained,
    frames_named,
    is_latent,
    join_arguments,
    model_work,
    positional_names,
    refuse_randomness,
    refuse_reads_of_what_is_not_missing,
    refuse_unheld,
    refuse_unsupported,
    signature_of,
    summed_out,
    trace_arguments,
)
from .guides import setup_guide
from .handlers import BatchPlates, Partition, RowAxes, kept_batch
from .runtime import Engine, Runtime, RuntimeDefaults
from .schedules import Schedule, ScheduleDefaults
from .sites import Held, LocalSites, OwnConditionals
from .solvers import LocalSolver, SolverDefaults

# Sets of fresh draws over which a variational fit's evidence is averaged, and what is folded into a state's key for them.
EVIDENCE_SETS = 16
_EVIDENCE_DRAWS = 0xE71D


@functools.partial(owned_jit, static_argnames=("engine", "static", "length", "fine"))
def run_rounds(engine: Any, state: PVIState, dynamic: list, static: tuple, count, tol, seen, length: int, fine: bool):
    """Engine.rounds on split arguments, compiled; the state comes back without its packing."""

    def program(state, args, kwargs, count, tol, seen):
        seen = None if seen is None else (seen[0].tree, seen[1])
        done = engine.rounds(state, args, kwargs, count, tol, length, fine, seen)
        evaluation = None if done.evaluation is None else Flat.of(done.evaluation)
        return done._replace(state=dataclasses.replace(done.state, packing=None), evaluation=evaluation)

    return _over_rows(engine, program, state, dynamic, static, count, tol, seen)


def unseen(engine: Any, state: PVIState, dynamic: list, static: tuple, fine: bool) -> Any:
    """Shapes, laid flat, of what Engine.rounds can be told of a state's q, None where of nothing; traced, not compiled."""

    def program(state, args, kwargs):
        found = engine.unseen(state, args, kwargs, fine)
        return None if found is None else Flat.of(found)

    return jax.eval_shape(lambda state, rows: _over_rows(engine, program, state, rows, static), state, dynamic)


@functools.partial(owned_jit, static_argnames=("engine", "static", "fine"))
def evaluate_loss(engine: Any, state: PVIState, dynamic: list, static: tuple, fine: bool):
    """Engine.loss on split arguments, compiled."""

    def program(state, args, kwargs):
        return engine.loss(state, args, kwargs, fine)

    return _over_rows(engine, program, state, dynamic, static)


@functools.partial(owned_jit, static_argnames=("engine", "static", "fine"))
def evaluate_factors(engine: Any, state: PVIState, dynamic: list, static: tuple, fine: bool):
    """Engine.factor_values on split arguments, compiled."""

    def program(state, args, kwargs):
        return engine.factor_values(state, args, kwargs, fine)

    return _over_rows(engine, program, state, dynamic, static)


@functools.partial(owned_jit, static_argnames=("engine", "static", "fine"))
def evaluate_evidence(engine: Any, state: PVIState, dynamic: list, static: tuple, fine: bool):
    """Engine.evidence on split arguments, compiled."""

    def program(state, args, kwargs):
        return engine.evidence(state, args, kwargs, fine)

    return _over_rows(engine, program, state, dynamic, static)


def _over_rows(engine: Any, program: Callable, state: PVIState, dynamic: list, static: tuple, *others: Any) -> Any:
    """A program of a state and the model's arguments, where the engine's runtime has the rows."""

    def with_rows(rows, packing, state, *others):
        args, kwargs = join_arguments(rows, static)
        return program(dataclasses.replace(state, packing=packing), args, kwargs, *others)

    bare, axes = dataclasses.replace(state, packing=None), row_axes(state.plan, static)
    return engine.runtime.over_rows(with_rows, dynamic, axes, state.packing, bare, *others)


# What reads rows in this process, and what there is in its place where the clients alone have them.
_INSTEAD = {
    "khat": "khat of the whole q is of every client's log-likelihood at each of many draws, numbers from which its rows can be "
    "solved for: khat(state, by_group=True, rng_key=...) has each client judge its own site, and tell one number",
    "prequential": "prequential gives every row's own log predictive density, which is the client's to know",
}


def refuse_elsewhere(runtime: Runtime, verb: str) -> None:
    """Raise for what reads rows in this process where it has none. Raises PVIError naming the method."""
    if runtime.elsewhere is not None:
        raise PVIError(
            f"{verb} reads rows, which are with the clients alone: {_INSTEAD[verb]}. Where the rows are, call it on a PVI without "
            "this runtime: a state's q is the same there."
        )


def refuse_held(state: PVIState, verb: str) -> None:
    """Raise for what reads latents of groups' own in this process, where clients have them.

    Raises PVIError naming the method.
    """
    if isinstance(getattr(getattr(state, "sites", None), "local", None), Held):
        raise PVIError(
            f"{verb} reads latents inside the plate, which are with the clients and are told nobody: fit without this runtime "
            "where all rows are, or ask each client for its own, client.posterior() in its process."
        )


def watched(runtime: Runtime, plan: Plan, run: Callable[[], Any]) -> Any:
    """What programs give that pass over rows outside of rounds, wherever these are."""
    return run() if runtime.elsewhere is None else runtime.elsewhere.watched(plan, run)


def row_axes(plan: Plan, static: tuple) -> tuple[int | None, ...]:
    """Of every array of the model's arguments, the axis that runs over the rows, or None.

    ``static``: the static leaves, which stand between the arrays. Returns one entry per array.
    """
    _, kept = static
    axes = plan.partition.reading.axes or (None,) * len(kept)
    return tuple(axis for axis, leaf in zip(axes, kept, strict=True) if leaf is None)


def placed(engine: Any, state: PVIState, dynamic: list, static: tuple) -> tuple[PVIState, list]:
    """A state and the model's arrays as programs over rows take them: see :meth:`numpyro_pvi.runtime.Runtime.place`.

    Returns the state and the arrays. Raises StateError for a state of another runtime's, whose own latents are in other chunks.
    """
    runtime = engine.runtime
    rows, packing = runtime.place(dynamic, row_axes(state.plan, static), state.packing, engine.whole_groups)
    local = state.sites.local
    here = isinstance(local, LocalSites | OwnConditionals)
    elsewhere = here if engine.of_clients else isinstance(local, Held)
    if elsewhere or (local is not None and packing.chunk_group.shape != state.packing.chunk_group.shape):
        raise StateError(
            "the state was made by a PVI with another runtime, and what its groups hold of their own rows is laid out for that: "
            "make it anew with `init`, or go on with the runtime that it was made with."
        )
    bare = dataclasses.replace(state, packing=None)
    rest = runtime.publish(bare)
    return state if rest is bare and packing is state.packing else dataclasses.replace(rest, packing=packing), rows


# Evaluations of the model that the start of a fit makes, about.
_START_LOOKS = 32


def level_for(programs: Programs, engine: Any, plan: Plan, dynamic: list, static: tuple, often: bool = True) -> str:
    """How well programs over all rows are compiled: by what one evaluation of the model makes, and how many a round makes.

    ``programs``: of the PVI, where the count is kept; ``often``: whether it is a program of rounds; the start of a fit looks at
    the factors a few dozen times and is done. Returns a level of :mod:`numpyro_pvi._compiling`; the same whoever asks for
    rounds of this model over this many rows.
    """
    if is_traced(dynamic):
        return "full"
    part = plan.partition

    def count() -> int:
        once = model_work(part.model(engine.model), *join_arguments(dynamic, static))
        structured = part.likelihood in ("quadratic", "affine")
        # Cavities and targets of all groups, beside the factors.
        dim = part.layout.dim
        square = dim**2 if plan.family.full else dim
        return once * (1 if structured else 2 * dim + 1) + part.table.num_groups * square

    shapes = tuple((x.shape, x.dtype) for x in dynamic)
    key = part.likelihood, part.table.num_groups, plan.family, static, shapes
    work = programs.once(key, count)
    return level_of(work, engine.levels) if often else level_of(_START_LOOKS * work)


def evidence_of(engine: Any, state: PVIState, arguments: tuple, loss: Callable, with_error: bool) -> Any:
    """Log evidence in nats, with its standard error if asked for: of a solver that matches moments, or the ELBO.

    A finer quadrature rule is compiled in where the one at hand will not do. ``loss``: ``(engine, state) -> nats``, the
    negative ELBO on the draws that belong to a state; ``with_error``: whether the standard error is wanted. Returns nats, or a
    pair with the standard error.
    """
    if not engine.solver.matches_moments:
        value, error = _elbo(engine, state, loss, is_traced((state, arguments)))
        return (value, error) if with_error else value
    dynamic, static = rows_of(state.plan, *arguments)
    fine, state = state.plan.fine or is_traced((state, dynamic)), reduced(state, engine)
    state, dynamic = placed(engine, state, dynamic, static)

    def at(fine: bool) -> Any:
        run = partial(evaluate_evidence, engine, state, dynamic, static, fine=fine)
        return engine.runtime.fetch(watched(engine.runtime, state.plan, run))

    found = at(fine)
    if not fine and bool(found[2]):
        found = at(True)
    return found[:2] if with_error else found[0]


@functools.partial(owned_jit, static_argnames=("engine", "plan", "static", "mode"))
def start_arrays(
    engine: Engine, plan: Plan, packing, dynamic: list, static: tuple, optim_state, loc, sd, local, mode: str
):
    """Engine.start on split arguments, compiled."""
    args, kwargs = join_arguments(dynamic, static)
    return engine.start(plan, packing, args, kwargs, optim_state, loc, sd, local, mode)


@functools.partial(owned_jit, static_argnames=("engine", "static", "mode"))
def arrive_groups(engine: Engine, state: PVIState, dynamic: list, static: tuple, known, mode: str):
    """Engine.arrive on split arguments, compiled."""
    args, kwargs = join_arguments(dynamic, static)
    return engine.arrive(state, args, kwargs, known, mode)


@functools.partial(owned_jit, static_argnames=("engine", "plan", "static"))
def _prior_gap(engine: Any, plan: Plan, packing, dynamic: list, static: tuple, optim_state, at):
    """How far the prior is another on one chunk of rows than on all, and the size of its numbers."""
    args, kwargs = join_arguments(dynamic, static)
    return engine.prior_gap(plan, packing, args, kwargs, optim_state, at)


def refuse_prior_of_rows(engine: Any, plan: Plan, packing, dynamic: list, static: tuple, optim_state, at: Any) -> None:
    """Raise where rows are on several devices and the prior depends on them, so that no device could evaluate it.

    ``optim_state``: of the model's params, or None; ``at``: where the prior is looked at: Float[D] prior location, or natural
    parameters of a product of families. Raises PVIError saying what to write.
    """
    if engine.runtime.alone is engine.runtime or plan.rows is not None:
        return
    gap, size = _prior_gap(engine, plan, packing, dynamic, static, optim_state, at, level="cheap")
    if float(gap) > 1e-3 * float(size):
        raise PVIError(
            "the model's prior depends on the rows of its arguments (a scale that is X.std(), say), and no device of Sharded() has "
            "all of them: compute that number beforehand and pass it as an argument of its own; or write runtime=Vmap()."
        )


_EXAMPLES = {"solver": "NaturalGradient()", "schedule": "Synchronous()", "runtime": "Vmap()"}


def check_choices(model: Any, num_groups: Any, init_sites: str, solver: Any, schedule: Any, runtime: Any) -> None:
    """Refuse choices that are none, or that do not fit together. Raises PVIError naming the argument and what to write."""
    if init_sites not in ("auto", "prior", "curvature"):
        raise PVIError(f"init_sites={init_sites!r}: expected 'auto', 'prior' or 'curvature'.")
    if num_groups is not None and (
        isinstance(num_groups, bool) or not isinstance(num_groups, int | np.integer) or num_groups < 1
    ):
        raise PVIError(
            f"num_groups={num_groups!r}: expected a positive int, the number of random blocks of rows, or None for the default."
        )
    if isinstance(model, Partition) and num_groups is not None:
        raise PVIError(
            "num_groups is given beside a Partition; write the number there: Partition(model, plate, num_groups)."
        )
    if num_groups is not None and "num_groups" in positional_names(model):
        raise PVIError(
            f"num_groups={num_groups} is how many groups PVI makes, and the model has a parameter of that name: give its own to "
            "run or bind it (functools.partial), and write the groups as Partition(model, plate, number)."
        )
    if isinstance(model, Partition) and model.group is not None:
        raise PVIError("the Partition is restricted to one group; pass it without `group`.")
    kinds = (
        (solver, LocalSolver, "solver", SolverDefaults, "numpyro_pvi.solvers"),
        (schedule, Schedule, "schedule", ScheduleDefaults, "numpyro_pvi.schedules"),
        (runtime, Runtime, "runtime", RuntimeDefaults, "numpyro_pvi.runtime"),
    )
    for value, kind, word, base, room in kinds:
        if isinstance(value, type) or not isinstance(value, kind):
            raise PVIError(
                f"{word}={value!r} is not a {word}; pass an instance, such as {_EXAMPLES[word]}.{lacking(value, kind, base, room)}"
            )
    if solver.tied and not schedule.carries_tied:
        raise PVIError(
            f"{type(solver).__name__} has one site for all groups, and {type(schedule).__name__} keeps one per group: "
            "use schedule=Synchronous() or Sequential(), or solver=PowerEP(...), which keeps a site per group."
        )


# What refuses to look at rows of a private fit, and why.
_LOOKS = {
    "evaluate": "the ELBO is one more look at the rows, which no noise covers",
    "log_evidence": "the evidence is one more look at the rows, which no noise covers",
    "khat": "importance weights are one more look at the rows, which no noise covers",
    "prequential": "scores of rows are looks at them, which no noise covers",
    "to_arviz": "the log-likelihood of every row, and the observed data themselves, would be in it",
    "add_group": "visits of rows that come are counted from nothing, whatever was released of them before",
    "revisit": "visits of rows that come back are counted from nothing, whatever was released of them before",
    "forget_group": "the count of what was released of the group would go with it, and what was released cannot be taken back",
}


def refuse_look(solver: Any, call: str) -> None:
    """Refuse what would look at the rows of a private fit, or lose count. Raises PVIError saying why, and what to write."""
    if solver.private:
        raise PVIError(
            f"{call} is refused under {type(solver).__name__}: {_LOOKS[call]}. On rows that need no protection "
            "(held-out or public ones) score draws of Predictive(guide, params=pvi.get_params(state), ...)."
        )


def private_start(init_sites: str, schedule: Any, runtime: Any, optim: Any) -> str:
    """Where sites start under a solver that is private: at 1; and refusals of what would look at rows beside its visits.

    Returns "prior". Raises PVIError naming the argument and what to write.
    """
    if init_sites == "curvature":
        raise PVIError(
            "init_sites='curvature' reads curvatures of all rows before the first visit, which DifferentialPrivacy "
            "does not count: leave init_sites out, and sites start at 1; init_params may say where q starts."
        )
    if optim is not None:
        raise PVIError(
            "optim fits numpyro.param sites by gradients of all rows in every round, which DifferentialPrivacy "
            "neither clips nor counts: give them a prior with numpyro.sample, and they are part of the sites; or "
            "leave optim out."
        )
    if schedule.streams:
        raise PVIError(
            f"{schedule!r} takes rows as they come and updates agents by them itself, beside the solver's visits that "
            "DifferentialPrivacy clips, noises and counts: write Decentralized(..., mixing='tracking'), or another "
            "schedule."
        )
    if schedule.at_their_pace:
        raise PVIError(
            f"{schedule!r} has clients send what they see at a q beside their sites, and leaves visits under way at the end, which "
            "DifferentialPrivacy neither noises nor counts: write Asynchronous() with simulated delays, or another schedule."
        )
    if schedule.discards and runtime.traffic is not None:
        raise PVIError(
            f"{schedule!r} simulates groups that are away or messages that come twice by visits whose answers it "
            "throws away, with their counts of releases; clients would have sent these answers all the same. Write "
            "the schedule without (rates, duplicate_rate), or leave runtime out."
        )
    return "prior"


def check_state(state: Any) -> None:
    """Refuse what is no state, such as the result it came in."""
    if not isinstance(state, PVIState):
        raise StateError(f"expected a PVIState (from pvi.init or result.state), got {type(state).__name__}.")


def check_run(num_steps: Any, tol: Any, loss_every: Any = 1, least: int = 1) -> None:
    """Refuse numbers of rounds and tolerances that mean nothing.

    ``tol``: posterior sds, or None. Raises PVIError naming the argument.
    """
    if not isinstance(num_steps, (int, np.integer)) or num_steps < least:
        kind = "a positive int" if least else "an int of at least 0"
        missing = (
            " Write run(rng_key, 50, *args): it comes before the model's arguments." if _is_array(num_steps) else ""
        )
        raise PVIError(f"num_steps={shown(num_steps)}: expected {kind}, the number of rounds.{missing}")
    if tol is not None and (_is_array(tol) or not tol > 0):
        raise PVIError(f"tol={shown(tol)}: expected a positive number of posterior sds, or None.")
    if not isinstance(loss_every, (int, np.integer)) or loss_every < 1:
        raise PVIError(f"loss_every={shown(loss_every)}: expected a positive int.")


def shown(value: Any) -> str:
    """A value for a message; of an array its shape, since no message holds the data."""
    return f"<an array of shape {tuple(value.shape)}>" if _is_array(value) else repr(value)


def _is_array(value: Any) -> bool:
    return bool(getattr(value, "shape", None))


def refuse_two_starts(init_state: Any, init_params: Any) -> None:
    """Raise when ``run`` is told to continue from a state and to start from params: SVI drops the params silently."""
    if init_state is not None and init_params is not None:
        raise PVIError(
            "run(init_state=..., init_params=...): a state says where q is already, so init_params would be dropped. "
            "Leave out one: init_params starts afresh from guide params, init_state continues."
        )


def _elbo(engine: Any, state: PVIState, loss: Callable, traced: bool) -> tuple[Any, Any]:
    """The ELBO and its standard error in nats, over fresh sets of draws where expectations are by draws."""
    engine, rule = engine.for_evidence, state.rule
    # Sigma points steer rounds where draws hardly tell them from q's mean; what they leave out has no error of its own. Product
    # rules are good to more than that.
    points = rule.points._replace(sampled=rule.points.sampled | ~rule.points.finer)
    state = dataclasses.replace(state, rule=rule._replace(points=points))
    values = [-loss(engine, state)]
    if not traced:
        keys = jax.random.split(jax.random.fold_in(state.rng_key, _EVIDENCE_DRAWS), EVIDENCE_SETS)
        for key in keys:
            values.append(-loss(engine, dataclasses.replace(state, rng_key=key)))
            if values[-1] == values[0]:
                # Nothing is by draws.
                break
        else:
            found = jnp.stack(values[1:])
            return jnp.mean(found), jnp.std(found, ddof=1) / np.sqrt(EVIDENCE_SETS)
    return values[0], jnp.zeros((), float_dtype())


def float_dtype():
    """The floating dtype that is switched on."""
    # `jnp.result_type` says the same at thirty times the cost, at every update.
    return jax.dtypes.canonicalize_dtype(np.float64)


def check_loss(loss: Any) -> None:
    """Refuse objectives that PVI cannot take, naming what to pass instead."""
    if isinstance(loss, RenyiELBO):
        raise PVIError("RenyiELBO is not a PVI objective; pass Trace_ELBO().")
    if getattr(loss, "sum_sites", True) is False:
        raise PVIError(f"{type(loss).__name__}(sum_sites=False) returns a dict of terms; pass it with sum_sites=True.")
    if getattr(loss, "multi_sample_guide", False):
        raise PVIError(f"{type(loss).__name__}(multi_sample_guide=True) is not supported: q is one Gaussian.")
    if not hasattr(loss, "loss"):
        raise PVIError(
            f"loss={loss!r} is not a NumPyro ELBO; pass Trace_ELBO(). Solvers, schedules and runtimes go by name: solver=..., "
            "schedule=..., runtime=..."
        )


def check_keywords(model: Callable | None, static_kwargs: dict, init: Callable, run: Callable) -> None:
    """Refuse keywords that nothing would receive, and model parameters that ``run`` would intercept.

    Raises PVIError naming the keyword, and the nearest known one.
    """
    if model is None or not callable(model):
        raise PVIError(
            f"the model is {model!r}, which cannot be called: pass a NumPyro model or Partition(model, plate, labels)."
        )
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):
        return
    own = set(inspect.signature(run).parameters) - {"self", "args", "kwargs"}
    clash = [name for name in parameters if name in own]
    if clash:
        raise PVIError(
            f"the model has a parameter {clash[0]!r}, which is also a keyword of PVI.run and would never reach "
            "the model: rename it."
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    options = [n for n in inspect.signature(init).parameters if n not in ("self", "static_kwargs")]
    for name in static_kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, options + known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PVIError(
                f"unknown keyword {name!r}: it is neither an option of PVI ({', '.join(options)}) nor a parameter of the model "
                f"({', '.join(known) or 'none'}).{hint}"
            )


# ---------------------------------------------------------------------------------------- what every fit looks at first
# What every kind of fit looks at first: the arguments, an abstract trace of the model, its partition and its latents.


@dataclasses.dataclass(frozen=True)
class Opening:
    """A call of ``init`` before anything is planned.

    ``args``: the model's positional arguments, as arrays; ``kwargs``: its keyword arguments, with the static ones;
    ``guide_key``: random key of the guide's initial values; ``plan_key``: random key of the points at which the plan is
    checked; ``untouched``: abstract trace of the model; ``trace``: the same with discrete local latents enumerated;
    ``partition``: the user's, or the default one; ``rows``: which axis of which sample site runs over the partitioned rows;
    ``enumeration``: how discrete local latents are summed out, or None; ``names``: of the model's positional parameters, for
    messages; ``held``: discrete latents that q holds, having families; ``partitions``: the partition, and those to take if
    planning refuses it; ``by_value``: places of the arguments that the model reads values of; ``elsewhere``: whether the rows
    are, so that arguments hold nothing.
    """

    args: tuple
    kwargs: dict
    key: Any
    guide_key: Any
    plan_key: Any
    untouched: dict
    trace: dict
    partition: Partition
    rows: RowAxes
    enumeration: Enumeration | None
    names: tuple[str, ...]
    held: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] = ()
    by_value: tuple[int, ...] = ()
    elsewhere: bool = False

    @property
    def signature(self) -> Any:
        """Structure, shapes and dtypes of the arguments, which later calls must have too."""
        return signature_of(self.args, self.kwargs, self.names, self.by_value)

    def set_up(self, guide: Any) -> None:
        """Run the guide's own set-up eagerly, which fixes its layout."""
        args, kwargs = self.args, self.kwargs
        if self.elsewhere:
            args, kwargs = harmless(args, kwargs)
        with explained(guide, self.guide_key, args, kwargs):
            setup_guide(guide, self.guide_key, args, kwargs, self.hides)

    @property
    def hides(self) -> Callable[[Callable], Callable] | None:
        """What hides from a guide the latents that q does not hold, and rows that are not here; None where there is neither."""
        if self.elsewhere:
            return self.partition.without_rows
        return self.enumeration and partial(summed_out, enumeration=self.enumeration)

    def plan(self, pvi: Any, attempt: Callable[[Opening], Planned]) -> tuple[Opening, Planned]:
        """Plan the factors; where that refuses a partition which is not the user's own, the next one is taken.

        Returns the call by the partition that was taken, and its plan. Raises PartitionError when the partition does not fit.
        """

        def at(partition: Partition) -> tuple[Opening, Planned]:
            opening = self if partition is self.partition else _split_by(partition, self, pvi.model)
            return opening, attempt(opening)

        (opening, planned), left = first_that_fits(self.partitions, at)
        if pvi.partition is None:
            warn_of_choice(left[0], pvi.num_groups)
        return opening, planned


@Program
def _three_keys(key: Any) -> list:
    return list(jax.random.split(key, 3))


def open_call(pvi: Any, rng_key: Any, args: tuple, kwargs: dict, families: Collection[str] = ()) -> Opening:
    """Look at a call of ``init``.

    ``families``: latents that the guide was given families for; discrete ones among them are not summed out. Raises PVIError
    inside ``jit``, or for a model that no fit can take; DataError for NaN or infinity in the arguments; PartitionError when
    there is nothing to split.
    """
    if is_traced((rng_key, args, kwargs)):
        raise PVIError(
            "jit(pvi.init) is not possible, nor under vmap: planning looks at values. Call pvi.init eagerly, once a key; jit "
            "pvi.update, or vmap it over states that are stacked leaf by leaf."
        )
    names = positional_names(pvi.model)
    given = args, kwargs
    args, kwargs = pvi._arguments(*given)
    pvi._followed.renew_guide(pvi.guide)
    key, guide_key, plan_key = _three_keys(rng_key)
    with frames_named(*given, names):
        trace, by_value = trace_arguments(watch := KeyWatch(pvi.model), plan_key, args, kwargs)
    elsewhere = pvi.runtime.elsewhere is not None
    if by_value and elsewhere:
        raise PVIError(
            "the model reads values of its arguments in Python (to size a plate, say), and the rows are with clients: size it by "
            "an argument's shape, or pass the number as an argument of its own."
        )
    if by_value:
        args, kwargs = pvi._arguments(*given, by_value=by_value)
    looked_at = pvi.model if kept_batch(trace) is None else BatchPlates(pvi.model)
    if not elsewhere:
        pvi._memory.missing = check_data(looked_at, args, kwargs, names)
        refuse_unheld(trace, lambda: handlers.trace(handlers.seed(looked_at, plan_key)).get_trace(*args, **kwargs))
        refuse_reads_of_what_is_not_missing(trace, looked_at, plan_key, args, kwargs)
    refuse_unsupported(trace)
    check_observed_shapes(trace)
    if watch.asked:
        refuse_randomness(looked_at, plan_key, args, kwargs)
    partitions = pvi._partitions(trace)
    held = values_held(trace, families)
    call = Opening(args, kwargs, key, guide_key, plan_key, trace, trace, partitions[0], RowAxes(), None, names, held)
    opening, left = first_that_fits(partitions, lambda partition: _split_by(partition, call, pvi.model))
    return dataclasses.replace(opening, partitions=left, by_value=by_value, elsewhere=elsewhere)


def _split_by(partition: Partition, opening: Opening, model: Callable) -> Opening:
    """The call as one partition sees it."""
    trace = opening.untouched
    rows, enumeration = partition.row_axes(trace), None
    if not rows.whole:
        check_observed_shapes(trace, rows)
    if not opening.held:
        _, trace, enumeration = enumerated(model, trace, rows, opening.plan_key, opening.args, opening.kwargs)
    return dataclasses.replace(opening, trace=trace, partition=partition, rows=rows, enumeration=enumeration)


def values_held(trace: dict, families: Collection[str]) -> tuple[str, ...]:
    """The discrete latents that have a family, so that q holds them and nothing is enumerated.

    ``families``: latents that the guide was given families for. Raises GuideError where others are discrete and have none.
    """
    discrete = [n for n, s in trace.items() if is_latent(s) and s["fn"].support.is_discrete]
    held = tuple(n for n in discrete if n in families)
    rest = [n for n in discrete if n not in held]
    if held and rest:
        raise GuideError(
            f"families names the discrete latent(s) {', '.join(map(repr, held))}, and {', '.join(map(repr, rest))} "
            f"would be summed out: give all of them a family, such as families={{{rest[0]!r}: CategoricalFamily(n)}}, or none."
        )
    return held
