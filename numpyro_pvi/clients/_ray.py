"""Clients in Ray's actors: workers that may die, hang, move to another machine and come back in the middle of a fit."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiling import settings_for_others
from ..errors import ClientError, PVIError, WireError
from ..factors import split_arguments
from ..wire import digest_of
from ._client import Respondent
from ._exchange import Exchange, Traffic
from ._own import Client
from ._runtimes import ClientsRuntime, Makers
from ._share import Share, with_digests

# What the runtime itself sees to.
_OWN_OPTIONS = frozenset({"max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups"})
# Seconds that an actor is given to be done with what it is at when its clients are let go.
_LAST_WAIT = 1.0


def _ray() -> Any:
    """Ray, where it is installed. Raises PVIError naming the line to install."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise PVIError("runtime=Ray(...) needs ray, which is not installed: pip install 'numpyro_pvi[ray]'.") from error


# ----------------------------------------------------------------------------------------------------------- in an actor


@dataclasses.dataclass(frozen=True)
class Order:
    """What an actor makes a client of: its share, or the share without its rows and how to load them.

    Args:
        share: all that the client is given; without arrays where they are loaded.
        load: of a label, the model's arguments with that group's rows; None where the share has them.
        shapes: shapes and dtypes of the arrays that the server's plan is made of.
        digest: of these arrays.
    """

    share: Share
    load: Callable[[Hashable], Any] | None
    shapes: tuple
    digest: bytes

    def respondent(self, known: dict[Any, Any]) -> Respondent:
        """The client. Raises ClientError for rows that are not those which the fit was planned with."""
        if self.load is None:
            return self.share.respondent(known)
        label, found = self.share.label, self.load(self.share.label)
        args, kwargs = ((), dict(found)) if isinstance(found, Mapping) else (tuple(found), {})
        given = jax.tree.map(lambda x: jnp.asarray(x) if hasattr(x, "dtype") else x, (args, kwargs))
        arrays, static = split_arguments(*given)
        arrays = [np.asarray(x) for x in arrays]
        shapes = _shapes_of(arrays)
        if static != self.share.static or shapes != self.shapes or digest_of(tuple(arrays)) != self.digest:
            what = "other numbers of the same shapes" if shapes == self.shapes else f"arrays of shapes {shapes}"
            what = "other arguments that are no arrays" if static != self.share.static else what
            raise ClientError(
                f"rows({label!r}) has loaded {what}, where the fit was planned with {self.shapes}: return the model's arguments, "
                "as a tuple or as a dict by name as they are given to run, with this group's rows in the order in which they are "
                "there.",
                label,
            )
        return dataclasses.replace(self.share, arrays=arrays).respondent(known)


def _shapes_of(arrays: list[np.ndarray]) -> tuple:
    return tuple((x.shape, x.dtype.name) for x in arrays)


class Worker:
    """What an actor is: clients of some groups, one after another asked for what they know."""

    def __init__(self, settings: dict[str, Any]):
        for name, value in settings.items():
            jax.config.update(name, value)
        # Programs outlive the clients: others of the same model and solver are not compiled again.
        self._known: dict[Any, Any] = {}
        self._clients: dict[int, Respondent] = {}
        self._failed: dict[int, Exception] = {}

    def begin(self, orders: dict[int, Any]) -> int:
        """Make clients, by their places; those that were here are forgotten.

        ``orders``: references to an :class:`Order` each, or to what makes a client that has its own rows. Returns the process
        of the actor.
        """
        self._clients, self._failed = {}, {}
        for place, reference in orders.items():
            try:
                self._clients[place] = _ray().get(reference).respondent(self._known)
            except Exception as error:
                # Said to whoever asks this client, so that it is named.
                self._failed[place] = error
        return os.getpid()

    def answer(self, place: int, data: bytes) -> bytes | None:
        """A client's answer; None where it has none, as for bytes that are no message."""
        if place in self._failed:
            raise self._failed[place]
        try:
            return self._clients[place].answer(data)
        except WireError:
            return None


# ------------------------------------------------------------------------------------------------------------ at the server


class Crew:
    """The actors of one runtime. They outlive the rows that they hold, and are replaced where they die or hang."""

    def __init__(self, options: dict[str, Any]):
        self._options, self._handles, self._session = options, {}, None
        # Times that a client was begun anew, by label.
        self.restarts: collections.Counter = collections.Counter()
        # How many of those that are in use have begun, in words.
        self.told: Callable[[], str] = str
        # Processes of those that have begun, by number.
        self.processes: dict[int, int] = {}

    def actor(self, index: int) -> Any:
        """The actor with this number, begun where there is none."""
        if index not in self._handles:
            settings = settings_for_others()
            made = _ray().remote(Worker).options(**self._options)
            self._handles[index] = made.remote(settings)
        return self._handles[index]

    def attend(self, count: int, session: Any) -> None:
        """Let actors go that nobody needs, and forget those of a session of Ray that has ended.

        ``session``: what tells this session of Ray from others.
        """
        if session != self._session:
            self._handles.clear()
            self.processes.clear()
            self._session = session
        for index in [i for i in self._handles if i >= count]:
            self.dismiss(index)

    def dismiss(self, index: int) -> None:
        """Kill an actor, if it lives."""
        handle = self._handles.pop(index, None)
        self.processes.pop(index, None)
        if handle is not None and _ray().is_initialized():
            with contextlib.suppress(Exception):
                _ray().kill(handle)

    def close(self) -> None:
        """Kill all actors."""
        for index in list(self._handles):
            self.dismiss(index)


class Actors:
    """Carries questions to clients in actors; implements :class:`numpyro_pvi.clients.Transport`.

    An actor that has died, or owes an answer and has given none for as long as ``wait``, is begun anew with its groups' rows, and
    everything that it was asked is asked again. Its clients then have no memory, which the server's questions bring along.

    ``orders``: references to what they are made of; ``wait``: seconds that each actor has for an answer, counted from when it
    was asked, had begun or answered another question; ``tries``: times that a question is asked before its client counts as
    gone.
    """

    def __init__(self, labels: tuple, orders: list[Any], crew: Crew, per_actor: int, wait: float, tries: int):
        self._labels, self._orders, self._crew, self._per_actor = labels, orders, crew, per_actor
        self._wait, self._tries = wait, tries
        # What is under way: questions by place, the time when they were handed over and how often; references and their places.
        self._frames: dict[int, bytes] = {}
        self._since: dict[int, float] = {}
        self._times: collections.Counter = collections.Counter()
        # When each actor has answered last.
        self._heard: dict[int, float] = {}
        self._places: dict[Any, tuple[int, bytes]] = {}
        # By actor: what is there once its clients are, and those whose are.
        self._begun: dict[int, Any] = {}
        self._live: set[int] = set()
        crew.told = self._told
        for index in range(math.ceil(len(labels) / per_actor)):
            self._begin(index)

    def send(self, place: int, data: bytes) -> None:
        """Hand a question over; one that is repeated is under way already."""
        if self._frames.get(place) != data:
            self._frames[place] = data
            self._times[place] = 0
            self._submit(place)

    def receive(self, wait: float) -> tuple[int, bytes] | None:
        """The next answer of any client. Actors from which none has come for too long are replaced on the way."""
        ray, until = _ray(), time.monotonic() + wait
        while self._places:
            starting = {ref: index for index, ref in self._begun.items() if index not in self._live}
            left = max(0.0, min([until, *self._due().values()]) - time.monotonic())
            ready, _ = ray.wait([*starting, *self._places], num_returns=1, timeout=left)
            if not ready:
                self._renew_silent()
                if time.monotonic() >= until:
                    return None
                continue
            if ready[0] in starting:
                self._has_begun(starting[ready[0]])
                continue
            place, question = self._places.pop(ready[0])
            try:
                data = ray.get(ready[0])
            except ray.exceptions.RayTaskError as error:
                raise self._failed(place, error) from error
            except ray.exceptions.RayError as error:
                self._renew(place // self._per_actor, f"has died ({type(error).__name__})")
                continue
            self._heard[place // self._per_actor] = time.monotonic()
            if self._frames.get(place) is question:
                del self._frames[place]
            if data is not None:
                return place, data
        return None

    def _due(self) -> dict[int, float]:
        """When each actor that owes an answer will have been silent for too long.

        One that has not begun yet waits for a place, or loads: another one would begin no sooner. Questions to an actor are
        answered one after another, so that one that answers others is at work; and one that was begun anew has all of its time
        again, whenever that was.
        """
        asked: dict[int, float] = {}
        for place in self._frames:
            index = place // self._per_actor
            if index in self._live:
                asked[index] = min(asked.get(index, math.inf), self._since[place])
        return {index: max(since, self._heard.get(index, 0.0)) + self._wait for index, since in asked.items()}

    def _renew_silent(self) -> None:
        """Replace actors that have been silent for too long, where nothing of theirs waits to be heard."""
        now = time.monotonic()
        for index in [index for index, due in self._due().items() if due <= now]:
            mine = [ref for ref, of in self._places.items() if of[0] // self._per_actor == index]
            if mine and not _ray().wait(mine, num_returns=1, timeout=0)[0]:
                self._renew(index, "has not answered")

    def _told(self) -> str:
        return f"{len(self._live)} of {len(self._begun)} workers live"

    def close(self) -> None:
        """Forget what is under way; actors that go on working on it are killed, and the others stay for the next clients."""
        ray = _ray()
        if self._places and ray.is_initialized():
            _, busy = ray.wait(list(self._places), num_returns=len(self._places), timeout=_LAST_WAIT)
            for index in {self._places[ref][0] // self._per_actor for ref in busy}:
                self._crew.dismiss(index)
        self._frames, self._places = {}, {}

    def _has_begun(self, index: int) -> None:
        """From now on its answers can be waited for; one that died on the way is found by what it was asked."""
        self._live.add(index)
        with contextlib.suppress(Exception):
            self._crew.processes[index] = _ray().get(self._begun[index])
        for place in self._frames:
            if place // self._per_actor == index:
                self._since[place] = time.monotonic()

    def _begin(self, index: int) -> None:
        self._live.discard(index)
        places = range(index * self._per_actor, min((index + 1) * self._per_actor, len(self._labels)))
        self._begun[index] = self._crew.actor(index).begin.remote({place: self._orders[place] for place in places})

    def _submit(self, place: int) -> None:
        self._times[place] += 1
        self._since[place] = time.monotonic()
        actor = self._crew.actor(place // self._per_actor)
        self._places[actor.answer.remote(place, self._frames[place])] = place, self._frames[place]

    def _renew(self, index: int, why: str) -> None:
        """A new actor in the place of one, with the same rows and the same questions."""
        mine = [place for place in self._frames if place // self._per_actor == index]
        for place in mine:
            if self._times[place] >= self._tries:
                raise ClientError(
                    f"the actor of client {self._labels[place]!r} {why}, and so have those that took its place: its question was "
                    f"asked {self._tries} times. Nothing of it was absorbed; look at the worker's log, or pass more tries.",
                    self._labels[place],
                )
        self._crew.dismiss(index)
        self._places = {ref: of for ref, of in self._places.items() if of[0] // self._per_actor != index}
        self._begin(index)
        for place in mine:
            label = self._labels[place]
            self._crew.restarts[label] += 1
            logging.getLogger("numpyro_pvi").warning("the actor of client %r %s and is begun anew", label, why)
            self._submit(place)

    def _failed(self, place: int, error: Any) -> ClientError:
        label, cause = self._labels[place], getattr(error, "cause", None) or error
        return ClientError(
            f"client {label!r} has failed with {type(cause).__name__}: {str(cause)[:1000]}. Nothing of it was absorbed.",
            label,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Ray(ClientsRuntime):
    """Groups in actors of Ray, on this machine or on a cluster: ``PVI(..., runtime=Ray())``, and nothing else changes.

    Needs the extra: ``pip install 'numpyro_pvi[ray]'``. The first round begins the actors, gives each its groups' rows by
    reference, and keeps them while the rows stay what they are; they end with this program, or at :meth:`close`. Where Ray does
    not run yet, it is begun on this machine, without dashboard and usage statistics; ``ray.init(...)`` before that says otherwise.

    An actor that dies, with its machine or without, or that does not answer within ``wait`` seconds is replaced by a new one with
    the same rows, its clients are counted in :attr:`restarts`, and it is asked again. Sites, memories and versions are the
    server's: every question carries them, so that nothing is lost with an actor and nothing is absorbed twice.

    Args:
        wait: seconds without any answer after which actors that owe one are replaced; longer than the longest visit, and than an
            actor takes to begin (JAX is imported there, and programs are compiled).
        tries: times that a question is asked before its client counts as gone.
        groups_per_actor: how many groups share an actor, which answers for one after another.
        rows: None, and an actor is sent its groups' rows; or a function of a label, called in the actor, that loads them: it
            returns the model's arguments as a tuple, or as a dict by name, with that group's rows only, in their order. They are
            compared with those that the fit was planned with.
        options: of every actor, as Ray takes them in ``.options(...)``: ``{"num_gpus": 1}``, ``{"resources": {"hospital": 1}}``. By
            default actors claim no CPU, for one that waits for a free CPU would wait without a word.
        clients: in place of ``rows``, by label what makes a :class:`Client` in its actor, from rows that only that one has, as of
            :class:`Processes`. The fit is then given no rows.

    Raises:
        PVIError: on construction, where ray is not installed, and for values outside these ranges.
    """

    groups_per_actor: int = 1
    rows: Callable[[Hashable], Any] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clients: Mapping[Hashable, Callable[[], Client]] = dataclasses.field(default_factory=dict)
    _makers: Makers = dataclasses.field(default=None, init=False, repr=False)  # type: ignore[assignment]

    def __post_init__(self):
        super().__post_init__()
        count = self.groups_per_actor
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise PVIError(f"Ray(groups_per_actor={count!r}): expected a positive int.")
        if self.rows is not None and not callable(self.rows):
            raise PVIError(
                f"Ray(rows={self.rows!r}): expected None, or a function of a label that loads that group's rows."
            )
        if not isinstance(self.options, Mapping):
            raise PVIError(
                f"Ray(options={self.options!r}): expected a dict of Ray's options, such as {{'num_gpus': 1}}."
            )
        if own := sorted(_OWN_OPTIONS & self.options.keys()):
            raise PVIError(
                f"Ray(options={{{own[0]!r}: ...}}): actors are begun anew, and asked one question at a time, by this runtime, "
                "which counts both. Leave it out; tries says how often."
            )
        object.__setattr__(self, "_makers", Makers.of(self, self.clients))
        if self.rows is not None and self._makers.each:
            raise PVIError(
                "Ray(rows=..., clients=...): rows= loads in the actor what the fit is planned with here, and clients= is for a fit "
                "that is given no rows. Leave one out."
            )
        _ray()

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """See :attr:`ClientsRuntime.labels`."""
        return self._makers.labels

    @property
    def came(self) -> tuple[int, ...]:
        """See :attr:`ClientsRuntime.came`."""
        return self._makers.came

    @functools.cached_property
    def _crew(self) -> Crew:
        return Crew({"num_cpus": 0, "max_restarts": 0, **self.options})

    @property
    def restarts(self) -> dict[Hashable, int]:
        """Times that each client was begun anew while it was asked, by label; those that never were are left out."""
        return dict(self._crew.restarts)

    @property
    def processes(self) -> dict[int, int]:
        """Process ids of the actors that have begun, on the machines where they are."""
        return dict(self._crew.processes)

    @property
    def traffic(self) -> Traffic:
        """Round trips, messages and bytes that were really sent so far, and clients begun anew."""
        return super().traffic._replace(restarts=sum(self._crew.restarts.values()))

    @property
    def workers(self) -> str:
        """What a progress bar says: how many actors there are, how many have begun, and what was sent."""
        exchange = self._line.exchange
        told = [super().workers] if exchange is None else [self._crew.told(), super().workers]
        return ", ".join(told)

    def close(self) -> None:
        """End the clients and their actors; the next round begins them anew. Ray itself goes on: ``ray.shutdown()`` ends it."""
        super().close()
        self._crew.close()

    def connect(self, shares: list[Share]) -> Exchange:
        """See :meth:`ClientsRuntime.connect`."""
        return self._hire(
            tuple(share.label for share in shares), [self._order(share) for share in with_digests(shares)]
        )

    def open(self) -> Exchange:
        """See :meth:`ClientsRuntime.open`."""
        return self._hire(self.labels, list(self._makers.each))

    def _hire(self, labels: tuple, orders: list[Any]) -> Exchange:
        """Have actors make clients of what these are made of."""
        ray = _ray()
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        try:
            orders = [ray.put(order) for order in orders]
        except (TypeError, AttributeError) as error:
            raise PVIError(f"what clients are made of cannot be handed to actors: {error}") from error
        here = ray.get_runtime_context()
        self._crew.attend(math.ceil(len(labels) / self.groups_per_actor), (here.get_node_id(), here.get_job_id()))
        actors = Actors(labels, orders, self._crew, self.groups_per_actor, self.wait, self.tries)
        return Exchange(labels, actors, self.wait, self.tries)

    def _order(self, share: Share) -> Order:
        shapes, digest = _shapes_of(share.arrays), digest_of(tuple(share.arrays))
        kept = share if self.rows is None else dataclasses.replace(share, arrays=[])
        return Order(kept, self.rows, shapes, digest)
