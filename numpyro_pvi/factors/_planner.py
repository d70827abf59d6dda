"""Planning: which mechanism evaluates one group, checked against the untouched model, and what structure the factors have."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions.transforms import biject_to

from ..errors import PartitionError
from ..handlers import GroupTable, Partition, choose_plate, find_plates
from ._model import Layout, ModelCall, abstract_trace, frame_of, is_latent, is_observed
from ._packing import Packing, choose_chunk_rows, pack_rows
from ._plan import PartitionPlan
from ._probe import Probe, check_additive, run_probe
from ._structure import find_term, is_quadratic
from ._validate import as_arrays


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan with the arrays found on the way."""

    plan: PartitionPlan
    packing: Packing
    # Prior location and sd of every flat coordinate, estimated from draws (0 and 1 where the prior is improper).
    prior_loc: np.ndarray
    prior_sd: np.ndarray
    params: dict


def make_plan(partition: Partition, args: tuple, kwargs: dict) -> PartitionPlan:
    """Plan a partition for the user's eyes: see :meth:`numpyro_pvi.Partition.plan`."""
    args, kwargs = as_arrays(args, kwargs)
    return plan_factors(partition, args, kwargs, key=jax.random.key(0)).plan


def plan_factors(
    partition: Partition,
    args: tuple,
    kwargs: dict,
    *,
    key,
    layout: Layout | None = None,
    params: dict | None = None,
) -> Planned:
    """Choose the mechanism, validate it by the additive law, and find the structure of every factor.

    Args:
        partition: the model with its grouping.
        args: positional arguments as arrays.
        kwargs: keyword arguments as arrays.
        key: a random key (prior draws and probe directions).
        layout: flat order of the latents; the model's own order by default.
        params: constrained values of ``numpyro.param`` sites; their initial values by default.

    Returns:
        The static plan and its arrays.

    Raises:
        PartitionError: when the model cannot be split, naming the sample site, its plates and shapes.
    """
    partition.require_one_plate()
    model = _model_of(partition)
    trace = abstract_trace(model, key, args, kwargs)
    refuse_unsupported(trace)
    plate = choose_plate(trace, partition.plate)
    size = find_plates(trace)[plate].size
    table = partition.resolve(size)
    layout = layout if layout is not None else model_layout(trace)
    axes, sliced = _data_axes(partition, model, args, kwargs, size)
    chunk_rows = choose_chunk_rows(table.sizes, partition.chunk_size)
    packing = pack_rows(table, chunk_rows)
    if partition.mode not in ("auto", "args"):
        raise PartitionError(
            f"mode={partition.mode!r} is not available in this version: size plate {plate!r} by an argument's shape, "
            "numpyro.plate(name, X.shape[0]), pass the rows as arguments, and leave mode='auto'."
        )
    _try_chunk(model, plate, table, chunk_rows, axes, sliced, args, kwargs, trace)
    observed = tuple(n for n, s in trace.items() if is_observed(s) and frame_of(s, plate) is not None)
    outside = tuple(n for n, s in trace.items() if is_observed(s) and frame_of(s, plate) is None)
    call = ModelCall(model, layout, args, kwargs, {} if params is None else params)
    probe = run_probe(call, trace, plate, packing, axes, key, params)
    if partition.check:
        check_additive(probe, plate, table, sliced)
    plan = PartitionPlan(
        plate=plate,
        table=table,
        layout=layout,
        mechanism="args",
        reason="the plate's size follows the arguments",
        axes=axes,
        sliced=sliced,
        chunk_rows=chunk_rows,
        num_chunks=int(packing.rows.shape[0]),
        observed=observed,
        outside=outside,
        params=tuple(probe.params),
        **_structure(probe, observed, outside, layout),
    )
    return Planned(plan, packing, probe.prior_loc, probe.prior_sd, probe.params)


def with_expectation(planned: Planned, expectation: str) -> Planned:
    """Treat every factor as a solver insists, where its structure allows that.

    Args:
        planned: what was found.
        expectation: "monte_carlo" (draws for all factors), "quadrature" (for all whose predictors are known), or anything else to
            leave the plan as it is.

    Returns:
        The plan to follow.
    """
    plan = planned.plan
    if expectation == "monte_carlo":
        prior_kind = "draws" if plan.has_prior_factor else "none"
        plan = dataclasses.replace(plan, likelihood="draws", prior_kind=prior_kind)
    elif expectation == "quadrature" and plan.terms:
        plan = dataclasses.replace(plan, likelihood="affine")
    return dataclasses.replace(planned, plan=plan)


def move_to_prior_factor(planned: Planned) -> Planned:
    """Give up the exact prior: every latent goes to the prior factor (a mean-field q over a correlated Gaussian prior)."""
    plan = planned.plan
    plan = dataclasses.replace(
        plan,
        exact=(),
        prior_latents=tuple(plan.layout.names),
        prior_terms=(),
        prior_kind="draws",
    )
    return dataclasses.replace(planned, plan=plan)


def model_layout(trace: dict) -> Layout:
    """The latents in model order with their unconstrained shapes."""
    names, shapes = [], []
    for name, site in trace.items():
        if is_latent(site) and not site["fn"].support.is_discrete:
            names.append(name)
            shapes.append(tuple(biject_to(site["fn"].support).inverse_shape(site["fn"].shape())))
    return Layout(tuple(names), tuple(shapes))


def refuse_unsupported(trace: dict) -> None:
    """Raise for what no mechanism can split: mutable state, discrete latents, no latent at all.

    Args:
        trace: an abstract trace of the model.

    Raises:
        PartitionError: naming the site.
    """
    for name, site in trace.items():
        if site["type"] == "mutable":
            raise PartitionError(
                f"numpyro mutable site {name!r}: state that changes with every evaluation (BatchNorm and the like) makes "
                "factors depend on the order of visits. Use a stateless layer (LayerNorm, GroupNorm) instead."
            )
        if is_latent(site) and site["fn"].support.is_discrete:
            raise PartitionError(
                f"latent {name!r} is discrete ({type(site['fn']).__name__}); only continuous latents can be held by a "
                "Gaussian q. Marginalise it in the model (for example MixtureSameFamily)."
            )
    if not any(is_latent(site) for site in trace.values()):
        raise PartitionError("the model has no latent sample site, so there is nothing to infer.")


def slice_rows(tree: tuple, axes: tuple[int | None, ...], rows) -> tuple:
    """Take rows of every argument leaf that runs over the plate.

    Args:
        tree: ``(args, kwargs)``.
        axes: per leaf, the axis of the plate or None.
        rows: Int[R] plate indices.

    Returns:
        ``(args, kwargs)`` of those rows.
    """
    leaves, structure = jax.tree.flatten(tree)
    taken = [
        x if axis is None else jnp.take(x, rows, axis=axis, indices_are_sorted=False, mode="clip")
        for x, axis in zip(leaves, axes, strict=True)
    ]
    return structure.unflatten(taken)


def _model_of(partition: Partition) -> Callable:
    if partition.fn is None:
        raise PartitionError("this Partition holds no model: write Partition(model, plate, groups).")
    return partition.fn


def _data_axes(partition: Partition, model: Callable, args: tuple, kwargs: dict, size: int):
    names = _parameter_names(model, len(args))
    paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    wanted = dict(partition.data_axes or {})
    axes, sliced = [], []
    for path, leaf in paths:
        key = path[1].key if path[0].idx == 1 else path[1].idx
        name = key if isinstance(key, str) else names.get(key, key)
        shown = str(name) + jax.tree_util.keystr(path[2:])
        axis: int | None = None
        if name in wanted or key in wanted:
            axis = wanted.get(name, wanted.get(key))
        elif hasattr(leaf, "shape") and leaf.ndim and leaf.shape[0] == size:
            axis = 0
        if axis is not None and (not hasattr(leaf, "shape") or leaf.ndim <= axis or leaf.shape[axis] != size):
            raise PartitionError(
                f"data_axes says that argument {shown!r} runs over the plate on axis {axis}, but it does not."
            )
        axes.append(axis)
        if axis is not None:
            sliced.append(shown)
    return tuple(axes), tuple(sliced)


def _parameter_names(model: Callable, count: int) -> dict[int, str]:
    try:
        parameters = list(inspect.signature(model).parameters.values())
    except (TypeError, ValueError):
        return {}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {i: p.name for i, p in enumerate(positional[:count])}


def _try_chunk(model, plate: str, table: GroupTable, rows: int, axes, sliced, args, kwargs, trace) -> None:
    if not sliced:
        raise PartitionError(_no_argument_message(plate, table.num_rows))
    # Two chunk lengths: one could meet a constant plate size by chance.
    for length in {rows, max(1, rows // 2)} - {table.num_rows} or {rows}:
        try:
            chunk = _abstract_chunk(model, axes, args, kwargs, length)
        except (TypeError, ValueError, IndexError, AssertionError) as error:
            raise PartitionError(_not_sliceable_message(plate, sliced, length, error)) from error
        for name, site in chunk.items():
            full = frame_of(trace[name], plate) if name in trace and is_observed(trace[name]) else None
            if full is None:
                continue
            frame = frame_of(site, plate)
            if frame is None or frame.size != length or site["fn"].batch_shape[frame.dim] != length:
                got = "no such plate" if frame is None else f"size {frame.size}"
                detail = ValueError(f"observed site {name!r} of {length} rows is in plate {plate!r} of {got}")
                raise PartitionError(_not_sliceable_message(plate, sliced, length, detail))


def _abstract_chunk(model, axes, args, kwargs, length: int) -> dict:
    found: dict = {}

    def run(arrays):
        chunk_args, chunk_kwargs = slice_rows(arrays, axes, jnp.zeros((length,), jnp.int32))
        found.update(abstract_trace(model, jax.random.key(0), chunk_args, chunk_kwargs))
        return 0

    arrays, static = _split_static((args, kwargs))
    jax.eval_shape(lambda a: run(_join_static(a, static)), arrays)
    return found


def _split_static(tree):
    leaves, structure = jax.tree.flatten(tree)
    dynamic = [x if hasattr(x, "dtype") else None for x in leaves]
    return dynamic, ([None if hasattr(x, "dtype") else x for x in leaves], structure)


def _join_static(dynamic, static):
    leaves, structure = static
    return structure.unflatten([d if s is None and d is not None else s for d, s in zip(dynamic, leaves, strict=True)])


def _structure(probe: Probe, observed: tuple[str, ...], outside: tuple[str, ...], layout: Layout) -> dict[str, Any]:
    rays = probe.rays
    terms = tuple(find_term(probe.facts[n], probe.leaves[n], None, rays) for n in observed)
    complete = all(t is not None for t in terms)
    continuous = not any(probe.facts[n].discrete for n in observed)
    possible = continuous and all(probe.facts[n].may_be_quadratic for n in observed)
    quadratic = possible and all(is_quadratic(probe.rows[n], rays) for n in observed)
    kind = "quadratic" if quadratic else "affine" if complete else "draws"
    gaussian = {n for n in layout.names if is_quadratic(probe.latents[n], rays)}
    if len(gaussian) == len(layout.names):
        exact = tuple(layout.names)
    else:
        # A latent whose own prior moves with others is only safely exact when all of those are.
        exact = tuple(n for n in layout.names if n in gaussian and not probe.depends_on_others(n))
    rest = tuple(n for n in layout.names if n not in exact)
    prior_terms = tuple(find_term(probe.facts[n], probe.leaves[n], probe.own(n, layout), rays) for n in rest)
    prior_terms += tuple(find_term(probe.facts[n], probe.leaves[n], None, rays) for n in outside)
    if not prior_terms:
        prior_kind = "none"
    else:
        prior_kind = "affine" if all(t is not None for t in prior_terms) else "draws"
    return {
        "likelihood": kind,
        "terms": terms if complete else (),
        "exact": exact,
        "prior_latents": rest,
        "prior_terms": prior_terms if prior_kind == "affine" else (),
        "prior_kind": prior_kind,
    }


def _no_argument_message(plate: str, size: int) -> str:
    return (
        f"plate {plate!r} has size {size}, but no argument of the model has {size} entries along its leading axis, so its rows "
        "cannot be sliced. Pass the data as arguments, model(X, y), size the plate by one, "
        f"numpyro.plate({plate!r}, X.shape[0]), or name the axis with Partition(..., data_axes={{'X': 1}})."
    )


def _not_sliceable_message(plate: str, sliced: tuple[str, ...], length: int, error: BaseException) -> str:
    return (
        f"the model cannot be evaluated on {length} rows of plate {plate!r} with argument(s) {', '.join(sliced)} sliced: "
        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. Size the plate by an argument's shape, "
        f"numpyro.plate({plate!r}, X.shape[0]), use the rows without an index of the full data, and pass every per-row array as "
        "an argument; arguments that are not per-row are excluded with Partition(..., data_axes={'name': None})."
    )
