"""Flower's SecAgg+ as what adds clients' numbers: its workflow at the server, and whole numbers between; clients run the mod."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..clients import Summed, Traffic, Transport
from ..errors import ClientError, PVIError
from ._messages import CLIP, MODULUS, QUESTION, TARGET, flwr
from ._runtime import Federation, Nodes

# Clients whose sum stays below the modulus.
_MOST_CLIENTS = MODULUS // TARGET - 1
# Clients below whom no sum is asked for, where there are so many: of two in a sum each can tell the other's part.
_FEWEST = 3


class SecAggSums:
    """Sums of clients at Flower's nodes, by its SecAgg+: implements :class:`numpyro_pvi.clients.SecureSum`.

    ``PVIStrategy(..., secure=True)`` fits with them. The server sees public keys, encrypted shares, masked numbers and the sum. A
    client that is gone before its masked numbers have come is left out, with its masks taken out of the sum; with fewer clients
    than the threshold nothing is unmasked at all. Bytes are those of Flower's records, keys and shares among them.

    Args:
        grid: Flower's, of a ServerApp whose nodes run ``client_app(..., secure=True)``.
        threshold: clients without whom nothing is unmasked: how many, at least 2; or a share of all, and at least three where there
            are three.
        timeout: seconds to wait for a message's answers; None waits for ever, and a client that is gone is never missed.
        owners: labels of the owners to wait for, any others being left out; or how many, all that are there being taken.
        patience: seconds to wait for them.

    Raises:
        PVIError: where flwr is not installed, and for a threshold that is neither; when owners are looked for, where they are not
            there in time, and for two of one label.
    """

    capacity = CLIP

    def __init__(
        self,
        grid: Any,
        *,
        threshold: int | float = 0.75,
        timeout: float | None = 600.0,
        owners: int | Sequence[Hashable] = 2,
        patience: float = 600.0,
    ):
        flwr("flwr.server.workflow")
        if isinstance(threshold, bool) or not (
            threshold >= 2 if isinstance(threshold, int) else isinstance(threshold, float) and 0 < threshold <= 1
        ):
            raise PVIError(
                f"SecAggSums(threshold={threshold!r}): expected an int of 2 or more, or a share of all clients in (0, 1]."
            )
        self.threshold, self.timeout, self.traffic = threshold, timeout, Traffic()
        self._grid = _Counted(grid, self)
        self._federation = Federation(grid, owners if isinstance(owners, int) else tuple(owners), patience)
        self._carrier: Nodes | None = None
        self._round = 0

    @property
    def labels(self) -> tuple[Hashable, ...]:
        """Of the clients: see :class:`numpyro_pvi.clients.SecureSum`."""
        found = self._federation.found
        if not 2 <= len(found) <= _MOST_CLIENTS:
            raise ClientError(
                f"nodes answer for the clients {', '.join(map(repr, found))}: a sum is of 2 to {_MOST_CLIENTS} clients."
            )
        return tuple(found)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ids of the nodes, by place."""
        return tuple(self._federation.found.values())

    def open(self) -> Transport:
        """See :class:`numpyro_pvi.clients.SecureSum`."""
        self._carrier = Nodes(self._federation)
        return self._carrier

    def _least_of(self, count: int) -> int:
        """Clients of so many without whom nothing is unmasked."""
        if isinstance(self.threshold, int):
            return self.threshold
        return max(round(self.threshold * count), min(_FEWEST, count))

    def sum(self, question: bytes) -> Summed | None:
        """See :class:`numpyro_pvi.clients.SecureSum`."""
        self._round += 1
        if self._carrier is not None:
            self._carrier.seek()
        strategy = _strategy()(self.nodes, question)
        context = _context(strategy, self._round)
        kept: dict[str, Any] = {"quantization_range": TARGET, "modulus_range": MODULUS, "max_weight": 1.0}
        kept |= {"clipping_range": float(CLIP), "timeout": self.timeout}
        _workflow()(1.0, self._least_of(len(self.labels)), **kept)(self._grid, context)
        if strategy.found is None:
            return None
        mean, who = strategy.found
        total = np.asarray(mean, np.float64) * len(who)
        numbers = np.rint(total)
        # What masks are left in is no sum of so many clients' whole numbers.
        torn = np.abs(total - numbers) > 1e-3
        if np.any(torn) or np.any(np.abs(numbers) > len(who) * CLIP):
            raise ClientError("the masks did not go out of the sum, which is of no use. Nothing of it was absorbed.")
        return Summed(numbers.astype(np.int64), tuple(sorted(self.nodes.index(node) for node in who)))

    def close(self) -> None:
        """Nodes are not this process's to end."""

    def hear(self, sent: int, replies: list) -> None:
        """Count a stage's bytes, and say who has failed in it.

        Args:
            sent: bytes to all clients.
            replies: what came of them, Flower's messages.
        """
        there = [reply for reply in replies if not reply.has_error()]
        more = {"trips": 1, "sent": sent, "received": sum(map(_size, there))}
        self.traffic = self.traffic._replace(**{name: getattr(self.traffic, name) + x for name, x in more.items()})
        labels = dict(zip(self.nodes, self.labels, strict=True))
        for reply in replies:
            if reply.has_error():
                # Flower's own errors (a node that is gone) do not say whose they are.
                label, why = labels.get(reply.metadata.src_node_id), str(reply.error.reason)[:1000]
                who = "a client that Flower does not name" if label is None else f"client {label!r}"
                logging.getLogger("numpyro_pvi").warning("%s drops out of a sum: %s", who, why)


def _size(message: Any) -> int:
    return flwr("flwr.common.serde").recorddict_to_proto(message.content).ByteSize()


@dataclasses.dataclass(frozen=True)
class _Counted:
    """A Grid for the workflow, whose messages are counted."""

    grid: Any
    sums: SecAggSums

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list:
        asked = list(messages)
        # Before they go: what answers in this process may take them apart.
        sent = sum(map(_size, asked))
        replies = list(self.grid.send_and_receive(asked, timeout=timeout))
        self.sums.hear(sent, replies)
        return replies


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
            asked = common.FitIns(parameters, {QUESTION: self.question})
            return [(_proxy(node), asked) for node in self.nodes]

        def aggregate_fit(self, server_round: int, results: list, failures: list) -> tuple:
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
