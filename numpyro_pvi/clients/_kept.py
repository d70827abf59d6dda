"""What a client holds of latents of its group's own, under names that are told in its place."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import jax
import numpy as np

from ..errors import PVIError

# As many are held: a round asks about few, and a state that is gone on from is among the last that were asked about.
MOST_KEPT = 16


class Kept:
    """The last things that a client was asked about or that came of questions, the oldest given up first, but for what is pinned.

    Args:
        first: what it begins with, which is never given up; None where it holds nothing.
    """

    def __init__(self, first: Any):
        self.first = first
        # What the last look was at: a name, and moments of q as arrays.
        self.seen: tuple[Any, tuple] | None = None
        self._held: OrderedDict[tuple[int, int], Any] = OrderedDict()
        # Names of what the state that a call began with, and the last checkpoint's, are of.
        self.pinned: tuple[tuple[int, int], ...] = ()

    def after(self, old: Kept) -> Kept:
        """This, with what another one of the same shapes holds."""
        if _shapes(self.first) == _shapes(old.first):
            self._held, self.seen, self.pinned = old._held, old.seen, old.pinned
        return self

    def at(self, ticket: Any) -> Any:
        """What a name stands for. Raises PVIError for what is not here any more, or never was."""
        name = _name(ticket)
        if name == (0, 0) and self.first is not None:
            return self.first
        if name not in self._held:
            raise PVIError(
                "it does not have its own latents as this state left them: it was begun anew since, or the state is not one of "
                "the last. Begin it with restore and what its save has returned, go on from the last state, or begin a fit anew "
                "with init"
            )
        self._held.move_to_end(name)
        return self._held[name]

    def keep(self, ticket: Any, value: Any) -> None:
        """Hold something under a name."""
        self._held[_name(ticket)] = value
        free = [name for name in self._held if name not in self.pinned]
        for name in free[: max(0, len(free) - MOST_KEPT)]:
            del self._held[name]

    def save(self) -> tuple[np.ndarray, ...]:
        """All of it as arrays: names, and what they stand for."""
        if self.first is None:
            return ()
        names = np.array(list(self._held), np.int32).reshape(-1, 2)
        ticket, seen = (np.zeros((0, 2), np.int32), ()) if self.seen is None else self.seen
        at = np.asarray(ticket).reshape(-1, 2), *(np.asarray(x) for x in seen)
        return (
            names,
            np.array([len(at)]),
            *at,
            *(np.asarray(x) for value in self._held.values() for x in jax.tree.leaves(value)),
        )

    def restore(self, arrays: tuple[np.ndarray, ...]) -> None:
        """Go on from what :meth:`save` has returned. Raises PVIError for arrays of other shapes."""
        if not arrays:
            # Saved before it was known what it would hold.
            self._held.clear()
            self.seen = None
            return
        shapes = _shapes(self.first)
        names, count, *rest = arrays
        (ticket, *seen), leaves = rest[: int(count[0])], rest[int(count[0]) :]
        if names.shape != (len(names), 2) or [(x.shape, x.dtype) for x in leaves] != shapes * len(names):
            raise PVIError("what was kept of a client's own latents is of other rows or of another model.")
        size, structure = len(shapes), jax.tree.structure(self.first)
        self.seen = (ticket, tuple(seen)) if len(ticket) else None
        self._held.clear()
        for i, name in enumerate(names):
            self._held[_name(name)] = structure.unflatten(leaves[i * size : (i + 1) * size])


def _shapes(held: Any) -> list[tuple]:
    return [(x.shape, np.dtype(x.dtype)) for x in jax.tree.leaves(held)]


def _name(ticket: Any) -> tuple[int, int]:
    run, sequence = (int(x) for x in np.asarray(ticket).reshape(-1))
    return run, sequence
