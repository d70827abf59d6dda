"""Some rows of some groups as a problem of their own: what a round of a few groups sees, and a step by a mini-batch.

The sites of all other groups count as a prior, and of latents inside the partitioned plate only the rows at hand are looked up,
so that what is done with them costs as much as these rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..factors import GroupMasks, Packing, ValueCall
from ..families import ProductFamily, ProductNatural, members_of, repeated
from ..sites import MemberSites, SiteStack
from ._product_plan import ProductPlan, owners
from ._product_problem import ProductProblem


class Chosen(NamedTuple):
    """K groups, and some of the rows of each in chunks."""

    # Positions of different groups, and which of them take part; the others' sites stay as they are.
    groups: Int[Array, "K"]
    there: Bool[Array, "K"]
    # Plate indices of the rows, as a packing has them; all groups' masks where rows cannot be taken.
    packing: Packing | GroupMasks
    # What a sum over a group's rows is multiplied by; None is 1.
    weights: Float[Array, "K"] | None


@dataclasses.dataclass(frozen=True)
class _Gathered(ValueCall):
    """A model whose chunks name places in a list of rows."""

    ids: Int[Array, "P"]

    def rows(self, reading: Any, chunk: Any) -> ValueCall:
        """The model on one chunk's rows."""
        return super().rows(reading, (self.ids[chunk[0]], chunk[1]))


@dataclasses.dataclass(frozen=True)
class Beside(ProductProblem):
    """A problem whose prior holds the sites of other groups, and need not be normalisable."""

    def divergences(self, q: ProductNatural) -> Float[Array, "C"]:
        """Of every component ``A(q) - <q - prior, mu>``, nats: minus a divergence to a prior that need not be normalisable."""
        found = []
        for name, family in self.family.components:
            own = q.parts[name]
            gap = own - self.prior.parts[name]
            found.append(family.log_partition(own) - family.inner(gap, family.natural_to_mean(own)))
        return jnp.stack([jnp.asarray(x) for x in found])


@dataclasses.dataclass(frozen=True)
class SomeRows(Beside):
    """A problem of K groups, or of a batch of the rows of each.

    Its ELBO is the local free energy of these groups and the prior factor, ``sum_S E_q[log f_m] - KL(q || q without the sites of
    S)`` with an unnormalised second argument (PVI eq. 2). Under ``weights`` a message about shared latents is ``N_m / B`` times
    the batch's; a row's own latents get their own.

    Args:
        full: the problem of all groups.
        chosen: the groups and rows, by plate index.
    """

    full: ProductProblem
    chosen: Chosen

    @property
    def num_groups(self) -> int:
        """K."""
        return self.chosen.groups.shape[0]

    def largest_by_group(self, name: str, found: Any) -> Float[Array, "K"]:
        """See :meth:`ProductPlan.largest_by_group`."""
        rows = jax.tree.leaves(found)[0].shape[self.plan.row_axes[name]]
        owner = owners(self.packing, rows, self.plan.row_key)
        return self.plan.largest_by_group(name, found, owner, self.num_groups)

    def _by_group(self, results: Any) -> Any:
        found, weights = super()._by_group(results), self.chosen.weights
        if weights is None:
            return found
        return jax.tree.map(lambda x: x * weights.reshape((-1,) + (1,) * (x.ndim - 1)), found)

    def _known(self, sites: SiteStack | None, chunk: Any, group: Any, place: Any) -> dict[str, Any]:
        found, weights = super()._known(sites, chunk, group, place), self.chosen.weights
        if weights is None:
            return found
        # A batch's share of what its group's site says, so that the whole is what the batch's total is compared with.
        inside, share = self.plan.row_axes, 1.0 / weights[group]
        return {n: x if n in inside else jax.tree.map(lambda a: a * share, x) for n, x in found.items()}

    def _rows_key(self, key: Any, chunk: Any) -> Any:
        if isinstance(self.packing, GroupMasks):
            return None
        assert isinstance(self.call, _Gathered)
        return self.full._rows_key(key, (self.call.ids[chunk[0]], chunk[1]))

    def _prior_density(self, values: dict, weights: Any = None, laws: Any = None) -> Array:
        # The prior factor reads the model's own arguments; it says nothing of rows' latents, whose values are of no account.
        count, axes = self.plan.partition.table.num_rows, self.plan.row_axes
        if not isinstance(self.packing, GroupMasks):
            first = jnp.zeros((count,), jnp.int32)
            values = {n: jnp.take(x, first, axis=axes[n]) if n in axes else x for n, x in values.items()}
        return self.full._prior_density(values, weights, laws)


def whole_groups(problem: ProductProblem, groups: Int[Array, "K"], there: Bool[Array, "K"]) -> Chosen:
    """All rows of some groups, in as many chunks as the K largest groups have.

    Args:
        problem: of all groups.
        groups: positions of the groups, all different.
        there: which of them take part.

    Returns:
        The rows.
    """
    packing, count = problem.packing, groups.shape[0]
    if isinstance(packing, GroupMasks):
        place = jnp.full((problem.num_groups,), -1, jnp.int32)
        place = place.at[groups].set(jnp.where(there, jnp.arange(count, dtype=jnp.int32), -1))
        own = {key: jnp.where(index >= 0, place[index], -1) for key, index in packing.group_of_row.items()}
        numbers = jnp.arange(count + 1, dtype=jnp.int32)
        return Chosen(groups, there, GroupMasks(own, numbers[:-1], numbers), None)
    length = packing.rows.shape[1]
    chunks = np.sort(-(-np.asarray(problem.plan.partition.table.sizes) // length))[::-1]
    most = int(chunks[:count].sum())
    counts = (packing.offsets[1:] - packing.offsets[:-1])[groups]
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    numbers = jnp.arange(most, dtype=jnp.int32)
    slot = jnp.minimum(jnp.searchsorted(ends, numbers, side="right"), count - 1).astype(jnp.int32)
    spare = numbers >= ends[-1]
    chunk = jnp.where(spare, 0, packing.offsets[groups[slot]] + numbers - (ends[slot] - counts[slot]))
    mask = packing.mask[chunk] & (~spare & there[slot])[:, None]
    # Spare chunks belong to the last group and hold no row.
    offsets = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1], jnp.full((1,), most, ends.dtype)])
    return Chosen(groups, there, Packing(packing.rows[chunk], mask, slot, offsets), None)


def batch_rows(
    problem: ProductProblem, groups: Int[Array, "K"], there: Bool[Array, "K"], positions: Int[Array, "K B"]
) -> Chosen:
    """A batch of B rows of each of some groups, weighted by ``N_m / B``.

    Args:
        problem: of all groups.
        groups: positions of the groups, all different.
        there: which of them take part.
        positions: of the rows within their groups, all different.

    Returns:
        The rows.
    """
    packing, (count, size) = problem.packing, positions.shape
    assert isinstance(packing, Packing)  # batches are refused where rows cannot be taken
    length = packing.rows.shape[1]
    own = packing.offsets[groups][:, None] + positions // length
    # In the order of the plate: a model that reads a whole plate by its indices has to find them in order.
    rows = jnp.sort(packing.rows[own, positions % length], axis=1)
    each = min(size, length)
    chunks = -(-size // each)
    slots = jnp.arange(chunks * each)
    mask = jnp.broadcast_to(slots < size, (count, chunks * each)) & there[:, None]
    rows = rows[:, jnp.where(slots < size, slots, 0)]
    numbers = jnp.arange(count + 1, dtype=jnp.int32)
    shape = (count * chunks, each)
    packed = Packing(rows.reshape(shape), mask.reshape(shape), jnp.repeat(numbers[:-1], chunks), numbers * chunks)
    sizes = jnp.asarray(problem.plan.partition.table.sizes, jnp.result_type(float))
    return Chosen(groups, there, packed, sizes[groups] / size)


def others(problem: ProductProblem, sites: SiteStack, chosen: Chosen) -> ProductNatural:
    """The exact prior times the sites of all groups that take no part, of shared components.

    Args:
        problem: of all groups.
        sites: all sites.
        chosen: who takes part.

    Returns:
        Natural parameters.
    """
    rest = jnp.ones((problem.num_groups,), bool).at[chosen.groups].set(~chosen.there)
    parts = {}
    for name, site in sites.groups.parts.items():

        def add(prior: Array, x: Array) -> Array:
            return prior + jnp.sum(jnp.where(rest.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0.0), axis=0)

        parts[name] = jax.tree.map(add, problem.prior.parts[name], site)
    return ProductNatural(parts)


def own_groups(sites: SiteStack, chosen: Chosen) -> ProductNatural:
    """The groups' own sites, zero (the unit factor) of those that take no part."""

    def kept(x: Array) -> Array:
        there = chosen.there.reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.where(there, x[chosen.groups], 0.0)

    return jax.tree.map(kept, sites.groups)


def view_of(problem: ProductProblem, chosen: Chosen, base: ProductNatural) -> SomeRows:
    """The problem of some rows.

    Args:
        problem: of all groups.
        chosen: the rows.
        base: as of :func:`others`.

    Returns:
        The problem; its prior is ``base``, with the rows' part of the prior of their own latents.
    """
    plan, call, packing, ids = problem.plan, problem.call, chosen.packing, row_ids(chosen)
    if isinstance(packing, Packing) and ids is not None:
        call = _Gathered(call.model, call.args, call.kwargs, ids, params=call.params)
        places = jnp.arange(ids.shape[0], dtype=jnp.int32).reshape(packing.rows.shape)
        packing = Packing(places, packing.mask, packing.chunk_group, packing.offsets)
        plan = _resized(plan, ids.shape[0])
    prior = ProductNatural(base.parts | rows_of(problem.plan, problem.prior.parts, ids))
    return SomeRows(plan, call, packing, prior, problem.num_draws, problem.together, problem, chosen)


def row_ids(chosen: Chosen) -> Int[Array, "P"] | None:
    """Plate indices of the places of some rows; None where all rows have their own place."""
    return chosen.packing.rows.reshape(-1) if isinstance(chosen.packing, Packing) else None


def rows_of(plan: ProductPlan, parts: dict[str, Any], ids: Any) -> dict[str, Any]:
    """Of latents inside the partitioned plate, the members of some rows; of all rows where ``ids`` is None."""
    axes = plan.row_axes
    own = {n: x for n, x in parts.items() if n in axes}
    if ids is None:
        return own
    return {n: jax.tree.map(lambda x, n=n: jnp.take(x, ids, axis=axes[n]), part) for n, part in own.items()}


def local_of(problem: ProductProblem, chosen: Chosen, local: MemberSites | None) -> MemberSites | None:
    """The sites of the rows' own latents."""
    if local is None:
        return None
    return MemberSites(rows_of(problem.plan, local.parts, row_ids(chosen)))


def with_local(problem: ProductProblem, chosen: Chosen, local: Any, new: Any) -> Any:
    """Sites of all rows' own latents (or any natural parameters by latent) with those of some rows replaced.

    Args:
        problem: of all groups.
        chosen: the rows.
        local: of all rows, or None.
        new: of these rows.

    Returns:
        Of all rows.
    """
    if local is None or not isinstance(chosen.packing, Packing):
        return new
    packing, axes = chosen.packing, problem.plan.row_axes
    # A row that is not there is left out.
    ids = jnp.where(packing.mask, packing.rows, np.iinfo(np.int32).max).reshape(-1)

    def put(axis: int, old: Array, x: Array) -> Array:
        moved = jnp.moveaxis(old, axis, 0).at[ids].set(jnp.moveaxis(x, axis, 0), mode="drop")
        return jnp.moveaxis(moved, 0, axis)

    parts = {
        n: jax.tree.map(lambda a, b, n=n: put(axes[n], a, b), local.parts[n], x) if n in axes else x
        for n, x in new.parts.items()
    }
    return type(local)(parts)


def with_groups(sites: SiteStack, chosen: Chosen, new: ProductNatural) -> ProductNatural:
    """All groups' sites with those that take part replaced."""

    def put(x: Array, own: Array) -> Array:
        there = chosen.there.reshape((-1,) + (1,) * (own.ndim - 1))
        return x.at[chosen.groups].set(jnp.where(there, own, x[chosen.groups]))

    return jax.tree.map(put, sites.groups, new)


def _resized(plan: ProductPlan, count: int) -> ProductPlan:
    """A plan whose latents inside the plate have a given number of rows."""
    families = dict(plan.family.components)
    for latent in plan.inside:
        members = list(members_of(families[latent.name]))
        members[latent.axis] = count
        # The last axes are those of one event, which its family has already.
        batch = members[: len(members) - len(members_of(latent.family))]
        families[latent.name] = repeated(latent.family, tuple(batch))
    return dataclasses.replace(plan, family=ProductFamily(families))


__all__ = [
    "Beside",
    "Chosen",
    "SomeRows",
    "batch_rows",
    "local_of",
    "others",
    "own_groups",
    "row_ids",
    "rows_of",
    "view_of",
    "whole_groups",
    "with_groups",
    "with_local",
]
