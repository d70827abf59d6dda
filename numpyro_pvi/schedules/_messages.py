"""One message of an asynchronous round: from a group's visit to the server's answer."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..families import Moments
from ..sites import damp, take
from ..solvers import LocalResult
from ._contract import Problem
from ._delays import delay_sampler
from ._discount import Discount, bounded_step, has_read, remember, weight
from ._network import Delivery, Faults, Link, may_be_absorbed, next_arrival, put
from ._noise import Averaging


class AsynchronousState(NamedTuple):
    """Where every group stands with its work."""

    started: Bool[Array, ""]
    # When each group's message arrives, relative to the start of the round.
    arrival: Float[Array, "M"]
    # Changes absorbed since each group read q.
    age: Int[Array, "M"]
    # Natural parameters of the q that each group read; None without delays.
    seen: Any
    link: Link | None
    discount: Discount | None
    averaging: Averaging


class Tally(NamedTuple):
    """Counts of one round."""

    # New sites that arrived, per group; whether the last of them was of no use, how stale it was and how much was taken.
    arrived: Int[Array, "M"]
    skipped: Bool[Array, "M"]
    staleness: Int[Array, "M"]
    step: Float[Array, "M"]
    backoffs: Int[Array, "M"]
    messages: Int[Array, "2"]
    events: Int[Array, ""]


def first_tally(staleness: Int[Array, "M"], dtype: Any) -> Tally:
    """Nothing has arrived yet; groups that are not heard keep the staleness of their last site."""
    none = jnp.zeros_like(staleness)
    return Tally(none, none > 0, staleness, none.astype(dtype), none, jnp.zeros((2,), jnp.int32), jnp.int32(0))


class Walk(NamedTuple):
    """What changes from message to message within a round."""

    q: Any
    moments: Moments
    # The groups' sites, and what groups hold beside them.
    sites: Any
    local: Any
    solver: Any
    state: AsynchronousState
    clock: Float[Array, ""]
    tally: Tally


class _Absorbed(NamedTuple):
    q: Any
    moments: Moments
    # 0 where nothing was absorbed.
    step: Float[Array, ""]
    halvings: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Messages:
    """What does not change within a round.

    Args:
        problem: the factors.
        rule: the quadrature rule of visits.
        noise: the round's draws, or None.
        share: share of every change that is taken, discounts aside.
        auto: whether there are discounts.
        delays: time that visits take, or None.
        max_staleness: bound of the staleness, or None.
        faults: what may happen to messages, or None.
    """

    problem: Problem
    rule: Any
    noise: Any
    share: Any
    auto: bool
    delays: Any
    max_staleness: int | None
    faults: Faults | None

    def event(self, walk: Walk, key: Any) -> Walk:
        """The next message.

        Args:
            walk: where things stand.
            key: a random key.

        Returns:
            Where they stand after it.
        """
        problem, state = self.problem, walk.state
        late = None if state.link is None else state.link.late
        bounded = self.max_staleness is not None and self.delays is not None
        allowed = may_be_absorbed(state.age, self.max_staleness) if bounded else None
        m, time, copy = next_arrival(state.arrival, late, allowed)
        clock = jnp.maximum(walk.clock, time)
        mine = take(walk.sites, m)
        seen, confirmed = (walk.q, mine) if state.seen is None else (take(state.seen, m), mine)
        if state.link is not None and state.seen is not None:
            confirmed = take(state.link.confirmed, m)
        result, local = problem.visit_group(
            m, seen, confirmed, take(walk.solver, m), key, self.rule, self.noise, walk.local
        )
        delivery, link = self._deliver(state, m, copy, clock, result, key)
        change = delivery.site - mine
        usable = delivery.new & (copy | result.moved)
        done = self._absorb(walk, m, change, usable)
        absorbed = done.step > 0
        sites = jax.tree.map(lambda x, d: x.at[m].add(done.step * d), walk.sites, change)
        if local is not None:
            # Private: the group takes the share of its own part that the server took of its site.
            local = damp(walk.local, local, jnp.where(copy, 0.0, done.step))
        state = state._replace(link=link)
        state = self._answer(state, walk, m, done, take(sites, m), change, absorbed, delivery.answered)
        delay = self._delay(key, 3, m, clock.dtype)
        state = state._replace(arrival=put(state.arrival, m, clock + delay, ~copy))
        tally = self._count(walk, m, copy, result, delivery, done)
        solver = put(walk.solver, m, result.state, ~copy)
        return Walk(done.q, done.moments, sites, local, solver, state, clock, tally)

    def _delay(self, key: Any, purpose: int, index: Any, dtype: Any) -> Float[Array, ""]:
        if self.delays is None:
            return jnp.ones((), dtype)
        return delay_sampler(self.delays, self.problem, dtype)(jax.random.fold_in(key, purpose), index)

    def _deliver(
        self, state: AsynchronousState, m: Any, copy: Any, clock: Any, result: LocalResult, key: Any
    ) -> tuple[Delivery, Link | None]:
        if self.faults is None or state.link is None:
            sent = jnp.ones((2,), jnp.int32)
            return Delivery(result.site, jnp.array(True), jnp.array(True), sent), None
        fate_key, wait_key = jax.random.split(jax.random.fold_in(key, 2))
        # A copy is on the way for up to twice as long as a visit takes.
        wait = 2 * jax.random.uniform(wait_key, (), clock.dtype) * self._delay(wait_key, 1, m, clock.dtype)
        young = jnp.array(True) if self.max_staleness is None else state.age[m] <= self.max_staleness
        return self.faults.transmit(state.link, m, copy, clock, wait, result.site, young, fate_key)

    def _absorb(self, walk: Walk, m: Any, change: Any, usable: Any) -> _Absorbed:
        """Move q and one site, halving the step until q is normalisable and, by what "auto" allows, near enough."""
        state, problem = walk.state, self.problem
        step, limit = jnp.asarray(self.share, walk.clock.dtype), jnp.inf
        if self.auto and state.discount is not None:
            share, limit = weight(problem, state.discount, m, walk.moments, state.seen is not None)
            step = step * share
        elif self.auto and problem.stochastic:
            # Of the changes since, at most one of each other group counts: later ones took the place of earlier ones.
            step = step / (1.0 + jnp.minimum(state.age[m], problem.num_groups - 1))
        # What cannot be used must not be searched with.
        change = jax.tree.map(lambda x: jnp.where(usable, x, 0.0), change)
        step, moments, halvings = bounded_step(problem, walk.q, walk.moments, change, step, limit)
        good = usable & moments.valid
        step = jnp.where(good, step, 0.0)
        moments = jax.tree.map(lambda a, b: jnp.where(good, a, b), moments, walk.moments)
        return _Absorbed(walk.q + change * step, moments, step, halvings)

    def _answer(
        self, state: AsynchronousState, walk: Walk, m: Any, done: _Absorbed, site: Any, change: Any, absorbed, answered
    ) -> AsynchronousState:
        """What the server remembers, and what the group reads."""
        if state.discount is not None:
            # Without delays q is read when the visit is made: there is no drift.
            memory = remember(self.problem, state.discount, m, change, walk.moments, done.moments, absorbed)
            state = state._replace(discount=has_read(self.problem, memory, m, done.moments, answered))
        if state.seen is None:
            return state
        age = state.age + absorbed
        state = state._replace(
            age=put(age, m, jnp.zeros_like(age[m]), answered), seen=put(state.seen, m, done.q, answered)
        )
        if state.link is not None:
            confirmed = put(state.link.confirmed, m, site, answered)
            state = state._replace(link=state.link._replace(confirmed=confirmed))
        return state

    def _count(self, walk: Walk, m: Any, copy: Any, result: LocalResult, delivery: Delivery, done: _Absorbed) -> Tally:
        old, absorbed = walk.tally, done.step > 0
        return Tally(
            old.arrived.at[m].add(delivery.new.astype(jnp.int32)),
            put(old.skipped, m, ~absorbed, delivery.new),
            put(old.staleness, m, walk.state.age[m], absorbed),
            put(old.step, m, done.step, delivery.new),
            old.backoffs.at[m].add(jnp.where(copy, 0, result.backoffs) + done.halvings),
            old.messages + delivery.sent,
            old.events + 1,
        )
