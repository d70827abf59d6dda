"""Planning: what a model cannot be fitted with, which mechanism evaluates one group, and what structure factors have."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.primitives import Messenger

from .._compiling import Same
from ..errors import (
    DataError,
    GuideError,
    ImproperError,
    NonFiniteLossError,
    PartitionError,
    PVIError,
    SkippedGroupError,
)
from ..handlers import Completed, FullPlates, Partition, RowAxes, completed_in, missing_of, refuse_latents
from ._arguments import as_arrays, check_finite_arguments, is_dynamic, join_arguments, split_arguments
from ._chunks import GroupMasks, Packing
from ._enumerate import check_enumerated, enumerated
from ._log_densities import ValueCall
from ._mechanism import HOSTILE, HOSTILE_TO_DRAWS, choose_reading, densities_nearby, is_hostile
from ._model import DrawImproper, Layout, LocalLayout, ModelCall, abstract_trace, is_latent, is_observed, site_log_prob
from ._plan import PartitionPlan
from ._probe import Probe, draw_trace
from ._structure import TermSpec, find_term, judge_quadratic

# ------------------------------------------------------------------------------------------------------ the first trace
# The first trace of a model with its arguments: which of them are traced, and which a model reads values of.

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

    ``numpyro.plate("J", len(np.unique(idx)))`` needs the values of ``idx``, as a loop or an ``if`` may. Where a trace with all
    arrays abstract fails for want of values, integer arrays are given values, then all; and each is taken back whose values are
    not missed. ``model``: the NumPyro model; ``key``: a random key; ``args``: positional arguments, converted; ``kwargs``:
    keyword arguments, converted. Returns ``(trace, by_value)``: the abstract trace, and the places of the arrays that are read
    by value.
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


def check_data(model: Callable, args: tuple, kwargs: dict, names: Sequence[str]) -> bool:
    """Refuse NaN and infinity in the arguments, but for a model that deals with them itself.

    A model that masks or imputes missing entries has a finite log density all the same, of finite parameters: it is looked at, at
    draws from the prior, only where entries are not finite. ``model``: the NumPyro model; ``args``: positional arguments,
    converted; ``kwargs``: keyword arguments, converted; ``names``: names of the positional arguments, for messages. Returns
    whether there are such entries, and the model deals with them. Raises DataError as of ``check_finite_arguments``.
    """
    try:
        check_finite_arguments(args, kwargs, names)
    except DataError:
        if not _finite_at_prior(model, args, kwargs):
            raise
        return True
    return False


def _finite_at_prior(model: Callable, args: tuple, kwargs: dict) -> bool:
    arrays, static = split_arguments(args, kwargs)

    @jax.jit
    def density(arrays: list, key: Any) -> Any:
        trace = draw_trace(model, key, *join_arguments(arrays, static), {})
        sites = [s for s in trace.values() if s["type"] == "sample"]
        whole = sum(jnp.sum(site_log_prob(s)) for s in sites)
        # Some densities are finite at parameters that are NaN, as Bernoulli's for zeros.
        unknown = [jnp.any(_without_number(s["fn"], s["value"] if is_observed(s) else None)) for s in sites]
        return jnp.where(jnp.any(jnp.stack(unknown)), jnp.nan, whole)

    with numpyro.validation_enabled(False):
        found = [density(arrays, key) for key in jax.random.split(jax.random.key(0), _PRIOR_DRAWS)]
    return bool(np.all(np.isfinite(np.asarray(found))))


def _without_number(fn: Any, value: Any) -> Any:
    """Where a distribution of NumPyro's has NaN among its parameters, or a value that is NaN, and no mask over it: Bool[*batch]."""
    if isinstance(fn, dist.MaskedDistribution):
        return _without_number(fn.base_dist, value) & fn._mask
    if isinstance(fn, dist.ExpandedDistribution):
        return _without_number(fn.base_dist, value)
    if isinstance(fn, dist.Independent):
        inner = _without_number(fn.base_dist, value)
        inner = jnp.broadcast_to(inner, jnp.broadcast_shapes(jnp.shape(inner), fn.base_dist.batch_shape))
        return jnp.any(inner, axis=tuple(range(-fn.reinterpreted_batch_ndims, 0)))
    if not type(fn).__module__.startswith("numpyro.distributions"):
        return jnp.array(False)
    found, given = jnp.array(False), [(x, jnp.ndim(x) - len(fn.batch_shape)) for x in jax.tree.leaves(fn)]
    given += [] if value is None else [(value, fn.event_dim)]
    for x, events in given:
        if jnp.issubdtype(jnp.result_type(x), jnp.floating):
            own = jnp.any(jnp.isnan(x), axis=tuple(range(-max(events, 0), 0)))
            # What a whole batch shares, such as cutpoints or a covariance, has no place in it.
            shared = any(
                size not in (1, whole) for size, whole in zip(own.shape[::-1], fn.batch_shape[::-1], strict=False)
            )
            found = found | (jnp.any(own) if shared else own)
    return found


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


# -------------------------------------------------------------------------------------------------------------- planner

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
    # Log-likelihoods of the rows near the prior's location, nats: see ``densities_nearby``.
    nearby: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1))
    # How the groups' expectations are taken where q is a product of families, if that is known already.
    structure: Any = None

    @property
    def hostile(self) -> bool:
        """Whether densities under the prior are of no use to start from: not finite, or far worse than at best."""
        return is_hostile(self.nearby, far_worse(self.plan))


def far_worse(plan: PartitionPlan) -> float:
    """How many times worse than another a place to start from may be: less where no structure says where to go from there."""
    return HOSTILE_TO_DRAWS if plan.likelihood == "draws" else HOSTILE


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

    ``partition``: the model with its grouping; ``args``: positional arguments as arrays; ``kwargs``: keyword arguments as
    arrays; ``key``: a random key (prior draws and probe directions); ``layout``: flat order of the latents; the model's own
    order by default; ``params``: constrained values of ``numpyro.param`` sites; their initial values by default. Returns the
    static plan and its arrays. Raises PartitionError when the model cannot be split, naming the sample site, its plates and
    shapes.
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
    read = choose_reading(partition, call, trace, rows, key, params, (Same(untouched), enumeration))
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
        jumps=_jumps(probe, (*observed, *(() if local is None else local.names)), outside, layout),
        kinks=local is not None and _kinks(probe, (*observed, *local.names)),
    )
    if read.reading.mechanism == "mask":
        # Every group is the whole model with the others' rows masked.
        plan = dataclasses.replace(plan, proved=plan.proved | {"additivity"})
    if local is not None:
        plan = dataclasses.replace(plan, likelihood="local", terms=(), proved=plan.proved - {"likelihood"})
    params = {n: v for n, v in probe.params.items() if n in plan.params}
    own = (None, None) if probe.local is None else (probe.local.loc, probe.local.sd)
    return Planned(plan, packing, probe.prior_loc, probe.prior_sd, params, *own, nearby=densities_nearby(probe))


def with_expectation(planned: Planned, expectation: str, full: bool = True) -> Planned:
    """Treat every factor as a solver insists, where its structure allows that.

    ``planned``: what was found; ``expectation``: "monte_carlo" or "sigma_points" (all factors as if they
    had no structure), "quadrature" (for all whose predictors are known), "reparameterised" (draws without Hessians for all
    factors of a mean-field q), or anything else to leave the plan as it is; ``full``: whether q has full covariance. Returns
    the plan to follow.
    """
    plan = planned.plan
    if plan.local is not None:
        drawn = expectation == "monte_carlo" and plan.unstructured == "auto"
        return (
            dataclasses.replace(planned, plan=dataclasses.replace(plan, unstructured=expectation)) if drawn else planned
        )
    if expectation in ("monte_carlo", "sigma_points"):
        prior_kind = "draws" if plan.has_prior_factor else "none"
        points = plan.unstructured if plan.unstructured in ("values", "slopes") else expectation
        plan = dataclasses.replace(plan, likelihood="draws", prior_kind=prior_kind, unstructured=points)
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


def proved_only(plan: PartitionPlan) -> PartitionPlan:
    """Give up structure that was seen in values and not proved from the model's program, and every choice by later looks.

    ``plan``: what was found, and treated as a solver insists. Returns the plan to follow, whose structure says nothing of
    values of the rows. Raises PVIError for observations outside the partitioned plate, which are no group's.
    """
    if plan.outside:
        raise PVIError(
            f"observed site(s) {', '.join(map(repr, plan.outside))} are outside {plan.where}, so that they are part "
            "of the prior factor and of no group whose releases are clipped and noised: put them inside the plate, "
            "or fit without DifferentialPrivacy."
        )
    likelihood = "draws" if plan.evidence("likelihood") == "found" else plan.likelihood
    # What may jump and is not looked at is taken as if it did.
    unstructured = "values" if plan.jumps else "monte_carlo" if plan.unstructured == "auto" else plan.unstructured
    return dataclasses.replace(plan, likelihood=likelihood, unstructured=unstructured)


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

    Returns their layout, or None when there are none. Raises PartitionError when they are in several of the partitioned plates.
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
    inside = (site for site in trace.values() if site["type"] == "sample" and rows.of(site) is not None)
    terms = sum(math.prod(site["fn"].batch_shape) for site in inside)
    return LocalLayout(key, size, tuple(found), tuple(shapes), tuple(dims), -(-terms // max(size, 1)))


def _without(layout: Layout, local: LocalLayout | None) -> Layout:
    if local is None:
        return layout
    kept = [(n, s) for n, s in zip(layout.names, layout.shapes, strict=True) if n not in local.names]
    return Layout(tuple(n for n, _ in kept), tuple(s for _, s in kept))


def refuse_unsupported(trace: dict) -> None:
    """Raise for what no mechanism can split: mutable state, no latent at all.

    ``trace``: an abstract trace of the model. Raises PartitionError naming the site.
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


def _jumps(probe: Probe, inside: tuple[str, ...], outside: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    """Of "likelihood" and "prior factor", whose log density may jump in the latents: comparisons, roundings, look-ups.

    ``inside``: names of the rows' sites, observed and latent; ``outside``: of observed sites that are no rows'.
    """
    rows = any(probe.row_forms[n].jump for n in inside)
    prior = any(probe.latent_forms[n].jump for n in layout.names)
    prior = prior or any(form.jump for n in outside for form in probe.leaf_forms[n].values())
    return ("likelihood",) * rows + ("prior factor",) * prior


def _kinks(probe: Probe, inside: tuple[str, ...]) -> bool:
    """Whether rows with latents of their own may have kinks. Those that jump in shared ones follow slopes, and are said to."""
    return not any(probe.row_forms[n].jump for n in inside) and not probe.kinked.isdisjoint(inside)


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


# ------------------------------------------------------------------------------------------------ what cannot be fitted
# What a model cannot be fitted with, found by running it: observations of another shape, randomness, no finite density.

# What NumPyro says where it has looked for a start in vain, and where a distribution's parameters are checked.
_NO_START = ("valid initial parameters", "invalid")


def check_observed_shapes(trace: dict, rows: RowAxes | None = None) -> None:
    """Refuse observations that broadcast every row against every other: a column of shape (N, 1) in a plate of N.

    ``trace``: an abstract trace of the model; ``rows``: which axis of which sample site runs over the partitioned rows; None
    looks at every plate. Raises PartitionError naming the sample site, its shape and its distribution's.
    """
    for name, site in trace.items():
        if not is_observed(site):
            continue
        frames = [(frame.dim, frame.name) for frame in site["cond_indep_stack"]]
        if rows is not None:
            frames = [] if (axis := rows.of(site)) is None else [(axis.dim, axis.key)]
        for dim, key in frames:
            _refuse_column(name, site, dim, key)


def _refuse_column(name: str, site: dict, dim: int, key: Any) -> None:
    fn, value = site["fn"], tuple(jnp.shape(site["value"]))
    own, place = _declared(site), dim - fn.event_dim
    if len(value) < -place or len(own) < -place or value[place] == own[place]:
        return
    # One number for all rows is no column of them; sizes that do not go together at all are refused where they meet.
    if value[place] != 1 or all(size == 1 for size in value[:place]):
        return
    # Nor is one of another plate's axis, which the distribution has as well.
    ahead = ((1,) * max(0, len(value) - len(own)) + own)[-len(value) :][:place]
    if not any(there != 1 and here == 1 for there, here in zip(value[:place], ahead, strict=True)):
        return
    column = ", such as y[:, 0]" if value[-1] == 1 else ""
    raise PartitionError(
        f"sample site {name!r} is observed with shape {value}, but its distribution, in plate {key!r}, has "
        f"shape {own}: every row would be compared with every other. Pass observations of shape {own}{column}; columns of "
        "one row belong to the event: numpyro.sample(name, fn.to_event(1), obs=y)."
    )


def _declared(site: dict) -> tuple[int, ...]:
    """Shape of a sample site's distribution as the model has it, with its plates but not as wide as what is observed."""
    return site.get("declared", tuple(site["fn"].shape()))


@contextlib.contextmanager
def lengths_named(trace: dict) -> Iterator[None]:
    """Around first looks at a model: say which observations do not go together with their distribution, where JAX says shapes only.

    ``trace``: an abstract trace of the model. Raises DataError naming the sample site and its plates.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not isinstance(error, PVIError):
            _refuse_other_lengths(trace, error)
        raise


def _refuse_other_lengths(trace: dict, error: Exception) -> None:
    for name, site in trace.items():
        if not is_observed(site):
            continue
        value, own = tuple(jnp.shape(site["value"])), _declared(site)
        try:
            jax.lax.broadcast_shapes(value, own)
        except ValueError:
            plates = [_size_of(trace, frame) for frame in site["cond_indep_stack"]]
            raise DataError(
                f"sample site {name!r} is observed with shape {value}, and its distribution has shape {own}, which do not go "
                f"together{': ' * bool(plates)}{' and '.join(plates)}. Give one observation for every row of the model's other "
                "arguments, in their order; for rows without one any number in its support, and leave them out with "
                "numpyro.handlers.mask."
            ) from error


def _size_of(trace: dict, frame: Any) -> str:
    drawn = trace[frame.name].get("drawn", frame.size) if frame.name in trace else frame.size
    some = f", of which it draws {drawn}" if drawn != frame.size else ""
    return f"plate {frame.name!r} has {frame.size} rows{some}"


@contextlib.contextmanager
def masks_named(trace: Callable[[], dict]) -> Iterator[None]:
    """Around a fit: where nothing holds some latent, say which of those in a plate a mask leaves without their prior.

    ``trace``: gives an abstract trace of the model. Raises what is raised inside, with that said.
    """
    try:
        yield
    except (ImproperError, SkippedGroupError, NonFiniteLossError) as error:
        masked = [repr(n) for n, s in trace().items() if is_latent(s) and s["cond_indep_stack"] and _is_masked(s["fn"])]
        if masked:
            error.args = (
                f"{error} In rows that numpyro.handlers.mask leaves out, latent(s) {', '.join(masked)} are without their prior, "
                "and nothing holds them where the observation is left out as well: mask the observed sample sites alone.",
            )
        raise


def _is_masked(fn: Any) -> bool:
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return isinstance(fn, dist.MaskedDistribution) and fn._mask is not True and not isinstance(fn, Completed)


def refuse_unheld(trace: dict, concrete: Callable[[], dict]) -> None:
    """Refuse a latent of a row whose prior and observations are all masked, so that nothing holds it and q would never settle.

    ``trace``: abstract trace of the model; ``concrete``: gives one with values, which is asked for where a latent in a plate is
    masked. Raises ImproperError naming the latent and its first such row.
    """
    names = [n for n, s in trace.items() if is_latent(s) and s["cond_indep_stack"] and _is_masked(s["fn"])]
    found = concrete() if names else {}
    for name in names:
        # What has finitely many values, or ends on both sides, needs nothing to hold it.
        if not _may_run_away(found[name]["fn"].support):
            continue
        for frame in found[name]["cond_indep_stack"]:
            observed = [s for s in found.values() if s["type"] == "sample" and s["is_observed"]]
            # An observation elsewhere may see the latent by an index.
            if any(frame not in s["cond_indep_stack"] for s in observed):
                continue
            held = _masks(found[name]["fn"], frame)
            for s in observed:
                held = held | _masks(s["fn"], frame)
            if not np.all(held):
                raise ImproperError(
                    f"latent {name!r} is without its prior in row {int(np.argmin(held))} of plate {frame.name!r}, which "
                    "numpyro.handlers.mask leaves out together with all that is observed of the row, so that nothing holds it: "
                    "mask the observed sample sites alone."
                )


def refuse_reads_of_what_is_not_missing(trace: dict, model: Callable, key: Any, args: tuple, kwargs: dict) -> None:
    """Refuse a model that reads a latent of missing data where these are not missing: see :func:`with_missing_only`.

    NumPyro's own ``obs_mask`` lets nobody; a latent that a user gave such a name may be read anywhere. ``trace``: abstract trace
    of the model; ``key``: a random key. The densities of all other sites are compared, at draws from the prior, with what they
    are where those entries are others. Raises PVIError naming the latent and the site that reads it.
    """
    names = [n for n, s in trace.items() if is_latent(s) and completed_in(s["fn"]) is not None]
    if not names:
        return
    with numpyro.validation_enabled(False):
        values = {n: s["value"] for n, s in draw_trace(model, key, args, kwargs, {}).items() if is_latent(s)}
        call = ValueCall(model, args, kwargs)
        before = call.trace(values)
        for name in names:
            fn, value = before[name]["fn"], values[name]
            missing = jnp.asarray(completed_in(fn)._mask)
            missing = jnp.reshape(missing, jnp.shape(missing) + (1,) * fn.event_dim)
            moved = jnp.where(missing, value, fn.sample(jax.random.fold_in(key, 1)))
            for other, site in call.trace(values | {name: moved}).items():
                if site["type"] != "sample" or other == name:
                    continue
                if not np.array_equal(site_log_prob(site), site_log_prob(before[other]), equal_nan=True):
                    raise PVIError(
                        f"latent {name!r} is masked where '{missing_of(name)}_observed' is not, and is taken for obs_mask's own, "
                        f"which nothing reads where the data are there; {other!r} does: give it another name."
                    )


def _may_run_away(support: Any) -> bool:
    """Whether values without a density of their own may go anywhere: real numbers, to one side or both."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    ends = constraints.real, constraints.real_vector, constraints.positive, constraints.nonnegative
    kinds = tuple(type(x) for x in ends) + (constraints.greater_than, constraints.less_than)
    return isinstance(support, kinds) and not support.is_discrete


def _masks(fn: Any, frame: Any) -> np.ndarray:
    """By index of a plate, whether anything of a distribution is left in by masks."""
    left = np.ones((frame.size,), bool)
    while isinstance(fn, dist.MaskedDistribution):
        mask, axis = np.broadcast_to(np.asarray(fn._mask), fn.batch_shape), len(fn.batch_shape) + frame.dim
        # None, of a site that is looked at beside the log density, says nothing.
        if fn._mask is not None and axis >= 0 and mask.shape[axis] == frame.size:
            left &= np.moveaxis(mask, axis, 0).reshape(frame.size, -1).any(1)
        fn = fn.base_dist
    return left


class KeyWatch(Messenger):
    """Watches a model ask for random keys with ``numpyro.prng_key()``, and answers with its own where it has one."""

    def __init__(self, fn: Callable, key: Any = None) -> None:
        self.key, self.asked = key, 0
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Count, and answer."""
        if msg["type"] == "prng_key":
            self.asked += 1
            if self.key is not None and msg["value"] is None:
                msg["value"] = jax.random.fold_in(self.key, self.asked)


def refuse_randomness(model: Callable, key: Any, args: tuple, kwargs: dict) -> None:
    """Refuse a model that asks for keys whose log density changes with them: it is no function of its latents.

    Keys that leave the density alone pass: first values of a network's params, simulations beside the observations. ``model``:
    the NumPyro model; it asks for keys; ``key``: a random key; ``args``: the model's positional arguments; ``kwargs``: its
    keyword arguments. Raises PVIError saying what to write instead.
    """
    model = FullPlates(model)

    def values(key: Any) -> dict:
        trace = handlers.trace(handlers.seed(DrawImproper(KeyWatch(model, key), key), key)).get_trace(*args, **kwargs)
        return {n: s["value"] for n, s in trace.items() if s["type"] == "param" or is_latent(s)}

    def density(point: dict, asked: Any) -> Any:
        held = handlers.substitute(KeyWatch(model, asked), data=point)
        trace = handlers.trace(handlers.seed(held, key)).get_trace(*args, **kwargs)
        return sum(jnp.sum(site_log_prob(s)) for s in trace.values() if s["type"] == "sample")

    with numpyro.validation_enabled(False):
        point, both = jax.jit(values)(key), jax.jit(density)
        one, other = (np.asarray(both(point, k)) for k in jax.random.split(key))
    if not np.array_equal(one, other, equal_nan=True):
        raise PVIError(
            "the model draws random numbers with numpyro.prng_key(), and its log density changes with them: it is another "
            "function of the latents at every key, which no posterior belongs to. Pass the random numbers as an argument of the "
            "model, so that they stay the same, or make them a latent with numpyro.sample; a network's dropout (apply_rng) has to "
            "be switched off."
        )


@contextlib.contextmanager
def explained(guide: Any, key: Any, args: tuple, kwargs: dict) -> Iterator[None]:
    """Around a guide's set-up: say which sample site is not finite where NumPyro finds no start, and what to write.

    ``guide``: the guide; ``key``: a random key; ``args``: the model's positional arguments; ``kwargs``: its keyword arguments.
    Raises DataError naming the sample site, where observations are outside of its support; GuideError naming the sample site.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, PVIError) or not any(words in str(error) for words in _NO_START):
            raise
        name, (outside, where) = type(guide).__name__, _not_finite(guide, key, args, kwargs)
        if outside:
            raise DataError(
                f"the observations of sample site {', '.join(outside)} are outside of the distribution's support, so that there is "
                f"no finite log density to start from: {where}. Look for negative counts, for labels that begin at 1, for shares "
                "of 0 or 1, or choose a distribution that has them."
            ) from error
        raise GuideError(
            f"the guide {name} found no point with a finite log density to start from ({str(error).split('. ')[0].rstrip('.')}): "
            f"{where}. Check the observations against the distribution's support and its "
            f"parameters against their ranges, or start elsewhere: {name}(model, init_loc_fn=numpyro.infer.init_to_median()), or "
            "init_to_value(values={...}) from there."
        ) from error


def _not_finite(guide: Any, key: Any, args: tuple, kwargs: dict) -> tuple[list[str], str]:
    """Observed sites outside of their supports, and which are not finite at a draw of the guide's strategy; no values of theirs."""
    with warnings.catch_warnings(), numpyro.validation_enabled(False):
        warnings.simplefilter("ignore")
        # Seeded inside: strategies draw with the keys that sample sites have been given.
        seeded, strategy = handlers.seed(guide.model, key), guide.init_loc_fn
        trace = handlers.trace(handlers.substitute(seeded, substitute_fn=strategy)).get_trace(*args, **kwargs)
        found, off = [], []
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            terms = np.asarray(site_log_prob(site))
            bad = int((~np.isfinite(terms)).sum())
            if bad:
                outside = is_observed(site) and not bool(jnp.all(site["fn"].support(site["value"])))
                off += [repr(name)] * outside
                why = ", whose observations are outside of its support" if outside else ""
                found.append(f"{name!r} ({_kind(site['fn'])}{why}) in {bad} of {terms.size} entries")
    if not found:
        return off, "every sample site is finite at a draw of its init strategy, but a gradient is not"
    return off, f"at a draw of its init strategy the log density is not finite at sample site {', '.join(found)}"


def _kind(fn: Any) -> str:
    """A distribution's name as the model has it, without what plates and handlers have put around it."""
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent):
        fn = fn.base_dist
    return type(fn).__name__
