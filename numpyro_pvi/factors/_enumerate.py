"""Discrete latents inside the partitioned plate: which there are, and the model with them summed out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro.primitives import Messenger

from .._compiling import look
from ..errors import PartitionError, PVIError
from ..handlers import RowAxes, missing_of
from ._arguments import is_dynamic
from ._model import (
    EnumeratedRows,
    Enumeration,
    ModelCall,
    abstract_trace,
    base_distribution,
    is_latent,
    is_observed,
    rows_first,
    site_log_prob,
)


def summed_out(model: Callable, enumeration: Enumeration) -> Callable:
    """A model with its discrete latents summed out of every row.

    ``model``: the NumPyro model; ``enumeration``: which latents, and where. Returns a model of the same arguments and
    continuous latents, whose partitioned plates hold one observed site each. Raises PVIError where funsor is not installed.
    """
    require_funsor(enumeration.latents)
    # Funsor is imported only where a model has such latents.
    from ._marginal import MarginalModel, WholeMarginalModel

    return MarginalModel(model, enumeration) if enumeration.plates else WholeMarginalModel(model, enumeration)


def require_funsor(latents: tuple[str, ...]) -> None:
    """Import funsor, or say which extra has it.

    ``latents``: the discrete latents it is needed for. Raises PVIError where it is not installed.
    """
    try:
        import funsor  # noqa: F401 - only whether it can be imported
    except ModuleNotFoundError as error:
        raise PVIError(
            f"discrete latent(s) {_names(latents)} are summed out by funsor, which is not installed: "
            "pip install 'numpyro_pvi[enum]', or marginalise in the model (for example MixtureSameFamily)."
        ) from error


def enumerated(
    model: Callable, trace: dict, rows: RowAxes, key: Any, args: tuple, kwargs: dict
) -> tuple[Callable, dict, Enumeration | None]:
    """Sum the local discrete latents out of a model, where it has some.

    ``model``: the NumPyro model; ``trace``: an abstract trace of it; ``rows``: the partitioned axes; ``key``: a random key;
    ``args``: positional arguments; ``kwargs``: keyword arguments. Returns ``(model, trace, enumeration)``: the model without
    discrete latents, its abstract trace, and what was done; the model, its trace and None where there is nothing to do. Raises
    PartitionError for discrete latents that cannot be summed out row by row.
    """
    enumeration = find_enumeration(trace, rows)
    if enumeration is None:
        return model, trace, None
    model = summed_out(model, enumeration)
    return model, abstract_trace(model, key, args, kwargs), enumeration


def find_enumeration(trace: Mapping[str, Mapping[str, Any]], rows: RowAxes) -> Enumeration | None:
    """Find the discrete latents that each belong to one row of a partitioned plate.

    Returns what to sum out; None for a model without discrete latents. Raises PartitionError for a discrete latent outside the
    partitioned plates, one without finite support, or sample sites whose batch axes enumeration could not tell from its own.
    """
    found = {n: s for n, s in trace.items() if is_latent(s) and s["fn"].support.is_discrete}
    if not found:
        return None
    if not rows.whole:
        _refuse_global(found, rows)
    for name, site in found.items():
        _refuse_support(name, site["fn"])
    if len(found) == sum(is_latent(s) for s in trace.values()):
        raise PartitionError(
            f"the model has no latent but the discrete {_names(found)}, which are summed out, so there is nothing to fit."
        )
    depth = max((-f.dim for s in trace.values() if s["type"] == "sample" for f in s["cond_indep_stack"]), default=0)
    if rows.whole:
        return Enumeration((), (), tuple(found), ("+".join(n for n, s in trace.items() if is_observed(s)),), depth)
    inside = {
        n: frame
        for n, site in trace.items()
        if site["type"] == "sample"
        for frame in site["cond_indep_stack"]
        if frame.name in rows.plates
    }
    plates = tuple(p for p in rows.plates if any(inside[n].name == p for n in found))
    inside = {n: frame for n, frame in inside.items() if frame.name in plates}
    for name in inside:
        _refuse_undeclared_axes(name, trace[name])
    dims = {frame.name: frame.dim for frame in inside.values()}
    names = ("+".join(n for n, f in inside.items() if f.name == p and is_observed(trace[n])) for p in plates)
    return Enumeration(plates, tuple(dims[p] for p in plates), tuple(found), tuple(names), depth)


def check_enumerated(call: ModelCall, enumeration: Enumeration, where: str, loc: np.ndarray, sd: np.ndarray) -> None:
    """Compare rows with their discrete latents summed out with NumPyro's own enumeration of the untouched model.

    A latent that enters another row's terms escapes that comparison: while it is enumerated its axis along the plate has length
    one, and ``jnp.roll`` along it, say, does nothing on either side. So its values are also given, one for each row, and
    changed on half of the rows: the terms of the others must stay. ``call``: the untouched model on all rows, with values of
    its continuous local latents; ``loc``: Float[D] prior location; ``sd``: Float[D] prior sd. Raises PartitionError when the
    log-likelihoods of all rows differ at one of two points by more than 1e-5 (float32; 1e-10 in x64) of the absolute row terms,
    or a row's by as much when other rows' discrete latents change.
    """
    from ._marginal import numpyro_log_density

    direction = np.cos(1.0 + np.arange(len(loc)))
    points = np.asarray(loc + np.array([[0.3], [0.01]]) * sd * direction, jnp.result_type(float))
    arrays, structure = jax.tree.flatten((call.args, call.kwargs))
    moving = [i for i, x in enumerate(arrays) if is_dynamic(x)]

    def densities(values, point, swap):
        leaves = list(arrays)
        for i, value in zip(moving, values, strict=True):
            leaves[i] = value
        args, kwargs = structure.unflatten(leaves)
        here = dataclasses.replace(call, args=args, kwargs=kwargs)
        trace, _ = dataclasses.replace(here, model=summed_out(call.model, enumeration)).trace(point)
        own = () if call.local_layout is None else call.local_layout.names
        # NumPyro's sum over a plate's sites has the continuous latents of its rows in it.
        inside = [n for n in own if any(f.name in enumeration.plates for f in trace[n]["cond_indep_stack"])]
        rows = jnp.concatenate([site_log_prob(trace[n]).reshape(-1) for n in (*enumeration.names, *inside)])
        latents = {n: trace[n]["value"] for n in (*call.layout.names, *own)}
        coupled = _coupled_rows(here, enumeration, point, swap)
        return jnp.sum(rows), jnp.sum(jnp.abs(rows)), numpyro_log_density(here, enumeration, latents), coupled

    def at_points(values, points):
        return jax.lax.map(lambda x: densities(values, *x), (points, np.array([False, True])))

    got, size, expected, coupled = jax.device_get(look(at_points, [arrays[i] for i in moving], points))
    tolerance = 1e-5 if points.dtype == jnp.float32 else 1e-10
    for mine, scale, theirs in zip(got, size, expected, strict=True):
        if np.isfinite(theirs) and not abs(mine - theirs) <= tolerance * max(scale, 1.0):
            raise PartitionError(
                f"{where}: with {_names(enumeration.latents)} summed out row by row, the log-likelihood differs from "
                f"NumPyro's own enumeration of it by {abs(mine - theirs):.3g} nats. Something couples rows through a "
                "discrete latent: keep what depends on one inside its row, or marginalise it in the model."
            )
    for plate, (gaps, sizes) in coupled.items():
        point, row = np.unravel_index(int(np.argmax(gaps)), gaps.shape)
        if gaps[point, row] > 1e2 * tolerance * max(sizes[point, row], 1.0):
            raise PartitionError(
                f"{where}: row {row} of plate {plate!r} changes by {gaps[point, row]:.3g} nats when the values of "
                f"{_names(enumeration.latents)} change on other rows, so rows are not independent, and their discrete latents "
                "cannot be summed out row by row. Keep what depends on one inside its row (a chain within a row is a "
                "loop over `numpyro.contrib.funsor.markov(range(T))` in the plate), or marginalise it in the model."
            )


class _GivenValues(Messenger):
    """Gives every discrete latent a value for each row, and the next value of its support on half of the rows."""

    def __init__(self, fn: Callable, names: tuple[str, ...], moved: Callable[[int], Any]):
        self.names, self.moved = names, moved
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Set the value of an enumerated latent."""
        if msg["type"] != "sample" or msg["name"] not in self.names:
            return
        fn, shape = msg["fn"], tuple(msg["fn"].shape())
        count = fn.enumerate_support(expand=False).shape[0]
        key = jax.random.fold_in(jax.random.key(11), self.names.index(msg["name"]))
        value = jax.random.randint(key, shape, 0, count)
        for frame in msg["cond_indep_stack"]:
            if (moved := self.moved(frame.name)) is not None:
                axes = (1,) * (-frame.dim - 1)
                value = (value + moved.reshape(-1, *axes)) % count
        msg["value"] = value


def _coupled_rows(call: ModelCall, enumeration: Enumeration, point, swap) -> dict[str, tuple[Any, Any]]:
    """By plate, how much each row's terms change when the discrete latents of other rows do, and their size, in nats."""
    where = dict(zip(enumeration.plates, enumeration.dims, strict=True))

    def half(plate: str, size: int) -> Any:
        draw = jax.random.bernoulli(jax.random.fold_in(jax.random.key(5), list(where).index(plate)), 0.5, (size,))
        return draw ^ swap

    def rows(move: bool) -> dict[str, Any]:
        def moved(plate):
            return half(plate, sizes[plate]).astype(int) if move and plate in where else None

        trace, _ = dataclasses.replace(call, model=_GivenValues(call.model, enumeration.latents, moved)).trace(point)
        found: dict[str, Any] = {}
        for site in trace.values():
            for frame in site["cond_indep_stack"] if site["type"] == "sample" else ():
                if frame.name in where:
                    values = rows_first(site_log_prob(site), frame.dim)
                    found[frame.name] = found.get(frame.name, 0.0) + values
        return found

    before = rows(False)
    sizes = {plate: values.shape[0] for plate, values in before.items()}
    after = rows(True)

    def gap(plate):
        same = half(plate, sizes[plate]) | (before[plate] == after[plate])
        return jnp.where(same, 0.0, jnp.abs(before[plate] - after[plate]))

    return {p: (gap(p), jnp.where(jnp.isfinite(before[p]), jnp.abs(before[p]), 0.0)) for p in before}


def _refuse_global(found: Mapping[str, Mapping[str, Any]], rows: RowAxes) -> None:
    coupling = [n for n, s in found.items() if not any(f.name in rows.plates for f in s["cond_indep_stack"])]
    if not coupling:
        return
    (name, *_) = coupling
    kind = type(base_distribution(found[name]["fn"])).__name__
    if not rows.plates:
        raise PartitionError(
            f"latent {name!r} is discrete ({kind}) and in no plate; a labelled axis, sites={dict(rows.sites)}, cannot say "
            "which of its values belong to which row. Put it and the observed site inside `with numpyro.plate(...)` and "
            "partition that plate."
        )
    plates = " and ".join(repr(p) for p in rows.plates)
    raise PartitionError(
        f"latent {name!r} is discrete ({kind}) and outside the partitioned plate {plates}, so it couples all groups: summed "
        "out, log sum_k p(k) prod_m p(y_m | k) is not a sum over groups. Move it into the plate, one value per row, "
        f"`with numpyro.plate({rows.plates[0]!r}, N): {name} = numpyro.sample(...)`, or replace it by continuous mixing "
        "weights."
    )


def _refuse_support(name: str, fn: Any) -> None:
    base = base_distribution(fn)
    kind = type(base).__name__
    if not fn.has_enumerate_support:
        what = f"latent {name!r} is discrete ({kind}) and has infinitely many values, or too many to enumerate."
        if isinstance(fn, dist.MaskedDistribution) and (data := missing_of(name)):
            raise PartitionError(
                f"{what} obs_mask makes it of what is missing. Where nothing else in the model reads {data!r}, it needs no latent: "
                f"write `with numpyro.handlers.mask(mask=there): numpyro.sample({data!r}, ..., obs=...)` in its place, and "
                "`Predictive` without observations draws what is missing."
            )
        raise PartitionError(
            f"{what} Marginalise it in the model (a Poisson with a Gamma rate is GammaPoisson), or bound it: "
            "numpyro.distributions.Categorical over the values that matter."
        )
    low = getattr(base, "low", 0) if isinstance(base, dist.DiscreteUniform) else 0
    # NumPyro's enumeration counts values from 0 whatever the support.
    if isinstance(low, jax.core.Tracer) or np.any(np.asarray(low) != 0):
        raise PartitionError(
            f"latent {name!r} is a DiscreteUniform whose values do not start at 0, which enumeration takes for granted: "
            f"write low=0 and add the offset, {name} + low, where it is used."
        )


def _refuse_undeclared_axes(name: str, site: Mapping[str, Any]) -> None:
    value, event_dim = jnp.shape(site["value"]), site["fn"].event_dim
    shape = jax.lax.broadcast_shapes(tuple(site["fn"].batch_shape), value[: len(value) - event_dim])
    declared = {frame.dim for frame in site["cond_indep_stack"]}
    for dim in range(-len(shape), 0):
        if shape[dim] != 1 and dim not in declared:
            raise PartitionError(
                f"sample site {name!r} has batch shape {shape}, and its axis {dim} (size {shape[dim]}) is no plate's, so "
                "enumeration of the discrete latents cannot place it. Make it an event, `.to_event(1)`, or give it a "
                "plate. Discrete states of a `scan` are not supported: write the steps as a Python loop, `for t in "
                "numpyro.contrib.funsor.markov(range(T)):`, inside the plate."
            )


def _names(names: Any) -> str:
    return ", ".join(repr(name) for name in names)


__all__ = [
    "EnumeratedRows",
    "Enumeration",
    "check_enumerated",
    "enumerated",
    "find_enumeration",
    "require_funsor",
]
