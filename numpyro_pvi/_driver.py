"""The loop around compiled blocks of rounds: progress, tolerance, callbacks, interruption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from ._state import SKIP_LIMIT, PVIInfo, PVIState
from ._views import factor_labels, moment_notes
from .errors import SkippedGroupError
from .handlers import PRIOR
from .runtime import noise_floor
from .schedules import RoundReport

# Rounds in one compiled block: long enough that re-reading the data between blocks does not show, short enough to look
# up.
BLOCK = 32


class Run(NamedTuple):
    """The outcome of :func:`drive`."""

    state: PVIState
    losses: Any
    # Reports of the rounds that ran, with a leading axis; None when none did.
    reports: RoundReport | None
    converged: bool | None
    message: str


def drive(
    rounds: Callable,
    info: Callable[[PVIState], PVIInfo],
    state: PVIState,
    num_steps: int,
    tol: float | None,
    callback: Callable | None,
    progress_bar: bool,
) -> Run:
    """Run blocks of rounds until the number is reached, the tolerance is met, or a callback or the user stops it.

    Args:
        rounds: ``(state, count, tol, length) -> (state, losses, reports, done, missed)``, compiled once for all blocks.
        info: a state's report.
        state: where to start.
        num_steps: number of rounds.
        tol: tolerance in posterior sds, or None.
        callback: called after every round.
        progress_bar: whether to show progress.

    Returns:
        The last state, the losses of the rounds that ran, and how it ended.

    Raises:
        SkippedGroupError: when a factor was skipped in :data:`SKIP_LIMIT` rounds running.
    """
    dtype = jnp.result_type(float)
    limit = jnp.asarray(-1.0 if tol is None else tol, dtype)
    step = 1 if callback is not None else max(1, min(BLOCK, num_steps // 20)) if progress_bar else BLOCK
    losses: list[np.ndarray] = []
    reports: list[RoundReport] = []
    done, converged, message = 0, None if tol is None else False, ""
    bar = tqdm.tqdm(total=num_steps, disable=not progress_bar, unit="round")
    try:
        while done < num_steps and not message:
            count = min(step, num_steps - done)
            state, block, seen, ran, _ = rounds(state, jnp.int32(count), limit, BLOCK)
            ran = int(ran)
            if ran == 0:
                continue
            losses.append(np.asarray(block)[:ran])
            reports.append(jax.tree.map(lambda x, ran=ran: np.asarray(x)[:ran], seen))
            move = float(reports[-1].total_move[-1])
            done += ran
            bar.update(ran)
            bar.set_postfix_str(f"elbo {-losses[-1][-1]:.6g}, largest move {move:.1e} sd", refresh=False)
            _raise_if_stuck(state)
            floor = 0.0 if tol is None else float(noise_floor(state.solver_state, state.report))
            if tol is not None and move <= max(tol, floor):
                why = "" if move <= tol else ", the noise of sampled moments (more draws would lower it)"
                converged, message = (
                    True,
                    f"converged after {done} rounds: no move above {max(tol, floor):g} posterior sd{why}",
                )
            elif callback is not None and callback(done, state, info(state)):
                message = f"stopped by the callback after {done} rounds"
    except KeyboardInterrupt:
        message = f"interrupted by the user after {done} rounds; the state is that of the last finished block"
    finally:
        bar.close()
    if not message:
        message = f"ran {done} rounds" + ("" if tol is None else f" without reaching tol={tol:g}")
    found = jax.tree.map(lambda *blocks: np.concatenate(blocks), *reports) if reports else None
    all_losses = jnp.asarray(np.concatenate(losses) if losses else np.zeros(0, dtype))
    return Run(state, all_losses, found, converged, message)


def _raise_if_stuck(state: PVIState) -> None:
    runs = np.asarray(state.report.skip_run)
    if runs.max() < SKIP_LIMIT:
        return
    part = state.plan.partition
    label = factor_labels(state.plan)[int(runs.argmax())]
    why = [note for note in moment_notes(state) if note.startswith(f"group {label!r}: ")]
    if why:
        raise SkippedGroupError(
            f"group {label!r} was skipped in {SKIP_LIMIT} rounds running: {why[0].partition(': ')[2]} The exception's .state is "
            "the last good state.",
            state,
        )
    latents = ", ".join(part.prior_latents if label is PRIOR else part.layout.names)
    raise SkippedGroupError(
        f"group {label!r} was skipped in {SKIP_LIMIT} rounds running: its log density or its gradient in latent(s) {latents} is "
        "not finite under q, or no step left q normalisable. Likely causes: a link that overflows under a wide prior (narrow the "
        "prior or scale the columns), an observation outside the likelihood's support, or a likelihood that is unbounded in a "
        "scale latent. The exception's .state is the last good state.",
        state,
    )
