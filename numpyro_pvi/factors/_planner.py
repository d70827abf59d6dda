"""Planning: which mechanism evaluates one group, checked against the untouched model, and what structure the factors have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions.transforms import biject_to

from ..errors import PartitionError
from ..handlers import Partition, RowAxes, refuse_latents
from ._enumerate import check_enumerated, enumerated
from ._mechanism import choose_reading
from ._model import Layout, LocalLayout, ModelCall, abstract_trace, is_latent, is_observed
from ._packing import Packing
from ._plan import PartitionPlan
from ._probe import Probe
from ._reading import GroupMasks
from ._structure import find_term, is_quadratic
from ._validate import as_arrays

# Latents above which a mean-field q takes its curvature from a few draws' gradients instead of 2D points (or a Hessian a
# draw, which costs D tangents of the gradient and D^2 numbers: measured on a small net, 70 times a gradient at D = 64, 170
# at 128, 950 at 256). That makes up for its noise with some D times as many draws.
LARGEST_HESSIAN = 128


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan with the arrays found on the way."""

    plan: PartitionPlan
    packing: Packing | GroupMasks
    # Prior location and sd of every flat coordinate, estimated from draws (0 and 1 where the prior is improper).
    prior_loc: np.ndarray
    prior_sd: np.ndarray
    params: dict
    # The same of the local latents, Float[U K]; None when there are none.
    local_loc: np.ndarray | None = None
    local_sd: np.ndarray | None = None


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
    untouched = _model_of(partition)
    trace = abstract_trace(untouched, key, args, kwargs)
    refuse_unsupported(trace)
    rows = partition.row_axes(trace)
    model, trace, enumeration = enumerated(untouched, trace, rows, key, args, kwargs)
    refuse_latents(trace, rows.plates)
    layout = layout if layout is not None else model_layout(trace)
    local = local_layout(trace, rows)
    layout = _without(layout, local)
    call = ModelCall(model, layout, args, kwargs, {} if params is None else params, local)
    read = choose_reading(partition, call, trace, rows, key, params)
    observed = tuple(n for n, s in trace.items() if is_observed(s) and rows.of(s) is not None)
    outside = tuple(n for n, s in trace.items() if is_observed(s) and rows.of(s) is None)
    packing, probe = read.packing, read.probe
    if enumeration is not None and partition.check:
        # Off their prior location, where densities of the rows' own latents would not see a wrong sign.
        values = None if probe.local is None else jnp.asarray(probe.local.loc + 0.3 * probe.local.sd)
        whole = ModelCall(untouched, layout, args, kwargs, probe.params, local, values)
        check_enumerated(whole, enumeration, read.where, probe.prior_loc, probe.prior_sd)
    plan = PartitionPlan(
        where=read.where,
        rows=rows,
        table=read.table,
        layout=layout,
        reading=read.reading,
        reason=read.reason,
        sliced=read.sliced,
        chunk_rows=packing.rows.shape[1] if isinstance(packing, Packing) else read.table.num_rows,
        num_chunks=int(packing.chunk_group.shape[0]),
        observed=observed,
        outside=outside,
        params=tuple(n for n in probe.params if n not in probe.inert),
        local=local,
        enumeration=enumeration,
        **_structure(probe, observed, outside, layout),
    )
    if local is not None:
        plan = dataclasses.replace(plan, likelihood="local", terms=())
    params = {n: v for n, v in probe.params.items() if n in plan.params}
    own = (None, None) if probe.local is None else (probe.local.loc, probe.local.sd)
    return Planned(plan, packing, probe.prior_loc, probe.prior_sd, params, *own)


def with_expectation(planned: Planned, expectation: str, full: bool = True) -> Planned:
    """Treat every factor as a solver insists, where its structure allows that.

    Args:
        planned: what was found.
        expectation: "monte_carlo", "stein", "hessian" or "sigma_points" (all factors as if they had no structure),
            "quadrature" (for all whose predictors are known), "reparameterised" (draws without Hessians for all factors of
            a mean-field q), or anything else to leave the plan as it is.
        full: whether q has full covariance.

    Returns:
        The plan to follow.
    """
    plan = planned.plan
    if plan.local is not None:
        return planned
    if expectation in ("monte_carlo", "stein", "hessian", "sigma_points"):
        prior_kind = "draws" if plan.has_prior_factor else "none"
        plan = dataclasses.replace(plan, likelihood="draws", prior_kind=prior_kind, unstructured=expectation)
    elif expectation == "quadrature" and plan.terms:
        plan = dataclasses.replace(plan, likelihood="affine")
    elif expectation == "reparameterised" and not full:
        prior_kind = "reparameterised" if plan.has_prior_factor else "none"
        plan = dataclasses.replace(plan, likelihood="reparameterised", prior_kind=prior_kind)
    elif not full and plan.layout.dim > LARGEST_HESSIAN:
        kinds = {"draws": "reparameterised"}
        plan = dataclasses.replace(
            plan,
            likelihood=kinds.get(plan.likelihood, plan.likelihood),
            prior_kind=kinds.get(plan.prior_kind, plan.prior_kind),
        )
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


def local_layout(trace: dict, rows: RowAxes) -> LocalLayout | None:
    """The continuous latents inside the partitioned plates.

    Args:
        trace: an abstract trace of the model.
        rows: the partitioned axes.

    Returns:
        Their layout, or None when there are none.

    Raises:
        PartitionError: when they are in several of the partitioned plates.
    """
    found = {}
    for name, site in trace.items():
        if is_latent(site) and not site["fn"].support.is_discrete and (axis := rows.of(site)) is not None:
            shape = tuple(biject_to(site["fn"].support).inverse_shape(site["fn"].shape()))
            dim = axis.dim - (len(shape) - len(site["fn"].batch_shape))
            place = len(shape) + dim
            found[name] = axis, shape[:place] + shape[place + 1 :], dim
    if not found:
        return None
    keys = {axis.key: axis.size for axis, _, _ in found.values()}
    if len(keys) > 1:
        raise PartitionError(
            f"local latents {', '.join(map(repr, found))} are in several partitioned plates ({', '.join(map(repr, keys))}): "
            "keep those of one plate inside it, and declare the others outside, in plates of their own."
        )
    ((key, size),) = keys.items()
    _, shapes, dims = zip(*found.values(), strict=True)
    return LocalLayout(key, size, tuple(found), tuple(shapes), tuple(dims))


def _without(layout: Layout, local: LocalLayout | None) -> Layout:
    if local is None:
        return layout
    kept = [(n, s) for n, s in zip(layout.names, layout.shapes, strict=True) if n not in local.names]
    return Layout(tuple(n for n, _ in kept), tuple(s for _, s in kept))


def refuse_unsupported(trace: dict) -> None:
    """Raise for what no mechanism can split: mutable state, no latent at all.

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
    if not any(is_latent(site) for site in trace.values()):
        raise PartitionError("the model has no latent sample site, so there is nothing to infer.")


def _model_of(partition: Partition) -> Callable:
    if partition.fn is None:
        raise PartitionError("this Partition holds no model: write Partition(model, plate, groups).")
    return partition.fn


def _structure(probe: Probe, observed: tuple[str, ...], outside: tuple[str, ...], layout: Layout) -> dict[str, Any]:
    rays = probe.rays
    terms = tuple(find_term(probe.facts[n], probe.leaves[n], None, rays) for n in observed)
    complete = all(t is not None for t in terms)
    continuous = not any(probe.facts[n].discrete for n in observed)
    possible = continuous and all(probe.facts[n].may_be_quadratic for n in observed)
    quadratic = possible and all(is_quadratic(probe.rows[n], rays) for n in observed)
    kind = "quadratic" if quadratic else "affine" if complete else "draws"
    gaussian = {n for n in layout.names if probe.facts[n].may_be_quadratic and is_quadratic(probe.latents[n], rays)}
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
