"""The server's side: clients at the nodes of a Flower federation, found by what they say they are."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Hashable, Sequence
from typing import Any

from ..clients import ClientsRuntime, Exchange, Traffic
from ..errors import ClientError, PVIError, WireError
from ..handlers import labels_table
from ..wire import Message, decode, encode, kind_of
from ._messages import ASK, WHO, flwr, pack, unpack

# Seconds between two looks at what has come: at first, and at most.
_SOONEST, _LATEST = 0.01, 0.3
# Seconds between two looks at who is there, while an answer is waited for.
_LOOK_AROUND = 2.0
# Flower's codes of errors after which a question may be asked again: of messages that are gone (3, 4) and of a process that has
# crashed (8), with the same node; of a node that is gone (5), with the one that takes its place.
_GONE, _AGAIN = 5, (3, 4, 8)
# Times that a question is asked again for these, beside the repetitions that the conversation counts.
_AT_ONCE = 2


class Introductions:
    """Asks every node that is there who it is, each once."""

    def __init__(self, grid: Any):
        self._grid = grid
        self._asked: dict[str, int] = {}
        self._met: set[int] = set()

    @property
    def pending(self) -> set[str]:
        """Messages that have no answer yet."""
        return set(self._asked)

    def look_around(self) -> None:
        """Ask nodes that have not been asked, and forget those that have left."""
        there = set(self._grid.get_node_ids())
        for node in there - self._met:
            message = post(self._grid, node, WHO, encode(Message("who?", {"run": ""})))
            if message is not None:
                self._asked[message] = node
                self._met.add(node)
        self._met &= there
        self._asked = {message: node for message, node in self._asked.items() if node in there}

    def hear(self, reply: Any) -> tuple[int, Hashable] | None:
        """A node and its label, from its answer; None for one that has not said who it is, and is asked again."""
        node = self._asked.pop(reply.metadata.reply_to_message_id)
        if reply.has_error():
            if reply.error.code in (_GONE, *_AGAIN):
                self._met.discard(node)
            else:
                why = str(reply.error.reason)[:1000]
                logging.getLogger("numpyro_pvi").warning("node %s does not say who it is: %s", node, why)
            return None
        data = unpack(reply.content)
        try:
            said = None if data is None else decode(data)
        except WireError:
            said = None
        if said is None or said.kind != "who":
            # Of another app, or of another version of this one: nobody to fit with.
            return None
        return node, said.fields["label"]


def post(grid: Any, node: int, kind: str, data: bytes) -> str | None:
    """Send bytes to a node. Returns the message's id; None where Flower does not take it, as for a node that has left."""
    message = flwr("flwr.app").Message(pack(data), node, kind)
    ids = list(grid.push_messages([message]))
    return ids[0] if ids else None


class Federation:
    """Who is where: nodes by label, once they have said so.

    ``owners``: labels to wait for, others being left out; or how many to wait for, all that are there being taken.
    """

    def __init__(self, grid: Any, owners: int | tuple[Hashable, ...], patience: float):
        self.grid, self._owners, self._patience = grid, owners, patience
        # Who has been asked who it is: in a process of its own, where nodes begin one a message, and so no more than once.
        self.meet = Introductions(grid)
        # Times that a client was found again at another node, by label.
        self.moves: collections.Counter = collections.Counter()

    @functools.cached_property
    def found(self) -> dict[Hashable, int]:
        """Ids of nodes by label, in the order in which groups are; looked for at the first time, and kept up to date.

        Raises PVIError where owners are not there in time, and for two nodes of one label.
        """
        until, pause = time.monotonic() + self._patience, _SOONEST
        meet, found = self.meet, {}
        named = None if isinstance(self._owners, int) else set(self._owners)
        count = self._owners if isinstance(self._owners, int) else len(self._owners)
        while True:
            meet.look_around()
            for reply in self.grid.pull_messages(meet.pending) if meet.pending else ():
                met = meet.hear(reply)
                if met is None or (named is not None and met[1] not in named):
                    continue
                node, label = met
                if found.setdefault(label, node) != node:
                    raise PVIError(
                        f"two nodes ({found[label]} and {node}) have the label {label!r}; every owner has one of its own."
                    )
            late = time.monotonic() >= until
            if len(found) >= count and (late or named or not meet.pending):
                return {label: found[label] for label in labels_table(list(found)).labels}
            if late:
                raise self._missing(list(found))
            time.sleep(pause)
            pause = min(_LATEST, 1.5 * pause)

    def _missing(self, found: list) -> PVIError:
        wanted = f"{self._owners} owners" if isinstance(self._owners, int) else f"the owners {list(self._owners)}"
        return PVIError(
            f"{wanted} were waited for, and after {self._patience:g} s there are {found}: begin the others' nodes, with an app of "
            "client_app, or pass fewer owners, or more patience."
        )


class Nodes:
    """Carries questions to nodes in Flower's messages; implements :class:`numpyro_pvi.clients.Transport`.

    A node that has left is replaced by the one that says it has its label. What a client has not been told (its node has lost its
    state, or is another) it is told before it is asked again.

    Args:
        federation: the nodes, whose order is that of places.
    """

    def __init__(self, federation: Federation):
        self._grid, self._moves, self._found = federation.grid, federation.moves, federation.found
        self._labels = list(federation.found)
        self._meet, self._looked = federation.meet, float("-inf")
        # What is under way: questions by place, messages of Flower's with place and bytes, and those that only tell.
        self._frames: dict[int, bytes] = {}
        self._open: dict[str, tuple[int, bytes]] = {}
        self._telling: dict[str, int] = {}
        # What each was told its rows are to be taken for; and how often a question was asked again.
        self._told: dict[int, bytes] = {}
        self._times: collections.Counter = collections.Counter()
        self._came: collections.deque[tuple[int, bytes]] = collections.deque()

    def send(self, place: int, data: bytes) -> None:
        """Send a question; with one that is repeated, see who is there."""
        if self._frames.get(place) == data:
            self._looked = float("-inf")
        else:
            self._frames[place], self._times[place] = data, 0
            if kind_of(data) == "plan?":
                self._told[place] = data
        self._post(place)

    def receive(self, wait: float) -> tuple[int, bytes] | None:
        """The next answer of any client."""
        until, pause = time.monotonic() + wait, _SOONEST
        while True:
            self._pull()
            if self._came:
                return self._came.popleft()
            now = time.monotonic()
            if now >= until:
                return None
            if now - self._looked >= _LOOK_AROUND:
                self._meet.look_around()
                self._looked = now
            time.sleep(min(pause, max(0.0, until - now)))
            pause = min(_LATEST, 1.5 * pause)

    def seek(self) -> None:
        """See who is there, and who has come back at another node; nobody is waited for."""
        self._meet.look_around()
        self._pull()

    def close(self) -> None:
        """Forget what is under way; nodes go on for whoever asks next."""
        self._frames, self._open, self._telling = {}, {}, {}
        self._came.clear()

    def _pull(self) -> None:
        pending = {*self._open, *self._telling, *self._meet.pending}
        for reply in self._grid.pull_messages(pending) if pending else ():
            self._take(reply)

    def _post(self, place: int) -> None:
        data = self._frames[place]
        message = post(self._grid, self._found[self._labels[place]], ASK, data)
        if message is not None:
            self._open[message] = place, data

    def _tell(self, place: int) -> None:
        """Tell a client what its rows are to be taken for; its question follows when it has heard it."""
        message = post(self._grid, self._found[self._labels[place]], ASK, self._told[place])
        if message is not None:
            self._telling[message] = place

    def _take(self, reply: Any) -> None:
        """Hear a message of Flower's."""
        of = reply.metadata.reply_to_message_id
        if of in self._meet.pending:
            met = self._meet.hear(reply)
            if met is not None:
                self._move(*met)
        elif of in self._telling:
            place = self._telling.pop(of)
            if place in self._frames:
                self._post(place)
        elif of in self._open:
            place, question = self._open.pop(of)
            if reply.has_error():
                self._failed(place, question, reply.error)
                return
            data = unpack(reply.content)
            current = self._frames.get(place) is question
            if current and _is_untold(data) and place in self._told and self._once_more(place):
                self._tell(place)
            elif data is not None:
                if current:
                    del self._frames[place]
                self._came.append((place, data))

    def _move(self, node: int, label: Hashable) -> None:
        """A client has said where it is."""
        if label not in self._labels:
            return
        place, before = self._labels.index(label), self._found[label]
        if before == node:
            return
        logging.getLogger("numpyro_pvi").warning("client %r is now at node %s, and was at node %s", label, node, before)
        self._found[label] = node
        self._moves[label] += 1
        if place in self._frames:
            self._post(place)

    def _failed(self, place: int, question: bytes, error: Any) -> None:
        """What Flower says in a client's place."""
        if error.code == _GONE:
            self._looked = float("-inf")
        elif error.code in _AGAIN:
            if self._frames.get(place) is question and self._once_more(place):
                self._post(place)
        else:
            label = self._labels[place]
            raise ClientError(
                f"client {label!r} has failed at its node (Flower's error {error.code}): {str(error.reason)[:1000]}. Nothing of it "
                "was absorbed.",
                label,
            )

    def _once_more(self, place: int) -> bool:
        self._times[place] += 1
        return self._times[place] <= _AT_ONCE


def _is_untold(data: bytes | None) -> bool:
    """Whether a client says that it has not been told the plan: it hears that first, and its question when it has."""
    with contextlib.suppress(WireError):
        return data is not None and kind_of(data) == "untold"
    return False


@dataclasses.dataclass(frozen=True, eq=False)
class Flower(ClientsRuntime):
    """Groups at the nodes of a Flower federation, whose owners keep their rows: ``PVI(model, guide, runtime=Flower(grid=grid))``.

    To be used where Flower hands out a ``Grid``, in the main function of a ``ServerApp``; :class:`PVIStrategy` does so in
    Flower's own words. Clients are apps of :func:`client_app`, one a node. Every node is asked for its label; a client that comes
    back at another node is found again by it, told what it has forgotten, and asked again. Needs the extra:
    ``pip install 'numpyro_pvi[flower]'``.

    Args:
        wait: seconds after which a question is repeated; longer than the longest visit, and than a process of Flower's takes to
            begin (JAX is imported there, and programs are compiled) where it begins one for every message.
        tries: times that a question is sent before its client counts as gone.
        grid: Flower's.
        owners: labels of the owners to wait for, any others being left out; or how many to wait for, all that are there being
            taken.
        patience: seconds to wait for them.

    Raises:
        PVIError: on construction, where flwr is not installed, and for values outside these ranges; when owners are looked for,
            where they are not there in time, and for two of one label.
    """

    wait: float = 300.0
    grid: Any = None
    owners: int | Sequence[Hashable] = 2
    patience: float = 600.0

    def __post_init__(self):
        super().__post_init__()
        flwr("flwr.app")
        if self.grid is None:
            raise PVIError(
                "Flower(grid=None): expected the Grid that Flower hands to the main function of a ServerApp: @app.main() "
                "def main(grid, context)."
            )
        if isinstance(self.owners, int):
            if isinstance(self.owners, bool) or self.owners < 1:
                raise PVIError(f"Flower(owners={self.owners!r}): expected a positive int, or labels.")
        else:
            named = tuple(self.owners)
            if not named or len(set(named)) != len(named):
                raise PVIError(f"Flower(owners={self.owners!r}): expected labels, each once, or how many there are.")
            object.__setattr__(self, "owners", named)
        if not (isinstance(self.patience, int | float) and self.patience >= 0):
            raise PVIError(f"Flower(patience={self.patience!r}): expected a number of seconds.")

    @functools.cached_property
    def _federation(self) -> Federation:
        return Federation(self.grid, self.owners, self.patience)  # type: ignore[arg-type]

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """See :attr:`ClientsRuntime.labels`; they are looked for at the first time."""
        return tuple(self._federation.found)

    @property
    def moves(self) -> dict[Hashable, int]:
        """Times that each client was found again at another node, by label; those that never were are left out."""
        return dict(self._federation.moves)

    @property
    def traffic(self) -> Traffic:
        """Round trips, messages and bytes that were really sent so far, and clients that were found again at another node."""
        return super().traffic._replace(restarts=sum(self._federation.moves.values()))

    def open(self) -> Exchange:
        """See :meth:`ClientsRuntime.open`."""
        return Exchange(self.labels, Nodes(self._federation), self.wait, self.tries)
