"""No server: agents on a graph track the sum of all sites by one-hop messages."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError
from ..sites import SiteStack, back_off, damp, select
from ._consensus import check_consensus, consensus_round
from ._contract import Accepted, Problem, RoundCarry, check_visits
from ._graph_settings import DecentralizedState, GraphSettings
from ._report import round_report, with_prior


class _Visits(NamedTuple):
    """The agents' updates in one round."""

    state: Any
    backoffs: Int[Array, "n"]
    moved: Bool[Array, "n"]
    share: Float[Array, "n"]


@dataclasses.dataclass(frozen=True)
class Decentralized(GraphSettings):
    """Inference on a graph of agents, one per group, without a server: messages go to neighbours only.

    Every agent i holds ``z_i``, and its own ``q_i = eta_0 + n z_i``; A is doubly stochastic, so that mixing
    ``z_i <- sum_j A_ij z_j`` keeps the mean of the ``z_i``, which is the mean site at any moment, whatever the links do.

    ``mixing="tracking"``: a round is one damped local update of every agent's site at its own q, after which
    ``z_i <- sum_j A_ij (z_j + eta_j^new - eta_j^old)``, and more gossip. Its fixed point is the one of a server that has all
    sites. A prior outside the family is refined by every agent for itself, and counts as 1/n of each. The loss is that of the
    network's mean: no agent could know it.

    ``mixing="consensus"``: DELBO, for rows that come one after another. Agents mix, then each takes its next rows, once:
    ``eta_i <- sum_j A_ij eta_j + w nabla_mu E_{q_i} log l_i``, in closed form for rows of affine predictors (regressions,
    classification), in O(D^2) a row between mixings, in O(D) for a mean-field q. The network's mean is the prior and all
    contributions; the posterior is that of one pass, exact for conjugate rows and else dependent on their order. A round's
    loss is minus DELBO on the rows that it took, ``sum_i E_{q_i} log l_i - KL(q_i || q_i before) / w``, summed over its updates
    (no pass over other rows is made; ``pvi.evaluate`` is the global loss), and 0 when none were left. Priors outside the
    family are refused.

    ``get_params`` and ``posterior(state)`` are the network's mean in natural space; ``posterior(state, agent=label)`` is one's.

    Args:
        adjacency: the graph: a square matrix of non-negative weights (row i: what i gets), links ``[(a, b), ...]``, a
            networkx graph, or a list of those: graphs taken in turn. Self-loops are added, and weights made doubly
            stochastic (Sinkhorn). Agents stand in the order of ``pvi.groups``.
        mixing: "tracking" or "consensus".
        steps_per_round: gossip steps after every round's updates, or "auto": until disagreement has shrunk about tenfold
            (fivefold where links fail), by Chebyshev's polynomials on one symmetric graph (with less memory the more fail).
            For consensus: steps of every exchange, "auto" 1.
        damping: share of each local update that is taken, in (0, 1]; 1 is the full step, as in earlier PVI code. "auto" is .5
            for tracking (above it an agent's ``n``-fold step can leave its q improper before its neighbours have heard of
            it), and 1 for consensus, which allows no other.
        nodes: names of the agents in the order of ``pvi.groups``, where links are between names.
        link_failure: probability that a link carries nothing in a gossip step; both ends then keep its weight.
        availability: probability that an agent is there in a round, one number or one per agent: an agent that is away
            neither updates nor sends; its site stays in the sum, and its rows wait.
        likelihood_weight: (consensus) w. "agents" is n: mixing leaves 1/n of every contribution, so that with weight 1, as 003
            is printed, the network's mean would hold 1/n of the data's precision. 1 is right where agents see the same
            rows, which would else count n times.
        batch_size: (consensus) rows of one update; None takes all of an agent's rows in one.
        updates_per_exchange: (consensus) updates of every agent between two mixings.
        exchanges_per_round: (consensus) mixings in a round, which is one compiled loop.
        replay: (consensus) rows that every update takes beside its fresh ones, from those the agent has seen before it: a class
            with a seen row uniformly, then one of its seen rows uniformly, with replacement, by the state's key. Classes are
            the values of the first Bernoulli or Categorical response; without one all seen rows are equally likely. A row
            that is taken again counts again: q is then that of a larger, class-balanced data set, and too narrow.
        exhausted: (consensus) what an agent without rows does: "gossip" only, or "again": begins with its first row as if it
            were new, for calls of ``update`` with new rows every time. On the same rows it counts them twice.
        expectation: (consensus) "auto" (closed form for quadratic rows, else quadrature), "quadrature", or "probit": a Bernoulli
            response's logistic function is taken for a probit (003, lemma 4), the fastest.

    Raises:
        PVIError: for a graph that is not connected or cannot be balanced, values out of range, or (in ``init``) a model that
            consensus cannot treat.

    References:
        Di Lorenzo and Scutari, NEXT: In-Network Nonconvex Optimization, 2016 (gradient tracking). Paritosh, Atanasov and
        Martinez, Distributed Variational Inference for Online Supervised Learning ("003"): section IV (the graph, DELBO),
        lemmas 3 to 7 (updates). Corrected here: (11) needs the likelihood's power n and mixing exponents A_ij, (13) the new
        information matrix in the mean, and (22) the factor of (19) in gamma.
    """

    def check_families(self, solver: Any) -> None:
        """``mixing="tracking"`` goes with every family under solvers that visit one group alone, where rows have no own latents.

        Raises:
            PVIError: for ``mixing="consensus"``, whose updates are those of a Gaussian, or another solver.
        """
        if self.mixing == "consensus":
            raise PVIError(
                "Decentralized(mixing='consensus') takes rows of affine predictors into a Gaussian, and AutoExponentialFamily is a "
                "product of families: write mixing='tracking'."
            )
        check_visits(self, solver)

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
        if self.mixing == "consensus":
            check_consensus(self, problem)
        zero = problem.family.zeros((n,), dtype)
        return DecentralizedState(
            zero, zero, zero if problem.has_prior_factor else None, jnp.int32(0), jnp.zeros((n,), jnp.int32)
        )

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
        if not self.reliable:
            present = jax.random.bernoulli(away_key, jnp.asarray(self.availability, carry.evaluation.elbo.dtype))
        if self.mixing == "consensus":
            return consensus_round(self, problem, carry, present, mix_key)
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
        after = DecentralizedState(tracked, new, priors, state.mixed + self.gossip.count, state.taken)
        return self._finish(problem, carry, noise, sites, after, visits, sent, present)

    def _visits(self, problem: Problem, carry: RoundCarry, tracked, priors, present, key, noise):
        """Every agent's update, shortened until its own q, which takes it n-fold before others hear of it, stays valid."""
        n, rule = self.adjacency.size, carry.evaluation.rule

        def visit(local, step):
            index, z, site, own_prior, state, key, here = step
            q = self.own_q(problem, z)
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

    def _share(self, problem: Problem, z: Any, change: Any) -> tuple[Float[Array, ""], Int[Array, ""]]:
        """``damping``, halved until the agent's q is normalisable after the step; the whole of it where it was not before.

        Valid q's form a convex set and gossip takes averages with the weights of a row, so that they stay valid after it.
        """
        valid = problem.family.in_domain

        first = jnp.asarray(self.damping, jax.tree.leaves(z)[0].dtype)
        share, tries = back_off(lambda share: valid(self.own_q(problem, z + change * share)), first)
        hopeless = ~valid(self.own_q(problem, z))
        return jnp.where(hopeless, first, share), jnp.where(hopeless, 0, tries)

    def _finish(self, problem: Problem, carry: RoundCarry, noise, sites, after, visits, sent, present) -> RoundCarry:
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
            # An agent that was away waits with what it has not said yet.
            heard=with_prior(None if prior is None else jnp.array(True), present),
            states=visits.state,
            prior_state=carry.prior_solver,
            largest=self.damping,
            own=jnp.min(jnp.where(present, visits.share, 1.0)) / float(self.damping),
        )
        apart = self.disagreement(problem, after, evaluation)
        # A network whose mean stands still has not converged while its agents disagree.
        report = report._replace(
            consensus=apart, total_move=jnp.maximum(report.total_move, apart), left=jnp.maximum(report.left, apart)
        )
        return RoundCarry(sites, evaluation, visits.state, carry.prior_solver, after, report)


def _shifted(copies: Any, mean: Any) -> Any:
    """The agents' copies of the prior factor's site, moved together so that their mean is the one given."""
    if copies is None:
        return None
    return jax.tree.map(lambda x, m: x + (m - jnp.mean(x, axis=0)), copies, mean)


def _contribution(groups: Any, priors: Any, n: int) -> Any:
    return groups if priors is None else groups + priors * (1.0 / n)
