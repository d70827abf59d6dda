"""How a run ended, in words: converged, stalled, or short of its tolerance; and what an end may not be."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ._state import PVIState
from .errors import NonFiniteLossError
from .handlers import PRIOR
from .runtime import noise_floor
from .schedules import FELL, IMPROPER, NOT_FINITE, STALL_ROUNDS, VISITS, RoundReport, settled, stalled, within_noise

# Rates of contraction above which rounds are called slow, and what is left below which nobody is told.
_SLOW, _LITTLE = 0.9, 1e-3
_REFUSALS = {
    FELL: "the ELBO would have fallen",
    IMPROPER: "no step left q normalisable",
    NOT_FINITE: "a factor's log density was not finite there",
}
_REMEDIES = {
    FELL: "Start nearer (init_params, or init_sites='curvature'), narrow the priors, scale the columns to sds near 1, or pass "
    "Synchronous(damping=0.25); under draws, more of them (num_draws). Where the fall is within "
    "rounding, jax.config.update('jax_enable_x64', True)",
    IMPROPER: "Narrow the priors, pass Synchronous(damping=0.25), or start with init_sites='prior'",
    NOT_FINITE: "Narrow the prior or scale the columns, look for a link that overflows and for an observation outside the "
    "likelihood's support, or start nearer (init_params)",
    VISITS: "Allow more visits or ask them for less: Streaming(visits=..., tol=...), Committee(max_visits=..., tol=...); larger "
    "steps of the solver, or a schedule that comes back to its groups, such as Synchronous()",
}


def labels_of(plan: Any) -> tuple:
    """Labels of all factors, the prior factor (if any) first."""
    part = plan.partition
    return ((PRIOR,) if part.has_prior_factor else ()) + part.table.labels


def named(label: Any) -> str:
    """A factor's name in a sentence."""
    return "the prior factor (PRIOR)" if label is PRIOR else f"group {label!r}"


def ending(state: PVIState, done: int, tol: float | None) -> tuple[bool | None, str]:
    """Whether a run has converged (None when that was not asked for), and why it should stop now, if it should.

    Args:
        state: after the rounds so far.
        done: their number.
        tol: tolerance in posterior sds, or None.

    Returns:
        ``(converged, sentence)``; the sentence is empty where rounds go on.
    """
    if tol is None or not done:
        return None if tol is None else False, ""
    report, floor = jax.device_get((state.report, noise_floor(state.solver_state, state.report)))
    if bool(settled(report, tol, floor)):
        if float(report.left) <= tol:
            return True, f"converged after {done} rounds: no more than {tol:g} posterior sd is left to move"
        return True, (
            f"converged after {done} rounds: no move above {max(tol, float(floor)):g} posterior sd, the noise of sampled moments "
            "(more draws would lower it)"
        )
    if bool(stalled(report, tol, floor)):
        return False, f"stalled after {done} rounds: {standstill(state)}"
    return False, ""


def short_of(state: PVIState, tol: float | None) -> str:
    """What a run that has used up its rounds says beside their number; empty where there is nothing to say.

    Args:
        state: the last one.
        tol: tolerance in posterior sds, or None.

    Returns:
        A clause.
    """
    report = jax.device_get(state.report)
    if bool(np.any(report.skip_run > 0)):
        worst = labels_of(state.plan)[int(np.argmax(report.skip_run))]
        return f"{named(worst)} was skipped in the last {int(report.skip_run.max())} rounds"
    if int(report.refused) >= STALL_ROUNDS and float(report.left) > (_LITTLE if tol is None else tol):
        return standstill(state)
    notes = limits(state) if tol is None else (*limits(state), _left(state, report))
    return notes[0].removesuffix(".") if notes else ""


def standstill(state: PVIState) -> str:
    """Why q stands still while factors ask for more: who asks, what was refused, and what to do."""
    report = jax.device_get(state.report)
    worst, why = int(np.argmax(report.asked)), int(report.why)
    who, asked = named(labels_of(state.plan)[worst]), float(report.asked[worst])
    size = f"{asked:.2g} posterior sds" if np.isfinite(asked) else "no finite move"
    if why == VISITS:
        return (
            f"the visits that the schedule allows ended before {who} had settled (about {size} are left), and it does not come "
            f"back. {_REMEDIES[VISITS]}"
        )
    return (
        f"{who} asks for {size}, all together for {float(report.estimate):.2g}, but every step was refused in the last "
        f"{int(report.refused)} rounds because {_REFUSALS.get(why, _REFUSALS[FELL])}; q is not at an optimum. "
        f"{_REMEDIES.get(why, _REMEDIES[FELL])}"
    )


def _left(state: PVIState, report: RoundReport) -> str:
    left = f"about {float(report.left):.2g} posterior sds are left to move"
    # Of moments that are matched by draws, the ending itself tells the noise.
    if hasattr(state.solver_state, "ess") or not state.plan.by_draws(jax.device_get(state.rule)):
        return f"{left}."
    return (
        f"{left}. Expectations are by draws, whose noise late rounds average away: it falls with the root of the number of rounds "
        "and of draws. Ask for no more than it allows (a larger tol), or for more draws (num_draws)."
    )


def limits(state: PVIState) -> tuple[str, ...]:
    """Notes on what holds a fit back: refused steps, visits that ended, a slow contraction, a solver's own small steps.

    Args:
        state: after a round.

    Returns:
        Sentences; none where nothing is held back, or next to nothing is left.
    """
    report, found = jax.device_get(state.report), []
    if not np.isfinite(float(report.total_move)) or not float(report.left) > _LITTLE:
        return ()
    if int(report.refused) >= STALL_ROUNDS:
        return (f"stalled: {standstill(state)}.",)
    if float(report.rate) > _SLOW:
        found.append(
            f"slow contraction: {float(report.rate):.4g} of a round's move comes again in the next, so that about "
            f"{float(report.left):.2g} posterior sds are left to move. Run on; correlated latents want a guide with a full "
            "covariance, and small steps larger ones."
        )
    elif float(report.estimate) > 4 * float(report.total_move) and not bool(within_noise(report, _floor(state))):
        found.append(
            f"small steps: the last round moved q by {float(report.total_move):.2g} posterior sds, while its factors ask for "
            f"{float(report.estimate):.2g}: a step size of the solver's or a damping, noise that is averaged, or steps that were "
            "halved hold it back."
        )
    return tuple(found)


def _floor(state: PVIState) -> Any:
    return noise_floor(state.solver_state, state.report)


def refuse_unbounded(state: PVIState, loss: float, done: int) -> None:
    """Raise where a run ends with a loss that is no number.

    Args:
        state: the last one.
        loss: negative ELBO in nats, NaN where it was not looked at.
        done: rounds.

    Raises:
        NonFiniteLossError: naming the factor; its ``.state`` is the last state.
    """
    report = jax.device_get(state.report)
    if not done or bool(report.finite):
        return
    runs = np.asarray(report.skip_run)
    worst = int(np.argmax(runs) if runs.max() > 0 else np.argmax(report.asked))
    latents = ", ".join(str(name) for name in _latents(state, worst))
    raise NonFiniteLossError(
        f"the loss is {loss:.3g} nats after {done} rounds, which is no bound of anything: "
        f"{named(labels_of(state.plan)[worst])} has no finite log density, or an astronomically small one, under q in latent(s) "
        f"{latents}. {_REMEDIES[NOT_FINITE]}. The exception's .state is the last state.",
        state,
    )


def _latents(state: PVIState, index: int) -> tuple:
    part: Any = state.plan.partition
    if labels_of(state.plan)[index] is PRIOR and getattr(part, "prior_latents", ()):
        return part.prior_latents
    return part.layout.names if hasattr(part, "layout") else tuple(n for n, _ in state.plan.family.components)
