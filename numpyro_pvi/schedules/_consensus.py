"""A round of consensus (DELBO): agents mix their whole posteriors, then each takes rows that it has not taken before."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..errors import PVIError
from ..families import GaussianMoments, GaussianNatural
from ..sites import SiteStack
from ._contract import Accepted, Evaluation, Problem, RoundCarry
from ._graph_settings import DecentralizedState, GraphSettings
from ._report import round_report
from ._row_updates import take_rows
from ._stream import Replay, Stream, draw_seen, sort_classes


def check_consensus(schedule: GraphSettings, problem: Problem) -> None:
    """Refuse what consensus cannot do, when a fit is set up.

    Args:
        schedule: its settings.
        problem: the factors.

    Raises:
        PVIError: for a prior outside the family, another solver than the natural gradient's full step, rows without affine
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

    Args:
        schedule: its settings.
        problem: the factors.
        carry: where things stand.
        present: which agents are there.
        key: random key.

    Returns:
        The carry after the round; its ELBO is DELBO on the rows that the round took.
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
