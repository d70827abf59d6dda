"""No server: agents on a graph track the sum of all sites by one-hop messages, or mix their whole posteriors."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError
from ..families import GaussianMoments, GaussianNatural
from ..sites import SiteStack, back_off, damp, select
from ._contract import Accepted, Evaluation, Problem, RoundCarry, ScheduleDefaults, check_visits
from ._convergence import round_report, with_prior
from ._graph import Gossip, Graph, read_graph
from ._stream import Replay, Stream, draw_seen, sort_classes, take_rows

# ------------------------------------------------------------------------------------------- what agents have in common
# What agents on a graph have in common: settings, what is refused of them, and what each of them holds.

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
    """Refuse settings of consensus that are out of range, or beside another mixing. Raises PVIError naming the setting."""
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

    ``reliable``: whether all agents are there all the time. Raises PVIError naming the setting.
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
    def discards(self) -> bool:
        """Where agents may be away, they are visited all the same."""
        return not self.reliable

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


# ------------------------------------------------------------------------------------------------------------ consensus
# A round of consensus (DELBO): agents mix their whole posteriors, then each takes rows that it has not taken before.


def check_consensus(schedule: GraphSettings, problem: Problem) -> None:
    """Refuse what consensus cannot do, when a fit is set up.

    Raises PVIError for a prior outside the family, another solver than the natural gradient's full step, rows without affine
    predictors, or an expectation that does not fit them.
    """
    if problem.has_prior_factor:
        raise PVIError(
            "Decentralized(mixing='consensus') absorbs every row once and refines nothing, but part of this model's prior is "
            "outside the Gaussian family and would have to be refined with q (Partition.plan(*args) shows which latents): use "
            "mixing='tracking', where every agent refines it, or give those latents Gaussian priors."
        )
    solver = problem.solver
    if not (solver.immediate and solver.step_size == 1.0):
        raise PVIError(
            f"Decentralized(mixing='consensus') takes one full natural-gradient step per batch of rows, which {solver!r} is not: "
            "leave solver=NaturalGradient(), or use mixing='tracking'."
        )
    problem.stream.program(schedule.expectation)


def consensus_round(
    schedule: GraphSettings, problem: Problem, carry: RoundCarry, present: Bool[Array, "n"], key: Any
) -> RoundCarry:
    """One round: ``exchanges_per_round`` times gossip, then ``updates_per_exchange`` updates of every agent.

    Returns the carry after the round; its ELBO is DELBO on the rows that the round took.
    """
    state, n, family = carry.schedule, schedule.adjacency.size, problem.family
    stream, gossip = problem.stream, schedule.gossip
    program = stream.program(schedule.expectation)
    replay = sort_classes(stream) if schedule.replay else None
    weight = float(n) if schedule.likelihood_weight == "agents" else float(schedule.likelihood_weight)
    # What was changed from outside since (init_params, groups that came or went) counts from here on.
    tracked = state.tracked + (carry.sites.groups - state.seen)

    def exchange(at, step):
        tracked, sites, taken = at
        mix_key, draw_key = jax.random.split(jax.random.fold_in(key, step))
        tracked, sent = gossip.mix(tracked, mix_key, present, state.mixed + step * gossip.count)
        rows = _next_rows(schedule, stream, replay, taken, present, draw_key)
        own = jax.tree.map(lambda eta, z: eta + n * z, problem.prior_natural, tracked)
        done = take_rows(family, program, stream, own, *rows[:2], weight)
        change = done.change * (1.0 / n)
        return (tracked + change, sites + change, taken + rows[2]), (sent, rows[2], done.refused, done.value, done.gap)

    start = (tracked, carry.sites.groups, state.taken)
    (tracked, sites, taken), record = jax.lax.scan(exchange, start, jnp.arange(schedule.exchanges_per_round))
    sent, rows, refused, value, gap = (jnp.sum(x, axis=0, dtype=x.dtype) for x in record)
    sites = problem.tidy(SiteStack(sites, None))
    tracked = family.symmetrise(tracked)
    mixed = state.mixed + gossip.count * schedule.exchanges_per_round
    after = state._replace(tracked=tracked, seen=sites.groups, mixed=mixed, taken=taken)
    evaluation = problem.unread(sites, carry.evaluation.rule)._replace(elbo=value)
    return _finish(schedule, problem, carry, evaluation, sites, after, (sent, rows, refused, gap))


def _finish(schedule, problem, carry, evaluation: Evaluation, sites, after: DecentralizedState, record) -> RoundCarry:
    sent, rows, refused, gap = record
    one = jnp.ones((), evaluation.elbo.dtype)
    done = Accepted(sites, evaluation, one, jnp.int32(0), jnp.array(True), jnp.int32(0))
    report = round_report(
        problem,
        carry,
        done,
        step=jnp.where(rows > 0, one, 0.0),
        backoffs=refused,
        # An agent without rows, or away, is not one that is stuck.
        skipped=jnp.zeros(rows.shape, bool),
        exchanges=sent,
    )
    apart = schedule.disagreement(problem, after, evaluation)
    consensus = _consensus_gap(schedule, problem, after, evaluation)
    report = report._replace(
        consensus=apart,
        total_move=jnp.maximum(report.total_move, apart),
        left=jnp.maximum(report.left, apart),
        delbo=jnp.stack([evaluation.elbo, consensus, gap]),
    )
    return RoundCarry(sites, evaluation, carry.solver, carry.prior_solver, after, report)


def _next_rows(schedule: GraphSettings, stream: Stream, replay: Replay | None, taken, present, key):
    """Which rows every agent takes next: positions and which count, Int and Bool[n U B], and the number of fresh ones."""
    n, count = schedule.adjacency.size, schedule.updates_per_exchange
    sizes = jnp.asarray(stream.sizes, jnp.int32)
    batch = max(stream.sizes) if schedule.batch_size is None else schedule.batch_size
    steps = taken[:, None, None] + jnp.arange(count)[:, None] * batch + jnp.arange(batch)
    again = schedule.exhausted == "again"
    # A batch of all rows is every row once, whatever the sizes of the groups.
    if again and schedule.batch_size is None:
        fresh = jnp.broadcast_to((jnp.arange(batch) < sizes[:, None])[:, None], steps.shape)
        positions = jnp.broadcast_to(jnp.arange(batch), steps.shape)
    else:
        positions = steps % sizes[:, None, None] if again else steps
        fresh = jnp.ones(steps.shape, bool) if again else steps < sizes[:, None, None]
    fresh = fresh & present[:, None, None]
    rows = jnp.sum(fresh, axis=(1, 2), dtype=jnp.int32)
    if replay is None:
        return positions, fresh, rows
    seen = steps[:, :, 0]
    keys = jax.random.split(key, (n, count))
    groups = jnp.broadcast_to(jnp.arange(n)[:, None], (n, count))

    def draw(group, seen, key):
        return draw_seen(replay, group, jnp.minimum(seen, sizes[group]), key, schedule.replay)

    old, any_seen = jax.vmap(jax.vmap(draw))(groups, seen, keys)
    # Replays come with fresh rows, and stop with them.
    any_seen = any_seen & jnp.any(fresh, axis=2, keepdims=True)
    return jnp.concatenate([positions, old], axis=2), jnp.concatenate([fresh, any_seen], axis=2), rows


def _consensus_gap(schedule, problem: Problem, state: DecentralizedState, evaluation: Evaluation) -> Float[Array, ""]:
    """``log(1 / K)`` of 003, (8): the mean of the KLs from the network's mean to every agent's q, in nats."""
    family, center = problem.family, cast(GaussianMoments, evaluation.moments)
    zero = jnp.zeros_like(center.loc)
    at_zero = GaussianMoments(zero, center.scale, center.log_det_precision, center.valid)

    def divergence(tracked):
        own = jax.tree.map(lambda eta, z: eta + schedule.adjacency.size * z, problem.prior_natural, tracked)
        moments = family.moments(own)
        shift = moments.loc - center.loc
        trace = -2.0 * family.expect_quadratic(GaussianNatural(zero, own.precision), at_zero)
        square = jnp.dot(shift, family.precision_product(own, shift))
        logs = center.log_det_precision - moments.log_det_precision
        return jnp.where(moments.valid, 0.5 * (trace - family.dim + square + logs), jnp.inf)

    return jnp.mean(jax.lax.map(divergence, state.tracked))


# -------------------------------------------------------------------------------------------------------- decentralized


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
        """``mixing="tracking"`` goes with every family under solvers that visit one group alone.

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
