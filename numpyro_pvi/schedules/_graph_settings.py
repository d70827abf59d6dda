"""Settings of a schedule without a server, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PVIError
from ._graph import Graph

if TYPE_CHECKING:
    from ._decentralized import Decentralized

# What belongs to consensus alone, with its defaults.
_ALONE = {
    "likelihood_weight": "agents",
    "batch_size": None,
    "updates_per_exchange": 1,
    "exchanges_per_round": 1,
    "replay": 0,
    "exhausted": "gossip",
    "expectation": "auto",
}


def check_consensus_settings(schedule: Decentralized) -> None:
    """Refuse settings of consensus that are out of range, or beside another mixing.

    Args:
        schedule: its settings.

    Raises:
        PVIError: naming the setting.
    """
    given = {name: getattr(schedule, name) for name in _ALONE}
    if schedule.mixing != "consensus":
        for name, value in given.items():
            if value != _ALONE[name]:
                raise PVIError(
                    f"Decentralized({name}={value!r}) belongs to mixing='consensus'; leave it out, or write that."
                )
        return
    if schedule.damping != 1.0:
        raise PVIError(
            f"Decentralized(mixing='consensus', damping={schedule.damping!r}): rows are taken once, and what is left of one is "
            "lost; leave damping out, or give the likelihood another likelihood_weight."
        )
    for name, least in (("batch_size", 1), ("updates_per_exchange", 1), ("exchanges_per_round", 1), ("replay", 0)):
        value = given[name]
        if value is None and name == "batch_size":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PVIError(f"Decentralized({name}={value!r}): expected an int of at least {least}.")
    weight = schedule.likelihood_weight
    if weight != "agents" and not (isinstance(weight, (int, float)) and weight > 0):
        raise PVIError(f"Decentralized(likelihood_weight={weight!r}): expected 'agents' or a positive number.")
    words = {"exhausted": ("gossip", "again"), "expectation": ("auto", "quadrature", "probit")}
    for name, choices in words.items():
        if given[name] not in choices:
            raise PVIError(f"Decentralized({name}={given[name]!r}): expected one of {', '.join(map(repr, choices))}.")


def check_network(schedule: Decentralized, graph: Graph, reliable: bool) -> None:
    """Refuse settings of the network that are out of range.

    Args:
        schedule: its settings.
        graph: the graph.
        reliable: whether all agents are there all the time.

    Raises:
        PVIError: naming the setting.
    """
    if schedule.mixing not in ("tracking", "consensus"):
        raise PVIError(f"Decentralized(mixing={schedule.mixing!r}): expected 'tracking' or 'consensus'.")
    steps = schedule.steps_per_round
    if steps != "auto" and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise PVIError(f"Decentralized(steps_per_round={steps!r}): expected a positive int or 'auto'.")
    if not (isinstance(schedule.damping, (int, float)) and 0.0 < schedule.damping <= 1.0):
        raise PVIError(f"Decentralized(damping={schedule.damping!r}): expected a number in (0, 1]; 1 is the full step.")
    if not (isinstance(schedule.link_failure, (int, float)) and 0.0 <= schedule.link_failure < 1.0):
        raise PVIError(f"Decentralized(link_failure={schedule.link_failure!r}): expected a probability below 1.")
    if (schedule.link_failure > 0 or not reliable) and not graph.symmetric:
        raise PVIError(
            "Decentralized: links that fail and agents that are away need a graph whose links go both ways with equal "
            "weights: with one-way links the weights that are left cannot be doubly stochastic."
        )
