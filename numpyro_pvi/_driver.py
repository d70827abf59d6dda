"""The loop around compiled blocks of rounds: progress, tolerance, callbacks, interruption, and a run's checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from ._checkpoint import as_path
from ._compiling import on_device
from ._posterior_views import ending, full_passes, is_stuck, labels_of, moment_notes, refuse_unbounded, short_of
from ._saving import Loaded, fingerprint, load_state, new_salt, save_state
from ._state import SKIP_LIMIT, PVIInfo, PVIState
from .errors import CheckpointError, NonFiniteLossError, PVIError, SkippedGroupError, StateError
from .factors import abstract_trace
from .handlers import PRIOR
from .schedules import RoundReport

# --------------------------------------------------------------------------------------------------- a run's checkpoint
# A run's checkpoint: where it goes on from, and what is written between its blocks of rounds.


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come: the state, losses and reports of all its rounds, and why it was begun again where it was."""

    state: PVIState
    losses: tuple[np.ndarray, ...] = ()
    reports: tuple[RoundReport, ...] = ()
    done: int = 0
    again: str = ""

    def after(self, state: PVIState, losses: np.ndarray, reports: RoundReport) -> Progress:
        """The progress after some more rounds."""
        rounds = (*self.losses, losses), (*self.reports, reports), self.done + len(losses)
        return Progress(state, *rounds, self.again)

    @property
    def all_losses(self) -> np.ndarray:
        """Float[rounds]."""
        return np.concatenate(self.losses) if self.losses else np.zeros(0)

    @property
    def all_reports(self) -> RoundReport | None:
        """Reports with a leading axis of rounds; None before the first."""
        return jax.tree.map(lambda *blocks: np.concatenate(blocks), *self.reports) if self.reports else None


@dataclasses.dataclass
class Checkpoint:
    """The file of one run. Its digests are salted: as the file that is there has it, or afresh.

    ``every``: rounds between writes, or None: after every compiled block; ``start``: what the run starts from (key,
    init_params, init_state).
    """

    pvi: Any
    path: Any
    every: int | None
    start: Any
    data: Any
    salt: str = dataclasses.field(default_factory=new_salt)

    @functools.cached_property
    def digits(self) -> dict[str, str]:
        """Start and data as the file has them."""
        return {"start": fingerprint(self.start, self.salt), "data": fingerprint(self.data, self.salt)}

    def resume(self) -> Progress | None:
        """Where the file says that the run is; None when there is no file.

        Raises CheckpointError for a file that cannot be read, or that is not this run's; it is left as it is.
        """
        if not os.path.lexists(as_path(self.path)):
            return None
        loaded: Loaded = load_state(self.path, self.pvi)
        run, self.salt = loaded.run, loaded.salt
        hint = "remove the file to start anew, or give another path"
        if run is None:
            raise CheckpointError(
                f"the checkpoint {str(self.path)!r} was written by pvi.save and holds no run: write "
                "run(..., init_state=pvi.load(path), checkpoint=another_path)."
            )
        for part, what in (("start", "rng_key, init_params or init_state"), ("data", "arguments of the model")):
            if run[part] != self.digits[part]:
                raise CheckpointError(
                    f"the checkpoint {str(self.path)!r} is of a run with other {what}, so this one cannot go on from it: {hint}."
                )
        self.pvi._memory.supports.update(loaded.supports)
        losses, reports = run["losses"], run["reports"]
        rounds = ((losses,), (reports,), len(losses)) if len(losses) else ()
        return Progress(loaded.state, *rounds, again=run.get("again", ""))

    def write(self, progress: Progress) -> None:
        """Write the file anew."""
        losses, reports = progress.all_losses, progress.all_reports
        run = {**self.digits, "losses": losses, "reports": reports}
        if progress.again:
            run["again"] = progress.again
        save_state(self.path, self.pvi, progress.state, run, self.salt)
        self.pvi.runtime.hold("checkpoint", progress.state)

    def due(self, done: int) -> bool:
        """Whether the file is written after this many rounds of a block."""
        return self.every is None or done % self.every == 0

    def room(self, done: int) -> int | None:
        """Rounds until the next write."""
        return None if self.every is None else self.every - done % self.every


def begin(
    pvi: Any, path: Any, every: int | None, rng_key: Any, given: tuple, init_params: Any, init_state: Any
) -> tuple[Checkpoint | None, Progress]:
    """The checkpoint that a run keeps, and where the run starts: from its file, from a given state, or afresh.

    ``path``: ``run``'s checkpoint, or None; ``every``: ``run``'s checkpoint_every, or None; ``given``: the model's converted
    arguments ``(args, kwargs)``; ``init_params``: where q is asked to start, or None; ``init_state``: the state to continue
    from, or None. Returns the checkpoint (None when none was asked for), and the start. Raises PVIError for a
    ``checkpoint_every`` that is no positive int, or is given without ``checkpoint``; CheckpointError for a file that cannot be
    read, or is another run's.
    """
    if every is not None and (not isinstance(every, (int, np.integer)) or every < 1):
        raise PVIError(f"checkpoint_every={every!r}: expected a positive int, the rounds between two writes.")
    if path is None and every is not None:
        raise PVIError("checkpoint_every is given without checkpoint: write checkpoint='fit.pvi' as well.")
    args, kwargs = given
    checkpoint = before = None
    if path is not None:
        start = (rng_key, init_params) if init_state is None else jax.tree.leaves(init_state)
        checkpoint = Checkpoint(pvi, path, None if every is None else int(every), start, given)
        before = checkpoint.resume()
    if before is not None and checkpoint is not None:
        _check_fits(checkpoint, before, args, kwargs, init_state is None)
        pvi._memory.labels = before.state.groups
        return checkpoint, before
    state = pvi.init(rng_key, *args, init_params=init_params, **kwargs) if init_state is None else init_state
    return checkpoint, Progress(state)


def begun_elsewhere(pvi: Any, stuck: SkippedGroupError, given: tuple, init_params: Any, before: Progress) -> Progress:
    """A run that could not leave its start, begun again where the guide starts.

    Points a few prior sds out may be where a gradient is no number though the density is one (the root of what has underflown),
    which SVI's narrow start does not see.

    Args:
        pvi: what runs.
        stuck: raised by the run.
        given: its key and the model's converted arguments.
        init_params: where q was asked to start, or None.
        before: where the run set out: the start, or what it was taken up from, for which a guide is set up without the run's key.

    Returns:
        The start.

    Raises:
        SkippedGroupError: as it was, where the group was heard before, where q starts was asked for, and where the run was
            begun again already.
    """
    args, kwargs = given[1]
    if before.again:
        raise stuck
    fresh = _fresh(pvi, given, init_params, before)
    if _heard(stuck.state, fresh):
        raise stuck
    other = pvi._fit.other_start(pvi, fresh, init_params, *pvi._rows(fresh, args, kwargs))
    if other is None:
        raise stuck
    reason = str(stuck).partition(": ")[0]
    return Progress(other, again=f"begun again where the guide starts, since {reason}")


def nearer(
    far: Run,
    before: Progress,
    start: Callable[[], PVIState | None],
    driven: Callable[[Progress], Run],
    kept: Checkpoint | None,
) -> tuple[Run, Progress]:
    """A run that stands still far from where its factors ask it to go, begun again where the guide starts.

    Under a wide prior expectations may be numbers and of no use: by draws that differ by millions of nats.

    Args:
        far: how the run ended.
        before: where the run set out.
        start: makes the other start; None where q starts was asked for.
        driven: runs from there.
        kept: the checkpoint, which has the run that is returned.

    Returns:
        The run and where it set out; as they were where it ended otherwise, was begun again already, or ends no lower.
    """
    left = float(far.state.report.left)
    if before.again or far.converged is not False or left <= _FAR or not is_stuck(far.state):
        return far, before
    other = start()
    if other is None:
        return far, before
    again = Progress(
        other, again=f"begun again where the guide starts, since it stood still with {left:.2g} posterior sds to go"
    )
    try:
        found = driven(again)
    except (SkippedGroupError, NonFiniteLossError):
        found = None
    if found is not None and (found.losses[-1] < far.losses[-1] or not np.isfinite(far.losses[-1])):
        return found, again
    if kept is not None and far.reports is not None:
        kept.write(Progress(far.state).after(far.state, np.asarray(far.losses), far.reports))
    return far, before


def other_start(pvi: Any, given: tuple, init_params: Any, before: Progress) -> PVIState | None:
    """A fresh state with q where the guide starts; None where q starts was asked for. Arguments as of :func:`begun_elsewhere`."""
    fresh, (args, kwargs) = _fresh(pvi, given, init_params, before), given[1]
    return pvi._fit.other_start(pvi, fresh, init_params, *pvi._rows(fresh, args, kwargs))


def _fresh(pvi: Any, given: tuple, init_params: Any, before: Progress) -> PVIState:
    key, (args, kwargs) = given
    if before.done:
        pvi.guide.prototype_trace = None
    return pvi.init(key, *args, init_params=init_params, **kwargs)


def _heard(state: PVIState, fresh: PVIState) -> bool:
    """Whether the factor that was skipped most has made a step since the start: by rounds, or by its site, which it left then."""
    skipped = np.asarray(state.report.skip_run)
    if int(state.step) <= int(skipped.max()):
        return False
    prior, worst = int(state.plan.partition.has_prior_factor), int(skipped.argmax())
    if state.plan.tied and worst >= prior:
        return True

    def site(state: PVIState) -> Any:
        return state.sites.prior if worst < prior else jax.tree.map(lambda x: x[worst - prior], state.sites.groups)

    pairs = zip(jax.tree.leaves(site(state)), jax.tree.leaves(site(fresh)), strict=True)
    return not all(np.array_equal(now, then) for now, then in pairs)


def _check_fits(checkpoint: Checkpoint, progress: Progress, args: tuple, kwargs: dict, fresh: bool) -> None:
    """Refuse a file whose arguments are others, or (where the run starts from ``init``) whose groups are."""
    pvi, name = checkpoint.pvi, str(checkpoint.path)
    try:
        pvi._checked_arguments(progress.state, args, kwargs)
    except StateError as error:
        raise CheckpointError(f"the checkpoint {name!r} is of a run with other arguments: {error}") from error
    if not fresh:
        return
    trace = abstract_trace(pvi.model, jax.random.key(0), args, kwargs)
    saved = progress.state.plan.partition.table
    tables = [p.tables(p.row_axes(trace).sizes(trace))[0] for p in pvi._partitions(trace)]
    if saved in tables:
        return
    table = tables[0]
    other = [label for label in table.labels if label not in saved][:1]
    other += [label for label in saved.labels if label not in table][:1]
    what = f"group {other[0]!r} is in one of them only" if other else "the same labels are on other rows"
    raise CheckpointError(
        f"the checkpoint {name!r} is of a run with other groups than this PVI's: {what}. Remove the file to start anew, or give "
        "another path."
    )


# --------------------------------------------------------------------------------------------------------------- driver

# Rounds in one compiled block: long enough that re-reading the data between blocks does not show, short enough to look
# up.
BLOCK = 32
# Posterior sds left to move with which a run that stands still is nowhere near an optimum.
_FAR = 1.0


class Run(NamedTuple):
    """The outcome of :func:`drive`."""

    state: PVIState
    losses: Any
    # Reports of the rounds that ran, with a leading axis; None when none did.
    reports: RoundReport | None
    converged: bool | None
    message: str


def waiting(num_steps: int, shown: bool) -> tqdm.tqdm:
    """The bar of a run from its first moment: before any round it says what is waited for.

    Returns the bar, to be given to :func:`drive`, or closed.
    """
    return tqdm.tqdm(total=num_steps, disable=not shown, unit="round", desc="planning")


def drive(
    rounds: Callable,
    info: Callable[[PVIState], PVIInfo],
    before: Progress,
    num_steps: int,
    tol: float | None,
    callback: Callable | None,
    progress_bar: bool | tqdm.tqdm,
    checkpoint: Checkpoint | None = None,
    verify: Any = None,
    workers: Callable[[], str] | None = None,
    values: Callable[[PVIState], Any] = lambda state: None,
    once: bool = False,
) -> Run:
    """Run blocks of rounds until the number is reached, the tolerance is met, or a callback or the user stops it.

    ``rounds``: ``(state, count, tol, length) -> (state, losses, reports, done, missed)``, compiled once for all blocks;
    ``before``: where to start, and what was done before; ``num_steps``: number of rounds, those done before included; ``tol``:
    tolerance in posterior sds, or None; ``callback``: called after every round; ``progress_bar``: whether to show progress, or
    the bar of :func:`waiting`; it is closed here; ``checkpoint``: where to write the progress, or None; ``verify``: looks at
    the structure in use between blocks, and whether the run would end there; see :class:`numpyro_pvi._verified.Verifier`;
    ``workers``: what the bar says of those that answer for the groups, or None; ``values``: the factors' expected log densities at
    a state, as :func:`refuse_unbounded` asks for them; ``once``: whether groups are absorbed once. Returns the last state, the
    losses of all rounds, and how it ended. Raises SkippedGroupError when a factor was skipped in :data:`SKIP_LIMIT` rounds running;
    NonFiniteLossError when the rounds end with a loss that is not finite.
    """
    limit = np.asarray(-1.0 if tol is None else tol, jnp.result_type(float))
    bar = progress_bar if isinstance(progress_bar, tqdm.tqdm) else waiting(num_steps, progress_bar)
    step, now, written = _step(bar, num_steps, callback), before, before
    if checkpoint is not None and not before.done:
        # A folder that cannot be written to, or a label that cannot be stored, should show before hours of rounds.
        checkpoint.write(before)
    converged, message, ended = None if tol is None else False, "", functools.partial(_ended, info, tol, once)
    try:
        bar.n = bar.initial = before.done
        bar.set_description("compiling")
        # A run that was stopped between its last write and what follows it takes that up first.
        converged, message = ended(now, callback if now.done < num_steps else None)
        while now.done < num_steps and not message:
            rooms = [x.room(now.done) for x in (checkpoint, verify) if x is not None]
            # Who watches sees the first round as soon as there is one. Of the run, and not of this call: a run that is gone on
            # with is cut into the same blocks.
            first = 1 if now.done == 0 and not bar.disable else step
            count = min(first, num_steps - now.done, *(step if x is None else x for x in rooms))
            state, losses, reports, ran, *_ = rounds(now.state, np.int32(count), limit, BLOCK)
            ran = int(ran)
            if ran == 0:
                now = dataclasses.replace(now, state=state)
                continue
            block = np.asarray(losses)[:ran]
            now = now.after(state, block, jax.tree.map(lambda x, ran=ran: np.asarray(x)[:ran], reports).tree)
            bar.update(ran)
            bar.set_description(refresh=False)
            bar.set_postfix_str(_shown(-block[-1], now.reports[-1], workers), refresh=False)
            _raise_if_stuck(state)
            if verify is not None:
                now = verify(now, now.done >= num_steps or bool(ended(now, None)[1]))
            if checkpoint is not None and checkpoint.due(now.done):
                checkpoint.write(now)
                written = now
            converged, message = ended(now, callback)
    except KeyboardInterrupt:
        message = f"interrupted by the user after {now.done} rounds; the state is that of the last finished block"
    finally:
        _close(bar, now.state)
    if checkpoint is not None and written.done != now.done:
        checkpoint.write(now)
    message = _closed(now, tol, message, values)
    if before.done:
        message += f" ({before.done} of them before, as the checkpoint has them)"
    losses = on_device(now.all_losses, jnp.result_type(float))
    return Run(now.state, losses, now.all_reports, converged, message)


def _shown(elbo: Any, reports: RoundReport, workers: Callable[[], str] | None) -> str:
    """What the bar says of the last round."""
    told = [f"elbo {elbo:.6g}", f"largest move {float(reports.total_move[-1]):.1e} sd"]
    if stale := int(np.max(reports.staleness[-1])):
        told.append(f"staleness {stale}")
    if workers is not None and (them := workers()):
        told.append(them)
    return ", ".join(told)


def _close(bar: tqdm.tqdm, state: PVIState) -> None:
    """Close the bar; its last line says where groups cost more than they need to."""
    if count := full_passes(state):
        bar.set_postfix_str(f"{bar.postfix or ''}, {count} groups at a full pass each (see info)".lstrip(", "))
    bar.close()


def _closed(now: Progress, tol: float | None, message: str, values: Callable[[PVIState], Any]) -> str:
    """The sentence on how a run ended; raises where its loss is no number."""
    report = jax.device_get(now.state.report)
    if not message.startswith("interrupted"):
        loss = float(now.losses[-1][-1]) if now.losses else float("nan")
        refuse_unbounded(now.state, report, loss, now.done, values)
    if message:
        return message
    detail = short_of(now.state, tol, report)
    reached = "" if tol is None else f" without reaching tol={tol:g}"
    return f"ran {now.done} rounds{reached}" + (f": {detail}" if detail else "")


def _step(bar: tqdm.tqdm, num_steps: int, callback: Callable | None) -> int:
    """Rounds of a block: one where somebody is called after each, few where somebody watches."""
    return 1 if callback is not None else BLOCK if bar.disable else max(1, min(BLOCK, num_steps // 20))


def _ended(
    info: Callable, tol: float | None, once: bool, now: Progress, callback: Callable | None
) -> tuple[bool | None, str]:
    """Whether a run has converged (None when that was not asked for), and why it should stop now, if it should."""
    converged, why = ending(now.state, now.done, tol, once)
    if why:
        return converged, why
    if now.done and callback is not None and callback(now.done, now.state, info(now.state)):
        return converged, f"stopped by the callback after {now.done} rounds"
    return converged, ""


def _raise_if_stuck(state: PVIState) -> None:
    runs = np.asarray(state.report.skip_run)
    if runs.max() < SKIP_LIMIT:
        return
    part = state.plan.partition
    label = labels_of(state.plan)[int(runs.argmax())]
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
