"""The simulated link between groups and server: whose message arrives next, and what is on the way."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..sites import select, take


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

        Args:
            link: what has been sent and received.
            index: the group.
            copy: whether a late copy arrives, and not the site.
            clock: now.
            wait: how long a late copy of the site is on the way.
            site: the group's absolute site.
            young: whether the server takes work of this age.
            key: a random key.

        Returns:
            What became of it, and the link after.
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

    The change absorbed next takes one of the places left to everyone else. With ages sorted, the k-th oldest work can still
    be absorbed in time if it has k places left; where it has no more than that, only it and older ones may go.

    Args:
        age: changes absorbed since each group read q.
        max_staleness: largest age at which work is absorbed; at least M - 1.

    Returns:
        One flag per group; work that is too old already may arrive at any time (it is sent back).
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
