"""What is kept of every round, and how far it moved each factor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..families import GaussianFamily
from ..sites import SiteStack

if TYPE_CHECKING:
    from ._base import Accepted, Evaluation, Problem, RoundCarry

# What a factor that has not been heard lately counts for at most, in posterior sds: no tolerance is as large.
UNHEARD_MOVE = 0.5


class RoundReport(NamedTuple):
    """What happened to every factor in one round; the prior factor, if any, comes first."""

    # Largest change of a posterior mean by this factor's step, in posterior sds.
    move: Float[Array, "F"]
    step: Float[Array, "F"]
    backoffs: Int[Array, "F"]
    skipped: Bool[Array, "F"]
    # Rounds running in which the factor was skipped.
    skip_run: Int[Array, "F"]
    # Changes of q between a group's reading it and its last site's being absorbed; 0 where every site is fresh.
    staleness: Int[Array, "F"]
    # Largest change of any posterior mean or log sd in the round, in posterior sds; at least the last move of every factor
    # that took no part (half a sd where that was larger), so that a fit is not taken for settled before all were heard.
    total_move: Float[Array, ""]
    # Whether q was normalisable at the end of the round.
    valid: Bool[Array, ""]
    # Simulated time since the start: in the units of a schedule's delays, else one a round.
    clock: Float[Array, ""]
    # Natural parameters sent since the start, each once for every group that gets or sends them: sites to the server (or
    # to a neighbour), and q's from it.
    messages: Int[Array, "2"]
    # Largest distance of a group's own q from the common one, in posterior sds; 0 with a server.
    consensus: Float[Array, ""]
    # DELBO on the rows that the round took, its consensus gap and its modelling gap, nats; NaN under other schedules.
    delbo: Float[Array, "3"]


# The fields of a report with one entry per factor.
BY_FACTOR = ("move", "step", "backoffs", "skipped", "skip_run", "staleness")


def empty_report(count: int, dtype: Any) -> RoundReport:
    """The report of a state that no round has touched.

    Args:
        count: factors, the prior factor included.
        dtype: floating dtype.

    Returns:
        The report; nothing has moved by less than infinity yet.
    """
    none, zero = jnp.zeros((count,), jnp.int32), jnp.zeros((), dtype)
    return RoundReport(
        move=jnp.full((count,), jnp.inf, dtype),
        step=jnp.zeros((count,), dtype),
        backoffs=none,
        skipped=jnp.zeros((count,), bool),
        skip_run=none,
        staleness=none,
        total_move=jnp.asarray(jnp.inf, dtype),
        valid=jnp.array(True),
        clock=zero,
        messages=jnp.zeros((2,), jnp.int32),
        consensus=zero,
        delbo=jnp.full((3,), jnp.nan, dtype),
    )


def round_report(
    problem: Problem,
    carry: RoundCarry,
    done: Accepted,
    *,
    step: Float[Array, "F"],
    backoffs: Int[Array, "F"],
    skipped: Bool[Array, "F"],
    exchanges: Any,
    elapsed: Any = 1.0,
    staleness: Int[Array, "F"] | None = None,
    heard: Bool[Array, "F"] | None = None,
) -> RoundReport:
    """Report on a round that ends at ``done``.

    Args:
        problem: the factors.
        carry: where things stood before the round.
        done: sites after the round with their evaluation.
        step: share of each factor's proposed change that was taken.
        backoffs: halvings of each factor.
        skipped: which factors made no proposal.
        exchanges: how often q went out to a group and an answer came back, in this round.
        elapsed: simulated time that the round took.
        staleness: changes of q that each factor's site had not seen; None is none.
        heard: which factors took part; None is all. The others keep their last move, and q does not count as settled
            before they have moved little as well.

    Returns:
        The report, with running totals continued from the carry's.
    """
    last, moments = carry.report, done.evaluation.moments
    if problem.flat:
        move, moved = cast(Any, problem).moves(done.sites, carry.sites, done.evaluation, carry.evaluation)
    else:
        move = factor_moves(problem, done.sites, carry.sites, done.evaluation)
        moved = total_move(problem.family, done.evaluation, carry.evaluation)
    skip_run = jnp.where(skipped, last.skip_run + 1, 0)
    if heard is not None:
        move, skip_run = jnp.where(heard, move, last.move), jnp.where(heard, skip_run, last.skip_run)
        waiting = jnp.max(jnp.where(heard, 0.0, move), initial=0.0)
        moved = jnp.maximum(moved, jnp.minimum(waiting, UNHEARD_MOVE).astype(moved.dtype))
    return RoundReport(
        move=move,
        step=step,
        backoffs=backoffs,
        skipped=skipped,
        skip_run=skip_run,
        staleness=jnp.zeros_like(last.staleness) if staleness is None else staleness,
        total_move=moved,
        valid=moments.valid,
        clock=last.clock + jnp.asarray(elapsed, last.clock.dtype),
        messages=last.messages + jnp.asarray(exchanges, jnp.int32),
        consensus=last.consensus,
        delbo=last.delbo,
    )


def total_move(family: GaussianFamily, new: Evaluation, old: Evaluation) -> Float[Array, ""]:
    """Largest change of a posterior mean, or of a log sd, in posterior sd units."""
    sd_new, sd_old = (jnp.sqrt(family.variances(e.moments)) for e in (new, old))
    shift = jnp.max(jnp.abs(new.moments.loc - old.moments.loc) / sd_new)
    stretch = jnp.max(jnp.abs(jnp.log(sd_new) - jnp.log(sd_old)))
    largest = jnp.maximum(shift, stretch)
    if new.local is not None and old.local is not None:
        (mean_new, own_new), (mean_old, own_old) = new.local, old.local
        largest = jnp.maximum(largest, jnp.max(jnp.abs(mean_new - mean_old) / own_new))
        largest = jnp.maximum(largest, jnp.max(jnp.abs(jnp.log(own_new) - jnp.log(own_old))))
    return jnp.where(old.moments.valid, largest, jnp.inf)


def factor_moves(problem: Problem, new: SiteStack, old: SiteStack, evaluation: Evaluation) -> Float[Array, "F"]:
    """First-order change of the posterior means by each factor's step, largest coordinate, in posterior sds.

    Args:
        problem: the factors.
        new: sites after the round.
        old: sites before it.
        evaluation: evaluation of the q after the round.

    Returns:
        One number per factor, the prior factor (if any) first.
    """
    family, moments = problem.family, evaluation.moments
    sd = jnp.sqrt(family.variances(moments))
    change = new - old

    def move(natural):
        force = natural.precision_mean - family.precision_product(natural, moments.loc)
        return jnp.max(jnp.abs(family.covariance_product(moments, force)) / sd, axis=-1)

    # A tied site is moved by all groups together.
    moves = jnp.broadcast_to(move(change.groups), (problem.num_groups,))
    return moves if change.prior is None else jnp.concatenate([move(change.prior)[None], moves])


def with_prior(prior: Any, groups: Array) -> Array:
    """Put the prior factor's entry, if there is one, before the groups'."""
    return groups if prior is None else jnp.concatenate([jnp.reshape(prior, (1,)).astype(groups.dtype), groups])
