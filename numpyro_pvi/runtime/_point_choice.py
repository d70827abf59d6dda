"""Between rounds: sigma points or random ones, and an evaluation under the choice and on fresh draws."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..expectations import Expected, PointsProgram, disagreement
from ..schedules import Evaluation, Points
from ..sites import SiteStack
from ._data import Draws
from ._local import LocalProblem
from ._row_problem import RowProblem

# Posterior sds that q moves before sigma points are compared with draws again.
COMPARED_MOVE = 0.5
# Drop of q's mean log sd, or number of rounds, after which sigma points that failed are tried again; how many times as long a
# failed retry waits for the next.
RETRY_DROP, RETRY_ROUNDS, _LONGER = 0.2, 8, 4
# Antithetic pairs of the comparison that a pass over the rows takes at once.
_PAIRS_AT_ONCE = 4


def settle(
    problem: LocalProblem | RowProblem,
    sites: SiteStack,
    evaluation: Evaluation,
    noise: Draws | None,
    moved: Float[Array, ""],
    stale: bool,
    again: bool = False,
) -> Evaluation:
    """Decide whether sigma points still serve, and evaluate q under the decision.

    Sigma points stay while a few random draws agree with them; the comparison is made whenever q has moved by half a
    posterior sd since the last one, and every eight rounds: what the points do not see, q may grow into until it stands
    still at an optimum of theirs. Once contradicted they are tried again when q has become narrower, and every eight
    rounds; from then on draws have to confirm them.

    Args:
        problem: the factors.
        sites: where the sites are.
        evaluation: an evaluation at these sites, or one of the right shapes when ``stale``.
        noise: draws for this evaluation and the next round.
        moved: how far q has moved since the last call, in posterior sds.
        stale: whether the evaluation must be made afresh.
        again: whether to repeat the last evaluation to the letter: its quadrature rule, and its choice of points.

    Returns:
        The evaluation; its rule carries the decision.
    """
    able = jnp.asarray([getattr(p, "mode", "") == "auto" for p in (problem.program, problem.prior_program)])
    old = evaluation.rule.points
    if not (problem.can_switch and noise is not None):
        return problem.evaluate(sites, evaluation.rule, noise, again=again) if stale else evaluation
    spread = -0.5 * cast(Any, evaluation.moments).log_det_precision / problem.family.dim
    any_sampled = jnp.any(old.sampled)
    # Noise moves q for ever: where draws are in use, rounds count and not moves. Looking again is no round.
    least = COMPARED_MOVE / RETRY_ROUNDS
    travelled = old.moved if again else old.moved + jnp.where(any_sampled, least, jnp.maximum(moved, least))
    due = travelled >= COMPARED_MOVE
    # Before the first evaluation there is no spread to go by.
    retry = old.sampled & ((spread < old.anchor - RETRY_DROP) | due) & (not stale)
    ask = able & ~(old.sampled & ~retry) & (due | retry)
    points = Points(old.sampled & ~retry, old.anchor, jnp.where(due, 0.0, travelled))
    by_draws = problem.sampled(evaluation.rule)
    return _settled(problem, sites, evaluation, noise, points, ask, by_draws | stale, again)


def _settled(problem, sites, evaluation: Evaluation, noise, points: Points, ask, stale, again: bool) -> Evaluation:
    # Finite once they have been contradicted.
    before = jnp.isfinite(points.anchor)

    def unfinished(state):
        _, ask, stale = state
        return jnp.any(ask) | stale

    def step(state):
        evaluation, ask, stale = state
        rule = evaluation.rule
        evaluation = jax.lax.cond(stale, lambda: problem.evaluate(sites, rule, noise, again=again), lambda: evaluation)
        wrong = ask & jax.lax.cond(
            jnp.any(ask), lambda: _contradicted(problem, evaluation, noise, before), lambda: jnp.zeros((2,), bool)
        )
        spread = -0.5 * evaluation.moments.log_det_precision / problem.family.dim
        found = evaluation.rule.points
        wait = jnp.where(jnp.any(wrong & before), (1 - _LONGER) * COMPARED_MOVE, found.moved)
        found = Points(found.sampled | wrong, jnp.where(wrong, spread, found.anchor), wait.astype(found.moved.dtype))
        rule = evaluation.rule._replace(points=found)
        return evaluation._replace(rule=rule), jnp.zeros_like(ask), jnp.any(wrong)

    first = evaluation._replace(rule=evaluation.rule._replace(points=points))
    return jax.lax.while_loop(unfinished, step, (first, ask, jnp.asarray(stale)))[0]


def _contradicted(problem: LocalProblem, evaluation: Evaluation, noise: Draws, before: Bool[Array, "2"]) -> Any:
    """Whether draws contradict the sigma points of the likelihood, and of the prior factor, or do not confirm them again."""
    return jnp.stack(
        [_likelihood(problem, evaluation, noise, before[0]), _prior(problem, evaluation, noise, before[1])]
    )


def _likelihood(problem: LocalProblem, evaluation: Evaluation, noise: Draws, before: Bool[Array, ""]) -> Any:
    program, moments = problem.program, evaluation.moments
    if not isinstance(program, PointsProgram):
        return jnp.array(False)

    def total(groups: Expected) -> Expected:
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), groups)

    def pair(eps: Float[Array, "D"]) -> Expected:
        return total(problem.sum_groups(lambda chunk: program.pair(chunk, moments, eps)))

    pairs = jax.lax.map(pair, noise.compared, batch_size=_PAIRS_AT_ONCE)
    return disagreement(problem.family, moments, total(evaluation.groups), noise.compared, pairs, before)


def _prior(problem: LocalProblem, evaluation: Evaluation, noise: Draws, before: Bool[Array, ""]) -> Any:
    program, moments = problem.prior_program, evaluation.moments
    if not isinstance(program, PointsProgram) or evaluation.prior is None:
        return jnp.array(False)
    eps = noise.compared
    pairs = jax.vmap(lambda e: program.pair(problem.data.prior, moments, e))(eps)
    return disagreement(problem.family, moments, evaluation.prior, eps, pairs, before)
