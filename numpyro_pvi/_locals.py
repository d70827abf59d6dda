"""Local latents as a user sees them: joined with the shared ones under the guide's names, and their marginals."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float

from ._compiling import Program
from ._marginals import event_rank, in_own_support
from ._state import PVIState
from .factors import GroupMasks, LocalLayout
from .families import ConditionalMoments, ConditionalNatural, GaussianFamily, GaussianMoments, conditional_moments
from .guides import flat_to_params


def by_unit(state: PVIState) -> ConditionalNatural:
    """Natural parameters of every unit's local latents given the shared ones, in the plate's order.

    Args:
        state: a state of a model with local latents.

    Returns:
        Arrays with a leading axis U.
    """
    return _take(state.sites.local.rows, _places(state))


def _places(state: PVIState) -> tuple:
    """Where every unit's numbers lie: its group and itself, or its chunk and its slot there."""
    packing = state.packing
    if isinstance(packing, GroupMasks):
        group = packing.group_of_row[state.plan.partition.local.key]
        return group, np.arange(group.shape[0])
    where = np.flatnonzero(np.asarray(packing.mask).reshape(-1))
    slot = where[np.argsort(np.asarray(packing.rows).reshape(-1)[where])]
    return tuple(np.divmod(slot, packing.rows.shape[1]))


@Program
def _take(rows: ConditionalNatural, places: tuple) -> ConditionalNatural:
    return jax.tree.map(lambda x: x[places], rows)


def joint_params(guide: Any, state: PVIState, natural: Any) -> dict[str, Array]:
    """The guide's params over shared and local latents together.

    Args:
        guide: the guide.
        state: a state of a model with local latents.
        natural: natural parameters of q(theta).

    Returns:
        Params under the guide's own names; a guide of full covariance gets a dense matrix over all of them.
    """
    part = state.plan.partition
    names, shapes, order = _flat_order(part.layout, part.local)
    loc, spread = _joint(state.plan.family, natural, state.sites.local.rows, _places(state), order)
    return flat_to_params(guide, names, shapes, loc, spread)


@partial(Program, static=("family",))
def _joint(
    family: GaussianFamily, natural: Any, rows: ConditionalNatural, places: tuple, order: Any
) -> tuple[Array, Array]:
    """Location, and covariance (full) or sds (mean-field), of (theta, z of unit 0, z of unit 1, ...), in another order."""
    rows = _take(rows, places)
    shared, q = family.moments(natural), conditional_moments(rows)
    loc = jnp.concatenate([shared.loc, q.mean(shared.loc).reshape(-1)])
    if not family.full:
        return loc[order], jnp.concatenate([shared.scale, q.root.reshape(-1)])[order]
    dim, (count, width) = family.dim, rows.linear.shape
    inherited = (q.slope @ shared.scale).reshape(-1, dim)
    root = jnp.concatenate([shared.scale, inherited])
    own = jnp.einsum("uik,ujk->uij", q.root, q.root)
    unit = jnp.arange(count)
    blocks = jnp.zeros((count, width, count, width), loc.dtype).at[unit, :, unit, :].set(own)
    covariance = (root @ root.T).at[dim:, dim:].add(blocks.reshape(count * width, count * width))
    return loc[order], covariance[order][:, order]


def _flat_order(layout: Any, local: LocalLayout) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...], np.ndarray]:
    """All latents, and where their flattened values lie in (theta, z of unit 0, ...)."""
    index, own = layout.dim + np.arange(local.size * local.width).reshape(local.size, local.width), {}
    for name, shape, dim in zip(local.names, local.shapes, local.dims, strict=True):
        value = index[:, local.slice_of(name)].reshape(local.size, *shape)
        own[name] = np.moveaxis(value, 0, value.ndim + dim)
    names = (*layout.names, *own)
    shapes = (*layout.shapes, *(v.shape for v in own.values()))
    order = np.concatenate([np.arange(layout.dim), *(v.reshape(-1) for v in own.values())])
    return names, shapes, order


def local_distributions(state: PVIState, natural: Any, trace: dict) -> dict[str, dist.Distribution]:
    """Marginal posteriors of the local latents, in their own supports and the model's shapes.

    Args:
        state: a state.
        natural: natural parameters of q(theta).
        trace: a prototype trace with every latent's support.

    Returns:
        Distributions by name; empty when the model has no local latents.
    """
    local = state.plan.partition.local
    if local is None:
        return {}
    shared, q = state.plan.family.moments(natural), conditional_moments(by_unit(state))
    mean, sd = q.mean(shared.loc), q.marginal_sd(shared)
    locs, sds = local.unflatten(mean), local.unflatten(sd)
    found = {}
    for name in local.names:
        fn = trace[name]["fn"]
        rank, covariance = event_rank(fn), None
        if rank and state.plan.family.full:
            covariance = _event_covariance(q, shared, local, name, rank)
        found[name] = in_own_support(fn, locs[name], sds[name], covariance)
    return found


def _event_covariance(
    q: ConditionalMoments, shared: GaussianMoments, local: LocalLayout, name: str, event_dim: int
) -> Float[Array, "*batch E E"]:
    """Covariance over the event of one latent, marginal over everything else, in the latent's batch shape."""
    inherited = q.slope @ shared.scale
    covariance = q.root @ jnp.swapaxes(q.root, -1, -2) + inherited @ jnp.swapaxes(inherited, -1, -2)
    where, index = local.slice_of(name), local.names.index(name)
    shape, dim = local.shapes[index], local.dims[index]
    batch = shape[: len(shape) - event_dim]
    units, size = covariance.shape[0], int(np.prod(shape[len(shape) - event_dim :]))
    count = (where.stop - where.start) // size
    own = covariance[:, where, where].reshape(units, count, size, count, size)
    own = jnp.einsum("ubibj->ubij", own).reshape(units, *batch, size, size)
    # The plate's axis goes back to its place among the batch axes.
    return jnp.moveaxis(own, 0, len(batch) + 1 + dim + event_dim)
