"""No server: agents on a graph track the sum of all sites by one-hop messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError
from ..sites import SiteStack, damp, select
from ._base import MAX_HALVINGS, Accepted, Problem, RoundCarry
from ._gossip import Gossip
from ._graph import Graph, read_graph
from ._report import round_report, with_prior


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


class _Visits(NamedTuple):
    """The agents' updates in one round."""

    state: Any
    backoffs: Int[Array, "n"]
    moved: Bool[Array, "n"]
    share: Float[Array, "n"]


@dataclasses.dataclass(frozen=True)
class Decentralized:
    """Inference on a graph of agents, one per group, without a server: messages go to neighbours only.

    Every agent i keeps its site ``eta_i`` and an estimate ``z_i`` of the network's mean site (gradient tracking). A round
    is one damped local update of every agent from its own ``q_i = eta_0 + n z_i``, after which
    ``z_i <- sum_j A_ij (z_j + eta_j^new - eta_j^old)``, followed by more gossip steps. A is doubly stochastic, so that the
    mean of the ``z_i`` is the mean site at any moment, whatever the links do; its fixed point is the one of a server that
    has all sites. A prior outside the family is refined by every agent for itself, and counts as 1/n of each.

    ``get_params`` and ``posterior(state)`` are the network's mean in natural space, ``posterior(state, agent=label)`` is one
    agent's. The loss is that of the network's mean: no agent could know it.

    Args:
        adjacency: the graph: a square matrix of non-negative weights (row i: what i gets), links ``[(a, b), ...]``, a
            networkx graph, or a list of those: graphs taken in turn. Self-loops are added, and the weights are balanced to
            be doubly stochastic (Sinkhorn). Agents stand in the order of ``pvi.groups``.
        mixing: "tracking".
        steps_per_round: gossip steps after every round's updates, or "auto": until disagreement has shrunk about tenfold,
            by Chebyshev's polynomials on fixed, symmetric, reliable graphs.
        damping: share of each local update that is taken, in (0, 1]; 1 is the full step, as in earlier PVI code. Above .5
            an agent's ``n``-fold step can leave its q improper before its neighbours have heard of it.
        nodes: names of the agents in the order of ``pvi.groups``, where links are between names.
        link_failure: probability that a link carries nothing in a gossip step; both ends then keep its weight.
        availability: probability that an agent is there in a round, one number or one per agent: an agent that is away
            neither updates nor sends; its site stays in the sum.

    Raises:
        PVIError: on construction, for a graph that is not connected or cannot be balanced, or values out of range.

    References:
        Di Lorenzo and Scutari, NEXT: In-Network Nonconvex Optimization, 2016 (gradient tracking). Paritosh, Atanasov and
        Martinez, Distributed Variational Inference for Online Supervised Learning, section IV (the graph, assumption 2).
    """

    adjacency: Any = dataclasses.field(repr=False)
    mixing: str = "tracking"
    steps_per_round: int | str = "auto"
    damping: float = 0.5
    nodes: Sequence[Hashable] | None = dataclasses.field(default=None, repr=False)
    link_failure: float = 0.0
    availability: float | Sequence[float] = 1.0

    def __post_init__(self):
        graph = self.adjacency if isinstance(self.adjacency, Graph) else read_graph(self.adjacency, self.nodes)
        object.__setattr__(self, "adjacency", graph)
        object.__setattr__(self, "nodes", graph.nodes)
        if self.mixing != "tracking":
            raise PVIError(f"Decentralized(mixing={self.mixing!r}): expected 'tracking'.")
        steps = self.steps_per_round
        if steps != "auto" and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise PVIError(f"Decentralized(steps_per_round={steps!r}): expected a positive int or 'auto'.")
        if not (isinstance(self.damping, (int, float)) and 0.0 < self.damping <= 1.0):
            raise PVIError(f"Decentralized(damping={self.damping!r}): expected a number in (0, 1]; 1 is the full step.")
        if not (isinstance(self.link_failure, (int, float)) and 0.0 <= self.link_failure < 1.0):
            raise PVIError(f"Decentralized(link_failure={self.link_failure!r}): expected a probability below 1.")
        self._read_availability(graph)
        if (self.link_failure > 0 or not self._reliable) and not graph.symmetric:
            raise PVIError(
                "Decentralized: links that fail and agents that are away need a graph whose links go both ways with equal "
                "weights: with one-way links the weights that are left cannot be doubly stochastic."
            )

    def _read_availability(self, graph: Graph) -> None:
        share = self.availability
        shares = tuple(float(p) for p in share) if isinstance(share, Sequence) else (float(share),) * graph.size
        if len(shares) != graph.size or not all(0.0 < p <= 1.0 for p in shares):
            raise PVIError(
                f"Decentralized(availability={share!r}): expected a probability in (0, 1], or one for each of {graph.size} agents."
            )
        object.__setattr__(self, "availability", shares)

    @property
    def _reliable(self) -> bool:
        return all(p == 1.0 for p in self.availability)  # type: ignore[union-attr]

    @property
    def gossip(self) -> Gossip:
        """How agents mix."""
        return Gossip(self.adjacency, self.steps_per_round, float(self.link_failure), self._reliable)

    def init(self, problem: Problem, dtype: Any) -> DecentralizedState:
        """Nothing tracked yet: the first round adds what the sites are then.

        Raises:
            PVIError: when there are not as many groups as agents.
        """
        n = self.adjacency.size
        if problem.num_groups != n:
            raise PVIError(
                f"Decentralized: the graph has {n} agents, but the data has {problem.num_groups} groups: each group is one agent, "
                "in the order of pvi.groups."
            )
        zero = problem.family.zeros((n,), dtype)
        return DecentralizedState(zero, zero, zero if problem.has_prior_factor else None, jnp.int32(0))

    def agent_natural(self, state: DecentralizedState, prior_natural: Any, index: int) -> Any:
        """Natural parameters of one agent's own q, ``eta_0 + n z_i``.

        Args:
            state: this schedule's state.
            prior_natural: of the exactly held prior.
            index: which agent.

        Returns:
            The natural parameters; the prior alone before the first round.
        """
        return jax.tree.map(lambda eta, z: eta + self.adjacency.size * z[index], prior_natural, state.tracked)

    def round(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        """One local update of every agent, then gossip: see :class:`numpyro_pvi.schedules.Schedule`."""
        visit_key, mix_key, away_key = jax.random.split(key, 3)
        n, state = self.adjacency.size, carry.schedule
        present = jnp.ones((n,), bool)
        if not self._reliable:
            present = jax.random.bernoulli(away_key, jnp.asarray(self.availability, carry.evaluation.elbo.dtype))
        priors = _shifted(state.prior, carry.sites.prior)
        # What was changed from outside since (init_params, groups that came or went) counts from here on.
        own = _contribution(carry.sites.groups, priors, n)
        tracked = state.tracked + (own - state.seen)
        groups, priors, local, visits = self._visits(problem, carry, tracked, priors, present, visit_key, noise)
        shared = None if priors is None else jax.tree.map(lambda x: jnp.mean(x, axis=0), priors)
        sites = problem.tidy(SiteStack(groups, shared, local))
        priors = _shifted(priors, sites.prior)
        new = _contribution(sites.groups, priors, n)
        tracked, sent = self.gossip.mix(tracked + (new - own), mix_key, present, state.mixed)
        tracked = problem.family.symmetrise(tracked)
        after = DecentralizedState(tracked, new, priors, state.mixed + self.gossip.count)
        return self._finish(problem, carry, noise, sites, after, visits, sent)

    def _visits(self, problem: Problem, carry: RoundCarry, tracked, priors, present, key, noise):
        """Every agent's update, shortened until its own q, which takes it n-fold before others hear of it, stays valid."""
        n, rule = self.adjacency.size, carry.evaluation.rule

        def visit(local, step):
            index, z, site, own_prior, state, key, here = step
            q = self._own_q(problem, z)
            group_key, prior_key = jax.random.split(key)
            found, moved = problem.visit_group(index, q, site, state, group_key, rule, noise, local)
            change, prior = found.site - site, None
            backoffs, done = found.backoffs, found.moved
            if own_prior is not None:
                prior = problem.visit_prior(q, own_prior, carry.prior_solver, prior_key, rule, noise, start=None)
                change = change + (prior.site - own_prior) * (1.0 / n)
                backoffs, done = backoffs + prior.backoffs, done | prior.moved
            share, halvings = self._share(problem, z, change)
            share = jnp.where(here, share, 0.0)
            site = damp(site, found.site, share)
            own_prior = None if prior is None else damp(own_prior, prior.site, share)
            local = None if local is None else damp(local, moved, share)
            state = select(here, found.state, state)
            return local, (site, own_prior, _Visits(state, backoffs + halvings, done | ~here, share))

        steps = (jnp.arange(n), tracked, carry.sites.groups, priors, carry.solver, jax.random.split(key, n), present)
        local, (groups, priors, visits) = jax.lax.scan(visit, carry.sites.local, steps)
        return groups, priors, local, visits

    def _own_q(self, problem: Problem, z: Any) -> Any:
        return jax.tree.map(lambda eta, x: eta + self.adjacency.size * x, problem.prior_natural, z)

    def _share(self, problem: Problem, z: Any, change: Any) -> tuple[Float[Array, ""], Int[Array, ""]]:
        """``damping``, halved until the agent's q is normalisable after the step; the whole of it where it was not before.

        Valid q's form a convex set and gossip takes averages with the weights of a row, so that they stay valid after it.
        """
        valid = problem.family.in_domain

        def invalid(at):
            share, tries = at
            return ~valid(self._own_q(problem, z + change * share)) & (tries < MAX_HALVINGS)

        first = jnp.asarray(self.damping, jax.tree.leaves(z)[0].dtype)
        share, tries = jax.lax.while_loop(invalid, lambda at: (0.5 * at[0], at[1] + 1), (first, jnp.int32(0)))
        hopeless = ~valid(self._own_q(problem, z))
        return jnp.where(hopeless, first, share), jnp.where(hopeless, 0, tries)

    def _finish(self, problem: Problem, carry: RoundCarry, noise, sites, after, visits, sent) -> RoundCarry:
        evaluation = problem.evaluate(sites, carry.evaluation.rule, noise)
        one = jnp.ones((), evaluation.elbo.dtype)
        done = Accepted(sites, evaluation, one * self.damping, jnp.int32(0), jnp.array(True), jnp.int32(0))
        # The prior factor is refined by all agents: it is reported as their mean.
        prior = sites.prior if sites.prior is None else 0
        report = round_report(
            problem,
            carry,
            done,
            step=with_prior(None if prior is None else jnp.mean(visits.share), visits.share),
            backoffs=with_prior(prior, visits.backoffs),
            skipped=with_prior(None if prior is None else jnp.array(False), ~visits.moved),
            exchanges=sent,
        )
        apart = self._disagreement(problem, after, evaluation)
        # A network whose mean stands still has not converged while its agents disagree.
        report = report._replace(consensus=apart, total_move=jnp.maximum(report.total_move, apart))
        return RoundCarry(sites, evaluation, visits.state, carry.prior_solver, after, report)

    def _disagreement(self, problem: Problem, state: DecentralizedState, evaluation) -> Float[Array, ""]:
        """Largest distance of an agent's mean from that of the network's q, in its sds."""
        sd = jnp.sqrt(problem.family.variances(evaluation.moments))

        def apart(z):
            moments = problem.family.moments(self._own_q(problem, z))
            return jnp.where(moments.valid, jnp.max(jnp.abs(moments.loc - evaluation.moments.loc) / sd), jnp.inf)

        return jnp.max(jax.lax.map(apart, state.tracked))


def _shifted(copies: Any, mean: Any) -> Any:
    """The agents' copies of the prior factor's site, moved together so that their mean is the one given."""
    if copies is None:
        return None
    return jax.tree.map(lambda x, m: x + (m - jnp.mean(x, axis=0)), copies, mean)


def _contribution(groups: Any, priors: Any, n: int) -> Any:
    return groups if priors is None else groups + priors * (1.0 / n)
