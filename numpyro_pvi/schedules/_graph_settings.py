"""What agents on a graph have in common: settings, what is refused of them, and what each of them holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..errors import PVIError
from ._contract import Evaluation, Problem, ScheduleDefaults
from ._gossip import Gossip
from ._graph import Graph, read_graph

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


def check_consensus_settings(schedule: GraphSettings) -> None:
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


def check_network(schedule: GraphSettings, graph: Graph, reliable: bool) -> None:
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


class DecentralizedState(NamedTuple):
    """What every agent holds beside its site; all with a leading axis of agents."""

    # Estimate of the mean over the network of what the agents contribute, natural parameters.
    tracked: Any
    # The agent's own contribution when it was last added to the estimate.
    seen: Any
    # The agent's own copy of the prior factor's site, of which it contributes 1/n; None without a prior factor.
    prior: Any
    # Gossip steps so far.
    mixed: Int[Array, ""]
    # Rows that every agent has taken so far (consensus only).
    taken: Int[Array, "n"]


@dataclasses.dataclass(frozen=True)
class GraphSettings(ScheduleDefaults):
    """The settings of :class:`numpyro_pvi.schedules.Decentralized`, and what they mean to every agent."""

    adjacency: Any = dataclasses.field(repr=False)
    mixing: str = "tracking"
    steps_per_round: int | str = "auto"
    damping: float | str = "auto"
    nodes: Sequence[Hashable] | None = dataclasses.field(default=None, repr=False)
    link_failure: float = 0.0
    availability: float | Sequence[float] = 1.0
    likelihood_weight: float | str = "agents"
    batch_size: int | None = None
    updates_per_exchange: int = 1
    exchanges_per_round: int = 1
    replay: int = 0
    exhausted: str = "gossip"
    expectation: str = "auto"

    has_agents = True

    def __post_init__(self):
        graph = self.adjacency if isinstance(self.adjacency, Graph) else read_graph(self.adjacency, self.nodes)
        object.__setattr__(self, "adjacency", graph)
        object.__setattr__(self, "nodes", graph.nodes)
        if self.damping == "auto":
            object.__setattr__(self, "damping", 1.0 if self.streams else 0.5)
        self._read_availability(graph)
        check_network(self, graph, self.reliable)
        check_consensus_settings(self)

    def _read_availability(self, graph: Graph) -> None:
        share = self.availability
        shares = tuple(float(p) for p in share) if isinstance(share, Sequence) else (float(share),) * graph.size
        if len(shares) != graph.size or not all(0.0 < p <= 1.0 for p in shares):
            raise PVIError(
                f"Decentralized(availability={share!r}): expected a probability in (0, 1], or one for each of {graph.size} agents."
            )
        object.__setattr__(self, "availability", shares)

    @property
    def reliable(self) -> bool:
        """Whether all agents are there all the time."""
        return all(p == 1.0 for p in self.availability)  # type: ignore[union-attr]

    @property
    def gossip(self) -> Gossip:
        """How agents mix."""
        steps = 1 if self.streams and self.steps_per_round == "auto" else self.steps_per_round
        return Gossip(self.adjacency, steps, float(self.link_failure), self.reliable)

    @property
    def streams(self) -> bool:
        """Whether rows are taken as they come, so that nothing passes over all of them."""
        return self.mixing == "consensus"

    def own_q(self, problem: Problem, z: Any) -> Any:
        """Natural parameters of the q of an agent that holds z."""
        return jax.tree.map(lambda eta, x: eta + self.adjacency.size * x, problem.prior_natural, z)

    def disagreement(self, problem: Problem, state: DecentralizedState, evaluation: Evaluation) -> Float[Array, ""]:
        """Largest distance of an agent's mean from that of the network's q, in its sds."""
        sd = problem.family.sds(evaluation.moments)

        def apart(z):
            moments = problem.family.moments(self.own_q(problem, z))
            return jnp.where(moments.valid, jnp.max(jnp.abs(moments.loc - evaluation.moments.loc) / sd), jnp.inf)

        return jnp.max(jax.lax.map(apart, state.tracked))
