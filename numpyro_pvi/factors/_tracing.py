"""The first trace of a model with its arguments: which of them are traced, and which a model reads values of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from ..errors import DataError
from ._arguments import is_dynamic, join_arguments, split_arguments
from ._model import abstract_trace, site_log_prob
from ._probe import draw_trace
from ._validate import check_finite_arguments

_PRIOR_DRAWS = 3

# What reading a value of a traced array raises.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def trace_arguments(model: Callable, key: Any, args: tuple, kwargs: dict) -> tuple[dict, tuple[int, ...]]:
    """Trace a model with all of its arrays abstract but those whose values it reads in Python.

    ``numpyro.plate("J", len(np.unique(idx)))`` needs the values of ``idx``, as a loop or an ``if`` may. Where a trace with
    all arrays abstract fails for want of values, integer arrays are given values, then all; and each is taken back whose
    values are not missed.

    Args:
        model: the NumPyro model.
        key: a random key.
        args: positional arguments, converted.
        kwargs: keyword arguments, converted.

    Returns:
        ``(trace, by_value)``: the abstract trace, and the places of the arrays that are read by value.
    """
    leaves = jax.tree.leaves((args, kwargs))
    arrays = [i for i, x in enumerate(leaves) if is_dynamic(x)]
    try:
        return _trace(model, key, args, kwargs, ()), ()
    except _NEEDS_VALUES as error:
        whole = [i for i in arrays if not jnp.issubdtype(leaves[i].dtype, jnp.inexact)]
        for by_value in (whole, arrays):
            found = _try(model, key, args, kwargs, by_value)
            if found is not None:
                break
        else:
            raise error
    # Floats first: the data are best left traced.
    for place in sorted(by_value, key=lambda i: i in whole):
        fewer = [i for i in by_value if i != place]
        if (trace := _try(model, key, args, kwargs, fewer)) is not None:
            found, by_value = trace, fewer
    return found, tuple(by_value)


def check_data(model: Callable, args: tuple, kwargs: dict, names: Sequence[str]) -> None:
    """Refuse NaN and infinity in the arguments, but for a model that deals with them itself.

    A model that masks or imputes missing entries has a finite log density all the same: it is looked at, at draws from the
    prior, only where entries are not finite.

    Args:
        model: the NumPyro model.
        args: positional arguments, converted.
        kwargs: keyword arguments, converted.
        names: names of the positional arguments, for messages.

    Raises:
        DataError: as of ``check_finite_arguments``.
    """
    try:
        check_finite_arguments(args, kwargs, names)
    except DataError:
        if not _finite_at_prior(model, args, kwargs):
            raise


def _finite_at_prior(model: Callable, args: tuple, kwargs: dict) -> bool:
    arrays, static = split_arguments(args, kwargs)

    @jax.jit
    def density(arrays: list, key: Any) -> Any:
        trace = draw_trace(model, key, *join_arguments(arrays, static), {})
        return sum(jnp.sum(site_log_prob(s)) for s in trace.values() if s["type"] == "sample")

    with numpyro.validation_enabled(False):
        found = [density(arrays, key) for key in jax.random.split(jax.random.key(0), _PRIOR_DRAWS)]
    return bool(np.all(np.isfinite(np.asarray(found))))


def _try(model: Callable, key: Any, args: tuple, kwargs: dict, by_value: Collection[int]) -> dict | None:
    try:
        return _trace(model, key, args, kwargs, by_value)
    except _NEEDS_VALUES:
        return None


def _trace(model: Callable, key: Any, args: tuple, kwargs: dict, by_value: Collection[int]) -> dict:
    leaves, structure = jax.tree.flatten((args, kwargs))
    abstract = [i for i, x in enumerate(leaves) if is_dynamic(x) and i not in by_value]
    concrete = {i: np.asarray(leaves[i]) for i in by_value}
    found: dict = {}

    def run(values: list, key: Any) -> Any:
        given = dict(zip(abstract, values, strict=True)) | concrete
        args, kwargs = structure.unflatten([given.get(i, x) for i, x in enumerate(leaves)])
        found.clear()
        found.update(abstract_trace(model, key, args, kwargs))
        return key

    jax.eval_shape(run, [leaves[i] for i in abstract], key)
    return found
