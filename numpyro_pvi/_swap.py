"""What a model is split into when nobody said so: the literal swap of PVI for SVI, which fits whatever SVI fits."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ._compiling import is_traced
from ._initial import at_natural, streams
from ._prototype import guide_latents
from ._state import PVIState
from .errors import PartitionError, StateError
from .factors import abstract_trace, model_layout
from .handlers import Partition, PlateInfo, WholePartition, find_plates
from .runtime import ProductPlan
from .sites import posterior

_DEFAULT_GROUPS = 10


def default_partitions(model: Callable, trace: Mapping[str, Any], num_groups: int | None) -> tuple[Partition, ...]:
    """Ways to split a model that names none, the one to try first first; the last one keeps it whole.

    One plate with observed sample sites is split into random blocks. Several are split together where no sample site is
    inside two of them, so that every row has one plate of its own; else, or where that fails, the one that holds most
    observations is, and the other observed sites join the prior factor. A model without any is kept whole.

    Args:
        model: the NumPyro model.
        trace: an abstract trace of it.
        num_groups: the number of blocks that the user asked for, or None.

    Returns:
        The ways, each with its reason (empty for the one plate that there is).

    Raises:
        PartitionError: for more blocks than any of these plates has rows.
    """
    if (plate := _needs_batches(trace)) is not None:
        why = f"the data have as many rows as plate {plate!r} draws for a mini-batch, and not as many as it has."
        return (WholePartition(model, why, batches=True),)
    plates = {name: info for name, info in find_plates(trace).items() if info.observed}
    if not plates:
        return (WholePartition(model, _why_whole(trace)),)
    _refuse_too_many(num_groups, plates)
    wanted = _DEFAULT_GROUPS if num_groups is None else num_groups
    last = WholePartition(model, "no split of its rows was possible")
    if len(plates) == 1:
        ((name, info),) = plates.items()
        return Partition(model, name, min(wanted, info.size)).because(""), last
    found: list[Partition] = []
    names = " and ".join(map(repr, plates))
    if not _nested(trace, plates):
        blocks = {name: min(wanted, info.size) for name, info in plates.items()}
        why = f"plates {names} hold observed sites, and are split together"
        found.append(Partition(model, groups=blocks).because(why))
    name = max(plates, key=lambda name: (_observations(trace, plates[name]), plates[name].size))
    rest = [n for n, s in trace.items() if _is_observed(s) and n not in plates[name].observed]
    why = f"plates {names} hold observed sites; {name!r} has most observations"
    if rest:
        why += f", and the likelihood of {', '.join(map(repr, rest))} joins the prior factor"
    found.append(Partition(model, name, min(wanted, plates[name].size)).because(why))
    return *found, last


def _needs_batches(trace: Mapping[str, Any]) -> str | None:
    """The plate whose data are no more than the mini-batch it draws; None where every plate has all of its rows."""
    drawn = {n: site["drawn"] for n, site in trace.items() if site["type"] == "plate" and "drawn" in site}
    for site in trace.values():
        if not _is_observed(site):
            continue
        shape = np.shape(site["value"])
        shape = shape[: len(shape) - site["fn"].event_dim]
        for frame in site["cond_indep_stack"]:
            few = drawn.get(frame.name, frame.size)
            if few != frame.size and len(shape) >= -frame.dim and shape[frame.dim] == few:
                return frame.name
    return None


def first_that_fits(
    partitions: tuple[Partition, ...], attempt: Callable[[Partition], Any]
) -> tuple[Any, tuple[Partition, ...]]:
    """Try partitions in order until one is not refused.

    Args:
        partitions: as of :func:`default_partitions`; a user's own alone.
        attempt: raises ``PartitionError`` for one that does not fit.

    Returns:
        What the attempt gave, and the partitions that are left: the one that was taken, whose reason says why those before
        it were not, and those behind it.

    Raises:
        PartitionError: of the first partition, where none fits.
    """
    refusals: list[PartitionError] = []
    for place, partition in enumerate(partitions):
        if refusals and isinstance(partition, WholePartition):
            partition = partition.because(f"its rows cannot be split: {refusals[0]}")
        try:
            return attempt(partition), (partition, *partitions[place + 1 :])
        except PartitionError as error:
            refusals.append(error)
    raise refusals[0]


def warn_of_choice(partition: Partition, num_groups: int | None) -> None:
    """Warn where a number of groups was asked for, and the model is not split into them by its only plate.

    Args:
        partition: what was chosen.
        num_groups: what the user asked for; without that a note in ``info`` says the same.
    """
    if num_groups is None or not partition.why:
        return
    whole = isinstance(partition, WholePartition)
    if whole and num_groups == 1:
        return
    what = "the model is kept whole, as one group" if whole else "rows are split otherwise than by a single plate"
    warnings.warn(
        f"num_groups={num_groups}: {what}, because {partition.why} To choose yourself, pass Partition(model, plate, groups), "
        "Partition(model, groups={'A': labels_a, 'B': labels_b}) or Partition(model, groups=..., sites={'obs': -1}).",
        stacklevel=4,
    )


def taken(pvi: Any, state: Any, args: tuple, kwargs: dict) -> tuple[PVIState, list, tuple]:
    """Arguments as programs take them, and the state: planned anew where they are a mini-batch of another size.

    Args:
        pvi: the PVI.
        state: a state.
        args: the model's positional arguments.
        kwargs: its keyword arguments.

    Returns:
        ``(state, arrays, static leaves)``.

    Raises:
        StateError: for other arguments that do not fit the state.
    """
    try:
        return state, *pvi._rows(state, args, kwargs)
    except StateError:
        other = _as_another_batch(pvi, state, args, kwargs)
        if other is None:
            raise
    return other, *pvi._rows(other, args, kwargs)


def _as_another_batch(pvi: Any, state: Any, args: tuple, kwargs: dict) -> PVIState | None:
    """The same q as a state of arguments of another shape, where the model takes those for a mini-batch or did so before.

    A plate that draws mini-batches says itself to how many rows its data are scaled up, so another number of them is no other
    model. The likelihood's site is taken over as it is: the next round replaces it.

    Args:
        pvi: the PVI.
        state: a state that was made with other arguments.
        args: the model's positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The state, planned anew; None where these arguments are no mini-batch of the state's rows: under a ``Partition``, inside
        ``jit``, with latents inside the plate, and for all other models.
    """
    if not isinstance(state, PVIState) or isinstance(state.plan, ProductPlan) or pvi.partition is not None:
        return None
    part, by_row = state.plan.partition, state.plan.rows is not None or state.sites.local is not None
    if by_row or part.local is not None or state.plan.absent or streams(pvi.schedule):
        return None
    if is_traced((state, args, kwargs)):
        return None
    try:
        trace = abstract_trace(pvi.model, jax.random.key(0), *pvi._arguments(args, kwargs))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError):
        return None
    own = model_layout(trace)
    if dict(zip(own.names, own.shapes, strict=True)) != guide_latents(pvi.guide):
        return None
    if not part.batches and _needs_batches(trace) is None:
        return None
    made = at_natural(pvi.init(state.rng_key, *args, **kwargs), posterior(state.prior, state.sites))
    return dataclasses.replace(made, rng_key=state.rng_key, optim_state=state.optim_state, step=state.step)


def _why_whole(trace: Mapping[str, Any]) -> str:
    names = ", ".join(repr(name) for name, site in trace.items() if _is_observed(site))
    if not names:
        return "no sample site is observed, so q is fitted to the prior; pass the data if there are any."
    return f"no plate holds the observed sample site(s) {names}."


def _refuse_too_many(num_groups: int | None, plates: Mapping[str, PlateInfo]) -> None:
    largest = max(info.size for info in plates.values())
    if num_groups is not None and num_groups > largest:
        shown = ", ".join(f"{name!r} (size {info.size})" for name, info in plates.items())
        raise PartitionError(
            f"num_groups={num_groups}, but the plate{'s' * (len(plates) > 1)} with observed sites {shown} has at most {largest} "
            f"rows, so some groups would be empty: write num_groups={largest} or less."
        )


def _nested(trace: Mapping[str, Any], plates: Mapping[str, PlateInfo]) -> bool:
    """Whether some sample site is inside two of the plates."""
    for site in trace.values():
        if site["type"] == "sample" and sum(frame.name in plates for frame in site["cond_indep_stack"]) > 1:
            return True
    return False


def _observations(trace: Mapping[str, Any], info: PlateInfo) -> int:
    return sum(int(np.prod(trace[name]["fn"].batch_shape)) for name in info.observed)


def _is_observed(site: Mapping[str, Any]) -> bool:
    return site["type"] == "sample" and site["is_observed"]


__all__ = ["default_partitions", "first_that_fits", "taken", "warn_of_choice"]
