"""An owner's side: a ClientApp that answers from rows of its own, alone or in sums, whether its process lives on or not."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._compiling import settings_for_others, use_compilation_cache
from ..clients import Client, Respondent, Summand
from ..errors import PVIError, WireError
from ..handlers import Partition
from ..wire import Message
from ._messages import ASK, CLIP, MODULUS, QUESTION, RECORD, TARGET, WHO, flwr, pack, unpack

# Clients of this process, by the app and the node that they answer for, with the run and with what they were when they were made:
# where a process lives on, nothing is loaded or compiled again. What they remember is always the node's own state.
_LIVING: dict[tuple[str, int], tuple[int, Client, bytes]] = {}


def label_of(context: Any) -> Hashable:
    """The label of an owner whose node is given one: ``label`` in its node config, else ``partition-id``.

    Raises PVIError where neither is there.
    """
    for name in ("label", "partition-id"):
        if name in context.node_config:
            return context.node_config[name]
    raise PVIError(
        f"the node has no label: begin it with --node-config 'label=\"north\"', or pass client_app(..., label=a function of the "
        f"context). Its node config has {sorted(context.node_config)}."
    )


class _Failed(Respondent):
    """Says why there is no client with these rows, to every question; what one has kept before stays as it is."""

    def __init__(self, label: Hashable, error: Exception):
        super().__init__(label, None, {})
        self._error = error

    def _recall(self) -> None:
        raise PVIError(str(self._error)) from self._error

    def _reply(self, ask: Message) -> tuple[str, dict[str, Any], tuple]:
        raise PVIError(str(self._error)) from self._error

    def contribute(self, question: bytes, capacity: int) -> np.ndarray:
        """It has nothing to add. Raises PVIError always, saying why."""
        raise PVIError(str(self._error)) from self._error


@dataclasses.dataclass(frozen=True)
class Made:
    """Makes one owner's client."""

    model: Any
    guide: Any
    load_rows: Callable[[Any], Any]
    solver: Any
    loss: Any
    secret: Callable[[Any], bytes] | None
    like: Any

    def __call__(self, label: Hashable, context: Any, kind: type[Client]) -> Client:
        load = lambda: self.load_rows(context)  # noqa: E731
        secret = None if self.secret is None else self.secret(context)
        made = {"load_rows": load, "solver": self.solver, "loss": self.loss, "secret": secret, "like": self.like}
        # One of its own: it is set up with the shapes of its owner's rows, and a process may answer for several.
        return kind(self.model, copy.copy(self.guide), label, **made)


@dataclasses.dataclass(frozen=True)
class Owner:
    """What a ClientApp does with Flower's messages. It is sent to wherever clients run, and so holds no client.

    ``make``: makes the client of a label, a context and a kind of client; ``label``: see :func:`client_app`; a function of the
    context; ``settings``: of JAX, as they were where the app was made; ``name``: tells this app from others of the same
    process.
    """

    make: Callable[[Hashable, Any, type[Client]], Client]
    label: Callable[[Any], Hashable]
    cache: Any = None
    keep: Any = None
    secure: bool | Callable[[Any], bool] = False
    least: int = 3
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

    def introduce(self, message: Any, context: Any) -> Any:
        """Say whose rows are here. No row is loaded for it."""
        data = unpack(message.content)
        found = None if data is None else Respondent(self.label(context), None, {}).answer(data)
        return flwr("flwr.app").Message(pack(found), reply_to=message)

    def answer(self, message: Any, context: Any) -> Any:
        """Answer a question, from where the last one ended."""
        data = unpack(message.content)
        client = self._client(context)
        try:
            found = None if data is None else client.answer(data)
        except WireError:
            # As good as lost: whoever asked will ask again.
            found = None
        app = flwr("flwr.app")
        if found is not None:
            self._keep(client, context)
        return app.Message(pack(found), reply_to=message)

    def contribute(self, message: Any, context: Any) -> Any:
        """What the mod masks: whole numbers, as floats."""
        common, compat = flwr("flwr.common"), flwr("flwr.compat.common.recorddict_compat")
        question = compat.recorddict_to_fitins(message.content, True).config[QUESTION]
        client: Any = self._client(context)
        numbers = client.contribute(question, CLIP)
        self._keep(client, context)
        # Everybody counts the same, and nothing goes in the open beside the numbers.
        status = common.Status(common.Code.OK, "")
        said = common.FitRes(status, common.ndarrays_to_parameters([numbers.astype(np.float64)]), 1, {})
        return flwr("flwr.app").Message(compat.fitres_to_recorddict(said, False), reply_to=message)

    def guard(self, message: Any, context: Any, call_next: Any) -> Any:
        """Flower's SecAgg+ mod, for an owner who is heard in sums, and a server that asks for no less hiding than agreed."""
        constants = flwr("flwr.common.secure_aggregation.secaggplus_constants")
        key, stage = constants.Key, constants.Stage
        if not self.in_sums(context):
            raise PVIError("this owner's client answers one by one, and adds to no sum: client_app(..., secure=True).")
        asked = message.content.config_records.get(constants.RECORD_KEY_CONFIGS, {})
        if key.STAGE not in asked:
            raise PVIError("clients that are heard in sums only answer a training message within SecAgg+ alone.")
        if asked[key.STAGE] == stage.SETUP:
            agreed = {key.TARGET_RANGE: TARGET, key.MOD_RANGE: MODULUS, key.CLIPPING_RANGE: float(CLIP)}
            other = [name for name, value in (agreed | {key.MAX_WEIGHT: 1.0}).items() if asked.get(name) != value]
            if other or asked[key.THRESHOLD] < self.least:
                raise PVIError(
                    f"the server asks for a sum of {asked[key.THRESHOLD]} clients or more, and this one takes part in sums of "
                    f"{self.least} or more (client_app(least=)); settings that differ: {other}."
                )
        if asked[key.STAGE] == stage.UNMASK:
            both = set(asked[key.ACTIVE_NODE_ID_LIST]) & set(asked[key.DEAD_NODE_ID_LIST])
            if both:
                raise PVIError("the server asks for shares of both masks of a client, which would show what it said.")
        return flwr("flwr.client.mod.secure_aggregation").secaggplus_mod(message, context, call_next)

    def in_sums(self, context: Any) -> bool:
        """Whether the client is heard in sums only."""
        return bool(self.secure(context)) if callable(self.secure) else self.secure

    def _keep(self, client: Respondent, context: Any) -> None:
        """Leave what a client remembers in its node's state; what one has kept before stays where there is no client now."""
        if isinstance(client, _Failed):
            return
        kept = client.save()
        context.state[RECORD] = flwr("flwr.app").ConfigRecord({"client": kept})
        if (file := self._file(client.label, context)) is not None:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # A process that is killed leaves the old one or the new one.
            half = file.with_suffix(".half")
            with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(kept)
            half.replace(file)

    def _kept(self, label: Hashable, context: Any) -> bytes | None:
        """What the client of this run remembers: its node's state, or where the node has lost it, the owner's own file."""
        found = context.state.get(RECORD, {}).get("client")
        file = self._file(label, context) if found is None else None
        return file.read_bytes() if file is not None and file.exists() else found

    def _recount(self, client: Any, context: Any) -> None:
        """Have a client that is heard in sums know what other runs have released of its rows, as the owner's folder has it."""
        file = self._file(client.label, context) if self.in_sums(context) else None
        if file is not None:
            for other in file.parent.glob(f"*-{file.name.rpartition('-')[2]}"):
                try:
                    client.recount(other.read_bytes())
                except WireError as error:
                    raise PVIError(
                        f"{other.name}, in the folder of client_app(keep=), holds counts of what was released of these rows, and "
                        f"cannot be read ({error}): move it away only where they are counted otherwise."
                    ) from error

    def _file(self, label: Hashable, context: Any) -> Path | None:
        folder = self.keep(context) if callable(self.keep) else self.keep
        if folder is None:
            return None
        name = hashlib.sha256(f"{type(label).__name__} {label}".encode()).hexdigest()[:16]
        return Path(folder).expanduser() / f"{context.run_id}-{name}.pvi"

    def _client(self, context: Any) -> Respondent:
        for name, value in self.settings.items():
            if jax.config.values[name] != value:  # type: ignore[attr-defined]
                jax.config.update(name, value)
        if self.cache is not None:
            use_compilation_cache(self.cache(context) if callable(self.cache) else self.cache)
        label = self.label(context)
        run, client, first = _LIVING.get((self.name, context.node_id), (None, None, b""))
        if client is None or run != context.run_id or client.label != label:
            for of in [key for key, entry in _LIVING.items() if key[0] == self.name and entry[0] != context.run_id]:
                del _LIVING[of]
            try:
                client = self.make(label, context, Summand if self.in_sums(context) else Client)
                self._recount(client, context)
            except PVIError as error:
                return _Failed(label, error)
            except Exception as error:
                # Its words may hold what it has read, and they would go to the server.
                logging.getLogger("numpyro_pvi").exception("the rows of client %r could not be loaded", label)
                why = f"its rows could not be loaded ({type(error).__name__}): the log at its own node says more"
                return _Failed(label, PVIError(why))
            first = client.save()
            _LIVING[self.name, context.node_id] = context.run_id, client, first
        kept = self._kept(label, context) or first
        try:
            if kept != client.save():
                client.restore(kept)
        except PVIError as error:
            return _Failed(label, error)
        return client


def app_of(owner: Owner) -> Any:
    """The ClientApp of an owner. Returns Flower's ``ClientApp``."""
    app = flwr("flwr.clientapp").ClientApp()
    app.query(WHO.partition(".")[2])(owner.introduce)
    app.query(ASK.partition(".")[2])(owner.answer)
    if owner.secure is not False:
        app.train(mods=[owner.guard])(owner.contribute)
    return app


def client_app(
    model: Callable | Partition,
    guide: Any,
    load_rows: Any,
    *,
    solver: Any = None,
    loss: Any = None,
    label: Callable[[Any], Hashable] | None = None,
    cache: Any = None,
    keep: Any = None,
    secure: bool | Callable[[Any], bool] = False,
    least: int = 3,
    secret: Callable[[Any], bytes] | None = None,
    like: Any = None,
) -> Any:
    """A ``ClientApp`` of Flower that answers for one owner's rows.

    It answers what :class:`PVIStrategy` (or ``PVI(..., runtime=Flower(grid=grid))``) asks, as every
    :class:`numpyro_pvi.clients.Client` does: no answer holds a row, and a question that is heard twice gets the same answer, to
    the byte. What it has to remember from one question to the next (its solver's memory, what its rows are to be taken for, its
    last answer) is in the node's ``context.state``, as the bytes of one message of :mod:`numpyro_pvi.wire`; nothing is pickled. A
    process that ends after every message, as Flower's do where it is deployed, goes on from there with a newly made client; one
    that lives on, as in a simulation, keeps its rows and programs as well. Needs the extra:
    ``pip install 'numpyro_pvi[flower]'``.

    Args:
        model: the server's NumPyro model, or a :class:`numpyro_pvi.Partition` of it that names the plate.
        guide: a Gaussian guide of it.
        load_rows: a function, called with Flower's ``Context``; returns the model's positional arguments with this owner's rows, as
            a tuple, or a pair of that and a dict of keyword arguments.
        solver: the server's local solver.
        loss: the server's; it gives the number of particles where the loss is Monte Carlo.
        label: function of the context that gives the owner's label; by default ``label`` in the node's config, else
            ``partition-id``. It names the group, and by it a node is found again that has come back under another id.
        cache: folder of compiled programs, or a function of the context that gives one: see
            :func:`numpyro_pvi.use_compilation_cache`. Without it, a process that ends after every message compiles for every
            message. It should be the owner's own: programs hold what a model closes over.
        keep: folder of the owner's own, or a function of the context that gives one, in which what the client remembers lies as
            well, in a file a run and label that nobody else may read: a node whose process has ended (``flower-supernode`` has its
            state in memory alone) goes on where it was when it is begun again. A client with ``secure`` needs it for that: nobody
            else knows its site. Others are told anew, and sent the server's copy of their solver's memory. Under a solver that
            is ``private``, counts of what earlier runs have released in sums are taken over from the folder.
        secure: whether the client is heard in sums only, through Flower's SecAgg+ mod, by a ``PVIStrategy(secure=True)``; or a
            function of the context that says so, for an app that serves both. It is then a :class:`numpyro_pvi.clients.Summand`,
            which answers no look and no visit on its own; another run begins it anew. ``train`` messages are the mod's then.
        least: number of clients below which no sum shows; the client takes part in no other. Of two clients in a sum each can tell
            the other's part.
        secret: under a solver that is ``private``, a function of the context that returns the owner's secret: see
            :class:`numpyro_pvi.clients.Client`. It is to be the same in every process that answers for these rows.
        like: under a solver that is ``private``, the model's arguments with rows that everybody may know: likewise.

    Returns:
        The app.

    Raises:
        PVIError: where flwr is not installed, for a ``load_rows`` that is no function, and for a ``least`` below 2.
    """
    flwr("flwr.clientapp")
    if not callable(load_rows):
        raise PVIError(
            f"client_app(load_rows={type(load_rows).__name__}): expected a function of Flower's context that returns the model's "
            "arguments with this owner's rows."
        )
    if isinstance(least, bool) or not isinstance(least, int) or least < 2:
        raise PVIError(
            f"client_app(least={least!r}): expected an int of 2 or more; a sum of one client is what it says."
        )
    settings = settings_for_others()
    make = Made(model, guide, load_rows, solver, loss, secret, like)
    return app_of(Owner(make, label or label_of, cache, keep, secure, least, settings))
