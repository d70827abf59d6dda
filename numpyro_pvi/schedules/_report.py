"""What is kept of every round, and how far it moved each factor."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..sites import SiteStack
from ._contract import Accepted, Evaluation, Problem, RoundCarry, RoundReport
from ._convergence import (
    CRAWL,
    NOTHING,
    TRAIL,
    Asked,
    asked_of,
    pace,
    refusals,
    rounding,
    sketch,
    sound,
)

# What a factor that has not been heard lately counts for at most, in posterior sds: no tolerance is as large.
UNHEARD_MOVE = 0.5


# The fields of a report with one entry per factor.
BY_FACTOR = ("move", "step", "backoffs", "skipped", "skip_run", "staleness", "asked")


def empty_report(count: int, dtype: Any) -> RoundReport:
    """The report of a state that no round has touched.

    Args:
        count: factors, the prior factor included.
        dtype: floating dtype.

    Returns:
        The report; nothing has moved by less than infinity yet.
    """
    none, zero = np.zeros((count,), np.int32), np.zeros((), dtype)
    # Made on the host: here every line would be a program of its own.
    report = RoundReport(
        move=np.full((count,), np.inf, dtype),
        step=np.zeros((count,), dtype),
        backoffs=none,
        skipped=np.zeros((count,), bool),
        skip_run=none,
        staleness=none,
        total_move=np.asarray(np.inf, dtype),
        valid=np.array(True),
        clock=zero,
        messages=np.zeros((2,), np.int32),
        consensus=zero,
        delbo=np.full((3,), np.nan, dtype),
        asked=np.full((count,), np.inf, dtype),
        estimate=np.asarray(np.inf, dtype),
        before=np.asarray(np.inf, dtype),
        left=np.asarray(np.inf, dtype),
        rate=zero,
        trail=np.zeros((TRAIL,), dtype),
        paced=zero,
        refused=np.asarray(0, np.int32),
        why=np.asarray(NOTHING, np.int32),
        finite=np.array(True),
    )
    return jax.device_put(report)


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
    states: Any = None,
    prior_state: Any = None,
    largest: Any = 1.0,
    full: Any = 1.0,
    late: Any = 1.0,
    own: Any = None,
    asked: Asked | None = None,
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
        states: the groups' solver states after the round, which may tell what they asked for.
        prior_state: the prior factor's.
        largest: the joint step of a round in which nothing is held back.
        full: the joint step that takes all that is asked for.
        late: weight of the round in an average of late rounds.
        own: share of what it asks for that a solver takes by its own settings; a number, or one per group; None is all.
        asked: what the factors asked for, where the schedule knows.

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
    taken = done.accepted & (done.step >= CRAWL * largest)
    if asked is None:
        share = done.step / full * (1.0 if own is None else jnp.min(jnp.asarray(own)))
        asked = asked_of(problem, carry, states, prior_state, move, moved, share, taken)
    noisy = problem.noisy | problem.stochastic
    trail, still = _trail(problem, done, carry), _is_rounding(problem, done, carry)
    ahead = pace(last, trail, moved, asked.together, _longest(step, taken), noisy, late, still)
    finite = sound(done.evaluation.elbo)
    refused, why = refusals(last, taken, done.why)
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
        asked=asked.factors.astype(last.asked.dtype),
        **ahead._asdict(),
        refused=refused,
        why=why,
        finite=finite,
    )


def _longest(step: Float[Array, "F"], taken: Any) -> Float[Array, ""]:
    """The longest step of any factor, 0 where all were refused."""
    return jnp.where(taken, jnp.max(step), 0.0)


def _trail(problem: Problem, done: Accepted, carry: RoundCarry) -> Float[Array, "16"]:
    """A sketch of how the round moved the means and log sds of q."""
    new, old = done.evaluation.moments, carry.evaluation.moments
    if problem.flat:
        moves = cast(Any, problem).shifts(done.evaluation, carry.evaluation)
    else:
        moves = problem.family.moves(new, old)
    return sketch(jnp.where(old.valid, moves, 0.0))


def _is_rounding(problem: Problem, done: Accepted, carry: RoundCarry) -> Bool[Array, ""]:
    """Whether q has moved by rounding only."""
    new, old = done.evaluation.moments, carry.evaluation.moments
    if problem.flat:
        # Two numbers a row: q itself, beside a prior that does not move.
        return rounding(done.evaluation.q - carry.evaluation.q, done.evaluation.q)
    sd = problem.family.sds(new)
    return rounding((new.loc - old.loc, sd - problem.family.sds(old)), (new.loc, sd))


def total_move(family: Any, new: Evaluation, old: Evaluation) -> Float[Array, ""]:
    """Largest change of a posterior mean, or of a log sd, in posterior sd units."""
    largest = jnp.max(jnp.abs(family.moves(new.moments, old.moments)))
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
    change = new - old

    def move(natural):
        return jnp.max(jnp.abs(family.shift(natural, moments)), axis=-1)

    # A tied site is moved by all groups together.
    moves = jnp.broadcast_to(move(change.groups), (problem.num_groups,))
    return moves if change.prior is None else jnp.concatenate([move(change.prior)[None], moves])


def with_prior(prior: Any, groups: Array) -> Array:
    """Put the prior factor's entry, if there is one, before the groups'."""
    return groups if prior is None else jnp.concatenate([jnp.reshape(prior, (1,)).astype(groups.dtype), groups])
