"""What is kept of every round, and when rounds have converged or stalled: what q is still asked to do.

A move may be small because q has arrived, or because steps were refused, are small by a solver's own choice, or shrink slowly.
Three numbers tell these apart, all from what a round has at hand anyway: the move that was *asked for* (the effect on q of all
undamped proposals together), the *rate* at which successive moves shrink along their own direction, and how many rounds running
every step was refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..expectations import Expected
from ..sites import SiteStack, select
from ._contract import Accepted, Evaluation, Problem, RoundCarry, RoundReport

# ----------------------------------------------------------------------------------------------------- what is proposed
# What the natural gradient at one q asks of every site.


def natural_gradient_proposal(problem: Problem, carry: RoundCarry) -> SiteStack:
    """Every site's natural-gradient target at the carry's q (PVI eq. 10): small joint steps towards it raise the ELBO.

    Args:
        problem: the factors.
        carry: where things stand.

    Returns:
        Targets; a site whose factor was not finite stays.
    """

    def usable(expected: Expected, site: Any) -> Any:
        expected = dataclasses.replace(expected, local=None)
        good = jax.vmap(all_finite)(expected) if jnp.ndim(expected.value) else all_finite(expected)
        return select(good, expected.target, site)

    sites, evaluation = carry.sites, carry.evaluation
    prior = None if evaluation.prior is None or sites.prior is None else usable(evaluation.prior, sites.prior)
    local = problem.local_proposal(carry, jnp.ones((problem.num_groups,), bool))
    found = dataclasses.replace(evaluation.groups, target=problem.split(evaluation.groups.target))
    groups = problem.merge(usable(found, problem.split(sites.groups)))
    return SiteStack(groups, sites.prior if prior is None else prior, local)


# ---------------------------------------------------------------------------------------------------------- convergence

# Rounds running with every step refused before they count as stalled: line searches begin anew in between.
STALL_ROUNDS = 5
# What share of what is left to params is held from round to round, and the largest share of a gain that comes again.
_HELD, _SLOWEST_GAIN = 0.8, 0.999
# A step below this share of the largest one is a refusal that only looks like a step.
CRAWL = 2.0**-12
# Noise of draws, in posterior sds, beyond which nothing counts as converged.
LARGEST_NOISE = 0.1
# Numbers that stand for the direction of a round's move, whatever the dimension.
TRAIL = 16
# Standard errors of a move that count as its noise.
_NOISES = 2.0
# No contraction is told from 1 beyond this.
_SLOWEST = 1.0 - 1e-4
# Units in the last place that sums of a round may differ by.
_LAST_PLACES = 16
# Share of the last rate that is kept where moves are noisy.
_SMOOTHING = 0.5
# The share of a noisy move that comes again, at most: no rate is larger.
_LARGEST_SHARE = 1.0
# Nats beyond which a loss is an overflow that has not come to an end.
_HUGE = 1e18
# A step below this share of the longest recent one is short; what share of that is remembered from round to round.
_SHORT, _FADING = 0.1, 0.7

# Why a step was refused, or what else kept q from moving on.
NOTHING, FELL, IMPROPER, NOT_FINITE, VISITS = range(5)


class Asked(NamedTuple):
    """What a round's proposals would do to q at full length, to first order, in posterior sds: means and log sds."""

    # By each factor, the prior factor (if any) first.
    factors: Float[Array, "F"]
    together: Float[Array, ""]


class Pace(NamedTuple):
    """What a report remembers of how moves go on; fields of :class:`RoundReport` under the same names."""

    estimate: Float[Array, ""]
    before: Float[Array, ""]
    left: Float[Array, ""]
    rate: Float[Array, ""]
    trail: Float[Array, "16"]
    paced: Float[Array, ""]


# ------------------------------------------------------------------------------------------------------- what is asked


def _largest(moves: Float[Array, "*batch N"]) -> Float[Array, "*batch"]:
    """Largest entry in size; infinite where one is no number: nobody knows what a factor that is not finite asks for."""
    sizes = jnp.abs(moves)
    return jnp.max(jnp.where(jnp.isnan(sizes), jnp.inf, sizes), axis=-1)


def asked_by_proposal(problem: Problem, carry: RoundCarry, proposal: Any, refused: Any = True) -> Asked:
    """What all sites' targets ask of q, at the q that they were made for.

    ``proposal``: undamped targets; ``refused``: whether steps were refused, so that nothing else tells what is asked of the log
    sds of very many latents.
    """
    moments, change = carry.evaluation.moments, proposal - carry.sites
    # By factor the shift will do: it is what `move` tells as well.
    factors = _shifts(problem, change, moments, _largest)
    if problem.flat:
        return Asked(factors, _largest(factors))
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0), change.groups)
    if change.prior is not None:
        total = total + change.prior
    return Asked(factors, _largest(problem.family.effect(total, moments, refused)))


def asked_by_memory(moves: Float[Array, "M N"], prior: Float[Array, "N"] | None, has_prior: bool) -> Asked:
    """The same from what solvers that match moments remember: the full move that each asked for in its last visit.

    ``prior``: of the prior factor; None where nobody knows.
    """
    if has_prior:
        moves = jnp.concatenate([(jnp.zeros_like(moves[0]) if prior is None else prior)[None], moves])
    return Asked(_largest(moves), _largest(jnp.sum(moves, axis=0)))


def asked_by_move(move: Float[Array, "F"], moved: Float[Array, ""], share: Any, taken: Any, last: RoundReport) -> Asked:
    """The same from what was taken, where proposals tell nothing by themselves; after a refusal, what was asked before.

    ``move``: of every factor; ``moved``: of all together; ``share``: of what was asked for that was taken, one number or one
    per factor; ``taken``: whether any step was; ``last``: the report of the round before. Returns the moves.
    """
    share = jnp.asarray(share, move.dtype)
    good = jnp.asarray(taken) & (share > 0)
    safe = jnp.where(good, share, 1.0)
    factors = jnp.where(good, move / safe, last.asked)
    together = jnp.where(jnp.all(good), moved / jnp.min(safe), jnp.maximum(last.estimate, moved))
    return Asked(factors, together.astype(moved.dtype))


def asked_of(
    problem: Problem,
    carry: RoundCarry,
    states: Any,
    prior_state: Any,
    move: Float[Array, "F"],
    moved: Float[Array, ""],
    share: Any,
    taken: Any,
) -> Asked:
    """What a round's factors asked of q, by whatever this kind of fit knows; see the functions above for the arguments."""
    found = carry.evaluation.groups
    if problem.matches_moments and states:
        moments = carry.evaluation.moments
        moves = states.asked(problem.family, moments)
        # A tied site's groups keep no moves of their own.
        if moves.shape[-1] > 0:
            prior = prior_state.asked(problem.family, moments) if prior_state else None
            return asked_by_memory(moves, prior, problem.has_prior_factor)
    told = not (problem.stochastic or problem.matches_moments) and problem.units is None
    if not told or found.target is None:
        return asked_by_move(move, moved, share, taken, carry.report)
    proposal = natural_gradient_proposal(problem, carry)
    found_asked = asked_by_proposal(problem, carry, proposal, ~jnp.asarray(taken))
    if problem.flat:
        by_move = asked_by_move(move, moved, share, taken, carry.report)
        together = jnp.maximum(found_asked.together, jnp.where(taken, by_move.together, 0.0))
        found_asked = found_asked._replace(together=together)
    values = found.value if carry.evaluation.prior is None else _with(carry.evaluation.prior.value, found.value)
    wild = ~jnp.isfinite(values)
    together = jnp.where(carry.evaluation.moments.valid & ~jnp.any(wild), found_asked.together, jnp.inf)
    return Asked(jnp.where(wild, jnp.inf, found_asked.factors), together)


def _with(first: Any, others: Array) -> Array:
    return jnp.concatenate([jnp.reshape(first, (1,)).astype(others.dtype), others])


# ------------------------------------------------------------------------------------------------------ what is left


def sketch(moves: Float[Array, "N"]) -> Float[Array, "16"]:
    """A few numbers for a long vector: inner products of sketches are those of the vectors, up to chance.

    ``moves``: any vector. Returns sums of its entries by place modulo 16, with signs that look random; a linear map, exact for
    up to 16 entries.

    References:
        Charikar, Chen and Farach-Colton, Finding frequent items in data streams, 2004 (the count sketch).
    """
    place = jnp.arange(moves.shape[0], dtype=jnp.uint32)
    sign = jnp.where((place // TRAIL * jnp.uint32(2654435761)) >> 31, -1.0, 1.0).astype(moves.dtype)
    moves = jnp.where(jnp.isfinite(moves), moves * sign, 0.0)
    padded = jnp.pad(moves, (0, -moves.shape[0] % TRAIL))
    return jnp.sum(padded.reshape(-1, TRAIL), axis=0)


def pace(
    last: RoundReport,
    trail: Float[Array, "16"],
    moved: Float[Array, ""],
    asked: Float[Array, ""],
    step: Float[Array, ""],
    noisy: bool,
    late: Any = 1.0,
    still: Any = False,
    drift: Any = 0.0,
    mixed: Any = False,
) -> Pace:
    """How much is left to move: what is asked for, or the sum of the moves to come where they shrink slowly.

    With ``r`` the share of the last move that comes again in the same direction, further moves add up to ``move / (1 - r)``. A
    move that is short because steps were refused or cut says nothing of ``r``: the last one stands, for what is asked for.
    Where expectations are by draws and late naturals are averaged, what one round's draws ask for counts with the weight it has
    in the average, while the noise of that average is below a tenth of a sd.

    A mode that shrinks slowly shows only when faster ones are gone, so a number that is not ten times smaller than the last two
    has to come three times: ``left = max(new, min(max(last two), 10 new))``. ``last``: the report of the round before;
    ``trail``: sketch of the round's move; ``moved``: its largest coordinate, in posterior sds; ``asked``: what was asked for,
    likewise; ``step``: share of what was asked for that was taken; 0 where steps were refused; ``noisy``: whether moves have
    noise in them; ``late``: weight of a round in the average of late ones; ``still``: whether the move is rounding
    (:func:`rounding`), whose size and direction say nothing of a rate; ``drift``: how far q has gone one way through the noise of
    late rounds, which is left at least; ``mixed``: whether the round went to a mixture of rounds' targets, whose memory tells
    what is left (as ``drift``, of sites that are no numbers of rows), and how far says nothing of a rate. Returns the fields
    of the round's report.
    """
    step = jnp.asarray(step, moved.dtype)
    paced = jnp.maximum(step, _FADING * last.paced)
    steady = (step > 0) & (step >= _SHORT * paced)
    # A longer or shorter step than the last one moves q by so much more or less at the same rate.
    trail = trail / jnp.where(step > 0, step, 1.0)
    size, new = jnp.vdot(last.trail, last.trail), jnp.vdot(trail, trail)
    compares = steady & (size > 0) & ~jnp.asarray(still) & ~jnp.asarray(mixed)
    size = jnp.where(size > 0, size, 1.0)
    again = jnp.vdot(trail, last.trail) / size
    if noisy:
        # Noise makes shares of any size: a large one is no slow mode.
        again = jnp.clip(again, -_LARGEST_SHARE, _LARGEST_SHARE)
        again = _SMOOTHING * last.rate + (1.0 - _SMOOTHING) * again
    else:
        # Where moves shrink, by how much: fast modes that turn back would hide slow ones that go on.
        again = jnp.where(new < size, jnp.sqrt(new / size), again)
    rate = jnp.where(compares, jnp.clip(again, 0.0, _SLOWEST), last.rate).astype(moved.dtype)
    jitter = asked * jnp.sqrt(0.5 * jnp.asarray(late, moved.dtype))
    averaged = jnp.where(jitter <= LARGEST_NOISE, late * asked, jitter)
    asked = jnp.where(jnp.asarray(late) < 1, averaged, asked)
    to_come = moved * jnp.max(last.step, initial=0.0) / jnp.where(step > 0, step, 1.0) / (1.0 - rate)
    ahead = jnp.where(compares, to_come, jnp.minimum(last.estimate, asked / (1.0 - rate)))
    ahead = jnp.where(mixed, 0.0, ahead)
    estimate = jnp.maximum(jnp.maximum(asked, moved), ahead)
    estimate = jnp.where(jnp.isnan(estimate), jnp.inf, estimate).astype(moved.dtype)
    recent = jnp.maximum(last.estimate, last.before)
    left = jnp.maximum(estimate, jnp.minimum(recent, 10.0 * estimate))
    left = jnp.maximum(left, drift).astype(moved.dtype)
    trail = jnp.where(steady & ~jnp.asarray(mixed), trail, 0.0).astype(moved.dtype)
    return Pace(estimate, last.estimate, left, rate, trail, paced.astype(moved.dtype))


def rounding(change: Any, of: Any) -> Bool[Array, ""]:
    """Whether a change is no more than what rounding makes of the numbers that it changes.

    ``change``: a pytree of arrays; ``of``: the numbers, likewise. Returns True where no entry has changed by more than 16 units
    in its last place.
    """

    def none(a: Array, b: Array) -> Array:
        return jnp.all(jnp.abs(a) <= _LAST_PLACES * jnp.finfo(a.dtype).eps * jnp.abs(b))

    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(none, change, of))))


class Approach(NamedTuple):
    """How one factor's visits close in on its site, where it is visited until it has settled."""

    move: Float[Array, "N"]
    left: Float[Array, ""]


def approach(last: Approach, move: Float[Array, "N"]) -> Approach:
    """The same estimate from one visit to the next.

    ``last``: after the visit before; ``move``: of this visit, by coordinate, in posterior sds. Returns the last move, and what
    is left in posterior sds.
    """
    size = jnp.vdot(last.move, last.move)
    rate = jnp.where(size > 0, jnp.vdot(move, last.move) / jnp.where(size > 0, size, 1.0), 0.0)
    return Approach(move, (_largest(move) / (1.0 - jnp.clip(rate, 0.0, _SLOWEST))).astype(last.left.dtype))


def at_rest(last: RoundReport, still: RoundReport) -> RoundReport:
    """The report of a round of a schedule that is complete: nothing moves, and what its visits left undone is left.

    ``last``: the report of the round before, whose ``asked`` is what the visits to every factor left.
    """
    left = jnp.max(last.asked, initial=0.0).astype(still.left.dtype)
    return still._replace(
        asked=last.asked,
        estimate=left,
        before=left,
        left=left,
        refused=jnp.int32(STALL_ROUNDS),
        why=jnp.int32(VISITS),
        skipped=last.skipped,
        skip_run=last.skip_run,
        finite=last.finite,
    )


# ---------------------------------------------------------------------------------------------------------- verdicts


def refusals(last: RoundReport, taken: Any, why: Any) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Rounds running with every step refused, and why the last one was.

    ``last``: the report of the round before; ``taken``: whether any step was taken; ``why``: a code for where none was. Returns
    ``(rounds, code)``.
    """
    taken = jnp.asarray(taken)
    why = jnp.where(taken, NOTHING, jnp.asarray(why, jnp.int32)).astype(jnp.int32)
    return jnp.where(taken, 0, last.refused + 1).astype(jnp.int32), why


def sound(loss: Any) -> Bool[Array, ""]:
    """Whether a loss, or an ELBO, is a number that can bound anything."""
    return jnp.abs(jnp.asarray(loss)) < _HUGE


def with_params(report: RoundReport, gains: Float[Array, "P"], noisy: bool) -> RoundReport:
    """A round's report after a step of the model's params.

    With ``r`` the share of the last gain that comes again, further steps gain ``gain / (1 - r)``; twice that is the square of
    what is left in sds where the loss is quadratic. Where an optimiser with momentum turns, it stands still for a moment, far
    from where it goes: four fifths of what was left are left at least. ``report``: of the round; ``gains``: nats that the step
    gains to first order, by param in the order of their names; ``noisy``: whether slopes are by draws, whose noise moves params
    for ever: their gains tell no rate, and nothing below the largest noise counts. Returns the report.
    """
    gains = jnp.where(jnp.isnan(gains), jnp.inf, gains)
    largest = jnp.argmax(gains)
    gain = gains[largest]
    # Nothing is left of a round whose step was not finite once there is one that is.
    last = jnp.where(jnp.isfinite(report.param_gain), report.param_gain, 0.0)
    rate = jnp.where(last > 0, gain / jnp.where(last > 0, last, 1.0), _SLOWEST_GAIN)
    left = jnp.sqrt(2.0 * gain / (1.0 - (0.0 if noisy else jnp.clip(rate, 0.0, _SLOWEST_GAIN))))
    if noisy:
        left = jnp.where(left <= LARGEST_NOISE, 0.0, left)
    held = jnp.isfinite(report.param_move) & (report.param_move >= left)
    return report._replace(
        param_move=jnp.where(held, report.param_move, left).astype(report.param_move.dtype),
        param_gain=gain.astype(report.param_gain.dtype),
        param=jnp.where(held, report.param, largest).astype(report.param.dtype),
    )


def params_move(report: RoundReport, tol: Any) -> Any:
    """Whether more than the tolerance is left to a ``numpyro.param``."""
    return ~(report.param_move <= tol)


def settled(report: RoundReport, tol: Any, floor: Any) -> Any:
    """Whether a round's report says converged.

    ``report``: of the last round, on the device or, with NumPy's arrays, on the host: nothing here compiles there; ``tol``:
    tolerance in posterior sds; negative never is; ``floor``: the move that the noise of sampled moments explains; above a tenth
    of a sd it excuses nothing. Returns True where q is normalisable, the loss finite, no factor was left out, params stand, and
    what is left is within the tolerance or the noise of draws.
    """
    sound = report.valid & report.finite & ~(report.skip_run > 0).any() & (tol >= 0) & ~params_move(report, tol)
    return sound & ((report.left <= tol) | within_noise(report, floor))


def within_noise(report: RoundReport, floor: Any) -> Any:
    """Whether what is left is no more than what the noise of sampled moments asks for; never where nothing is sampled."""
    # Without any group at hand there is no step.
    step = report.step.max(initial=0.0)
    # An infinite move times no step would be a warning of NumPy's.
    moved = report.estimate.clip(max=_HUGE) * step
    explained = (moved <= _NOISES * floor) & ((step > 0) | (report.estimate <= 0))
    return explained & (floor > 0) & (floor <= LARGEST_NOISE)


def stalled(report: RoundReport, tol: Any, floor: Any) -> Any:
    """Whether q has stopped moving while factors ask for more than the tolerance; the arguments are those of :func:`settled`."""
    # A factor that is left out is reported as such, after a few rounds more.
    standing = (report.refused >= STALL_ROUNDS) & ~(report.skip_run > 0).any() & ~params_move(report, tol)
    return standing & ~settled(report, tol, floor) & (tol >= 0)


def finished(report: RoundReport, tol: Any, floor: Any) -> Bool[Array, ""]:
    """Whether rounds end here: converged, or stalled."""
    return settled(report, tol, floor) | stalled(report, tol, floor)


# ---------------------------------------------------------------------------------------------------- reports of rounds
# What is kept of every round, and how far it moved each factor.

# What a factor that has not been heard lately counts for at most, in posterior sds: no tolerance is as large.
UNHEARD_MOVE = 0.5


# The fields of a report with one entry per factor.
BY_FACTOR = ("move", "step", "backoffs", "skipped", "skip_run", "staleness", "asked")


def empty_report(count: int, dtype: Any) -> RoundReport:
    """The report of a state that no round has touched.

    ``count``: factors, the prior factor included; ``dtype``: floating dtype. Returns the report; nothing has moved by less than
    infinity yet.
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
        traffic=np.zeros((3,), np.int32),
        param_move=zero,
        param_gain=zero,
        param=np.asarray(0, np.int32),
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
    drift: Any = 0.0,
    own: Any = None,
    asked: Asked | None = None,
    mixed: Any = False,
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
        drift: what is left at least by what rounds remember: how far q has drifted through the noise of late ones, say;
            posterior sds.
        own: share of what it asks for that a solver takes by its own settings; a number, or one per group; None is all.
        asked: what the factors asked for, where the schedule knows.
        mixed: whether the round went to a mixture of rounds' targets: how far says nothing of a rate, nor of the next's.

    Returns:
        The report, with running totals continued from the carry's.
    """
    last, moments = carry.report, done.evaluation.moments
    move = factor_moves(problem, done.sites, carry.sites, done.evaluation)
    moved = total_move(problem, done.evaluation, carry.evaluation)
    skip_run = jnp.where(skipped, last.skip_run + 1, 0)
    if heard is not None:
        move, skip_run = jnp.where(heard, move, last.move), jnp.where(heard, skip_run, last.skip_run)
        waiting = jnp.max(jnp.where(heard, 0.0, move), initial=0.0)
        moved = jnp.maximum(moved, jnp.minimum(waiting, UNHEARD_MOVE).astype(moved.dtype))
    taken = done.accepted & (done.step >= CRAWL * largest)
    if asked is None:
        share = done.step / full * (1.0 if own is None else jnp.min(jnp.asarray(own)))
        asked = asked_of(problem, carry, states, prior_state, move, moved, share, taken)
    noisy = problem.noisy | problem.stochastic | problem.blind
    trail, still = _trail(problem, done, carry), _is_rounding(problem, done, carry)
    ahead = pace(last, trail, moved, asked.together, _longest(step, taken), noisy, late, still, drift, mixed)
    finite = sound(done.evaluation.elbo) | problem.blind
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
        **_beside_q(last),
    )


def _beside_q(last: RoundReport) -> dict[str, Array]:
    """What a round's report says of traffic and params, before those who know come after the round, where there are any."""
    held = {"param_move": _HELD * last.param_move, "param_gain": last.param_gain, "param": last.param}
    return {"traffic": jnp.zeros_like(last.traffic), **held}


def _longest(step: Float[Array, "F"], taken: Any) -> Float[Array, ""]:
    """The longest step of any factor, 0 where all were refused."""
    return jnp.where(taken, jnp.max(step), 0.0)


def _trail(problem: Problem, done: Accepted, carry: RoundCarry) -> Float[Array, "16"]:
    """A sketch of how the round moved the means and log sds of q."""
    new, old = done.evaluation.moments, carry.evaluation.moments
    return sketch(jnp.where(old.valid, problem.family.moves(new, old), 0.0))


def _is_rounding(problem: Problem, done: Accepted, carry: RoundCarry) -> Bool[Array, ""]:
    """Whether q has moved by rounding only."""
    new, old = done.evaluation.moments, carry.evaluation.moments
    if problem.flat:
        # Two numbers a row: q itself, beside a prior that does not move.
        return rounding(done.evaluation.q - carry.evaluation.q, done.evaluation.q)
    sd = problem.family.sds(new)
    return rounding((new.loc - old.loc, sd - problem.family.sds(old)), (new.loc, sd))


def total_move(problem: Problem, new: Evaluation, old: Evaluation) -> Float[Array, ""]:
    """Largest change of a posterior mean, or of a log sd, in posterior sd units."""
    largest = jnp.max(jnp.abs(problem.family.moves(new.moments, old.moments)))
    if new.local is not None and old.local is not None:
        largest = jnp.maximum(largest, problem.own_move(new, old))
    return jnp.where(old.moments.valid, largest, jnp.inf)


def factor_moves(problem: Problem, new: SiteStack, old: SiteStack, evaluation: Evaluation) -> Float[Array, "F"]:
    """First-order change of the posterior means by each factor's step, largest coordinate, in posterior sds.

    ``new``: sites after the round; ``old``: sites before it; ``evaluation``: evaluation of the q after the round. Returns one
    number per factor, the prior factor (if any) first.
    """
    return _shifts(problem, new - old, evaluation.moments, lambda shift: jnp.max(jnp.abs(shift), axis=-1))


def _shifts(problem: Problem, change: SiteStack, moments: Any, largest: Callable[[Array], Array]) -> Float[Array, "F"]:
    """The largest first-order change of the location by each factor's change, in sds; the prior factor's, if any, first."""
    # A tied site is moved by all groups together.
    groups = jnp.broadcast_to(largest(problem.shift(change.groups, moments)), (problem.num_groups,))
    return groups if change.prior is None else _with(largest(problem.family.shift(change.prior, moments)), groups)


def with_prior(prior: Any, groups: Array) -> Array:
    """Put the prior factor's entry, if there is one, before the groups'."""
    return groups if prior is None else jnp.concatenate([jnp.reshape(prior, (1,)).astype(groups.dtype), groups])
