"""An owner's side: a ClientApp that answers from rows of its own, whether its process lives on between two questions or not."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Hashable
from typing import Any

import jax

from .._compiling import use_compilation_cache
from ..clients import Client, Respondent
from ..errors import PVIError, WireError
from ..handlers import Partition
from ..wire import Message
from ._messages import ASK, RECORD, WHO, flwr, pack, unpack

# Clients of this process, by the app and the node that they answer for, with the run and with what they were when they were made:
# where a process lives on, nothing is loaded or compiled again. What they remember is always the node's own state.
_LIVING: dict[tuple[str, int], tuple[int, Client, bytes]] = {}


def label_of(context: Any) -> Hashable:
    """The label of an owner whose node is given one: ``label`` in its node config, else ``partition-id``.

    Args:
        context: Flower's.

    Raises:
        PVIError: where neither is there.
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


@dataclasses.dataclass(frozen=True)
class Owner:
    """What a ClientApp does with Flower's messages. It is sent to wherever clients run, and so holds no client.

    Args:
        model: see :func:`client_app`.
        guide: likewise.
        load_rows: likewise.
        solver: likewise.
        loss: likewise.
        label: likewise; a function of the context.
        cache: likewise.
        settings: of JAX, as they were where the app was made.
        name: tells this app from others of the same process.
    """

    model: Any
    guide: Any
    load_rows: Callable[[Any], Any]
    solver: Any
    loss: Any
    label: Callable[[Any], Hashable]
    cache: Any
    settings: dict[str, Any]
    name: str

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
        if found is not None and not isinstance(client, _Failed):
            context.state[RECORD] = app.ConfigRecord({"client": client.save()})
        return app.Message(pack(found), reply_to=message)

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
                client = self._made(label, context)
            except PVIError as error:
                return _Failed(label, error)
            except Exception as error:
                # Its words may hold what it has read, and they would go to the server.
                logging.getLogger("numpyro_pvi").exception("the rows of client %r could not be loaded", label)
                why = f"its rows could not be loaded ({type(error).__name__}): the log at its own node says more"
                return _Failed(label, PVIError(why))
            first = client.save()
            _LIVING[self.name, context.node_id] = context.run_id, client, first
        kept = context.state.get(RECORD, {}).get("client", first)
        try:
            client.restore(kept)
        except PVIError as error:
            return _Failed(label, error)
        return client

    def _made(self, label: Hashable, context: Any) -> Client:
        load = lambda: self.load_rows(context)  # noqa: E731
        return Client(self.model, self.guide, label, load_rows=load, solver=self.solver, loss=self.loss)


def client_app(
    model: Callable | Partition,
    guide: Any,
    load_rows: Any,
    *,
    solver: Any = None,
    loss: Any = None,
    label: Callable[[Any], Hashable] | None = None,
    cache: Any = None,
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

    Returns:
        The app.

    Raises:
        PVIError: where flwr is not installed, and for a ``load_rows`` that is no function.
    """
    app = flwr("flwr.clientapp").ClientApp()
    if not callable(load_rows):
        raise PVIError(
            f"client_app(load_rows={type(load_rows).__name__}): expected a function of Flower's context that returns the model's "
            "arguments with this owner's rows."
        )
    settings = {"jax_enable_x64": bool(jax.config.jax_enable_x64)}  # type: ignore[attr-defined]
    owner = Owner(model, guide, load_rows, solver, loss, label or label_of, cache, settings, secrets.token_hex(8))
    app.query(WHO.partition(".")[2])(owner.introduce)
    app.query(ASK.partition(".")[2])(owner.answer)
    return app
