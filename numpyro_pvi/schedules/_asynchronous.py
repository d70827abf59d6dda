"""Groups that work at their own pace, and a server that absorbs their sites as they arrive."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError
from ..families import Moments
from ..sites import SiteStack, damp, posterior, take
from ..solvers import LocalResult
from ._acceptance import Averaging, average_late, averaging_step, no_averaging, taken_whole
from ._contract import Accepted, Problem, RoundCarry, ScheduleDefaults, check_visits
from ._convergence import round_report, with_prior
from ._network import (
    LONGEST_STEP,
    REAL,
    Delivery,
    Discount,
    Faults,
    Late,
    Link,
    bounded_step,
    check_delays,
    delay_sampler,
    delays_by_label,
    first_discount,
    freeze_delays,
    has_read,
    may_be_absorbed,
    next_arrival,
    put,
    remember,
    weight,
)

# ---------------------------------------------------------------------------------------------------------- one message
# One message of an asynchronous round: from a group's visit to the server's answer.


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
    # Of the visit that each group is at, where visits really take their time; else None.
    ticket: Int[Array, "M 2"] | None = None
    # Natural parameters of the q that each group's last answer was made from, likewise.
    told: Any = None


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

    ``share``: share of every change that is taken, discounts aside; ``delays``: time that visits take, or None;
    ``max_staleness``: bound of the staleness, or None; ``faults``: what may happen to messages, or None.
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
        """The next message. Returns where they stand after it."""
        problem, state = self.problem, walk.state
        late = None if state.link is None else state.link.late
        bounded = self.max_staleness is not None and self.delays is not None
        allowed = may_be_absorbed(state.age, self.max_staleness) if bounded else None
        if self.delays == REAL:
            allowed = state.age >= 0 if allowed is None else allowed
            first = take(walk.sites, 0), take(walk.solver, 0)
            m, passed, result = problem.errands.next(state.ticket, allowed, self._young(state), *first)
            clock, copy, mine, local = walk.clock + passed, jnp.array(False), take(walk.sites, m), None
        else:
            m, time, copy = next_arrival(state.arrival, late, allowed)
            clock, mine = jnp.maximum(walk.clock, time), take(walk.sites, m)
            result, local = self._visit(walk, m, mine, key)
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
        tally = self._count(walk, m, copy, result, delivery, done)
        solver = put(walk.solver, m, result.state, ~copy)
        if self.delays == REAL:
            one = jax.tree.map(lambda x: x[None], (take(state.ticket, m), m, take(sites, m), take(solver, m)))
            begun = problem.errands.begin(*one[:2], done.q, *one[2:], key, self.rule, self.noise)
            state = state._replace(ticket=put(state.ticket, m, begun[0][0], delivery.answered))
        else:
            delay = self._delay(key, 3, m, clock.dtype)
            state = state._replace(arrival=put(state.arrival, m, clock + delay, ~copy))
        return Walk(done.q, done.moments, sites, local, solver, state, clock, tally)

    def _visit(self, walk: Walk, m: Any, mine: Any, key: Any) -> tuple[LocalResult, Any]:
        """The visit that a message is of, from the q that its group has read."""
        state = walk.state
        seen, confirmed = (walk.q, mine) if state.seen is None else (take(state.seen, m), mine)
        if state.link is not None and state.seen is not None:
            confirmed = take(state.link.confirmed, m)
        return self.problem.visit_group(
            m, seen, confirmed, take(walk.solver, m), key, self.rule, self.noise, walk.local
        )

    def _delay(self, key: Any, purpose: int, index: Any, dtype: Any) -> Float[Array, ""]:
        if self.delays is None:
            return jnp.ones((), dtype)
        return delay_sampler(self.delays, self.problem, dtype)(jax.random.fold_in(key, purpose), index)

    def _deliver(
        self, state: AsynchronousState, m: Any, copy: Any, clock: Any, result: LocalResult, key: Any
    ) -> tuple[Delivery, Link | None]:
        if self.faults is None or state.link is None:
            # Fast groups wait, so that only what was begun under another bound can be too old.
            new = self._young(state)[m] if self.delays == REAL else jnp.array(True)
            return Delivery(result.site, new, jnp.array(True), jnp.ones((2,), jnp.int32)), None
        fate_key, wait_key = jax.random.split(jax.random.fold_in(key, 2))
        # A copy is on the way for up to twice as long as a visit takes.
        wait = 2 * jax.random.uniform(wait_key, (), clock.dtype) * self._delay(wait_key, 1, m, clock.dtype)
        young = self._young(state)[m]
        return self.faults.transmit(state.link, m, copy, clock, wait, result.site, young, fate_key)

    def _young(self, state: AsynchronousState) -> Bool[Array, "M"]:
        """Whose work is from a q that no more than ``max_staleness`` changes have been made to since."""
        return state.age <= (jnp.iinfo(jnp.int32).max if self.max_staleness is None else self.max_staleness)

    def _absorb(self, walk: Walk, m: Any, change: Any, usable: Any) -> _Absorbed:
        """Move q and one site, halving the step until q is normalisable and, by what "auto" allows, near enough."""
        state, problem = walk.state, self.problem
        step, limit = jnp.asarray(self.share, walk.clock.dtype), jnp.inf
        if self.auto and state.discount is not None:
            share, limit = weight(problem, state.discount, m, walk.moments, state.seen is not None)
            step = step * share
        elif self.auto and problem.stochastic:
            # Of the changes since, at most one of each other group counts: later ones took the place of earlier ones.
            others = jnp.minimum(state.age[m], problem.num_groups - 1)
            step = step * jnp.minimum(1.0, taken_whole(problem) / (1.0 + others))
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
        if state.told is not None:
            state = state._replace(told=put(state.told, m, take(state.seen, m), answered))
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


# --------------------------------------------------------------------------------------------------------- asynchronous

_NO_CLIENTS = (
    "Asynchronous(delays='real') is for groups that work on their own: pass runtime=clients.Processes() or clients.Ray() and a "
    "Gaussian guide, or give delays as numbers, for a simulated clock."
)

# Messages per change that a round waits for at most.
_MOST_MESSAGES = 1000


def _furthest(family: Any, told: Any, here: Any) -> Float[Array, ""]:
    """The largest move, in posterior sds, from a q that some group has answered for (natural parameters, leading axis M) to this.

    Infinite for one that has answered for none.
    """
    moves = jax.vmap(lambda q: jnp.max(jnp.abs(family.moves(family.moments(q), here))))(told)
    return jnp.max(jnp.where(jnp.isnan(moves), jnp.inf, moves))


@dataclasses.dataclass(frozen=True)
class Asynchronous(ScheduleDefaults):
    """Groups at their own pace, on a simulated clock or a real one: nobody waits for the slowest. A round is M absorbed changes.

    Each group reads q, takes its time (``delays``) over a visit, and sends ``(group, version, site)`` with its *absolute*
    site. The server ignores a version that is not newer than the last it absorbed, and sets

        eta_q <- eta_q + rho (eta_msg - eta_m),    eta_m <- eta_m + rho (eta_msg - eta_m),

    so that prior plus sites is q whatever is lost, doubled or overtaken (with differences one lost message would be for
    ever). It answers with q and the site it now holds, from which the group takes its next cavity. A group that gets no
    answer works on from what it saw last, and sends its next version. The prior factor, if any, is held by the server
    and refined at the start of every round. Local latents stay with their group, which damps them as its site was.

    A server holds no data, so there is no test of the global ELBO here. ``damping="auto"`` guards by what a server knows:

    * a step that leaves q not normalisable, or moves a coordinate by more than one sd, is halved, and dropped after 20
      halvings;
    * a site loses weight once q has gone further since it was begun than q goes in M changes at present:
      ``min(1, ((0.1 + recent) / drift)^2)``, distances in posterior sds. A slow group's work from the first q counts next
      to nothing when it arrives late, and in full when q has come to rest meanwhile;
    * a group whose changes turn back without getting shorter halves its step, and lets it grow while they do not: what
      parallel mean-field updates need. Under delays a mean-field q begins with steps of 1/M;
    * under a stochastic solver, which moves each site as if alone, the step is ``1 / (1 + min(staleness, M - 1))``,
      times the ``power`` of ``LocalELBO`` and at most 1; where expectations are by draws, the naturals of late rounds are
      averaged, as :class:`Synchronous` does;
    * sites of factors that are quadratic under a q of full covariance are right at any q, and taken as they come.

    Args:
        delays: time that a visit takes from reading q to the arrival of the site: None (no delay, groups in turn: with
            ``damping=1`` the sweeps of :class:`Sequential`, without its guard), a positive number, one per group, a dict by
            label (1 for groups it does not name), ``("exponential", means)``, a function of ``(key, num_groups)``,
            :func:`measured_delays`, or "real": as long as it takes, under a runtime with clients (``clients.Processes()``,
            ``clients.Ray()``), whose sites are absorbed as they arrive. Then the clock runs in seconds, no round waits for a
            client that is slow, not even the first: the loss of a round is of what every client saw at the q that it read last,
            NaN (and nothing converged) until all have answered once. Two runs are not the same to the bit.
        max_staleness: no site is absorbed once more than so many changes have been since its group read q. Fast groups wait
            before that would happen, so that slow ones are always heard (stale-synchronous parallel); a site that is older all
            the same, as its visit was begun under another bound, is refused, and its group reads q anew. At least M - 1, as all
            groups start at once; None is no bound.
        damping: share of each arriving change that is absorbed, in (0, 1], or "auto". 1 is the full step, as in earlier PVI
            code.
        loss_rate: chance that a message, or an answer, is lost, in [0, 1).
        duplicate_rate: chance that a message arrives a second time, later, in [0, 1).
        reorder: whether half of the messages are held back until their group has given them up, so that they arrive with,
            or after, newer ones.

    Raises:
        PVIError: on construction, for values outside these ranges; at ``init``, for delays that do not fit the groups.

    References:
        Ashman et al., Partitioned Variational Inference, sections 3.1 and 7.1 (lock-free asynchronous updates).
        Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, section 3.
    """

    delays: Any = None
    max_staleness: int | None = None
    damping: float | str = "auto"
    loss_rate: float = 0.0
    duplicate_rate: float = 0.0
    reorder: bool = False

    def __post_init__(self):
        object.__setattr__(self, "delays", freeze_delays(self.delays))
        bound = self.max_staleness
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
            raise PVIError(
                f"Asynchronous(max_staleness={bound!r}): expected None, or a number of changes that is at least M - 1 for M groups."
            )
        if self.damping != "auto" and not (isinstance(self.damping, (int, float)) and 0.0 < self.damping <= 1.0):
            raise PVIError(
                f"Asynchronous(damping={self.damping!r}): expected 'auto' or a number in (0, 1]; 1 is the full step."
            )
        for name in ("loss_rate", "duplicate_rate"):
            rate = getattr(self, name)
            if isinstance(rate, bool) or not (isinstance(rate, (int, float)) and 0.0 <= rate < 1.0):
                raise PVIError(f"Asynchronous({name}={rate!r}): expected a probability in [0, 1).")
        if not isinstance(self.reorder, bool):
            raise PVIError(f"Asynchronous(reorder={self.reorder!r}): expected True or False.")
        if self.at_their_pace and self._faults is not None:
            raise PVIError(
                "Asynchronous(delays='real'): messages that are lost, doubled or reordered are simulated with simulated delays; "
                "leave loss_rate, duplicate_rate and reorder out."
            )

    @property
    def by_label(self) -> bool:
        """Whether settings name groups, so that compiled programs depend on the labels."""
        return delays_by_label(self.delays)

    @property
    def at_their_pace(self) -> bool:
        """Whether visits take as long as they take."""
        return self.delays == REAL

    def tickets(self, state: Any) -> Any:
        """Of the visits that groups were left at; None on a simulated clock."""
        return state.ticket

    @property
    def _faults(self) -> Faults | None:
        faulty = self.loss_rate or self.duplicate_rate or self.reorder
        return Faults(self.loss_rate, self.duplicate_rate, self.reorder) if faulty else None

    @property
    def discards(self) -> bool:
        """Where messages come twice: a second one has its place among the visits."""
        return self.duplicate_rate > 0

    def check_families(self, solver: Any) -> None:
        """Goes with every family under solvers that visit one group alone."""
        if self.at_their_pace:
            raise PVIError(_NO_CLIENTS)
        check_visits(self, solver)

    def round_trips(self, solver: Any, num_groups: int) -> int:
        """One for every visit, and a look at the end where visits do not say what was seen."""
        return num_groups + (not self.at_their_pace)

    def init(self, problem: Problem, dtype: Any) -> AsynchronousState:
        """Nobody has read q yet."""
        count, family = problem.num_groups, problem.family
        if self.max_staleness is not None and self.max_staleness < count - 1:
            raise PVIError(
                f"Asynchronous(max_staleness={self.max_staleness}) with {count} groups: all groups start from the same q, so the "
                f"last of them is absorbed after {count - 1} changes. Write max_staleness={count - 1} or more."
            )
        if self.delays is not None and not self.at_their_pace:
            check_delays(self.delays, problem, dtype)
        none, stack = jnp.zeros((count,), jnp.int32), family.zeros((count,), dtype)
        late = None
        if self.duplicate_rate or self.reorder:
            late = Late(jnp.full((count,), jnp.inf, dtype), none, stack)
        link = Link(none + 1, none, stack, late) if self._faults is not None else None
        # A quadratic factor's site is right at any q.
        exact = problem.quadratic and family.full
        adaptive = self.damping == "auto" and not problem.stochastic and not exact
        moments = family.standard(dtype)
        return AsynchronousState(
            jnp.array(False),
            jnp.zeros((count,), dtype),
            none,
            None if self.delays is None else stack,
            link,
            first_discount(problem, moments, self.delays is not None) if adaptive else None,
            no_averaging(family.dim if problem.noisy and not problem.stochastic else 0, dtype),
            *((jnp.zeros((count, 2), jnp.int32), stack) if self.at_their_pace else ()),
        )

    def round(self, problem: Problem, carry: RoundCarry, key: Any, noise: Any) -> RoundCarry:
        """M absorbed changes: see :class:`numpyro_pvi.schedules.Schedule`."""
        start_key, prior_key, visit_key = jax.random.split(key, 3)
        old, count = carry.evaluation, problem.num_groups
        largest = 1.0 if isinstance(self.damping, str) else self.damping
        share = averaging_step(carry.schedule.averaging, old.elbo.dtype) * largest
        prior, prior_site, q = None, carry.sites.prior, old.q
        if problem.has_prior_factor:
            prior = problem.visit_prior(q, prior_site, carry.prior_solver, prior_key, old.rule, noise, start=None)
            limit = jnp.inf if carry.schedule.discount is None else LONGEST_STEP
            found = bounded_step(problem, q, old.moments, prior.site - prior_site, share, limit)
            share_of_prior = jnp.where(found[1].valid, found[0], 0.0)
            prior_site = damp(prior_site, prior.site, share_of_prior)
            q = posterior(problem.prior_natural, dataclasses.replace(carry.sites, prior=prior_site))
        moments = problem.family.moments(q)
        state = self._begin(problem, carry, q, moments, start_key)
        if self.at_their_pace:
            state = self._send_out(problem, carry, q, moments, state, noise, start_key)
        tally = first_tally(carry.report.staleness[-count:], share.dtype)
        sites = carry.sites
        walk = Walk(q, moments, sites.groups, sites.local, carry.solver, state, jnp.zeros_like(share), tally)
        messages = Messages(
            problem, old.rule, noise, share, self.damping == "auto", self.delays, self.max_staleness, self._faults
        )
        if self._faults is None:
            keys = jax.random.split(visit_key, self._changes(problem))
            walk = jax.lax.scan(lambda w, k: (messages.event(w, k), None), walk, keys)[0]
        else:
            walk = jax.lax.while_loop(
                lambda w: (
                    (jnp.sum(w.tally.arrived) < self._changes(problem)) & (w.tally.events < _MOST_MESSAGES * count)
                ),
                lambda w: messages.event(w, jax.random.fold_in(visit_key, w.tally.events)),
                walk,
            )
        return self._finish(problem, carry, walk, prior, prior_site, noise)

    def _changes(self, problem: Problem) -> int:
        """Absorbed changes in a round."""
        return problem.num_groups

    def _begin(self, problem: Problem, carry: RoundCarry, q: Any, moments: Moments, key: Any):
        """In the first round every group reads q."""
        state, count, dtype = carry.schedule, problem.num_groups, carry.schedule.arrival.dtype
        every = jnp.arange(count)
        if self.at_their_pace:
            arrival = state.arrival
        elif self.delays is None:
            # In turn, one round a unit of time.
            arrival = (every + 1).astype(dtype) / count
        else:
            sample = delay_sampler(self.delays, problem, dtype)
            arrival = jax.vmap(sample)(jax.random.split(key, count), every)
        fresh = state._replace(started=jnp.array(True), arrival=arrival)
        if state.seen is not None:
            fresh = fresh._replace(seen=jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), q))
        if state.link is not None:
            fresh = fresh._replace(link=state.link._replace(confirmed=carry.sites.groups))
        if state.discount is not None:
            fresh = fresh._replace(discount=first_discount(problem, moments, self.delays is not None))
        return jax.tree.map(lambda old, new: jnp.where(state.started, old, new), state, fresh)

    def _send_out(
        self,
        problem: Problem,
        carry: RoundCarry,
        q: Any,
        moments: Moments,
        state: AsynchronousState,
        noise: Any,
        key: Any,
    ) -> AsynchronousState:
        """Groups that are at no visit of this state's read q and begin one; the others are left at theirs."""
        if problem.errands is None:
            raise PVIError(_NO_CLIENTS)
        given = state.ticket, jnp.arange(problem.num_groups), q, carry.sites.groups, carry.solver
        ticket, fresh = problem.errands.begin(*given, jax.random.fold_in(key, 1), carry.evaluation.rule, noise)

        def read(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(jnp.reshape(fresh, (-1,) + (1,) * (b.ndim - 1)), a, b), new, old)

        state = state._replace(ticket=ticket, age=read(0, state.age), seen=read(q, state.seen))
        if state.discount is not None:
            sd = problem.family.sds(moments)
            seen = read((moments.loc, sd), (state.discount.seen_loc, state.discount.seen_sd))
            state = state._replace(discount=state.discount._replace(seen_loc=seen[0], seen_sd=seen[1]))
        return state

    def _own(self, problem: Problem, tally: Any, heard: Any) -> Any:
        """Share of what was asked for that was absorbed, as far as it is less than the solver's noise calls for."""
        arrived = heard[-tally.step.shape[0] :] & (tally.step > 0)
        return jnp.min(jnp.where(arrived, tally.step, 1.0))

    def _finish(self, problem: Problem, carry: RoundCarry, walk: Walk, prior, prior_site, noise) -> RoundCarry:
        old, tally = carry.evaluation, walk.tally
        sites = problem.tidy(SiteStack(walk.sites, prior_site, walk.local))
        evaluation = problem.evaluate(sites, old.rule, noise, trial=True)
        # Every q on the way was normalisable; only rounding can undo that, or local latents that were damped.
        good = evaluation.moments.valid

        def keep(new, previous):
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, previous)

        done = Accepted(keep(sites, carry.sites), keep(evaluation, old), good * 1.0, jnp.int32(0), good, jnp.int32(0))
        heard = with_prior(None if prior is None else jnp.array(True), tally.arrived > 0)
        skipped = with_prior(None if prior is None else ~prior.moved, tally.skipped)
        state = walk.state._replace(arrival=walk.state.arrival - walk.clock)
        if state.link is not None and state.link.late is not None:
            late = state.link.late
            state = state._replace(link=state.link._replace(late=late._replace(arrival=late.arrival - walk.clock)))
        if problem.noisy and not problem.stochastic:
            state = state._replace(averaging=average_late(problem, state.averaging, done.evaluation, old))
        report = round_report(
            problem,
            carry,
            done,
            step=with_prior(None if prior is None else prior.moved * 1.0, tally.step),
            backoffs=with_prior(None if prior is None else prior.backoffs, tally.backoffs),
            skipped=skipped,
            exchanges=tally.messages,
            elapsed=walk.clock,
            staleness=with_prior(None if prior is None else jnp.int32(0), tally.staleness),
            heard=heard,
            states=walk.solver,
            prior_state=None if prior is None else prior.state,
            late=1.0 if problem.stochastic else averaging_step(carry.schedule.averaging, old.elbo.dtype),
            drift=carry.schedule.averaging.drift,
            own=self._own(problem, tally, heard),
        )
        if self.at_their_pace:
            # Whose last answer is from an older q has not said what it asks for at this one, though it may have read it.
            behind = _furthest(problem.family, state.told, done.evaluation.moments).astype(report.left.dtype)
            # Who has not answered yet is in no loss, and may ask for anything.
            untold = jnp.any(jnp.isnan(done.evaluation.groups.value))
            behind = jnp.where(untold, jnp.inf, behind)
            # The estimate as well: a move of nought would be taken for the noise of moments that have none.
            report = report._replace(
                left=jnp.maximum(report.left, behind),
                estimate=jnp.maximum(report.estimate, behind),
                finite=report.finite | untold,
            )
        return RoundCarry(
            done.sites, done.evaluation, walk.solver, None if prior is None else prior.state, state, report
        )
