"""How much of a late site is absorbed: what a server can tell from q, its sites and what it is sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..families import Moments, marginal_distance
from ..sites import MAX_HALVINGS, swings
from ._contract import Problem
from ._network import put

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

    Args:
        problem: the factors.
        moments: q.
        delayed: whether groups move in parallel, so that a mean-field q needs small first steps.

    Returns:
        The memory.
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

    ``rho = share_m * min(1, ((free + recent) / drift)^2)``: ``drift`` is the distance between the q that the group read and
    the q of now, ``recent`` the length of the last M changes of q. A site is right for the q it was computed at, and wrong in
    proportion to the drift since; so it loses weight with the drift's square, as in averages by inverse variance, as soon as
    q has gone further than it goes in a round at present. Where q stands still, a site of any age is as good as new, and may
    move q as far as the visit found; else no coordinate may go further than one sd.

    Args:
        problem: the factors.
        memory: how q has moved.
        index: the group.
        moments: q now.
        delayed: whether q may have moved since the group read it.

    Returns:
        A number in (0, 1], and the largest distance in sds.
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

    Args:
        problem: the factors.
        q: natural parameters before the step.
        moments: q as moments.
        change: the full step.
        step: share of it that is tried first.
        limit: largest distance; infinity tests for validity only.

    Returns:
        ``(step, moments after it, halvings)``; the moments are not valid where no step would do.
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
    not.

    Args:
        problem: the factors.
        share: its step.
        last: the force of its last change on the location, in precision-mean space.
        change: its next change, natural parameters, undamped.
        moments: q before it.

    Returns:
        ``(step, force)``.
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

    Args:
        problem: the factors.
        memory: what there was.
        index: the group.
        change: what the group asked for: its site less the server's, natural parameters, undamped.
        before: q before the message.
        after: q after it.
        absorbed: whether the message was absorbed.

    Returns:
        The memory; unchanged where nothing was absorbed.
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
