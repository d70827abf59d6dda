"""Runtimes whose groups are clients: in this process, or in a process each."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import logging
import multiprocessing
import multiprocessing.connection
import pickle
import queue
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from .._closures import Followed
from .._compiling import Token, settings_for_others, token_here
from ..errors import ClientError, PVIError, WireError
from ..handlers import labels_table
from ..runtime import (
    Engine,
    RemoteEngine,
    RemoteProductEngine,
    RowlessEngine,
    RowlessProductEngine,
    RuntimeDefaults,
    Vmap,
)
from ..sites import Held
from ..wire import Message, decode, encode
from ._exchange import RECORDS, Exchange, Traffic, Transport
from ._holders import Holders, agree_on
from ._own import Client
from ._share import Share, shares_of, with_digests

# Largest message that is taken off a pipe.
_MOST_BYTES = 1 << 31
# Fits that take turns on one runtime whose models are looked at without being taken for others.
_MODELS = 4


class Line:
    """The conversation of one fit at present: implements :class:`numpyro_pvi.runtime.Network`, anew for every set of rows."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.tells_step = False
        self.known: dict[Any, Any] = {}
        # Names of what clients hold for states that are to stay good: Int[M 2] each.
        self.pins: dict[str, np.ndarray] = {}
        # Of clients that have their own rows: what they said of them, what stands in for these, and what was agreed on.
        self.described: list[dict[str, Any]] | None = None
        self.stands: Any = None
        self.place: Any = None
        self.taken: Any = None
        self._key: Any = None
        self._before = Traffic()
        # By what stands for a model, what clients of it have compiled; it goes with the model's own programs.
        self._of_models: weakref.WeakKeyDictionary[Token, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._token: Token | None = None
        # Models of the last fits, and what they close over.
        self._models: list[tuple[Any, Followed]] = []

    def __reduce__(self) -> tuple:
        """A line without a conversation: processes and locks are nobody else's."""
        return Line, ()

    @property
    def traffic(self) -> Traffic:
        """What was sent by all conversations so far."""
        now = Traffic() if self.exchange is None else self.exchange.traffic
        return Traffic(*(a + b for a, b in zip(self._before, now, strict=True)))

    def look(
        self, how: dict[str, Any], shared: tuple, shapes: tuple, own: tuple = (), groups: np.ndarray | None = None
    ) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.look`."""
        return self._open.look(how, shared, shapes, own, groups)

    def seen(self, shapes: tuple) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.seen`."""
        return self._open.seen(shapes)

    def visit(self, how: dict[str, Any], shared: tuple, groups: np.ndarray, own: tuple, shapes: tuple) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.visit`."""
        return self._open.visit(how, shared, groups, own, shapes)

    def begin(
        self, how: dict[str, Any], shared: tuple, tickets: np.ndarray, groups: np.ndarray, own: tuple, shapes: tuple
    ) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.begin`."""
        return self._open.begin(how, shared, tickets, groups, own, shapes)

    def arrive(self, allowed: np.ndarray, young: np.ndarray, shapes: tuple) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.arrive`."""
        return self._open.arrive(allowed, young, shapes)

    def spent(self, ends: np.ndarray) -> tuple:
        """See :meth:`numpyro_pvi.runtime.Network.spent`."""
        return self._open.spent(ends)

    def turn_to(self, engine: Any, state: Any, rounds: bool) -> None:
        """Answer for a state from now on; clients are called back from what they are at where rounds of a fit begin."""
        if self.exchange is None:
            return
        self.exchange.pins = tuple(self.pins.values())
        if rounds and int(state.step) == 0:
            self.exchange.recall()
        self.exchange.face(jax.device_get(engine.schedule.tickets(state.schedule_state)))

    @property
    def _open(self) -> Exchange:
        if self.exchange is None:
            raise ClientError("there are no clients: call pvi.update, pvi.run or pvi.evaluate, which begin them")
        return self.exchange

    def attend(self, key: Any, connect: Callable[[], Exchange]) -> None:
        """Talk to clients with these rows: those that are there, or new ones after an error, or for other rows or another model."""
        key = self._token, key
        if self.exchange is not None and self._key == key and self.exchange.error is None:
            return
        self.close()
        if self._token is not None:
            self.known = self._of_models.setdefault(self._token, {})
        exchange = connect()
        try:
            facts = exchange.hello()
            agree_on(exchange.labels, facts, ("rows",))
        except BaseException:
            exchange.close()
            raise
        self.exchange, self._key, self.tells_step = exchange, key, facts[0]["step"]

    def follow(self, model: Any) -> None:
        """Have clients begun anew, or describe their rows anew, where a model closes over something else by now.

        What a runtime closes over, which the fit follows as well, is nothing to the clients; what a solver does is not followed.
        """
        known = [x for x in self._models if x[0] is model]
        _, followed = mine = known[0] if known else (model, Followed((model,)))
        self._models = [*(x for x in self._models if x is not mine), mine][-_MODELS:]
        followed.follow()
        # What a look at objects cannot tell, traces of the fit have.
        token = followed.programs.token if followed.programs.snapshot.exact else token_here()
        if token is not self._token:
            self.described = self.taken = None
            self._token = token

    def close(self) -> None:
        """Let the clients go."""
        if self.exchange is not None:
            self._before = self.traffic
            self.exchange.close()
        self.exchange = self.taken = None


@dataclasses.dataclass(frozen=True, eq=False)
class ClientsRuntime(RuntimeDefaults):
    """What runtimes with clients share: rounds go out to them, and what is done before and between rounds runs here.

    Args:
        wait: seconds after which a question is repeated.
        tries: times that a question is sent before its client counts as gone.
    """

    wait: float = 60.0
    tries: int = 3
    _line: Line = dataclasses.field(default_factory=Line, init=False, repr=False)

    # Errors name clients.
    by_label = True

    def __post_init__(self):
        if not (isinstance(self.wait, int | float) and self.wait > 0):
            raise PVIError(f"{type(self).__name__}(wait={self.wait!r}): expected a positive number of seconds.")
        if isinstance(self.tries, bool) or not isinstance(self.tries, int) or self.tries < 1:
            raise PVIError(f"{type(self).__name__}(tries={self.tries!r}): expected a positive int.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the settings; clients are begun anew, by the line that the engine of a PVI has too."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self) if field.init]
        return type(self), tuple(fields), {"_line": self._line}

    @property
    def traffic(self) -> Traffic:
        """Round trips, messages and bytes that were really sent so far."""
        return self._line.traffic

    @property
    def workers(self) -> str:
        """What a progress bar says: how many clients there are, and what was sent."""
        exchange, traffic = self._line.exchange, self.traffic
        count = 0 if exchange is None else len(exchange.labels)
        return f"{count} clients, {(traffic.sent + traffic.received) / 1000:.0f} kB"

    def close(self) -> None:
        """End the clients; the next round begins them anew."""
        self._line.close()

    def engine(self, engine: Any) -> Any:
        """The engine whose rounds are with clients."""
        here = self.elsewhere is None
        if isinstance(engine, Engine):
            given = engine.model, engine.solver, engine.schedule, self, engine.optim, engine.num_particles
            return (RemoteEngine if here else RowlessEngine)(*given, network=self._line)
        given = engine.model, engine.solver, engine.schedule, self, engine.num_particles, engine.optim
        return (RemoteProductEngine if here else RowlessProductEngine)(*given, network=self._line)

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """Of clients that have their own rows, in the order of their places; none where rows are dealt out to clients."""
        return ()

    @property
    def came(self) -> tuple[int, ...]:
        """By place, the client's number among those that were given: what takes groups as they came goes by it."""
        return tuple(range(len(self.labels)))

    @property
    def elsewhere(self) -> Any:
        """Who has the rows, where clients have their own."""
        return Holders(self) if self.labels else None

    def call(
        self, program: Callable, engine: Any, state: Any, dynamic: list, static: tuple, *rest: Any, **options: Any
    ) -> Any:
        """Call a program whose rounds leave it for the clients, which are begun where there are none with these rows."""
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, dynamic))):
            raise PVIError(
                f"runtime={type(self).__name__}(...) talks to clients, which jit, vmap and grad cannot: call pvi.update, or run, "
                "outside of them."
            )
        # What no client answers is refused before any is begun.
        engine.refuse(state)
        # Of what is called, rounds alone have a length.
        rounds = "length" in options
        if self.elsewhere is not None:
            self._line.turn_to(engine, state, rounds)
            return self.elsewhere.watched(
                state.plan, functools.partial(program, engine, state, dynamic, static, *rest, **options)
            )
        self._line.follow(engine.model)
        key = engine.model, engine.solver, engine.num_particles, _key_of(state, dynamic, static)
        self._line.attend(key, lambda: self.connect(shares_of(engine, state, dynamic, static)))
        self._line.turn_to(engine, state, rounds)
        found = jax.block_until_ready(program(engine, state, dynamic, static, *rest, **options))
        exchange = self._line.exchange
        if exchange is not None and exchange.error is not None:
            # What the program made of it since is worth nothing: the state stays what it was.
            raise exchange.error
        return found

    def hold(self, what: str, state: Any) -> None:
        """Have clients keep what a state names of latents of their own: see :meth:`numpyro_pvi.runtime.Runtime.hold`."""
        self._line.pins.pop(what, None)
        if isinstance(state.sites.local, Held):
            self._line.pins[what] = np.asarray(jax.device_get(state.sites.local.tickets))

    def connect(self, shares: list[Share]) -> Exchange:
        """Begin clients with these rows. ``shares``: one client's each. Returns the conversation with them."""
        raise NotImplementedError

    def open(self) -> Exchange:
        """Begin to talk with clients that have their own rows, in the order of :attr:`labels`.

        Returns the conversation with them.
        """
        raise NotImplementedError

    def sum_chunks(self, expect: Any, chunks: Any, chunk_group: Any, offsets: Any, working_bytes: int) -> Any:
        """What is done before and between rounds passes over the rows here, as :class:`numpyro_pvi.runtime.Vmap` does."""
        return Vmap().sum_chunks(expect, chunks, chunk_group, offsets, working_bytes)

    def map_groups(self, solve: Any, operands: Any, reads_rows: bool) -> Any:
        """Likewise."""
        return Vmap().map_groups(solve, operands, reads_rows)


def _key_of(state: Any, dynamic: list, static: tuple) -> Any:
    found = hashlib.blake2b(digest_size=16)
    own = state.sites.local.first if isinstance(state.sites.local, Held) else None
    for x in [*dynamic, *jax.tree.leaves(jax.device_get((state.packing, own)))]:
        x = np.ascontiguousarray(x)
        found.update(f"{x.dtype}{x.shape}".encode())
        found.update(x.reshape(-1).view(np.uint8).data)
    plan = dataclasses.replace(state.plan, fine=False)
    return plan, static, found.digest()


# ----------------------------------------------------------------------------------------------------------- transports


class Nearby:
    """Clients in this process, or what stands for them: a question is answered where it is sent. Implements :class:`Transport`.

    Args:
        respondents: by place, what has an ``answer(bytes)`` that returns bytes, or None for nothing.
    """

    def __init__(self, respondents: Sequence[Any]):
        self._respondents, self._answers = respondents, queue.SimpleQueue()

    def send(self, place: int, data: bytes) -> None:
        """Let a client answer."""
        with contextlib.suppress(WireError):
            answer = self._respondents[place].answer(data)
            if answer is not None:
                self._answers.put((place, answer))

    def receive(self, wait: float) -> tuple[int, bytes] | None:
        """The next answer."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Forget the clients."""
        self._respondents = []


@dataclasses.dataclass(frozen=True, eq=False)
class InProcess(ClientsRuntime):
    """Clients in this process, which talk in messages all the same: what a deployment does, without its processes.

    Args:
        wait: see :class:`Processes`.
        tries: likewise.
        through: a transport to one that takes its place, such as one that loses messages; None leaves it.
        clients: clients that have their own rows, so that the fit is given none: :class:`Client`, one a group. None deals the
            rows that the fit is given out to clients of its own. ``Streaming`` takes them in this order.
    """

    through: Callable[[Transport], Transport] | None = None
    clients: tuple[Client, ...] = ()
    _places: tuple[int, ...] = dataclasses.field(default=(), init=False, repr=False)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "clients", tuple(self.clients))
        for client in self.clients:
            client.compile_with(self._line.known)
        object.__setattr__(self, "_places", in_order(self, [client.label for client in self.clients]))

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """See :attr:`ClientsRuntime.labels`."""
        return tuple(self.clients[i].label for i in self._places)

    @property
    def came(self) -> tuple[int, ...]:
        """See :attr:`ClientsRuntime.came`."""
        return self._places

    def open(self) -> Exchange:
        """See :meth:`ClientsRuntime.open`."""
        return self._talk([self.clients[i] for i in self._places])

    def _talk(self, respondents: list[Any]) -> Exchange:
        nearby: Transport = Nearby(respondents)
        transport = nearby if self.through is None else self.through(nearby)
        return Exchange(tuple(one.label for one in respondents), transport, self.wait, self.tries)

    def connect(self, shares: list[Share]) -> Exchange:
        """See :meth:`ClientsRuntime.connect`."""
        # Programs outlive a conversation: after an error nothing is compiled again.
        return self._talk([share.respondent(self._line.known) for share in shares])


class Pipes:
    """Clients in processes of their own, one a group, over pipes; they end with this process, or when they are let go.

    Args:
        shares: what each is made from, with its label: a :class:`Share`, or a :class:`Maker`.
    """

    def __init__(self, shares: list[Any]):
        context = multiprocessing.get_context("spawn")
        self._labels = [share.label for share in shares]
        self._here, self._children = [], []
        # By place, questions without an answer, the oldest first, which alone is in the pipe.
        self._asked: dict[int, list[bytes]] = {}
        settings = settings_for_others()
        for share in shares:
            here, there = context.Pipe()
            child = context.Process(target=serve, args=(there, share, settings), daemon=True)
            self._here.append(here)
            self._start(child, share)
            there.close()
            self._children.append(child)
        _OPEN.add(self)

    def _start(self, child: Any, share: Any) -> None:
        try:
            child.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            self.close()
            raise PVIError(
                f"what client {share.label!r} is made of cannot be handed to a process of its own: {error}. The model is to be a "
                "function of a module; optimisers of NumPyro hold local functions: pass LocalELBO() as it is, or one of your own."
            ) from error

    def send(self, place: int, data: bytes) -> None:
        """Write to a client's pipe, once it has answered what was asked before; a pipe loses nothing that would be repeated."""
        asked = self._asked.setdefault(place, [])
        if data not in asked:
            asked.append(data)
            if len(asked) == 1:
                self._write(place)

    def _write(self, place: int) -> None:
        """Write to a client that has nothing to say: it reads, and neither side waits for the other."""
        try:
            self._here[place].send_bytes(self._asked[place][0])
        except OSError as error:
            raise self._gone(place) from error

    def receive(self, wait: float) -> tuple[int, bytes] | None:
        """The next answer of any client."""
        ready = multiprocessing.connection.wait(self._here, wait)
        if not ready:
            return None
        place = self._here.index(ready[0])
        try:
            data = self._here[place].recv_bytes(_MOST_BYTES)
        except (EOFError, OSError) as error:
            raise self._gone(place) from error
        asked = self._asked.get(place, [])
        del asked[:1]
        if asked:
            self._write(place)
        return (place, data) if data else None

    def _gone(self, place: int) -> ClientError:
        child = self._children[place]
        child.join(1.0)
        label = self._labels[place]
        return ClientError(
            f"the process of client {label!r} has ended (exit code {child.exitcode}). Nothing of it was absorbed; the next call "
            "begins all clients anew.",
            label,
        )

    def close(self) -> None:
        """Close the pipes, by which clients end; those that do not are killed after a second."""
        for pipe in self._here:
            pipe.close()
        for child in self._children:
            child.join(1.0)
            if child.is_alive():
                child.kill()
                child.join(1.0)
        _OPEN.discard(self)


_OPEN: weakref.WeakSet[Pipes] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pipes in list(_OPEN):
        pipes.close()


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes a client in its own process, from rows that only that one has."""

    label: Hashable
    make: Callable[[], Client]

    def respondent(self, known: dict[Any, Any]) -> Client:
        """The client. Raises PVIError for one of another label, and for what is no client."""
        client = self.make()
        if not isinstance(client, Client):
            raise PVIError(
                f"what was to make client {self.label!r} has made a {type(client).__name__}: return a Client."
            )
        if client.label != self.label:
            raise PVIError(f"what was to make client {self.label!r} has made {client.label!r}.")
        client.compile_with(known)
        return client


@dataclasses.dataclass(frozen=True)
class _Unmade:
    """Stands for a client that could not be made: it refuses every question, and says why."""

    label: Hashable
    why: str

    def answer(self, data: bytes) -> bytes:
        """The refusal."""
        head = {name: decode(data, RECORDS).fields[name] for name in ("run", "sequence")}
        return encode(Message("refusal", {**head, "label": self.label, "why": self.why[:1000]}))


def serve(pipe: Any, share: Any, settings: dict[str, Any]) -> None:
    """What a client's process does: answer until its pipe is closed.

    ``share``: what it is made from: its rows and the rest of what it is given, or what loads them.
    """
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        respondent = share.respondent({})
    except Exception as error:
        # Said to whoever asks, so that the client is named; words of others than this package may hold rows.
        words = str(error) if isinstance(error, PVIError) else "the log in its own process says why"
        logging.getLogger("numpyro_pvi").error("client %r could not be made", share.label, exc_info=error)
        respondent = _Unmade(share.label, f"it could not be made ({type(error).__name__}): {words}")
    while True:
        try:
            answer = respondent.answer(pipe.recv_bytes(_MOST_BYTES))
        except WireError:
            # As good as lost: whoever asked will ask again.
            answer = None
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            # Nothing is said too: what is asked next is written once there was an answer.
            pipe.send_bytes(answer or b"")
        except OSError:
            # Whoever asked has closed the pipe meanwhile, which ends a client.
            return


@dataclasses.dataclass(frozen=True, eq=False)
class Processes(ClientsRuntime):
    """Every group in a process of its own on this machine: ``PVI(..., runtime=Processes())``, and nothing else changes.

    The first round begins the processes, gives each its group's rows, and keeps them while the rows stay what they are; they end
    with this process, or at :meth:`close`. Model, solver and rows are handed over as ``multiprocessing`` hands them (pickled, at
    the start of a child of this process): the model is a function of a module. What is said afterwards are messages of
    :mod:`numpyro_pvi.wire`. Scripts begin under ``if __name__ == "__main__":``, as with every use of ``multiprocessing``.

    Args:
        wait: seconds after which a question is repeated; a first question compiles the client's programs.
        tries: times that a question is sent before its client counts as gone.
        clients: by label, what makes a :class:`Client` in its own process, from rows that only that process has: a function of a
            module, or a ``functools.partial`` of one. The fit is then given no rows. None deals out those that it is given.
            ``Streaming`` takes them in this order.

    Raises:
        PVIError: on construction, for a wait or a number of tries that is not positive.
    """

    clients: Mapping[Hashable, Callable[[], Client]] = dataclasses.field(default_factory=dict)
    _makers: Makers = dataclasses.field(default=None, init=False, repr=False)  # type: ignore[assignment]

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "_makers", Makers.of(self, self.clients))

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """See :attr:`ClientsRuntime.labels`."""
        return self._makers.labels

    @property
    def came(self) -> tuple[int, ...]:
        """See :attr:`ClientsRuntime.came`."""
        return self._makers.came

    def connect(self, shares: list[Share]) -> Exchange:
        """See :meth:`ClientsRuntime.connect`."""
        return self._talk(with_digests(shares))

    def open(self) -> Exchange:
        """See :meth:`ClientsRuntime.open`."""
        return self._talk(list(self._makers.each))

    def _talk(self, shares: list[Any]) -> Exchange:
        return Exchange(tuple(share.label for share in shares), Pipes(shares), self.wait, self.tries)


@dataclasses.dataclass(frozen=True)
class Makers:
    """What makes clients that have their own rows, by place. ``came``: by place, its number among those that were given."""

    each: tuple[Maker, ...] = ()
    came: tuple[int, ...] = ()

    @classmethod
    def of(cls, runtime: Any, clients: Any) -> Makers:
        """Those that a runtime is given.

        ``clients``: by label, what makes a client. Raises PVIError for what is no such mapping.
        """
        name = type(runtime).__name__
        if not isinstance(clients, Mapping):
            raise PVIError(
                f"{name}(clients={type(clients).__name__}): expected a dict of label to what makes that label's client in its own "
                "process, such as functools.partial(client_of, 'north')."
            )
        for label, make in clients.items():
            if not callable(make):
                raise PVIError(
                    f"{name}(clients={{{label!r}: {type(make).__name__}}}): expected a function that makes the client where it is "
                    "to live, such as functools.partial(client_of, 'north'); clients that are made already go with "
                    "InProcess(clients=[...])."
                )
        order = in_order(runtime, list(clients))
        made = list(clients.items())
        return cls(tuple(Maker(*made[i]) for i in order), order)

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """Of the clients, by place."""
        return tuple(maker.label for maker in self.each)


def in_order(runtime: Any, labels: list[Hashable]) -> tuple[int, ...]:
    """Places of clients in the order that a fit has groups in.

    Returns positions of the labels in that order. Raises PVIError for two of one label.
    """
    if not labels:
        return ()
    found = labels_table(labels).labels
    if len(found) != len(labels):
        twice = next(label for label in found if labels.count(label) > 1)
        raise PVIError(
            f"{type(runtime).__name__}(clients=...): two clients have the label {twice!r}; every group has one."
        )
    return tuple(labels.index(label) for label in found)
