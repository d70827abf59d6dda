"""What every kind of fit looks at first: the arguments, an abstract trace of the model, its partition and its latents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax

from ._compiling import Program, is_traced
from ._swap import first_that_fits, warn_of_choice
from ._user_inputs import positional_names
from .errors import GuideError, PVIError
from .factors import (
    Enumeration,
    KeyWatch,
    Planned,
    check_data,
    check_observed_shapes,
    enumerated,
    explained,
    is_latent,
    refuse_randomness,
    refuse_unsupported,
    signature_of,
    summed_out,
    trace_arguments,
)
from .guides import setup_guide
from .handlers import Partition, RowAxes


@dataclasses.dataclass(frozen=True)
class Opening:
    """A call of ``init`` before anything is planned.

    Attributes:
        args: the model's positional arguments, as arrays.
        kwargs: its keyword arguments, with the static ones.
        key: random key of the fit.
        guide_key: random key of the guide's initial values.
        plan_key: random key of the points at which the plan is checked.
        untouched: abstract trace of the model.
        trace: the same with discrete local latents enumerated.
        partition: the user's, or the default one.
        rows: which axis of which sample site runs over the partitioned rows.
        enumeration: how discrete local latents are summed out, or None.
        names: of the model's positional parameters, for messages.
        held: discrete latents that q holds, having families.
        partitions: the partition, and those to take if planning refuses it.
        by_value: places of the arguments that the model reads values of.
    """

    args: tuple
    kwargs: dict
    key: Any
    guide_key: Any
    plan_key: Any
    untouched: dict
    trace: dict
    partition: Partition
    rows: RowAxes
    enumeration: Enumeration | None
    names: tuple[str, ...]
    held: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] = ()
    by_value: tuple[int, ...] = ()

    @property
    def signature(self) -> Any:
        """Structure, shapes and dtypes of the arguments, which later calls must have too."""
        return signature_of(self.args, self.kwargs, self.names, self.by_value)

    def set_up(self, guide: Any) -> None:
        """Run the guide's own set-up eagerly, which fixes its layout."""
        with explained(guide, self.guide_key, self.args, self.kwargs):
            setup_guide(
                guide,
                self.guide_key,
                self.args,
                self.kwargs,
                self.enumeration and partial(summed_out, enumeration=self.enumeration),
            )

    def plan(self, pvi: Any, attempt: Callable[[Opening], Planned]) -> tuple[Opening, Planned]:
        """Plan the factors; where that refuses a partition which is not the user's own, the next one is taken.

        Args:
            pvi: whose.
            attempt: plans a call.

        Returns:
            The call by the partition that was taken, and its plan.

        Raises:
            PartitionError: when the partition does not fit.
        """

        def at(partition: Partition) -> tuple[Opening, Planned]:
            opening = self if partition is self.partition else _split_by(partition, self, pvi.model)
            return opening, attempt(opening)

        (opening, planned), left = first_that_fits(self.partitions, at)
        if pvi.partition is None:
            warn_of_choice(left[0], pvi.num_groups)
        return opening, planned


@Program
def _three_keys(key: Any) -> list:
    return list(jax.random.split(key, 3))


def open_call(pvi: Any, rng_key: Any, args: tuple, kwargs: dict, families: Collection[str] = ()) -> Opening:
    """Look at a call of ``init``.

    Args:
        pvi: whose.
        rng_key: random key.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        families: latents that the guide was given families for; discrete ones among them are not summed out.

    Returns:
        What was found.

    Raises:
        PVIError: inside ``jit``, or for a model that no fit can take.
        DataError: for NaN or infinity in the arguments.
        PartitionError: when there is nothing to split.
    """
    if is_traced((rng_key, args, kwargs)):
        raise PVIError(
            "jit(pvi.init) is not possible: planning looks at values. Call pvi.init eagerly; jit pvi.update."
        )
    names = positional_names(pvi.model)
    given = args, kwargs
    args, kwargs = pvi._arguments(*given)
    pvi._followed.renew_guide(pvi.guide)
    key, guide_key, plan_key = _three_keys(rng_key)
    trace, by_value = trace_arguments(watch := KeyWatch(pvi.model), plan_key, args, kwargs)
    if by_value:
        args, kwargs = pvi._arguments(*given, by_value=by_value)
    check_data(pvi.model, args, kwargs, names)
    refuse_unsupported(trace)
    refuse_randomness(watch, plan_key, args, kwargs)
    partitions = pvi._partitions(trace)
    held = values_held(trace, families)
    call = Opening(args, kwargs, key, guide_key, plan_key, trace, trace, partitions[0], RowAxes(), None, names, held)
    opening, left = first_that_fits(partitions, lambda partition: _split_by(partition, call, pvi.model))
    return dataclasses.replace(opening, partitions=left, by_value=by_value)


def _split_by(partition: Partition, opening: Opening, model: Callable) -> Opening:
    """The call as one partition sees it."""
    trace = opening.untouched
    rows, enumeration = partition.row_axes(trace), None
    if not rows.whole:
        check_observed_shapes(trace, rows)
    if not opening.held:
        _, trace, enumeration = enumerated(model, trace, rows, opening.plan_key, opening.args, opening.kwargs)
    return dataclasses.replace(opening, trace=trace, partition=partition, rows=rows, enumeration=enumeration)


def values_held(trace: dict, families: Collection[str]) -> tuple[str, ...]:
    """The discrete latents that have a family, so that q holds them and nothing is enumerated.

    Args:
        trace: an abstract trace of the model.
        families: latents that the guide was given families for.

    Returns:
        Their names.

    Raises:
        GuideError: where others are discrete and have none.
    """
    discrete = [n for n, s in trace.items() if is_latent(s) and s["fn"].support.is_discrete]
    held = tuple(n for n in discrete if n in families)
    rest = [n for n in discrete if n not in held]
    if held and rest:
        raise GuideError(
            f"families names the discrete latent(s) {', '.join(map(repr, held))}, and {', '.join(map(repr, rest))} "
            f"would be summed out: give all of them a family, such as families={{{rest[0]!r}: CategoricalFamily(n)}}, or none."
        )
    return held


__all__ = ["Opening", "open_call", "values_held"]
