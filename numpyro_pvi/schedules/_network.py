"""The simulated link between groups and server: how long it takes, what is lost, and how much of a late site counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError
from ..families import Moments, marginal_distance
from ..sites import MAX_HALVINGS, select, swings, take
from ..solvers import ByLabel, by_label, check_labels, freeze, resolve
from ._contract import Problem


class Late(NamedTuple):
    """Per group, at most one copy of a message that arrives beside the one being worked on: a double, or one held back."""

    # When it arrives, relative to the start of the round; infinity where there is none.
    arrival: Float[Array, "M"]
    version: Int[Array, "M"]
    # The absolute site in it.
    site: Any


class Link(NamedTuple):
    """What has been sent and received."""

    # Number of the message that each group is working on, and of the last one that the server absorbed.
    version: Int[Array, "M"]
    absorbed: Int[Array, "M"]
    # The site that the server last confirmed to each group.
    confirmed: Any
    late: Late | None


class Delivery(NamedTuple):
    """What became of one message."""

    # The site in it.
    site: Any
    # Whether it reached the server, newer than the last absorbed; and whether the answer reached the group.
    new: Bool[Array, ""]
    answered: Bool[Array, ""]
    # Natural parameters sent to the server, and from it.
    sent: Int[Array, "2"]


@dataclasses.dataclass(frozen=True)
class Faults:
    """What may happen to a message.

    Args:
        loss_rate: chance that a message, or an answer, is lost.
        duplicate_rate: chance that a message arrives a second time.
        reorder: whether half of the messages are held back.
    """

    loss_rate: float
    duplicate_rate: float
    reorder: bool

    def transmit(
        self, link: Link, index: Any, copy: Any, clock: Any, wait: Any, site: Any, young: Any, key: Any
    ) -> tuple[Delivery, Link]:
        """Send one site, or let a late copy of an earlier one arrive.

        ``link``: what has been sent and received; ``copy``: whether a late copy arrives, and not the site; ``clock``: now;
        ``wait``: how long a late copy of the site is on the way; ``site``: the group's absolute site; ``young``: whether the
        server takes work of this age. Returns what became of it, and the link after.
        """
        u, fresh, late = jax.random.uniform(key, (4,)), ~copy, link.late
        lost, held = u[0] < self.loss_rate, (u[1] < 0.5) & self.reorder
        doubled, answer_lost = u[2] < self.duplicate_rate, u[3] < self.loss_rate
        held, version = held & ~lost, link.version[index]
        message, number = site, version
        if late is not None:
            message, number = select(copy, take(late.site, index), site), jnp.where(copy, late.version[index], version)
            stays = fresh & (held | (doubled & ~lost))
            until = jnp.where(stays, clock + wait, jnp.where(copy, jnp.inf, late.arrival[index]))
            late = Late(
                late.arrival.at[index].set(until),
                late.version.at[index].set(jnp.where(stays, version, late.version[index])),
                put(late.site, index, site, stays),
            )
        delivered = copy | ~(lost | held)
        new = delivered & (number > link.absorbed[index]) & young
        link = Link(
            link.version.at[index].add(fresh.astype(jnp.int32)),
            link.absorbed.at[index].set(jnp.where(new, number, link.absorbed[index])),
            link.confirmed,
            late,
        )
        sent = jnp.stack([fresh * (1 + (doubled & ~lost & ~held)), fresh & delivered])
        return Delivery(message, new, fresh & delivered & ~answer_lost, sent.astype(jnp.int32)), link


def put(stack: Any, index: Any, value: Any, keep: Bool[Array, ""]) -> Any:
    """Replace one group's slice of a stacked pytree where ``keep``."""
    return jax.tree.map(lambda x, y: x.at[index].set(jnp.where(keep, y, x[index])), stack, value)


def may_be_absorbed(age: Int[Array, "M"], max_staleness: int) -> Bool[Array, "M"]:
    """Whose message may be absorbed next so that nobody's ever has to wait beyond ``max_staleness`` changes.

    The change absorbed next takes one of the places left to everyone else. With ages sorted, the k-th oldest work can still be
    absorbed in time if it has k places left; where it has no more than that, only it and older ones may go. ``age``: changes
    absorbed since each group read q; ``max_staleness``: largest age at which work is absorbed; at least M - 1. Returns one flag
    per group; work that is too old already may arrive at any time (it is sent back).
    """
    left = max_staleness - age
    alive = left >= 0
    places = jnp.where(alive, left, jnp.iinfo(jnp.int32).max)
    ranked = jnp.sort(places)
    tight = ranked <= jnp.arange(age.shape[0])
    limit = jnp.where(jnp.any(tight), ranked[jnp.argmax(tight)], jnp.iinfo(jnp.int32).max)
    return ~alive | (places <= limit)


def next_arrival(
    arrival: Float[Array, "M"], late: Late | None, allowed: Bool[Array, "M"] | None
) -> tuple[Int[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """The first message that may be taken: whose, when, and whether it is a late copy."""
    times = arrival if late is None else jnp.concatenate([arrival, late.arrival])
    if allowed is not None:
        flags = allowed if late is None else jnp.concatenate([allowed, allowed])
        times = jnp.where(flags, times, jnp.inf)
    first = jnp.argmin(times)
    count = arrival.shape[0]
    return first % count, times[first], first >= count


# --------------------------------------------------------------------------------------------------------------- delays
# How long a group takes from reading q to handing in its site.

# As long as it really takes.
REAL = "real"

_FORMS = (
    "None (no delay), a positive number, one per group, a dict by label, ('exponential', means), "
    "measured_delays(seconds), a function of (key, num_groups), or 'real'"
)

# Keys for which what a function of delays returns is looked at before it is used.
_LOOKS = 8


def _positive(x: float) -> bool:
    return 0.0 < x < math.inf


@dataclasses.dataclass(frozen=True)
class MeasuredDelays:
    """Delays drawn anew for every visit from what was measured; made by :func:`measured_delays`.

    Args:
        seconds: pairs of label and measured durations.
    """

    seconds: tuple[tuple[Hashable, tuple[float, ...]], ...]


def measured_delays(seconds: Mapping[Hashable, Sequence[float] | float]) -> MeasuredDelays:
    """Turn measured durations of the groups' visits into delays of :class:`Asynchronous`.

    Every visit takes one of its group's measured durations, drawn with equal chances, so the simulated clock runs in the
    unit that was measured.

    Args:
        seconds: durations by group label, one or more each.

    Returns:
        A hashable value for ``Asynchronous(delays=...)``.

    Raises:
        PVIError: for a group without durations, or a duration that is not positive.
    """
    if not isinstance(seconds, Mapping) or not seconds:
        raise PVIError(f"measured_delays({seconds!r}): expected a dict of durations by group label.")
    found = []
    for label, values in seconds.items():
        several = freeze(values, f"measured_delays, group {label!r}: seconds", _positive, "a positive duration")
        if isinstance(several, ByLabel):
            raise PVIError(f"measured_delays, group {label!r}: expected durations, got a dict.")
        found.append((label, (several,) if isinstance(several, float) else several))
    return MeasuredDelays(tuple(found))


def freeze_delays(delays: Any) -> Any:
    """Make the ``delays`` of a schedule hashable.

    ``delays``: None, numbers, a dict by label, a random law or a function. Returns the same, hashable. Raises PVIError naming
    the forms that are understood.
    """
    if delays is None or (isinstance(delays, str) and delays == REAL) or isinstance(delays, MeasuredDelays):
        return delays
    if isinstance(delays, str) or (isinstance(delays, tuple) and delays and isinstance(delays[0], str)):
        if isinstance(delays, str) or delays[0] != "exponential" or len(delays) != 2:
            raise PVIError(f"delays={delays!r}: expected {_FORMS}.")
        return ("exponential", freeze(delays[1], "delays=('exponential', means): means", _positive, "a positive mean"))
    if callable(delays):
        try:
            hash(delays)
        except TypeError:
            raise PVIError(
                f"delays={delays!r} is not hashable, and settings of a schedule must be: pass a plain function of "
                "(key, num_groups)."
            ) from None
        return delays
    return freeze(delays, "delays", _positive, "a positive number (delays=None is no delay)")


def delays_by_label(delays: Any) -> bool:
    """Whether delays that :func:`freeze_delays` made name groups."""
    # ("exponential", means) is a pair whose second entry may name groups.
    means = delays[1] if isinstance(delays, tuple) and len(delays) == 2 else None
    return isinstance(delays, MeasuredDelays) or by_label(delays) or by_label(means)


def delay_sampler(delays: Any, problem: Any, dtype: Any) -> Callable[[Any, Any], Float[Array, ""]]:
    """How long a group's next visit takes; labels are looked at by :func:`check_delays`.

    ``delays``: what :func:`freeze_delays` made; not None. Returns a function of a key and a group's index. Raises PVIError for
    delays that do not fit the groups.
    """
    if isinstance(delays, MeasuredDelays):
        return _resampled(delays, problem, dtype)
    if isinstance(delays, tuple) and not isinstance(delays, ByLabel) and delays[0] == "exponential":
        means = jnp.asarray(resolve(delays[1], "delays=('exponential', means)", problem, 1.0), dtype)
        return lambda key, m: means[m] * jax.random.exponential(key, (), dtype)
    if callable(delays):
        draw = cast(Callable[..., Any], delays)
        _check_drawn(draw, problem)
        tiny = jnp.finfo(dtype).tiny

        def sample(key, m):
            found = jnp.asarray(draw(key, problem.num_groups), dtype)[m]
            # A clock that stands still or runs backwards would never get to the other groups.
            return jnp.where((found > tiny) & jnp.isfinite(found), found, tiny)

        return sample
    fixed = jnp.asarray(resolve(delays, "delays", problem, 1.0), dtype)
    return lambda key, m: fixed[m]


def check_delays(delays: Any, problem: Any, dtype: Any) -> None:
    """Refuse delays that do not fit the groups, where a fit begins. Raises PVIError naming the group."""
    delay_sampler(delays, problem, dtype)
    if isinstance(delays, MeasuredDelays):
        measured = ByLabel(tuple((label, 1.0) for label, _ in delays.seconds))
        check_labels(measured, "delays=measured_delays(seconds)", problem)
    elif isinstance(delays, tuple) and not isinstance(delays, ByLabel) and delays[0] == "exponential":
        check_labels(delays[1], "delays=('exponential', means)", problem)
    else:
        check_labels(delays, "delays", problem)


def _check_drawn(draw: Callable[..., Any], problem: Any) -> None:
    """Look at what a function of delays returns for a few keys: durations, one for each group."""
    count, who = problem.num_groups, f"Asynchronous(delays={getattr(draw, '__name__', draw)!s})"
    wanted = (
        f"it must return one positive, finite duration for each of the {count} groups, in an array of shape ({count},)"
    )
    try:
        # init runs compiled, where random numbers have no values unless they are asked for.
        with jax.ensure_compile_time_eval():
            found = [np.asarray(draw(jax.random.key(seed), count), float) for seed in range(_LOOKS)]
    except (TypeError, ValueError) as error:
        raise PVIError(f"{who} returned what is no array of numbers ({error}); {wanted}.") from error
    if found[0].shape != (count,):
        raise PVIError(f"{who} returned shape {found[0].shape}; {wanted}.")
    for each in found:
        for label, seconds in zip(problem.labels, each.tolist(), strict=True):
            if not _positive(seconds):
                raise PVIError(f"{who} returned {seconds:g} for group {label!r}; {wanted}.")


def _resampled(delays: MeasuredDelays, problem: Any, dtype: Any) -> Callable[[Any, Any], Float[Array, ""]]:
    known = dict(delays.seconds)
    if missing := [label for label in problem.labels if label not in known]:
        raise PVIError(
            f"delays=measured_delays(seconds) has no durations of group {missing[0]!r}; measure every group."
        )
    rows = [known[label] for label in problem.labels]
    counts = jnp.asarray([len(row) for row in rows])
    table = np.zeros((len(rows), max(len(row) for row in rows)))
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    padded = jnp.asarray(table, dtype)
    return lambda key, m: padded[m, jax.random.randint(key, (), 0, counts[m])]


# ---------------------------------------------------------------------------------------------- discounts of late sites
# How much of a late site is absorbed: what a server can tell from q, its sites and what it is sent.

# Distance, in posterior sds, that q may go while a group works without its site losing weight.
FREE_DRIFT = 0.1
# A group's step is halved when its changes swing; else it grows by this. Independent changes, as noise makes them, do the one
# about half as often as the other.
GROWTH = 2.0**0.5
SMALLEST_SHARE = 1e-3
# Distance, in sds (or e-folds of one, times 2^(1/2)), that one site may move any coordinate of q.
LONGEST_STEP = 1.0


class Discount(NamedTuple):
    """The server's memory of how q moves."""

    # Location and sds of the q that each group read last.
    seen_loc: Float[Array, "M D"]
    seen_sd: Float[Array, "M D"]
    # Lengths of the last M changes of q, in turn.
    path: Float[Array, "M"]
    slot: Int[Array, ""]
    # Each group's own step, and the force of its last change on the location, in precision-mean space.
    share: Float[Array, "M"]
    force: Float[Array, "M D"]


def first_discount(problem: Problem, moments: Moments, delayed: bool) -> Discount:
    """The memory when all groups read the same q.

    ``delayed``: whether groups move in parallel, so that a mean-field q needs small first steps.
    """
    count, dim = problem.num_groups, problem.family.dim
    loc, sd = moments.loc, problem.family.sds(moments)
    share = 1.0 / count if delayed and not problem.family.full else 1.0
    zero = jnp.zeros((count,), loc.dtype)
    every = (count, dim)
    return Discount(
        jnp.broadcast_to(loc, every),
        jnp.broadcast_to(sd, every),
        zero,
        jnp.int32(0),
        zero + share,
        jnp.zeros(every, loc.dtype),
    )


def weight(
    problem: Problem, memory: Discount, index: Any, moments: Moments, delayed: bool
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Share of a message's change that is absorbed, before validity is looked at, and how far it may move q.

    ``rho = share_m * min(1, ((free + recent) / drift)^2)``: ``drift`` is the distance between the q that the group read and the
    q of now, ``recent`` the length of the last M changes of q. A site is right for the q it was computed at, and wrong in
    proportion to the drift since; so it loses weight with the drift's square, as in averages by inverse variance, as soon as q
    has gone further than it goes in a round at present. Where q stands still, a site of any age is as good as new, and may move
    q as far as the visit found; else no coordinate may go further than one sd. ``moments``: q now; ``delayed``: whether q may
    have moved since the group read it. Returns a number in (0, 1], and the largest distance in sds.
    """
    if not delayed:
        return memory.share[index], jnp.asarray(LONGEST_STEP, moments.loc.dtype)
    loc, sd = moments.loc, problem.family.sds(moments)
    drift = marginal_distance(loc, sd, memory.seen_loc[index], memory.seen_sd[index])
    usual = FREE_DRIFT + jnp.sum(memory.path)
    share = memory.share[index] * jnp.minimum(1.0, usual / jnp.maximum(drift, usual)) ** 2
    return share, jnp.where(drift <= FREE_DRIFT, jnp.inf, LONGEST_STEP).astype(drift.dtype)


def bounded_step(
    problem: Problem, q: Any, moments: Moments, change: Any, step: Float[Array, ""], limit: Any
) -> tuple[Float[Array, ""], Moments, Int[Array, ""]]:
    """Halve a step until q is normalisable after it and no coordinate has gone further than the limit.

    ``q``: natural parameters before the step; ``moments``: q as moments; ``step``: share of it that is tried first; ``limit``:
    largest distance; infinity tests for validity only. Returns ``(step, moments after it, halvings)``; the moments are not
    valid where no step would do.
    """
    family = problem.family
    sd = family.sds(moments)

    def too_far(tried):
        _, after, halvings = tried
        each = (moments.loc, sd, after.loc, family.sds(after))
        # A distance over one coordinate at a time.
        length = jnp.max(marginal_distance(*(x[..., None] for x in each)))
        return (~after.valid | ~(length <= limit)) & (halvings < MAX_HALVINGS)

    def halve(tried):
        step, _, halvings = tried
        return 0.5 * step, family.moments(q + change * (0.5 * step)), halvings + 1

    return jax.lax.while_loop(too_far, halve, (step, family.moments(q + change * step), jnp.int32(0)))


def next_share(
    problem: Problem, share: Float[Array, ""], last: Float[Array, "D"], change: Any, moments: Moments
) -> tuple[Float[Array, ""], Float[Array, "D"]]:
    """A group's own step after one more of its changes.

    A group whose changes turn back without getting shorter than half overshoots, together with others or alone: parallel
    mean-field updates do so at moderate correlations, with every q valid. Its step is halved, and grows again while they do
    not. ``last``: the force of its last change on the location, in precision-mean space; ``change``: its next change, natural
    parameters, undamped; ``moments``: q before it. Returns ``(step, force)``.
    """
    family = problem.family
    force = family.pull(change, moments.loc)
    image = family.covariance_product(moments, force)
    inner, size = jnp.dot(last, image), jnp.dot(force, image)
    before = jnp.dot(last, family.covariance_product(moments, last))
    factor = jnp.where(swings(inner, size, before), 0.5, GROWTH)
    return jnp.clip(share * factor, SMALLEST_SHARE, 1.0), force


def remember(
    problem: Problem,
    memory: Discount,
    index: Any,
    change: Any,
    before: Moments,
    after: Moments,
    absorbed: Bool[Array, ""],
) -> Discount:
    """Take one message into account.

    ``change``: what the group asked for: its site less the server's, natural parameters, undamped; ``before``: q before the
    message; ``after``: q after it. Returns the memory; unchanged where nothing was absorbed.
    """
    family = problem.family
    share, force = next_share(problem, memory.share[index], memory.force[index], change, before)
    sds = [family.sds(m) for m in (before, after)]
    length = marginal_distance(before.loc, sds[0], after.loc, sds[1])
    count = memory.path.shape[0]

    return memory._replace(
        path=put(memory.path, memory.slot, length, absorbed),
        slot=(memory.slot + absorbed) % count,
        share=put(memory.share, index, share, absorbed),
        force=put(memory.force, index, force, absorbed),
    )


def has_read(problem: Problem, memory: Discount, index: Any, moments: Moments, read: Bool[Array, ""]) -> Discount:
    """Remember which q a group works from now on, where it has ``read`` it."""
    sd = problem.family.sds(moments)
    return memory._replace(
        seen_loc=put(memory.seen_loc, index, moments.loc, read), seen_sd=put(memory.seen_sd, index, sd, read)
    )
