"""What every kind of fit looks at first: the arguments, an abstract trace of the model, its partition and its latents."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.core

from ._entry import positional_names
from .errors import GuideError, PVIError
from .factors import (
    Enumeration,
    abstract_trace,
    check_finite_arguments,
    enumerated,
    is_latent,
    refuse_unsupported,
    signature_of,
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
        trace: abstract trace of the model, discrete local latents enumerated.
        partition: the user's, or the default one.
        rows: which axis of which sample site runs over the partitioned rows.
        enumeration: how discrete local latents are summed out, or None.
        names: of the model's positional parameters, for messages.
        held: discrete latents that q holds, having families.
    """

    args: tuple
    kwargs: dict
    key: Any
    guide_key: Any
    plan_key: Any
    trace: dict
    partition: Partition
    rows: RowAxes
    enumeration: Enumeration | None
    names: tuple[str, ...]
    held: tuple[str, ...] = ()

    @property
    def signature(self) -> Any:
        """Structure, shapes and dtypes of the arguments, which later calls must have too."""
        return signature_of(self.args, self.kwargs, self.names)

    def set_up(self, guide: Any) -> None:
        """Run the guide's own set-up eagerly, which fixes its layout."""
        setup_guide(guide, self.guide_key, self.args, self.kwargs, self.enumeration and self.enumeration.wrap)


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
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((rng_key, args, kwargs))):
        raise PVIError(
            "jit(pvi.init) is not possible: planning looks at values. Call pvi.init eagerly; jit pvi.update."
        )
    names = positional_names(pvi.model)
    args, kwargs = pvi._arguments(args, kwargs)
    check_finite_arguments(args, kwargs, names)
    key, guide_key, plan_key = jax.random.split(rng_key, 3)
    trace = abstract_trace(pvi.model, plan_key, args, kwargs)
    refuse_unsupported(trace)
    partition = pvi.partition or pvi._default_partition(trace)
    rows = partition.row_axes(trace)
    held, enumeration = values_held(trace, families), None
    if not held:
        _, trace, enumeration = enumerated(pvi.model, trace, rows, plan_key, args, kwargs)
    return Opening(args, kwargs, key, guide_key, plan_key, trace, partition, rows, enumeration, names, held)


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
