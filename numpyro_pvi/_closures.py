"""What a model closes over, followed at every call; and the turns that calls take.

Compiled programs have everything that a model closes over as constants. A PVI therefore looks at it whenever one of its methods is
called, and drops its programs where something has changed. The first look, at every call, is a *snapshot* of the Python objects
that the model's code can reach (:mod:`numpyro_pvi._snapshot`). Where that has met something it cannot look into (files, iterators,
extension types), or what the model itself changes, the second, at calls that may cost a trace, compares the model as traced
(:mod:`numpyro_pvi._fingerprint`).
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core

from ._compiling import Programs, at_work, is_traced
from ._fingerprint import SiteDigest, model_digest
from ._snapshot import Snapshot
from .errors import PVIError
from .factors import split_arguments

# NumPyro's stack of handlers is one for all threads, and so is whatever a model's code changes while it is traced.
_TURN = threading.RLock()
# What takes objects apart as pickle does, functions of any kind included.
_PICKLE_ALL = frozenset(("copy", "cloudpickle", "_dill", "dill"))
_NOT_ASKING = frozenset(("numpyro_pvi", "jaxtyping", "beartype"))
_MARK = "_numpyro_pvi_followed"


class ModelPrograms(Programs):
    """Programs of a model as it was at a snapshot, and what traces of it gave then.

    Args:
        snapshot: of the model and of what a fit does with it.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot
        # By shapes and static values of the arguments.
        self.traced: dict[Any, dict[str, SiteDigest]] = {}
        # Whether the model's own code changes what it closes over, so that snapshots tell nothing.
        self.restless = False
        self._states: dict[int, weakref.ref] = {}

    def note(self, state: Any) -> None:
        """Remember a state that this model has made."""
        leaf = _leaf(state)
        if leaf is not None and id(leaf) not in self._states:
            self._states[id(leaf)] = weakref.ref(leaf, functools.partial(_forget, self._states, id(leaf)))

    def has_made(self, state: Any) -> bool:
        """Whether a state is one of those."""
        leaf = _leaf(state)
        known = self._states.get(id(leaf))
        return leaf is None or (known is not None and known() is leaf)

    def clear(self) -> None:
        """Drop all programs and traces, and forget what states were made."""
        super().clear()
        self.traced.clear()
        self._states.clear()


def _leaf(state: Any) -> Any:
    """An array of a state that stands for its prior, or None while it has no value."""
    leaf = next(iter(jax.tree.leaves(state.prior)), None)
    return leaf if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) else None


def _forget(states: dict, place: int, gone: Any) -> None:
    if states.get(place) is gone:
        del states[place]


# Programs of the PVIs that there are. Two of one model share them while neither has anything else in view.
_ALIVE: weakref.WeakSet[ModelPrograms] = weakref.WeakSet()


def _programs_at(snapshot: Snapshot) -> ModelPrograms:
    with _TURN:
        for programs in list(_ALIVE):
            if programs.snapshot == snapshot:
                return programs
        made = ModelPrograms(snapshot)
        _ALIVE.add(made)
        return made


class Followed:
    """What one PVI closes over, and the programs that hold for it.

    Args:
        roots: the model, and whatever else of the PVI may call a user's function.
    """

    def __init__(self, roots: tuple[Any, ...]) -> None:
        # A solver of plain numbers is not looked at again: one look costs a tenth of a small model's round.
        self.roots = (roots[0], *(x for x in roots[1:] if not Snapshot((x,)).constant))
        self.programs: Any = None
        self._inside = self._to_trace = False
        # Containers that the model's code writes into while it is traced, such as a list of calls.
        self._unread: dict[int, Any] = {}
        self.follow()

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle has of it: programs are made anew."""
        return {"roots": self.roots, "programs": None, "_inside": False, "_to_trace": False, "_unread": {}}

    @contextlib.contextmanager
    def turn(self, trace: bool) -> Iterator[None]:
        """One call of the PVI: what it closes over is looked at first, and does not change in the eyes of calls within.

        Args:
            trace: whether the call may cost a trace of the model.
        """
        if self._inside:
            with at_work(self.programs):
                yield
            return
        self.follow()
        self._inside, self._to_trace = True, trace
        try:
            with at_work(self.programs):
                yield
        finally:
            self._inside = self._to_trace = False

    def follow(self) -> None:
        """Take a snapshot, and other programs where it is another."""
        if self.programs is not None and self.programs.restless:
            return
        snapshot = self._look()
        if self.programs is None or snapshot != self.programs.snapshot:
            self.programs = _programs_at(snapshot)

    def _look(self) -> Snapshot:
        known = frozenset() if self.programs is None else frozenset(self.programs.snapshot.names)
        return Snapshot(self.roots, known, self._unread)

    def compare(self, model: Callable, args: tuple, kwargs: dict) -> None:
        """Trace the model, where snapshots may not tell all of it, and drop programs if it is not what it was.

        Args:
            model: the NumPyro model.
            args: positional arguments as arrays.
            kwargs: keyword arguments as arrays.
        """
        if not self._to_trace or is_traced((args, kwargs)):
            return
        arrays, static = split_arguments(args, kwargs)
        key, now = (static, tuple((x.shape, str(x.dtype)) for x in arrays)), self.programs
        if now.traced and now.snapshot.exact and not now.restless:
            self._to_trace = False
            return
        try:
            found = model_digest(model, arrays, static)
        except Exception:
            # Whatever is wrong with the model shows where it is used, with a message for it. Where it asks for values of its
            # arguments, they come with the next comparison of this call.
            self._settle(now)
            return
        self._to_trace = False
        if now.traced.setdefault(key, found) != found:
            now.clear()
            now.traced[key] = found
        self._settle(now)

    def _settle(self, now: ModelPrograms) -> None:
        """Leave out what a trace has just changed: it would be taken for a change at every call."""
        after = self._look()
        if after == now.snapshot:
            return
        before = now.snapshot.sizes
        written = {i: before[i] for i, (_, size) in after.sizes.items() if i in before and before[i][1] != size}
        self._unread |= written
        now.snapshot, now.restless = self._look(), not written

    def renew_guide(self, guide: Any) -> None:
        """Have a guide set up anew that was set up when the model closed over something else.

        Args:
            guide: the guide.
        """
        whole, of_model = vars(guide).get(_MARK, (None, None))
        if whole is self.programs.snapshot:
            return
        now = Snapshot(self.roots[:1], frozenset(self.programs.snapshot.names))
        if of_model is not None and of_model != now:
            guide.prototype_trace = None
        setattr(guide, _MARK, (self.programs.snapshot, now))


def check_picklable(pvi: Any) -> None:
    """Refuse to pickle a PVI with a part that cannot be: an optimiser is made of functions that only this process has.

    Args:
        pvi: the PVI. What ``copy`` and picklers of closures ask for is left to them.

    Raises:
        PVIError: naming the part, and what to do.
    """
    if not _PICKLE_ALL.isdisjoint(_who_asks().split(".")):
        return
    for part in ("optim", "model", "guide", "partition", "solver", "schedule", "runtime", "loss", "static_kwargs"):
        try:
            pickle.dumps(getattr(pvi, part))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PVIError(
                f"this PVI cannot be pickled for its {part} ({error}). Write its state with pvi.save(path, state); where it is "
                "read, make the PVI by the same lines and call pvi.load(path)."
            ) from error


def _who_asks() -> str:
    """The module whose code has called into this package, checkers of types left out."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_ASKING:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


def follows(verb: Callable | None = None, *, trace: bool = True) -> Any:
    """A method of PVI that takes its turn among all threads, and follows what the model closes over.

    Args:
        verb: the method.
        trace: whether a call may cost a trace of the model; without, only what a snapshot sees is followed.

    Returns:
        The method.
    """
    if verb is None:
        return functools.partial(follows, trace=trace)

    @functools.wraps(verb)
    def turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _TURN, self._followed.turn(trace):
            return verb(self, *args, **kwargs)

    return turn


__all__ = ["Followed", "check_picklable", "follows"]
