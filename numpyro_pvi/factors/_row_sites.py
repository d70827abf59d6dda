"""Whether sites can be kept as two numbers per row, and what such a fit reads off the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int

from ..families import RowPrior, see_latents, see_rows
from ..handlers import RowAxes
from ._model import ModelCall, latent_log_density
from ._packing import Packing
from ._plan import PartitionPlan
from ._reading import GroupMasks
from ._terms import TermData, TermSpec, prepare_term

# How far the prior as it is read may be from the model's own log density, of the size of its terms.
_AGREEMENT = {"float32": 1e-4, "float64": 1e-9}


def why_not_rows(part: PartitionPlan, trace: dict) -> str | None:
    """What keeps sites from being kept by rows, as far as names and shapes say; None where nothing does.

    Args:
        part: the plan.
        trace: an abstract trace of the model on all rows.

    Returns:
        A reason in words.
    """
    if part.likelihood not in ("quadratic", "affine") or not part.terms:
        return "the rows were not found to see the latents through affine predictors"
    for spec in part.terms:
        if len(spec.predictors) != 1:
            return f"the rows of {spec.site!r} have two predictors"
        if spec.predictors[0].shared:
            return f"all rows of {spec.site!r} share one predictor"
    if part.has_prior_factor:
        beyond = ", ".join((*part.prior_latents, *part.outside))
        return f"part of the prior ({beyond}) is outside the Gaussian family"
    if part.params:
        return f"the model has numpyro.param site(s) {', '.join(part.params)}"
    if part.local is not None or part.enumeration is not None:
        return "rows have latents of their own"
    odd = [
        name for name in part.layout.names if _scale_of(trace[name]["fn"]) is None or trace[name]["scale"] is not None
    ]
    return f"the prior of {', '.join(odd)} is neither Normal nor MultivariateNormal" if odd else None


def num_elements(part: PartitionPlan, trace: dict) -> int:
    """P, the number of predictors of all rows."""
    return sum(_count(trace[spec.site]["fn"].batch_shape) for spec in part.terms)


def read_row_prior(call: ModelCall, part: PartitionPlan, packing: Packing | GroupMasks, diagonal: bool) -> RowPrior:
    """The prior as the rows see it.

    Args:
        call: the model on all rows.
        part: the plan.
        packing: says whose the rows are.
        diagonal: whether each row sees a multiple of one latent, row n that of latent n.

    Returns:
        The prior; its making takes ``O(P^2 D)``.
    """
    loc, scales = _read_prior(call)
    design, data = read_design(call, part.terms)
    group = _groups_of_elements(part, packing, data)
    if diagonal:
        return see_latents(loc, scales, jnp.diagonal(design), group)
    return see_rows(loc, scales, design, group)


def read_design(call: ModelCall, terms: tuple[TermSpec, ...]) -> tuple[Float[Array, "P D"], tuple[TermData, ...]]:
    """The rows' vectors a_n, by reverse derivatives, and the terms' other arrays."""
    dim = call.layout.dim
    few = num_terms(call, terms) <= dim
    data = tuple(prepare_term(call, spec, few=few) for spec in terms)
    return jnp.concatenate([d.design[0] for d in data]), data


def num_terms(call: ModelCall, terms: tuple[TermSpec, ...]) -> int:
    """Elements of all terms, by shapes alone."""
    found: list[int] = []

    def count(point):
        trace, _ = call.trace(point)
        found.append(sum(_count(trace[spec.site]["fn"].batch_shape) for spec in terms))
        return point

    jax.eval_shape(count, jnp.zeros((call.layout.dim,)))
    return found[-1]


def read_rows(call: ModelCall, terms: tuple[TermSpec, ...], loc: Float[Array, "D"]) -> tuple[TermData, ...]:
    """The terms' arrays at the prior's location, whose predictors are the offsets of centred ones; no design is made.

    Args:
        call: the model on all rows.
        terms: their structure, one predictor each.
        loc: the prior's location.

    Returns:
        Per term its arrays, with an empty design.
    """
    return tuple(_moved(call, spec, loc) for spec in terms)


def look_at_rows(
    call: ModelCall, part: PartitionPlan, points: Float[Array, "2 D"]
) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
    """What values alone can tell.

    Args:
        call: the model on all rows.
        part: the plan.
        points: two points.

    Returns:
        Whether the prior is the Gaussian that was read off it, and whether each row sees a multiple of one latent, row n
        that of latent n.
    """
    loc, scales = _read_prior(call)
    prior = see_latents(loc, scales, jnp.ones_like(loc), jnp.zeros(loc.shape, jnp.int32))

    def wrong(point):
        away = point - loc
        own = -0.5 * jnp.sum(away * prior.precision_product(away)) - prior.half_log_det()
        own = own - 0.5 * loc.shape[0] * jnp.log(2 * jnp.pi)
        parts = jnp.stack(list(latent_log_density(call, point).values()))
        return jnp.abs(own - jnp.sum(parts)) / (1 + jnp.sum(jnp.abs(parts)))

    agrees = jnp.all(jax.vmap(wrong)(points) <= _AGREEMENT[loc.dtype.name])
    if num_terms(call, part.terms) != loc.shape[0]:
        return agrees, jnp.array(False)
    design, _ = read_design(call, part.terms)
    slope = jnp.diagonal(design)
    return agrees, jnp.all(slope != 0) & jnp.all(design == jnp.diag(slope))


def _moved(call: ModelCall, spec: TermSpec, loc: Float[Array, "D"]) -> TermData:
    # A model of the deviation from loc: its offsets are those of the centred predictor.
    centred = dataclasses.replace(call, layout=_Centred(call.layout, loc))
    return prepare_term(centred, spec, design=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Centred:
    """A layout whose origin is a given point."""

    layout: Any
    loc: Float[Array, "D"]

    @property
    def dim(self) -> int:
        """D."""
        return self.loc.shape[0]

    def unflatten(self, flat: Array) -> dict:
        """Latents at the point plus ``flat``."""
        return self.layout.unflatten(self.loc + flat)


def _read_prior(call: ModelCall) -> tuple[Float[Array, "D"], tuple]:
    """Location and roots of every latent's prior, at the flat origin."""
    dtype = jnp.result_type(float)
    trace, _ = call.trace(jnp.zeros((call.layout.dim,), dtype))
    locs, scales = [], []
    for name, shape in zip(call.layout.names, call.layout.shapes, strict=True):
        fn = trace[name]["fn"]
        base: Any = _plain(fn)
        locs.append(jnp.broadcast_to(base.loc, shape).astype(dtype).reshape(-1))
        if isinstance(base, dist.Normal):
            scales.append(jnp.broadcast_to(base.scale, shape).astype(dtype).reshape(-1))
        else:
            size = shape[-1]
            whole = jnp.broadcast_to(base.scale_tril, (*shape[:-1], size, size)).astype(dtype)
            scales.append(whole.reshape(-1, size, size))
    return jnp.concatenate(locs), tuple(scales)


def _plain(fn: dist.Distribution) -> dist.Distribution:
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def _scale_of(fn: dist.Distribution) -> str | None:
    kind = type(_plain(fn))
    return {dist.Normal: "sd", dist.MultivariateNormal: "root"}.get(kind)


def _groups_of_elements(
    part: PartitionPlan, packing: Packing | GroupMasks, data: tuple[TermData, ...]
) -> Int[Array, "P"]:
    found = []
    for spec, one in zip(part.terms, data, strict=True):
        shape = one.fn.batch_shape
        rows = _groups_of_rows(part.rows, packing, spec, shape)
        aligned = rows.reshape(rows.shape + (1,) * (-(spec.row_dim or -1) - 1))
        found.append(jnp.broadcast_to(aligned, shape).reshape(-1))
    return jnp.concatenate(found)


def _groups_of_rows(rows: RowAxes, packing: Packing | GroupMasks, spec: TermSpec, shape: tuple) -> Int[Array, "N"]:
    if rows.whole:
        return jnp.zeros((), jnp.int32)
    if isinstance(packing, GroupMasks):
        return packing.group_of_row[spec.row_key]
    size = shape[spec.row_dim]
    # Padding goes to a place beyond the last, which is dropped; a row that no chunk holds is nobody's.
    place = jnp.where(packing.mask, packing.rows, size)
    owner = jnp.broadcast_to(packing.chunk_group[:, None], place.shape)
    return jnp.full((size + 1,), -1, jnp.int32).at[place.reshape(-1)].set(owner.reshape(-1))[:size]


def _count(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
