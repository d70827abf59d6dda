"""Structure that was guessed, verified at draws from q while a fit runs, and given up where the model contradicts it."""

from __future__ import annotations

import dataclasses
import functools
import weakref
import zlib
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ._compiling import content, is_traced, on_device, owned_jit
from ._driver import Progress
from ._group_lifecycle import reduced
from ._initial import as_the_solver_takes, check_structure, param_values, taken
from ._numerics import nearly_same
from ._state import PVIState
from ._state_marginals import dense_form
from ._user_inputs import float_dtype, watched
from ._warnings import warn
from .errors import PVIError, StateError
from .factors import Planned, join_arguments, move_to_prior_factor, plan_factors
from .runtime import SLOPES_OF, RoundsDone
from .schedules import BY_FACTOR, mixing_as
from .sites import posterior
from .solvers import counts_releases

# Rounds after which `update` verifies again, at every doubling.
_FIRST_ROUNDS = 32
# Data that are remembered as verified with, and numbers of each array that are looked at one by one.
_REMEMBERED, _SAMPLED = 8, 1 << 14
# Bytes of an array up to which it is compared with the one before where it is another object.
_COMPARED = 1 << 22
# Leaves of arguments beyond which none are remembered: a list of numbers has one for each.
_MOST_LEAVES = 64
# What is told by its words.
_PLAIN = (bool, int, float, complex, str, bytes)


class Contradiction(NamedTuple):
    """A claim that the model does not bear out.

    ``gap``: by how much they differ there, nats; ``others``: how many factors differ beside it.
    """

    claim: str
    factor: int
    gap: float
    others: int


@functools.partial(owned_jit, static_argnames=("engine", "static"))
def verify_arrays(engine: Any, state: PVIState, dynamic: list, static: tuple):
    """The engine's verification on split arguments, for ``jit``."""
    args, kwargs = join_arguments(dynamic, static)
    return engine.verify(state, args, kwargs)


@functools.partial(owned_jit, static_argnames=("engine", "static"))
def restart_arrays(engine: Any, state: PVIState, dynamic: list, static: tuple):
    """The engine's new start on split arguments, for ``jit``."""
    args, kwargs = join_arguments(dynamic, static)
    return engine.begin_again(state, args, kwargs)


# ------------------------------------------------------------------------------------------------ the data that were seen


class Fingerprint:
    """What tells other data of the same shapes from those that a structure was found or verified with, at little cost.

    Arrays that are the very same objects are not looked at. Of others, sums of all numbers and up to 16,384 of them in full
    are compared: an edit of a few numbers in millions may pass, new data do not.
    """

    def __init__(self, arrays: list[Any]):
        self._objects = [weakref.ref(x) for x in arrays]
        self._digests = [_digest(x) for x in arrays]

    def fits(self, arrays: list[Any]) -> bool:
        """Whether these arrays are the same data."""
        if len(arrays) != len(self._objects):
            return False
        if all(ref() is x for ref, x in zip(self._objects, arrays, strict=True)):
            return True
        pairs = zip(self._objects, self._digests, arrays, strict=True)
        if not all(ref() is x or digest == _digest(x) for ref, digest, x in pairs):
            return False
        # The next call will bring these again, which nothing can change.
        self._objects = [weakref.ref(x) for x in arrays]
        return True


def _digest(x: Any) -> tuple:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    # On a CPU the array in place: nothing is compiled for a look at it.
    numbers = np.asarray(x).reshape(-1)
    sample = numbers[:: max(1, numbers.size // _SAMPLED)]
    total = complex(numbers.sum(dtype=np.result_type(numbers.dtype, np.float64))) if numbers.size else 0j
    # The sum by its digits: a NaN does not equal itself.
    return x.shape, str(x.dtype), zlib.crc32(content(sample)), repr(total)


class _Look(NamedTuple):
    """What :class:`LastLook` keeps."""

    state: weakref.ref
    # What the model was: another one where programs were dropped since.
    token: Any
    how: tuple
    rows: list[Any]
    evaluation: Any
    # Negative ELBOs of the last rounds in nats, and how many there were.
    losses: Any
    done: Any


class LastLook:
    """The evaluation that the last rounds ended with, with which the next rounds from their state begin.

    It holds for that very state, as long as the programs that made it do, and for the same data: the same arrays, or, of up to
    4 MB each, the same bytes (NumPy's arrays are copied at every call). It goes with the state.
    """

    def __init__(self) -> None:
        self._kept: _Look | None = None
        # Shapes, and numbers in place of an evaluation of these.
        self._blank: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: an evaluation is of states and arrays of this process."""
        return {"_kept": None, "_blank": None}

    def at(self, programs: Any, state: PVIState, dynamic: list, how: tuple, unseen: Any) -> tuple[Any, Any] | None:
        """What rounds are told of a state's q.

        ``programs``: that run now; ``how``: the engine, the plan, the static leaves, and which rules are compiled in;
        ``unseen``: shapes of what they can be told; None where of nothing. Returns the evaluation, or numbers in its place, and
        whether it is one; None where they are told nothing.
        """
        if unseen is None:
            return None
        if (known := self._known(programs, state, dynamic, how)) is not None:
            return known.evaluation, np.True_
        # All at once, and small ones once: an array after another takes a millisecond.
        leaves, structure = jax.tree.flatten(unseen)
        shapes = structure, tuple((x.shape, x.dtype) for x in leaves)
        if self._blank is None or self._blank[0] != shapes:
            blank = jax.device_put(([np.zeros(x.shape, x.dtype) for x in leaves], np.False_))
            small = sum(x.size * x.dtype.itemsize for x in leaves) <= _COMPARED
            # Within somebody's `jit` they are no numbers, even of arguments that are.
            self._blank = (shapes, blank) if small and not is_traced(blank) else None
        else:
            blank = self._blank[1]
        return structure.unflatten(blank[0]), blank[1]

    def loss(self, programs: Any, state: PVIState, dynamic: list, how: tuple) -> Any:
        """Negative ELBO of a state in nats, as the rounds that made it have left it; None where that is not known.

        ``programs``, ``state``, ``dynamic``, ``how``: as of :meth:`at`.
        """
        known = self._known(programs, state, dynamic, how)
        done = 0 if known is None else int(known.done)
        return None if known is None or not done else on_device(np.asarray(known.losses)[done - 1])

    def _known(self, programs: Any, state: PVIState, dynamic: list, how: tuple) -> _Look | None:
        kept, holds = self._kept, programs.has_made(state) and not programs.restless
        same = kept is not None and kept.state() is state and kept.token is programs.token and kept.how == how
        return kept if kept is not None and same and holds and _same_rows(kept.rows, dynamic) else None

    def keep(self, programs: Any, state: PVIState, dynamic: list, how: tuple, done: RoundsDone | None) -> None:
        """Remember what rounds ended with. ``done``: of rounds that left an evaluation; None forgets the last one."""
        self._kept = None
        if done is not None and done.evaluation is not None:
            rows = [x if x.nbytes <= _COMPARED else weakref.ref(x) for x in dynamic]
            own = weakref.ref(state, self._drop)
            self._kept = _Look(own, programs.token, how, rows, done.evaluation, done.losses, done.done)

    def forget(self) -> None:
        """Have the next rounds look for themselves."""
        self._kept = None

    def _drop(self, gone: weakref.ref) -> None:
        if self._kept is not None and self._kept.state is gone:
            self._kept = None


def _same_rows(kept: list[Any], now: list[Any]) -> bool:
    """Whether these are the same rows to the bit: one number changes an evaluation, and :class:`Fingerprint` may not see it."""

    def same(old: Any, new: Any) -> bool:
        return old() is new if isinstance(old, weakref.ref) else old is new or _same_numbers(old, new)

    return len(kept) == len(now) and all(same(old, new) for old, new in zip(kept, now, strict=True))


def _same_numbers(old: Any, new: Any) -> bool:
    """Whether two arrays hold the same to the bit; keys of draws do not count as numbers."""
    if (old.shape, old.dtype) != (new.shape, new.dtype) or jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        return False
    return content(old) == content(new)


class _Call(NamedTuple):
    """What :class:`LastCall` keeps."""

    programs: weakref.ref
    plan: Any
    dtype: Any
    structure: Any
    # Arrays of JAX, copies of NumPy's, and words for all else.
    leaves: list[Any]
    # The same as programs take them: arrays, and static leaves.
    rows: tuple[list, tuple]


class LastCall:
    """The arguments of the last call, checked and as programs take them, for a call with the same ones.

    A loop over ``update`` passes the same rows every time, and of what it costs a small model, to check and to convert them was the
    larger part. They are the same where they are the same arrays of JAX, or NumPy's with the same numbers to the bit, or plain
    values that are equal. Of anything else, and of more than some 4 MB, nothing is kept.
    """

    def __init__(self) -> None:
        self._kept: _Call | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: arrays are of this process."""
        return {"_kept": None}

    def again(self, programs: Any, plan: Any, args: tuple, kwargs: dict) -> tuple[list, tuple] | None:
        """What programs take of these arguments; None where those of the last call, or its state's plan or model, were others."""
        kept = self._kept
        if kept is None or kept.plan is not plan or kept.programs() is not programs or kept.dtype != float_dtype():
            return None
        leaves, structure = jax.tree.flatten((args, kwargs))
        if structure != kept.structure or not all(map(_same_leaf, kept.leaves, leaves)):
            return None
        return kept.rows

    def keep(self, programs: Any, plan: Any, args: tuple, kwargs: dict, rows: tuple[list, tuple]) -> None:
        """Remember a call's arguments, as they were given and as programs take them."""
        self._kept = None
        leaves, structure = jax.tree.flatten((args, kwargs))
        if len(leaves) > _MOST_LEAVES or not all(map(_can_be_kept, leaves)) or is_traced(rows):
            return
        if sum(x.nbytes for x in (*leaves, *rows[0]) if hasattr(x, "nbytes")) <= 2 * _COMPARED:
            own = [x if isinstance(x, jax.Array) else x.copy() if type(x) is np.ndarray else _words(x) for x in leaves]
            self._kept = _Call(weakref.ref(programs), plan, float_dtype(), structure, own, rows)


def _can_be_kept(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return not isinstance(leaf, jax.core.Tracer)
    if type(leaf) is np.ndarray:
        return leaf.dtype.kind in "biufc"
    return type(leaf) in _PLAIN


def _words(value: Any) -> tuple[type, str]:
    # A NaN does not equal itself, and 1 equals True.
    return type(value), repr(value)


def _same_leaf(kept: Any, leaf: Any) -> bool:
    if isinstance(kept, jax.Array):
        return kept is leaf
    if isinstance(kept, np.ndarray):
        return type(leaf) is np.ndarray and _same_numbers(kept, leaf)
    return type(leaf) in _PLAIN and kept == _words(leaf)


class _Known(NamedTuple):
    """One entry of :class:`Memory`."""

    part: Any
    model: weakref.ref
    data: Fingerprint
    # Natural parameters of q and values of params at which the plan's claims were last verified; None before.
    at: Any = None


class Memory:
    """What a PVI remembers between calls, beside its states.

    The data that their plans were last verified with (states hold nothing of the data), the labels that were seen last, and what
    a file says of the guide.

    ``followed``: what the model closes over; data were verified with the model as it was; ``look``: what the last rounds ended
    with; ``call``: the arguments of the last call; ``missing``: whether data had NaN that the model deals with; ``labels``: of the
    groups of the last state that was made, loaded or added to;
    ``supports``: of the latents as a loaded file has them, until the guide is set up.
    """

    def __init__(self, followed: Any) -> None:
        self._followed = followed
        self._known: list[_Known] = []
        self._own: set[Any] = set()
        self.look, self.call = LastLook(), LastCall()
        self.missing = False
        self.labels: tuple = ()
        self.supports: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle has of it: where it is read, everything is verified anew."""
        return {**vars(self), "_known": [], "_own": set()}

    def accept(self, state: PVIState) -> None:
        """Remember what a state of this PVI's own choices is made of."""
        self._own.add(_made_of(state))

    def accepts(self, state: PVIState) -> bool:
        """Whether a state is made of what one of those is."""
        return _made_of(state) in self._own

    def keep(self, state: PVIState, dynamic: list, at: Any = None) -> None:
        """Remember the data of a state, and where its claims were verified."""
        if is_traced(dynamic):
            return
        known, part = self._find(state, dynamic), state.plan.partition
        if known is not None:
            data, at = known.data, known.at if at is None else at
        else:
            data = Fingerprint(dynamic)
        others = [x for x in self._known if x.part != part and x.model() is not None]
        self._known = [*others, _Known(part, weakref.ref(self._followed.programs), data, at)][-_REMEMBERED:]

    def has(self, state: PVIState, dynamic: list) -> bool:
        """Whether the structure of this state was found or verified with these data."""
        return self._find(state, dynamic) is not None

    def has_verified(self, state: PVIState, dynamic: list, at: Any) -> bool:
        """Whether the claims of this state's plan were verified with these data where q is, to rounding."""
        known = self._find(state, dynamic)
        return known is not None and known.at is not None and nearly_same(known.at, at)

    def _find(self, state: PVIState, dynamic: list) -> _Known | None:
        # Plans that are equal claim the same: a second run makes its own.
        now, part = self._followed.programs, state.plan.partition
        found = (x for x in self._known if x.part == part and x.model() is now and x.data.fits(dynamic))
        return next(found, None)


def _place_of(state: PVIState) -> Any:
    """What verification at draws from q depends on beside the model and the data."""
    params = state.optim_state if state.plan.partition.params else None
    return jax.device_get((_posterior(state.prior, state.sites, level="cheap"), params))


_posterior = owned_jit(posterior, ())


# ----------------------------------------------------------------------------------------------------------- verification


def contradictions(pvi: Any, state: PVIState, dynamic: list, static: tuple, anew: bool = False) -> list[Contradiction]:
    """Claims of a state's plan that differ from the model at draws from its q.

    ``anew``: whether the data may be others than those that the state's prior was read with: its numbers are compared then,
    even where its form is proved. Returns one entry per claim that is contradicted, with the factor that differs most of what
    is allowed.
    """
    if anew:
        part = dataclasses.replace(state.plan.partition, proved=state.plan.partition.proved - {"prior"})
        state = dataclasses.replace(state, plan=dataclasses.replace(state.plan, partition=part))
    if not pvi._engine.claims(state.plan):
        return []
    small = reduced(state, pvi._engine)
    run = functools.partial(verify_arrays, pvi._engine, small, dynamic, static, level="cheap")
    checks = jax.device_get(watched(pvi.runtime, state.plan, run))
    found = []
    for claim, check in checks.items():
        with np.errstate(invalid="ignore"):
            excess = np.max(np.where(check.gap > check.allowed, check.gap / check.allowed, 0.0), axis=0)
        if np.any(excess > 0):
            worst = int(np.argmax(excess))
            found.append(Contradiction(claim, worst, float(np.max(check.gap[:, worst])), int(np.sum(excess > 0)) - 1))
    return found


def verified(pvi: Any, state: PVIState, dynamic: list, static: tuple) -> PVIState:
    """The state itself where its structure holds at draws from q; else one whose factors are taken by draws, with the same q.

    Where it was verified at this very q, with this model and these data, as at the end of a run that is repeated, it is not
    again. Raises PVIError where the solver cannot do without the structure.
    """
    claimed = bool(pvi._engine.claims(state.plan))
    place = _place_of(state) if claimed else None
    if claimed and pvi._memory.has_verified(state, dynamic, place):
        return state
    found = contradictions(pvi, state, dynamic, static, not pvi._memory.has(state, dynamic))
    if not found:
        pvi._memory.keep(state, dynamic, place)
        return state
    demoted = pvi._fit.demoted(pvi, state, found, dynamic, static)
    pvi._memory.keep(demoted, dynamic)
    return demoted


class Verifier:
    """Verifies a run between its compiled blocks: after 32 rounds, at every doubling of them, and before it ends.

    ``early``: rounds after which it does besides: see :attr:`numpyro_pvi._state.Plan.early_checks`.
    """

    def __init__(self, pvi: Any, dynamic: list, static: tuple, early: tuple[int, ...] = ()):
        self.pvi, self.arguments, self.early = pvi, (dynamic, static), early

    def room(self, done: int) -> int:
        """Rounds up to the next verification: it follows from their number alone, whoever cuts them into blocks."""
        early = [rounds for rounds in self.early if rounds > done]
        if early:
            return min(early) - done
        due = _FIRST_ROUNDS
        while due <= done:
            due *= 2
        return due - done

    def __call__(self, now: Progress, ending: bool) -> Progress:
        """The progress, with its state's structure given up where it was contradicted; its last round then counts as unsettled."""
        due = _is_due(now.done, self.early)
        if not (ending or due):
            return now
        state = verified(self.pvi, now.state, *self.arguments)
        if state is now.state:
            return now
        losses, reports = list(now.losses), [_as_factors(state, report) for report in now.reports]
        losses[-1] = np.append(losses[-1][:-1], float(self.pvi._loss_under(self.pvi._engine, state, *self.arguments)))
        moved = reports[-1].total_move.copy()
        moved[-1] = np.inf
        reports[-1] = reports[-1]._replace(total_move=moved)
        return dataclasses.replace(now, state=state, losses=tuple(losses), reports=tuple(reports))


def after_update(pvi: Any, state: PVIState, loss: Any, dynamic: list, static: tuple) -> tuple[PVIState, Any]:
    """What ``update`` returns: verified with data that are new to the state's structure, and at every doubling of 32 rounds."""
    known, rounds = pvi._memory.has(state, dynamic), int(state.step)
    if known and not _is_due(rounds, state.plan.early_checks):
        return state, loss
    found = verified(pvi, state, dynamic, static)
    if found is state:
        return state, loss
    news = found.plan.partition.remarks[len(state.plan.partition.remarks) :]
    warn(" ".join(news))
    return found, pvi._loss_under(pvi._engine, found, dynamic, static)


def _is_due(done: int, early: tuple[int, ...]) -> bool:
    """Whether claims are verified after so many rounds: 32 and every doubling, and early ones."""
    return done in early or (done >= _FIRST_ROUNDS and not done & (done - 1))


def _as_factors(state: PVIState, report: Any) -> Any:
    """Reports of earlier rounds with a place for a prior factor that there was none of."""
    missing = state.report.move.shape[0] - report.move.shape[-1]
    if not missing:
        return report
    wider = {n: np.insert(np.asarray(getattr(report, n)), [0] * missing, 0, axis=-1) for n in BY_FACTOR}
    return report._replace(**wider)


def restarted(pvi: Any, state: PVIState, dynamic: list, static: tuple) -> PVIState:
    """A state with a new plan, its solver and schedule at their beginnings."""
    given = pvi._engine, reduced(state, pvi._engine), dynamic, static
    fields = watched(pvi.runtime, state.plan, functools.partial(restart_arrays, *given, level="cheap"))
    return dataclasses.replace(state, **fields)


_MEMORIES = ("solver_state", "prior_solver_state", "schedule_state")


def taken_over(pvi: Any, state: Any, args: tuple, kwargs: dict) -> tuple[PVIState, list, tuple]:
    """As :func:`numpyro_pvi._initial.taken`, of a state of any PVI: memories of another solver or schedule begin anew.

    Returns ``(state, arrays, static leaves)``. Under ``jit``, and where the rows are with clients, memories are not looked at.
    Raises StateError for arguments that do not fit the state; for a state of another kind of guide, or that another solver's
    sites, rows or releases are part of.
    """
    if isinstance(state, PVIState):
        check_family(pvi, state)
    state, dynamic, static = taken(pvi, state, args, kwargs)
    if pvi._memory.accepts(state) or pvi.runtime.elsewhere is not None or is_traced((state, dynamic)):
        return state, dynamic, static
    _check_solver(pvi, state)
    _check_optim(pvi, state)
    wanted = pvi._fit.memories(pvi, state, dynamic, static)
    state = _mixed_anew(state, wanted["schedule_state"])
    other = [n for n in _MEMORIES if jax.tree.structure(getattr(state, n)) != jax.tree.structure(wanted[n])]
    if other:
        _check_memories(pvi, state, other)
        state = restarted(pvi, state, dynamic, static)
    pvi._memory.accept(state)
    return state, dynamic, static


def _mixed_anew(state: PVIState, wanted: Any) -> PVIState:
    """The state with an empty memory for extrapolation, or without one, where its schedule and that of the PVI differ in it.

    Whether rounds are extrapolated depends on damping and on the solver's steps, and the rest of the state does not.
    """
    return dataclasses.replace(state, schedule_state=mixing_as(wanted, state.schedule_state))


def _made_of(state: PVIState) -> Any:
    """Types of a state's memories, and what its factors are to a solver."""
    memories = jax.tree.structure([getattr(state, n) for n in (*_MEMORIES, "optim_state")])
    return memories, state.plan.tied, state.plan.factors


def check_family(pvi: Any, state: PVIState) -> None:
    """Raise ``StateError`` for a state of another kind of guide than the PVI's: its sites would be read as what they are not."""
    if type(state.plan) is not pvi._fit.plan_type:
        raise StateError(
            f"this state was not made with a guide like {type(pvi.guide).__name__}: one of the two is an AutoExponentialFamily, "
            "whose sites are of another kind. Begin anew with this PVI, without init_state, or make the PVI with the guide of the "
            "state."
        )
    pvi._fit.check_family(pvi.guide, state.plan)


def _check_solver(pvi: Any, state: PVIState) -> None:
    """Raise ``StateError`` for sites that the solver does not have, and for factors that it cannot treat."""
    if bool(state.plan.tied) != bool(pvi.solver.tied):
        shared, own = "one site that all groups share", "a site for every group"
        has, wants = (shared, own) if state.plan.tied else (own, shared)
        raise StateError(f"this state has {has}, and {pvi.solver!r} {wants}. {_ANEW}")
    try:
        pvi._fit.check_solver(pvi.solver, state.plan)
    except PVIError as error:
        raise StateError(f"this state cannot go on under the solver of this PVI: {error}") from error


def _check_optim(pvi: Any, state: PVIState) -> None:
    """Raise ``StateError`` where the optimiser of ``numpyro.param`` sites is another one."""
    if not state.plan.partition.params:
        return
    if pvi.optim is None:
        raise StateError(f"this state has numpyro.param sites, and this PVI no optimiser. {_ANEW}")

    def begin(kept: Any) -> Any:
        return pvi.optim.init(pvi.optim.get_params(kept))

    try:
        same = jax.tree.structure(jax.eval_shape(begin, state.optim_state)) == jax.tree.structure(state.optim_state)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        same = False
    if not same:
        raise StateError(f"this state was made with another optimiser of numpyro.param sites than this PVI's. {_ANEW}")


def _check_memories(pvi: Any, state: PVIState, other: list[str]) -> None:
    """Raise ``StateError`` where what is other than the PVI's own is more than a memory."""
    solver = other != ["schedule_state"]
    if pvi._fit.stores_memories:
        which = pvi.solver if solver else pvi.schedule
        raise StateError(
            f"this state was made with another {'solver' if solver else 'schedule'} than {which!r}. {_ANEW}"
        )
    if pvi.schedule.has_agents:
        raise StateError(f"this state has no q of every agent, which {pvi.schedule!r} goes on from. {_ANEW}")
    if solver and (state.plan.rows is not None or state.sites.local is not None):
        raise StateError(
            f"this state was made with another solver than {pvi.solver!r}, which holds the rows' own sites or latents in another "
            f"way. {_ANEW}"
        )
    if solver and counts_releases(state.solver_state):
        raise StateError(
            f"this state counts what DifferentialPrivacy has released of the rows, and {pvi.solver!r} would drop the count. {_ANEW}"
        )


_ANEW = "Begin anew, without init_state, or go on with what the state was made with."


def cannot_go_on(error: PVIError, remarks: tuple[str, ...]) -> PVIError:
    """The error for a solver that needs the structure that was contradicted."""
    return type(error)(f"{' '.join(remarks)} But {error}")


def remark(state: PVIState, found: Contradiction, claimed: str, instead: str, label: Any = None) -> str:
    """One sentence about a claim that was given up. ``label``: of the worst group; None for the prior."""
    whose = (
        "" if label is None else f"group {label!r}" + (f" (and {found.others} others)" if found.others else "") + ": "
    )
    return (
        f"{whose}{claimed}, but differs from the model by {found.gap:.2g} nats at draws from q: {instead} from round "
        f"{int(state.step) + 1} on."
    )


# --------------------------------------------------------------------------------------------------- structure given up
# What a Gaussian fit does when the model contradicts its structure: the factor is taken by draws, and q stays where it
# is.

_CLAIMED = {"quadratic": "its likelihood was taken as quadratic", "affine": "its likelihood was taken by quadrature"}
_DRAWS = "taken by draws"
_FACTORS = ("likelihood", "prior factor")
_VALUES = "it jumps, and is taken by values at draws"
_UNSEEN = (
    "follows slopes, which do not say so, to a q that is no optimum. NaturalGradient() takes it by values, and a smooth model, as "
    "with jax.nn.sigmoid in place of a comparison, has slopes that do; seen"
)
_UNSEEN_BESIDE = (
    "follows slopes, which do not say so, to a q that is no optimum. AutoExponentialFamily takes it by values, and a smooth model, "
    "as with jax.nn.sigmoid in place of a comparison, has slopes that do; seen"
)


def _sees_slopes_alone(pvi: Any, part: Any) -> bool:
    """Whether what a factor does is told by its slopes alone: solvers that take them at single points, rows with own latents."""
    return pvi.solver.stochastic or part.local is not None


def demoted(pvi: Any, state: PVIState, found: list[Contradiction], dynamic: list, static: tuple) -> PVIState:
    """The state with the contradicted structure given up.

    Returns the state with the same q. What of it was held exactly as the prior is in the PRIOR site where the prior is a factor
    now. Raises PVIError where the solver cannot do without the structure.
    """
    state = dense_form(state)
    claims = {one.claim: one for one in found}
    notes = tuple(_remark(pvi, state, one) for one in found)
    q = posterior(state.prior, state.sites)
    moments = state.plan.family.moments(q)
    sds = state.plan.family.sds(moments)
    planned = Planned(state.plan.partition, state.packing, moments.loc, sds, {})
    if "additivity" in claims:
        planned = _masked(pvi, state, planned, dynamic, static)
    plan = planned.plan
    jumping = {claim.removeprefix(SLOPES_OF) for claim in claims if claim.startswith(SLOPES_OF)}
    if jumping:
        plan = dataclasses.replace(plan, unstructured="slopes" if _sees_slopes_alone(pvi, plan) else "values")
    lost = {*claims} | {
        factor
        for factor, kind in zip(_FACTORS, (plan.likelihood, plan.prior_kind), strict=True)
        if factor in jumping and kind == "affine"
    }
    if "likelihood" in lost:
        plan = dataclasses.replace(plan, likelihood="draws", terms=())
    if "prior factor" in lost:
        plan = dataclasses.replace(plan, prior_kind="draws", prior_terms=())
    planned = dataclasses.replace(planned, plan=plan)
    if "prior" in claims:
        planned = move_to_prior_factor(planned)
        state = _without_exact_prior(state)
    planned = as_the_solver_takes(pvi.solver, planned, state.plan.family.full)
    part = dataclasses.replace(planned.plan, remarks=(*planned.plan.remarks, *notes))
    plan = dataclasses.replace(state.plan, partition=part)
    try:
        check_structure(pvi.solver, plan)
    except PVIError as error:
        raise cannot_go_on(error, notes) from error
    sites = state.sites
    if "likelihood" in lost and sites.local is not None:
        # Sites of single rows are of their predictors; a group's site is their sum.
        sites = dataclasses.replace(sites, local=None)
    state = dataclasses.replace(state, plan=plan, packing=planned.packing, sites=sites)
    return restarted(pvi, state, dynamic, static)


def _remark(pvi: Any, state: PVIState, found: Contradiction) -> str:
    part = state.plan.partition
    if found.claim.startswith(SLOPES_OF):
        likelihood = found.claim == SLOPES_OF + "likelihood"
        label, whose = (part.table.labels[found.factor], "its likelihood") if likelihood else (None, "the prior factor")
        instead = _VALUES
        if _sees_slopes_alone(pvi, part):
            who = type(pvi.solver).__name__ if part.local is None else f"{type(pvi.solver).__name__} beside own latents"
            instead = f"it jumps, and {who} {_UNSEEN if part.local is None else _UNSEEN_BESIDE}"
        return remark(state, found, f"{whose} was taken to change as its slopes say", instead, label)
    if found.claim == "likelihood":
        return remark(state, found, _CLAIMED[part.likelihood], _DRAWS, part.table.labels[found.factor])
    if found.claim == "additivity":
        claimed = "its rows were taken to be all that its likelihood depends on"
        instead = "all rows are evaluated for every group, the others masked,"
        return remark(state, found, claimed, instead, part.table.labels[found.factor])
    if found.claim == "prior":
        return remark(state, found, f"the prior of {', '.join(part.exact)} was taken as Gaussian", f"a factor {_DRAWS}")
    return remark(state, found, "the prior factor was taken by quadrature", _DRAWS)


def _without_exact_prior(state: PVIState) -> PVIState:
    """The same q with the prior's Gaussian in the PRIOR site, which stands in for it from now on."""
    own = state.prior if state.sites.prior is None else state.prior + state.sites.prior
    sites = dataclasses.replace(state.sites, prior=own)
    nothing = jax.tree.map(jnp.zeros_like, state.prior)
    return dataclasses.replace(state, prior=nothing, exact=jnp.zeros_like(state.exact), sites=sites)


def _masked(pvi: Any, state: PVIState, planned: Planned, dynamic: list, static: tuple) -> Planned:
    """The plan with every group evaluated on all rows, which needs no sum over groups of their own rows."""
    if state.plan.absent or state.plan.padded_rows:
        raise StateError(
            "numpyro.param values have moved to where the rows of one group depend on those of others, and some groups' rows are "
            "not at hand: fit all rows afresh with Partition(..., mode='mask')."
        )
    args, kwargs = join_arguments(dynamic, static)
    partition = pvi._partition_of(state, args, kwargs)._copy(mode="mask")
    key, params = jax.random.fold_in(state.rng_key, 0xAD), param_values(pvi.optim, pvi.guide, state)
    again = plan_factors(partition, args, kwargs, key=key, layout=planned.plan.layout, params=params)
    new = again.plan
    plan = dataclasses.replace(
        planned.plan,
        reading=new.reading,
        reason="rows of one group were found to depend on others at draws from q",
        sliced=new.sliced,
        chunk_rows=new.chunk_rows,
        num_chunks=new.num_chunks,
    )
    packing = pvi.runtime.lay_out(again.packing, pvi._engine.whole_groups, plan.mechanism)
    return dataclasses.replace(planned, plan=plan, packing=packing)
