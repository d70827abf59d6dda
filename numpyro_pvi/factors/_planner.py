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
from ._checks import is_hostile
from ._enumerate import check_enumerated, enumerated
from ._mechanism import choose_reading
from ._model import Layout, LocalLayout, ModelCall, abstract_trace, is_latent, is_observed
from ._packing import Packing
from ._plan import PartitionPlan
from ._probe import Probe
from ._reading import GroupMasks
from ._structure import find_term, judge_quadratic
from ._terms import TermSpec
from ._tracing import trace_arguments
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
    # Whether densities under the prior are of no use to start from: not finite, or a thousand times worse than at best.
    hostile: bool = False


def make_plan(partition: Partition, args: tuple, kwargs: dict) -> PartitionPlan:
    """Plan a partition for the user's eyes: see :meth:`numpyro_pvi.Partition.plan`."""
    given, key = (args, kwargs), jax.random.key(0)
    args, kwargs = as_arrays(*given)
    if by_value := trace_arguments(_model_of(partition), key, args, kwargs)[1]:
        args, kwargs = as_arrays(*given, by_value=by_value)
    return plan_factors(partition, args, kwargs, key=key).plan


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
    if enumeration is not None and enumeration.plates and partition.check:
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
        why=partition.why,
        batches=partition.batches,
        **_structure(probe, observed, outside, layout),
    )
    if read.reading.mechanism == "mask":
        # Every group is the whole model with the others' rows masked.
        plan = dataclasses.replace(plan, proved=plan.proved | {"additivity"})
    if local is not None:
        plan = dataclasses.replace(plan, likelihood="local", terms=(), proved=plan.proved - {"likelihood"})
    params = {n: v for n, v in probe.params.items() if n in plan.params}
    own = (None, None) if probe.local is None else (probe.local.loc, probe.local.sd)
    return Planned(plan, packing, probe.prior_loc, probe.prior_sd, params, *own, hostile=is_hostile(probe))


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
        sure = plan.proved if all(t.proved for t in plan.terms) else plan.proved - {"likelihood"}
        plan = dataclasses.replace(plan, likelihood="affine", proved=sure)
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
        proved=plan.proved | {"prior"},
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
    likelihood = _likelihood(probe, observed)
    prior = _prior(probe, outside, layout)
    sure = {name for name, (_, proved) in (("likelihood", likelihood), ("prior", prior)) if proved}
    return {**likelihood[0], **prior[0], "proved": frozenset(sure)}


def _likelihood(probe: Probe, observed: tuple[str, ...]) -> tuple[dict[str, Any], bool]:
    """What is said of the rows, and whether all of it is proved."""
    terms = [_term(probe, n) for n in observed]
    complete = tuple(t for t in terms if t is not None) if None not in terms else ()
    continuous = not any(probe.facts[n].discrete for n in observed)
    judged = [
        judge_quadratic(
            probe.rows[n],
            probe.rays,
            probe.row_forms[n],
            continuous and probe.facts[n].may_be_quadratic,
            probe.first_rows[n],
        )
        for n in observed
    ]
    kind = "quadratic" if all(judged) else "affine" if None not in terms else "draws"
    proved = set(judged) == {"proved"} if kind == "quadratic" else all(t.proved for t in complete)
    return {"likelihood": kind, "terms": complete}, proved


def _prior(probe: Probe, outside: tuple[str, ...], layout: Layout) -> tuple[dict[str, Any], bool]:
    """What is said of the prior, and whether all of it is proved."""
    judged = {
        n: judge_quadratic(probe.latents[n], probe.rays, probe.latent_forms[n], probe.facts[n].may_be_quadratic)
        for n in layout.names
    }
    if all(judged.values()):
        exact = tuple(layout.names)
    else:
        # A latent whose own prior moves with others is only safely exact when all of those are.
        exact = tuple(n for n in layout.names if judged[n] and not probe.depends_on_others(n))
    rest = tuple(n for n in layout.names if n not in exact)
    terms = [_term(probe, n, probe.own(n, layout)) for n in rest] + [_term(probe, n) for n in outside]
    found = tuple(t for t in terms if t is not None)
    kind = "none" if not terms else "affine" if len(found) == len(terms) else "draws"
    kept = found if kind == "affine" else ()
    proved = all(judged[n] == "proved" for n in exact) and all(t.proved for t in kept)
    return {"exact": exact, "prior_latents": rest, "prior_terms": kept, "prior_kind": kind}, proved


def _term(probe: Probe, name: str, own: Any = None) -> TermSpec | None:
    forms, first = probe.leaf_forms[name], probe.first_leaves[name]
    return find_term(probe.facts[name], probe.leaves[name], own, probe.rays, forms, first)
