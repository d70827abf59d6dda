"""The server's side of a conversation: questions with numbers, answers that are checked before anything is done with them."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..errors import ClientError, WireError
from ..expectations import FactorStructure, LatentRole
from ..factors import (
    ArgumentSignature,
    DerivedLeaf,
    Enumeration,
    Layout,
    LeafSignature,
    LocalLayout,
    PartitionPlan,
    Predictor,
    Reading,
    TermSpec,
)
from ..handlers import GroupTable, RowAxes
from ..wire import KeyData, Message, decode, digest_of, encode

# What plans are made of: all records that a message may hold.
RECORDS = {
    kind.__name__: kind
    for kind in (
        *(ArgumentSignature, DerivedLeaf, Enumeration, GroupTable, Layout, LeafSignature, LocalLayout, PartitionPlan),
        *(FactorStructure, LatentRole, Predictor, Reading, RowAxes, TermSpec),
    )
}
# What a round's report counts, and the largest number in it.
_SPENT, _MOST = ("trips", "sent", "received"), np.iinfo(np.int32).max
# Questions of names alone, and how many of their answers are kept.
_OF_NAMES, _ANSWERED = ("between", "apart"), 4
_LOG = logging.getLogger("numpyro_pvi")
# Relative asymmetry of a site's precision that is rounding.
_ASYMMETRY = {"float32": 1e-4, "float64": 1e-10}


@runtime_checkable
class Transport(Protocol):
    """What carries bytes to clients, by their places, and back. It may lose, double, delay and reorder them."""

    def send(self, place: int, data: bytes) -> None:
        """Send bytes to one client."""
        ...

    def receive(self, wait: float) -> tuple[int, bytes] | None:
        """The next bytes that came, with their sender's place; None where nothing came in ``wait`` seconds.

        Raises:
            ClientError: for a client that has gone.
        """
        ...

    def close(self) -> None:
        """Let the clients go."""
        ...


class Traffic(NamedTuple):
    """What was really sent since a server began.

    Attributes:
        trips: times that clients were asked, all those that are asked at once counted once.
        looks: those that were looks.
        visits: those that were visits.
        sent: bytes to clients, repetitions included.
        received: bytes from clients, doubled ones included.
        repeats: questions that were sent again.
        dropped: answers that came again, or too late.
        damaged: answers that were no message.
        restarts: clients that were begun anew in the middle of a conversation.
        stale: answers that were refused because they are from a q older than ``max_staleness`` allows.
    """

    trips: int = 0
    looks: int = 0
    visits: int = 0
    sent: int = 0
    received: int = 0
    repeats: int = 0
    dropped: int = 0
    damaged: int = 0
    restarts: int = 0
    stale: int = 0


@dataclasses.dataclass
class _Errand:
    """A visit that nobody waits for: its question, when and how often it was sent, and what its answer is to look like."""

    ticket: int
    fields: dict[str, Any]
    memory: tuple
    shapes: tuple
    frame: bytes = b""
    since: float = 0.0
    times: int = 0


class Exchange:
    """Questions and answers of one run: implements :class:`numpyro_pvi.runtime.Network`.

    Every question to a client has the next number. It is repeated, to the byte, until the answer to that number has come; an
    answer to an earlier one is dropped. A client answers a repeated question with its old answer, so that nothing is done
    twice on either side.

    Args:
        labels: of the clients, in the order of their places.
        transport: what carries the bytes.
        wait: seconds after which a question is repeated.
        tries: times that a question is sent before its client counts as gone.
    """

    def __init__(self, labels: tuple[Hashable, ...], transport: Transport, wait: float, tries: int):
        self.labels, self.transport, self.wait, self.tries = labels, transport, wait, tries
        self.run, self.traffic = secrets.token_hex(8), Traffic()
        # The first thing that went wrong: what is raised in the middle of a compiled program does not come out of it as itself.
        self.error: Exception | None = None
        self._sequence, self._versions = [0] * len(labels), [0] * len(labels)
        self._turn = threading.Lock()
        # What each client was told to take its rows for, and how often it was told this anew.
        self._told: dict[int, bytes] = {}
        self._reminded = [0] * len(labels)
        # Visits under way and their answers, by place.
        self._errands: dict[int, _Errand] = {}
        self._done: dict[int, Message] = {}
        # The last visit of each client that nobody waits for, and what it saw in its fit's visits before that; and the visits
        # that the fit which is asked for now was left at: fits that take turns share clients, and neither's looks are the other's.
        self._last, self._facing = [0] * len(labels), [(0, 0)] * len(labels)
        self._seen: list[tuple | None] = [None] * len(labels)
        # The last answers about what clients hold under names.
        self._answered: dict[tuple, tuple] = {}
        # What rounds have counted already, and whether one has left its part to the next.
        self._counted, self._owed = self.traffic, False
        # Names of what clients are to hold beyond the last few: Int[M 2] each.
        self.pins: tuple[np.ndarray, ...] = ()
        self._nonce, self._heard = int(ticket_of(self.run, 0)[0]), 0.0

    # ------------------------------------------------------------------ what is asked

    def hello(self) -> list[dict[str, Any]]:
        """What every client says of itself: facts of its shapes and structure."""
        found = self._ask({place: ("hello?", {}) for place in range(len(self.labels))}, "hello")
        return [found[place].fields["facts"] for place in range(len(self.labels))]

    def describe(self, key: KeyData | None = None) -> list[dict[str, Any]]:
        """What clients that have their own rows say of them.

        Args:
            key: random key of the points at which structure is looked for; None asks for shapes only.

        Returns:
            Facts by place.
        """
        fields = {"key": () if key is None else (key,)}
        found = self._ask(dict.fromkeys(range(len(self.labels)), ("describe?", fields)), "describe")
        return [found[place].fields["facts"] for place in range(len(self.labels))]

    def agree(self, key: KeyData, taken: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell clients what their rows are to be taken for.

        Args:
            key: as of :meth:`describe`, for a client that does not remember.
            taken: what all agree on.

        Returns:
            What every client says of itself from then on, as of :meth:`hello`.
        """
        fields = {"key": (key,), "taken": taken}
        found = self._ask(dict.fromkeys(range(len(self.labels)), ("plan?", fields)), "hello")
        return [found[place].fields["facts"] for place in range(len(self.labels))]

    def look(
        self, how: dict[str, Any], shared: tuple, shapes: tuple, own: tuple = (), groups: np.ndarray | None = None
    ) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.look`."""
        places, same = list(range(len(self.labels))) if groups is None else [int(g) for g in groups], None
        if how["ask"] in _OF_NAMES:
            # What is made of names is the same whenever it is asked for, and a step asks for it more than once.
            same = how["ask"], *(np.asarray(x).tobytes() for x in (*shared, *own))
            if same in self._answered:
                return self._answered[same]

        def ask() -> list[tuple]:
            # Visits that they are at are done first, and absorbed in their turn.
            while self._awaited:
                self._wait_for_errands()
            found = self._ask(
                {
                    m: ("look?", {"how": self._holding(how, m), "q": shared, "rest": _row(own, i)})
                    for i, m in enumerate(places)
                },
                "look",
                keep=True,
            )
            named = "held" in how and (how["held"] or how["ask"] == "look")
            told = shapes[:-1] if named else shapes
            for place in places:
                self._check_shapes(place, found[place].fields["found"], told, "what it sees at q")
            self._count(looks=1)
            return [(*found[place].fields["found"], *((self._ticket(place),) * named)) for place in places]

        found = self._kept(ask, shapes, len(places))
        if same is not None and self.error is None:
            self._answered = dict([*self._answered.items(), (same, found)][-_ANSWERED:])
        return found

    def face(self, tickets: np.ndarray | None) -> None:
        """Turn to a fit: what is asked from now on is asked for it.

        Args:
            tickets: Int[M 2], of the visits that its state left clients at; None where it leaves none at any.
        """
        found = [(0, 0)] * len(self.labels) if tickets is None else [(int(a), int(b)) for a, b in tickets]
        self._facing = found
        if not self._owed:
            # What was sent in between, as for an evaluation, is no round's.
            self._counted = self.traffic

    def spent(self, ends: np.ndarray) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.spent`."""
        self._owed = not ends
        if self._owed:
            return (np.zeros(3, np.int32),)
        now, before = self.traffic, self._counted
        self._counted = now
        return (np.array([min(getattr(now, name) - getattr(before, name), _MOST) for name in _SPENT], np.int32),)

    def seen(self, shapes: tuple) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.seen`."""
        nothing = tuple(np.zeros(x.shape, x.dtype) for x in shapes)

        def ask() -> list[tuple]:
            own = [self._seen[m] if self._is_own(m, self._facing[m]) else None for m in range(len(self.labels))]
            return [(np.array(found is not None), *(nothing if found is None else found)) for found in own]

        return self._kept(ask, (np.zeros((), bool), *shapes), len(self.labels))

    def _holding(self, how: dict[str, Any], place: int) -> dict[str, Any]:
        """How a client is asked that has latents of its own: with the names of what it is to go on holding."""
        if not self.pins or not ("held" in how or "units" in how):
            return how
        return {
            **how,
            "pins": tuple((int(a), int(b)) for a, b in (names[place] for names in self.pins if len(names) > place)),
        }

    def _ticket(self, place: int) -> np.ndarray:
        """What the last question to a client has left there, by name."""
        return ticket_of(self.run, self._sequence[place])

    def _is_own(self, place: int, ticket: tuple[int, int]) -> bool:
        """Whether a client's last visit is that which a state left it at."""
        return ticket == (self._nonce, self._last[place])

    def visit(self, how: dict[str, Any], shared: tuple, groups: np.ndarray, own: tuple, shapes: tuple) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.visit`."""
        rest, site, memory, keys, start, *held = own
        places = [int(g) for g in groups]

        def ask() -> list[tuple]:
            asks, memories = {}, {}
            for i, place in enumerate(places):
                memories[place] = _row(memory, i)
                key = KeyData(np.asarray(keys[i]), how["key"])
                fields = {
                    "how": self._holding(how, place),
                    "cavity": _row(rest, i),
                    "site": _row(site, i),
                    "memory": (),
                }
                beside = _row(held[0], i) if held else ()
                fields |= {"digest": digest_of(memories[place]), "rest": (key, _row(start, i), shared, (), beside)}
                asks[place] = ("visit?", fields)
            found = self._ask(asks, "visit", "gap")
            lost = [place for place in places if found[place].kind == "gap"]
            if lost:
                # A client that was begun anew, or a state that is not the last: the server's copy of its memory goes along.
                again = {place: ("visit?", {**asks[place][1], "memory": memories[place]}) for place in lost}
                found |= self._ask(again, "visit")
            self._count(visits=1)
            told = [self._visited(place, found[place].fields, shapes) for place in places]
            return [(*own, self._ticket(place)) for own, place in zip(told, places, strict=True)] if held else told

        named = (np.zeros((2,), np.int32),) if held else ()
        return self._kept(ask, (*(x for part in shapes for x in part), *named), len(places))

    def begin(
        self, how: dict[str, Any], shared: tuple, tickets: np.ndarray, groups: np.ndarray, own: tuple, shapes: tuple
    ) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.begin`."""
        rest, site, memory, keys, at = own

        def ask() -> list[tuple]:
            if len(groups) == len(self.labels):
                self._heard = time.monotonic()
            given = []
            for i, place in enumerate(int(g) for g in groups):
                errand, ticket = self._errands.get(place), (int(tickets[i][0]), int(tickets[i][1]))
                fresh = errand is None or not self._is_own(place, ticket)
                if fresh:
                    key = KeyData(np.asarray(keys[i]), how["key"])
                    fields = {"how": how, "cavity": _row(rest, i), "site": _row(site, i), "memory": ()}
                    fields |= {"digest": digest_of(_row(memory, i)), "rest": (key, (), shared, _row(at, i), ())}
                    errand = _Errand(self._sequence[place] + 1, fields, _row(memory, i), shapes)
                    self._forget(place)
                    if not self._is_own(place, ticket):
                        self._seen[place] = None
                    self._last[place], self._facing[place] = errand.ticket, (self._nonce, errand.ticket)
                    self._send_out(place, errand)
                given.append((np.array([self._nonce, errand.ticket], np.int32), np.array(fresh)))
            return given

        shape = np.zeros((2,), np.int32), np.zeros((), bool)
        return self._kept(ask, shape, len(groups))

    def arrive(self, allowed: np.ndarray, young: np.ndarray, shapes: tuple) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.arrive`."""

        def ask() -> list[tuple]:
            # All that has come, and then the first of it: a quick client would be heard for ever before the others.
            self._take_what_came()
            while not (ready := [place for place in self._done if allowed[place]]):
                self._wait_for_errands()
                self._take_what_came()
            place = ready[0]
            errand, fields = self._errands.pop(place), self._done.pop(place).fields
            *parts, seen = errand.shapes
            told = self._visited(place, fields, tuple(parts))
            self._check_shapes(place, fields["found"], seen, "what it sees at q")
            self._seen[place] = fields["found"]
            self._count(visits=1, trips=1, stale=int(not young[place]))
            if not young[place]:
                _LOG.warning(
                    "the answer of client %r is refused: it is from a q older than max_staleness allows. Nothing of it was "
                    "absorbed; it reads q anew",
                    self.labels[place],
                )
            now = time.monotonic()
            passed, self._heard = now - self._heard, now
            return [(np.int32(place), np.asarray(passed, shapes[1].dtype), *told)]

        return tuple(x[0] for x in self._kept(ask, shapes, 1))

    def recall(self) -> None:
        """Forget the visits under way: another fit begins. What it sees is its own, by the tickets of its visits."""
        self._errands.clear()
        self._done.clear()

    def close(self) -> None:
        """Let the clients go."""
        self.transport.close()

    # ------------------------------------------------------------------ visits that nobody waits for

    def _send_out(self, place: int, errand: _Errand) -> None:
        """Ask for a visit under the next number."""
        self._sequence[place] += 1
        head = {"run": self.run, "sequence": self._sequence[place], "label": self.labels[place]}
        errand.frame = encode(Message("visit?", head | errand.fields))
        errand.times = 0
        self._errands[place] = errand
        self._send_again(place, errand)

    def _send_again(self, place: int, errand: _Errand) -> None:
        if errand.times >= self.tries:
            raise self._silent(place)
        self.transport.send(place, errand.frame)
        self._count(sent=len(errand.frame), repeats=int(errand.times > 0))
        errand.since, errand.times = time.monotonic(), errand.times + 1

    @property
    def _awaited(self) -> dict[int, _Errand]:
        """Visits under way without an answer."""
        return {place: errand for place, errand in self._errands.items() if place not in self._done}

    def _take_what_came(self) -> None:
        """Take answers that wait to be heard, at most as many as there are questions."""
        for _ in range(len(self._awaited)):
            if not self._awaited or (came := self.transport.receive(0.0)) is None:
                return
            self._take(came)

    def _wait_for_errands(self) -> None:
        """Take one answer; where none comes in time, repeat the question that has waited longest."""
        open_ = self._awaited
        oldest = min(open_, key=lambda place: open_[place].since)
        left = open_[oldest].since + self.wait - time.monotonic()
        # What waits to be heard is heard, however late it is.
        came = self.transport.receive(max(left, 0.0))
        if came is None:
            self._send_again(oldest, open_[oldest])
            return
        self._take(came)

    def _take(self, came: tuple[int, bytes]) -> None:
        """Hear an answer to a visit that nobody waits for."""
        open_, found = self._awaited, {}
        self._hear(*came, {place: errand.frame for place, errand in open_.items()}, found, ("visit", "gap"))
        for place, message in found.items():
            errand = open_[place]
            if message.kind == "visit":
                self._done[place] = message
            elif errand.fields["memory"]:
                raise self._refused(place, "it has not taken the memory that it was sent")
            else:
                errand.fields = {**errand.fields, "memory": errand.memory}
                self._send_out(place, errand)

    def _forget(self, place: int) -> None:
        """A visit under way is for nothing once something else is asked."""
        self._errands.pop(place, None)
        self._done.pop(place, None)

    # ------------------------------------------------------------------ once and only once

    def _kept(self, ask: Callable[[], list[tuple]], shapes: tuple, count: int) -> tuple:
        """Answers on a leading axis; once something went wrong, zeros, until the compiled program has come to its end."""
        with self._turn:
            if self.error is None:
                try:
                    return tuple(np.stack(leaves) for leaves in zip(*ask(), strict=True))
                except Exception as error:
                    self.error = error
            return tuple(np.zeros((count, *x.shape), x.dtype) for x in shapes)

    def _ask(self, asks: dict[int, tuple[str, dict]], *kinds: str, keep: bool = False) -> dict[int, Message]:
        frames = {}
        for place, (kind, fields) in asks.items():
            if not keep:
                self._forget(place)
            self._sequence[place] += 1
            head = {"run": self.run, "sequence": self._sequence[place], "label": self.labels[place]}
            frames[place] = encode(Message(kind, head | fields), RECORDS)
            if kind == "plan?":
                self._told[place] = frames[place]
        found: dict[int, Message] = {}
        for attempt in range(self.tries):
            for place in frames.keys() - found.keys():
                self.transport.send(place, frames[place])
                self._count(sent=len(frames[place]), repeats=int(attempt > 0))
            while len(found) < len(frames):
                came = self.transport.receive(self.wait)
                if came is None:
                    break
                if came[0] in self._awaited.keys() - frames.keys():
                    self._take(came)
                else:
                    self._hear(*came, frames, found, kinds)
            if len(found) == len(frames):
                self._count(trips=1)
                return found
        raise self._silent(min(frames.keys() - found.keys()))

    def _silent(self, place: int) -> ClientError:
        return ClientError(
            f"client {self.labels[place]!r} has not answered question {self._sequence[place]} in {self.tries} tries of "
            f"{self.wait:g} s each. Nothing of it was absorbed; pass a longer wait, or more tries, or begin it anew.",
            self.labels[place],
        )

    def _hear(self, place: int, data: bytes, frames: dict, found: dict[int, Message], kinds: tuple[str, ...]) -> None:
        """Take one answer, or drop it."""
        self._count(received=len(data))
        try:
            message = decode(data, RECORDS)
        except WireError as error:
            if error.fault in ("newer", "older") and 0 <= place < len(self.labels):
                raise self._refused(place, f"{error} Install one version of numpyro_pvi on both sides") from error
            # As good as lost: the question is repeated.
            self._count(damaged=1)
            return
        fields = message.fields
        if not 0 <= place < len(self.labels) or fields["label"] != self.labels[place]:
            raise ClientError(
                f"an answer came from a client {fields['label']!r}, which is not known here (known are "
                f"{', '.join(map(repr, self.labels))}). Nothing of it was absorbed.",
                fields["label"],
            )
        if (
            fields["run"] != self.run
            or fields["sequence"] < self._sequence[place]
            or place in found
            or place not in frames
        ):
            self._count(dropped=1)
            return
        if fields["sequence"] > self._sequence[place]:
            raise self._refused(
                place, f"it answers question {fields['sequence']}, and {self._sequence[place]} were asked"
            )
        if message.kind == "untold":
            self._remind(place, frames[place])
            return
        if message.kind == "refusal":
            raise self._refused(place, f"it says: {fields['why']}")
        if message.kind not in kinds:
            raise self._refused(place, f"it answers with a message {message.kind!r} where {kinds[0]!r} was asked for")
        found[place] = message
        self._reminded[place] = 0

    def _remind(self, place: int, question: bytes) -> None:
        """Tell a client that was begun anew what its rows are to be taken for, and ask again."""
        self._reminded[place] += 1
        if place not in self._told or self._reminded[place] > self.tries:
            raise self._refused(
                place,
                f"it does not know what its rows are to be taken for, though it was told {self._reminded[place]} times",
            )
        for data in (self._told[place], question):
            self.transport.send(place, data)
            self._count(sent=len(data), repeats=1)

    # ------------------------------------------------------------------ what is refused

    def _visited(self, place: int, fields: dict[str, Any], shapes: tuple) -> tuple:
        """A site, a memory and a report, checked."""
        site, memory, reported = shapes
        self._check_shapes(place, fields["site"], site, "its site")
        self._check_shapes(place, fields["memory"], memory, "what it remembers")
        self._check_shapes(place, fields["rest"], reported, "its report")
        if fields["version"] <= self._versions[place]:
            raise self._refused(
                place, f"its site has version {fields['version']}, which is not newer than {self._versions[place]}"
            )
        for leaf, wanted in zip(fields["site"], site, strict=True):
            if not np.all(np.isfinite(leaf)):
                raise self._refused(place, "its site is not finite")
            if wanted.symmetric:
                gap, size = np.abs(leaf - np.swapaxes(leaf, -1, -2)), np.max(np.abs(leaf), initial=0.0)
                gap = np.max(gap, initial=0.0)
                if gap > _ASYMMETRY[leaf.dtype.name] * size:
                    raise self._refused(place, f"its site's precision is not symmetric (by {gap:.2g} of {size:.2g})")
        self._versions[place] = fields["version"]
        return (*fields["site"], *fields["memory"], *fields["rest"])

    def _check_shapes(self, place: int, found: tuple, wanted: tuple, what: str) -> None:
        shapes = [(x.shape, np.dtype(x.dtype)) for x in wanted]
        got = [(x.shape, x.dtype) if isinstance(x, np.ndarray) else type(x).__name__ for x in found]
        if got != shapes:
            raise self._refused(place, f"{what} has the shapes {got} and not {shapes}")

    def _refused(self, place: int, why: str) -> ClientError:
        label = self.labels[place]
        return ClientError(f"the answer of client {label!r} is refused: {why}. Nothing of it was absorbed.", label)

    def _count(self, **more: int) -> None:
        counts = self.traffic._asdict()
        self.traffic = Traffic(**{name: count + more.get(name, 0) for name, count in counts.items()})


def ticket_of(run: str, sequence: int) -> np.ndarray:
    """The name of what a client keeps of a question: Int[2], of the conversation and of the question in it."""
    return np.array([int(run, 16) & 0x7FFFFFFF, sequence], np.int32)


def _row(leaves: tuple, index: int) -> tuple:
    return tuple(np.asarray(x)[index] for x in leaves)
