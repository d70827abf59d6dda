"""Flower's SecAgg+ as what adds clients' numbers: the mod at the clients, the workflow at the server, and whole numbers between."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from ..clients import Nearby, Summand, Summed, Transport
from ..errors import ClientError, PVIError
from ._messages import RECORD, flwr, pack, unpack

# Questions that clients answer one by one, and where one to all of them is.
_WHO, _ASK, _QUESTION = "pvi_summed_who", "pvi_summed", "question"
# The mod takes numbers within the clipping range to whole ones of the target range: with twice the clipping range for the target
# range a whole number is taken to itself, and nothing is left to its rounding by chance.
_CLIP = 1 << 29
_TARGET, _MODULUS = 2 * _CLIP, 1 << 40
# Clients whose sum stays below the modulus.
_MOST_CLIENTS = _MODULUS // _TARGET - 1

# ------------------------------------------------------------------------------------------------------ the client's side

# Clients of this process, by app and node, with the run that they belong to and what they were when they were made: where a process
# lives on, nothing is loaded or compiled again. What they remember is the node's own state.
_LIVING: dict[tuple[str, int], tuple[int, Summand, bytes]] = {}
_KEPT = "summand"


@dataclasses.dataclass(frozen=True)
class _Owner:
    """What a ClientApp does with messages. It is sent to wherever clients run, and so holds no client."""

    make: Callable[[Any], Summand]
    least: int
    name: str
    settings: dict[str, Any]

    def client(self, context: Any) -> Summand:
        for name, value in self.settings.items():
            if jax.config.values[name] != value:  # type: ignore[attr-defined]
                jax.config.update(name, value)
        run, found, first = _LIVING.get((self.name, context.node_id), (None, None, b""))
        if found is None or run != context.run_id:
            found = self.make(context)
            first = found.save()
            _LIVING[self.name, context.node_id] = context.run_id, found, first
        kept = context.state.get(RECORD, {}).get(_KEPT, first)
        if kept != found.save():
            found.restore(kept)
        return found

    def keep(self, context: Any, client: Summand) -> None:
        """Leave what a client remembers in its node's state."""
        context.state[RECORD] = flwr("flwr.app").ConfigRecord({_KEPT: client.save()})

    def introduce(self, message: Any, context: Any) -> Any:
        app = flwr("flwr.app")
        label = self.client(context).label
        return app.Message(app.RecordDict({RECORD: app.ConfigRecord({"label": label})}), reply_to=message)

    def answer(self, message: Any, context: Any) -> Any:
        data = unpack(message.content)
        client = self.client(context)
        found = None if data is None else client.answer(data)
        self.keep(context, client)
        return flwr("flwr.app").Message(pack(found), reply_to=message)

    def contribute(self, message: Any, context: Any) -> Any:
        """What the mod masks: whole numbers, as floats."""
        common, compat = flwr("flwr.common"), flwr("flwr.compat.common.recorddict_compat")
        question = compat.recorddict_to_fitins(message.content, True).config[_QUESTION]
        client = self.client(context)
        numbers = client.contribute(question, _CLIP)
        self.keep(context, client)
        # Everybody counts the same, and nothing goes in the open beside the numbers.
        status = common.Status(common.Code.OK, "")
        said = common.FitRes(status, common.ndarrays_to_parameters([numbers.astype(np.float64)]), 1, {})
        return flwr("flwr.app").Message(compat.fitres_to_recorddict(said, False), reply_to=message)

    def guard(self, message: Any, context: Any, call_next: Any) -> Any:
        """Flower's SecAgg+ mod, for a server that asks for no less hiding than agreed."""
        constants = flwr("flwr.common.secure_aggregation.secaggplus_constants")
        key, stage = constants.Key, constants.Stage
        asked = message.content.config_records.get(constants.RECORD_KEY_CONFIGS, {})
        if key.STAGE not in asked:
            raise PVIError("clients that are heard in sums only answer a training message within SecAgg+ alone.")
        if asked[key.STAGE] == stage.SETUP:
            agreed = {key.TARGET_RANGE: _TARGET, key.MOD_RANGE: _MODULUS, key.CLIPPING_RANGE: float(_CLIP)}
            other = [name for name, value in (agreed | {key.MAX_WEIGHT: 1.0}).items() if asked.get(name) != value]
            if other or asked[key.THRESHOLD] < self.least:
                raise PVIError(
                    f"the server asks for a sum of {asked[key.THRESHOLD]} clients or more, and this one takes part in sums of "
                    f"{self.least} or more (summed_client_app(least=)); settings that differ: {other}."
                )
        if asked[key.STAGE] == stage.UNMASK:
            both = set(asked[key.ACTIVE_NODE_ID_LIST]) & set(asked[key.DEAD_NODE_ID_LIST])
            if both:
                raise PVIError("the server asks for shares of both masks of a client, which would show what it said.")
        return flwr("flwr.client.mod.secure_aggregation").secaggplus_mod(message, context, call_next)


def summed_client_app(make: Callable[[Any], Summand], *, least: int = 3) -> Any:
    """A ``ClientApp`` of Flower for one client that is heard in sums only, through the SecAgg+ mod.

    What the client has to remember (its site, its solver's memory, what it said last) is in the node's ``context.state``, as the
    bytes of one message of :mod:`numpyro_pvi.wire`: where a process ends after every message, as Flower's do when deployed, a
    client that is made anew goes on from there. Another run begins anew.

    Args:
        make: a function of Flower's ``Context`` that returns the :class:`numpyro_pvi.clients.Summand`, which loads its own rows.
        least: number of clients below which no sum shows; the client takes part in no other. Of two clients in a sum each can tell
            the other's part.

    Returns:
        The app.

    Raises:
        PVIError: where flwr is not installed, and for a ``least`` below 2.
    """
    if isinstance(least, bool) or not isinstance(least, int) or least < 2:
        raise PVIError(
            f"summed_client_app(least={least!r}): expected an int of 2 or more; a sum of one client is what it says."
        )
    app = flwr("flwr.clientapp").ClientApp()
    settings = {"jax_enable_x64": bool(jax.config.jax_enable_x64)}  # type: ignore[attr-defined]
    owner = _Owner(make, least, secrets.token_hex(8), settings)
    app.query(_WHO)(owner.introduce)
    app.query(_ASK)(owner.answer)
    app.train(mods=[owner.guard])(owner.contribute)
    return app


# ------------------------------------------------------------------------------------------------------ the server's side


@dataclasses.dataclass(frozen=True)
class _Node:
    """A node that is asked in the open, and waited for; answers as a client in this process does."""

    sums: SecAggSums
    node: int

    def answer(self, data: bytes) -> bytes | None:
        replies = self.sums.ask(_ASK, pack(data), [self.node])
        return unpack(replies[0][1]) if replies else None


class SecAggSums:
    """Sums of clients at Flower's nodes, by its SecAgg+: implements :class:`numpyro_pvi.clients.SecureSum`.

    The server sees public keys, encrypted shares, masked numbers and the sum. A client that is gone before its masked numbers have
    come is left out, with its masks taken out of the sum; with fewer clients than the threshold nothing is unmasked at all.

    Args:
        grid: Flower's, of a ServerApp whose nodes run :func:`summed_client_app`.
        threshold: clients without whom nothing is unmasked: how many, or a share of all, at least 2.
        timeout: seconds to wait for a message's answers; None waits for ever, and a client that is gone is never missed.

    Raises:
        PVIError: where flwr is not installed.
    """

    capacity = _CLIP

    def __init__(self, grid: Any, *, threshold: int | float = 0.75, timeout: float | None = 600.0):
        flwr("flwr.server.workflow")
        self.grid, self.threshold, self.timeout = grid, threshold, timeout
        self._nodes: tuple[int, ...] = ()
        self._labels: tuple[Hashable, ...] = ()
        self._round = 0

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """Of the clients: see :class:`numpyro_pvi.clients.SecureSum`."""
        self._meet()
        return self._labels

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ids of the nodes, by place."""
        self._meet()
        return self._nodes

    def _meet(self) -> None:
        if self._nodes:
            return
        found = {n: x[RECORD]["label"] for n, x in self.ask(_WHO, pack(None), list(self.grid.get_node_ids()))}
        self._nodes = tuple(sorted(found, key=lambda node: (str(found[node]), node)))
        self._labels = tuple(found[node] for node in self._nodes)
        if len(set(self._labels)) < len(found) or not 2 <= len(found) <= _MOST_CLIENTS:
            self._nodes = ()
            raise ClientError(
                f"nodes answer for the clients {', '.join(map(repr, sorted(found.values(), key=str)))}: a sum is of 2 to "
                f"{_MOST_CLIENTS} clients, each with a label of its own."
            )

    def ask(self, action: str, content: Any, nodes: list[int]) -> list[tuple[int, Any]]:
        """Ask nodes something that no sum is made of.

        Args:
            action: of the app's query.
            content: what is sent, Flower's ``RecordDict``.
            nodes: their ids.

        Returns:
            Pairs of a node and what it answers.
        """
        app = flwr("flwr.app")
        sent = [app.Message(content, dst_node_id=node, message_type=f"query.{action}") for node in nodes]
        replies = self.grid.send_and_receive(sent, timeout=self.timeout)
        return [(x.metadata.src_node_id, x.content) for x in replies if not x.has_error()]

    def open(self) -> Transport:
        """See :class:`numpyro_pvi.clients.SecureSum`."""
        return Nearby([_Node(self, node) for node in self.nodes])

    def sum(self, question: bytes) -> Summed | None:
        """See :class:`numpyro_pvi.clients.SecureSum`."""
        self._round += 1
        strategy = _strategy()(self.nodes, question)
        context = _context(strategy, self._round)
        kept: dict[str, Any] = {"quantization_range": _TARGET, "modulus_range": _MODULUS, "max_weight": 1.0}
        kept |= {"clipping_range": float(_CLIP), "timeout": self.timeout}
        _workflow()(1.0, self.threshold, **kept)(self.grid, context)
        if strategy.found is None:
            return None
        mean, who = strategy.found
        total = np.asarray(mean, np.float64) * len(who)
        numbers = np.rint(total)
        # What masks are left in is no sum of so many clients' whole numbers.
        torn = np.abs(total - numbers) > 1e-3
        if np.any(torn) or np.any(np.abs(numbers) > len(who) * _CLIP):
            raise ClientError("the masks did not go out of the sum, which is of no use. Nothing of it was absorbed.")
        return Summed(numbers.astype(np.int64), tuple(sorted(self.nodes.index(node) for node in who)))

    def close(self) -> None:
        """Nodes are not this process's to end."""


@functools.cache
def _strategy() -> Any:
    """What Flower's workflow asks for clients and gives the sum to."""
    common, server = flwr("flwr.common"), flwr("flwr.server.strategy")

    class Once(server.FedAvg):
        """One question to all, and what came of it."""

        def __init__(self, nodes: tuple[int, ...], question: bytes):
            super().__init__()
            self.nodes, self.question, self.found = nodes, question, None

        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list:
            del server_round, client_manager
            asked = common.FitIns(parameters, {_QUESTION: self.question})
            return [(_proxy(node), asked) for node in self.nodes]

        def aggregate_fit(self, server_round: int, results: list, failures: list) -> tuple:
            del server_round, failures
            (mean,) = common.parameters_to_ndarrays(results[0][1].parameters)
            self.found = mean, tuple(proxy.node_id for proxy, _ in results)
            return None, {}

    return Once


@dataclasses.dataclass
class _Proxy:
    """What the workflow reads of a client."""

    node_id: int


def _proxy(node: int) -> Any:
    return _Proxy(node)


@functools.cache
def _workflow() -> Any:
    """Flower's workflow, which also goes on without clients that are gone before they have given out shares."""
    flow = flwr("flwr.server.workflow")

    class Pruned(flow.SecAggPlusWorkflow):
        """No mask is of a client that has no key, or has given nobody shares of it: it is as if it had not been asked."""

        def setup_stage(self, grid: Any, context: Any, state: Any) -> bool:
            return super().setup_stage(grid, context, state) and self._prune(state)

        def share_keys_stage(self, grid: Any, context: Any, state: Any) -> bool:
            return super().share_keys_stage(grid, context, state) and self._prune(state)

        def _prune(self, state: Any) -> bool:
            there = set(state.active_node_ids)
            state.sampled_node_ids = set(there)
            state.nid_to_neighbours = {n: near & there for n, near in state.nid_to_neighbours.items() if n in there}
            return True

    return Pruned


def _context(strategy: Any, number: int) -> Any:
    app, compat = flwr("flwr.app"), flwr("flwr.server.compat.legacy_context")
    constant = flwr("flwr.server.workflow.constant")
    state = app.RecordDict()
    state.config_records[constant.MAIN_CONFIGS_RECORD] = app.ConfigRecord({constant.Key.CURRENT_ROUND: number})
    state.array_records[constant.MAIN_PARAMS_RECORD] = app.ArrayRecord([np.zeros(0)])
    base = app.Context(run_id=0, node_id=0, node_config={}, state=state, run_config={})
    return compat.LegacyContext(base, strategy=strategy)
