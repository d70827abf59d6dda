"""A run's checkpoint: where it goes on from, and what is written between its blocks of rounds."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import jax
import numpy as np

from ._checkpoint import as_path
from ._saving import Loaded, fingerprint, load_state, new_salt, save_state
from ._state import PVIState
from .errors import CheckpointError, PVIError, StateError
from .factors import abstract_trace
from .schedules import RoundReport


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come: the state, and losses and reports of all its rounds."""

    state: PVIState
    losses: tuple[np.ndarray, ...] = ()
    reports: tuple[RoundReport, ...] = ()
    done: int = 0

    def after(self, state: PVIState, losses: np.ndarray, reports: RoundReport) -> Progress:
        """The progress after some more rounds."""
        return Progress(state, (*self.losses, losses), (*self.reports, reports), self.done + len(losses))

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

    Args:
        pvi: what runs.
        path: the file.
        every: rounds between writes, or None: after every compiled block.
        start: what the run starts from (key, init_params, init_state).
        data: the model's arguments.
        salt: text that enters every digest.
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

        Raises:
            CheckpointError: for a file that cannot be read, or that is not this run's; it is left as it is.
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
        return Progress(loaded.state, *(((losses,), (reports,), len(losses)) if len(losses) else ()))

    def write(self, progress: Progress) -> None:
        """Write the file anew."""
        losses, reports = progress.all_losses, progress.all_reports
        run = {**self.digits, "losses": losses, "reports": reports}
        save_state(self.path, self.pvi, progress.state, run, self.salt)

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

    Args:
        pvi: what runs.
        path: ``run``'s checkpoint, or None.
        every: ``run``'s checkpoint_every, or None.
        rng_key: the run's key.
        given: the model's converted arguments ``(args, kwargs)``.
        init_params: where q is asked to start, or None.
        init_state: the state to continue from, or None.

    Returns:
        The checkpoint (None when none was asked for), and the start.

    Raises:
        PVIError: for a ``checkpoint_every`` that is no positive int, or is given without ``checkpoint``.
        CheckpointError: for a file that cannot be read, or is another run's.
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
