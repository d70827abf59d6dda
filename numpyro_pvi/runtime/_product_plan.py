"""What is decided beforehand about a fit whose q is a product of families."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._state import Plan
from ..expectations import RULES, FactorStructure, PredictorLaw, Unconstrained
from ..factors import GroupMasks, Layout, Packing, ValueCall
from ..families import ProductFamily, ProductNatural


@dataclasses.dataclass(frozen=True)
class JointBlock:
    """Latents that share one Gaussian: a component whose value is their entries in one vector."""

    name: str
    latents: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def split(self, value: Array) -> dict[str, Array]:
        """Name -> value in the latent's own shape, of one vector."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        parts = jnp.split(value, ends[:-1], axis=-1)
        return {n: x.reshape(s) for n, x, s in zip(self.latents, parts, self.shapes, strict=True)}


@dataclasses.dataclass(frozen=True)
class RowLatent:
    """A latent inside the partitioned plate, one or more members per row.

    Attributes:
        name: the latent, a component of its own.
        axis: the plate's axis, counted from the left, of values and parameters alike.
        family: of one event.
        key: of the partitioned axis, the same for all of them.
    """

    name: str
    axis: int
    family: Any
    key: str


@dataclasses.dataclass(frozen=True)
class ProductLatents:
    """How a model is traced at draws of the components of a product.

    Args:
        blocks: joint blocks, whose values are vectors.
    """

    blocks: tuple[JointBlock, ...]

    def trace(self, model: Callable, args: tuple, kwargs: dict, params: dict, draw: Any, rng_key: Any) -> dict:
        """The model's trace at one draw: see :meth:`numpyro_pvi.factors.FlatLatents.trace`."""
        return ValueCall(model, args, kwargs, params=params).trace(latent_values(self.blocks, draw), rng_key)


@dataclasses.dataclass(frozen=True)
class ProductPlan(Plan):
    """The plan of a fit under :class:`numpyro_pvi.AutoExponentialFamily`; ``family`` is a ``ProductFamily``.

    Attributes:
        likelihood: how the groups' expectations are taken.
        prior_factor: the same of the prior factor; None where there is none.
        exact: components whose prior is held exactly.
        blocks: joint blocks.
        turns: for every component, in the family's order, the number of the step of a round that moves it.
        inside: latents inside the partitioned plate. A group's site has terms in its own rows' members alone.
        tilted: how tilted moments are taken ("exact", "quadrature" or "importance"), of the groups and of the prior factor;
            empty where nobody matches moments.
    """

    likelihood: FactorStructure = dataclasses.field(default_factory=lambda: FactorStructure(()))
    prior_factor: FactorStructure | None = None
    exact: tuple[str, ...] = ()
    blocks: tuple[JointBlock, ...] = ()
    turns: tuple[int, ...] = ()
    inside: tuple[RowLatent, ...] = ()
    tilted: tuple[str, ...] = ()

    @property
    def chain_dim(self) -> int:
        """Unconstrained coordinates of the components that the groups' factors see."""
        return Unconstrained(touched(self.family, self.likelihood)).dim

    @property
    def row_axes(self) -> dict[str, int]:
        """By latent inside the partitioned plate, the plate's axis."""
        return {latent.name: latent.axis for latent in self.inside}

    @property
    def row_key(self) -> str:
        """Key of the partitioned axis of the latents inside the plate, of which there is at least one."""
        return self.inside[0].key

    @property
    def shared(self) -> tuple[str, ...]:
        """Components outside the partitioned plate, in the family's order."""
        return tuple(name for name, _ in self.family.components if name not in self.row_axes)

    @property
    def latents(self) -> ProductLatents:
        """How the model is traced at one of :meth:`shared_draws`."""
        return ProductLatents(self.blocks)

    def shared_draws(self, q: ProductNatural, rng_key: Any, count: int) -> dict[str, Any]:
        """See :meth:`numpyro_pvi._state.Plan.shared_draws`: values by component."""
        families = dict(self.family.components)
        own = ProductFamily([(n, families[n]) for n in self.shared])
        return own.sample(ProductNatural({n: q.parts[n] for n in self.shared}), rng_key, (count,))

    def masked(self, name: str, own: Any, rows: Bool[Array, "R"]) -> Any:
        """Parameters of a latent inside the plate, zero but in some rows."""
        axis = self.row_axes[name]
        return jax.tree.map(lambda x: jnp.where(_along(rows, axis, x.ndim), x, 0.0), own)

    def largest_by_group(
        self, name: str, found: Any, owner: Int[Array, "N"], groups: int | None = None
    ) -> Float[Array, "M"]:
        """The largest number of every group's rows, of arrays by member of a latent inside the plate (M is ``groups`` if given)."""
        count, axis = groups or len(self.partition.table.labels), self.row_axes[name]
        total = jnp.zeros((count,))
        for x in jax.tree.leaves(found):
            rows = jnp.max(jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) * 1.0, axis=1)
            total = jnp.maximum(total, jax.ops.segment_max(rows, owner, count))
        return total

    def sum_by_group(self, name: str, found: Array, packing: Packing | GroupMasks) -> Float[Array, "M"]:
        """The sum over every group's rows, of an array by member of a latent inside the plate."""
        axis = self.row_axes[name]
        rows = jnp.sum(jnp.moveaxis(found, axis, 0).reshape(found.shape[axis], -1), axis=1)
        owner = owners(packing, rows.shape[0], self.row_key)
        return jax.ops.segment_sum(rows, owner, len(self.partition.table.labels))

    @property
    def num_turns(self) -> int:
        """Steps of a round, each of which moves some components."""
        return max(self.turns) + 1

    @property
    def exact_latents(self) -> tuple[str, ...]:
        """Latents whose prior is held exactly."""
        inside = {block.name: block.latents for block in self.blocks}
        return tuple(latent for name in self.exact for latent in inside.get(name, (name,)))

    @property
    def summed(self) -> tuple[str, ...]:
        """Components whose values are summed over."""
        factors = [f for f in (self.likelihood, self.prior_factor) if f is not None]
        return tuple(dict.fromkeys(name for factor in factors for name, _ in factor.cells))

    @property
    def separate(self) -> bool:
        """Whether it is known that no message depends on q: every factor sees one latent alone, member by member, exactly."""
        seen = [role for role in self.likelihood.roles if role.kind != "absent"]
        alone = len(seen) == 1 and seen[0].kind == "exact" and seen[0].single
        return alone and self.prior_factor is None and not self.inside

    @property
    def noisy(self) -> bool:
        """Whether any expectation is by draws."""
        factors = (self.likelihood, self.prior_factor)
        return any(factor is not None and not factor.exact for factor in factors)

    def by_draws(self, rule: Any) -> bool:
        """Whether any expectation is by draws, whatever the rule."""
        del rule
        return self.noisy

    def log_base_measures(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """log h of every shared component whose prior is a factor, in nats: its factor is the prior's density over h."""
        outside = {n: f for n, f in self.family.components if n not in self.exact and n not in self.row_axes}
        return {n: jnp.asarray(f.log_base_measure(values[n])) for n, f in outside.items()}

    def over_base_measure(self, values: Mapping[str, Array], name: str, term: Array) -> Array:
        """A term, over the base measure h where it is the prior of a latent inside the partitioned plate, in nats."""
        own = next((latent for latent in self.inside if latent.name == name), None)
        return term if own is None else term - own.family.log_base_measure(values[name])

    def vector_layout(self, names: Collection[str]) -> Layout:
        """Of the latents that some components hold, in one vector of the components' values, end to end."""
        blocks, shapes = {block.name: block for block in self.blocks}, {}
        for name, family in self.family.components:
            if name in names:
                block = blocks.get(name)
                own = (
                    {name: tuple(family.event_shape)}
                    if block is None
                    else zip(block.latents, block.shapes, strict=True)
                )
                shapes |= dict(own)
        return Layout(tuple(shapes), tuple(shapes.values()))

    def predictor_law(self, factor: FactorStructure, laws: Mapping[str, Any]) -> PredictorLaw:
        """The law of what a factor sees through predictors, of its components' coordinates by name."""
        names = factor.by_predictors
        rules = len(RULES) - (not self.fine)
        return PredictorLaw(factor.terms, self.vector_layout(names), tuple(laws[n] for n in names), rules)

    def latent_values(self, values: Mapping[str, Array]) -> dict[str, Any]:
        """Latent -> value, of component -> value."""
        return latent_values(self.blocks, values)


def touched(family: ProductFamily, factor: FactorStructure) -> ProductFamily:
    """The components that a factor depends on."""
    absent = {role.name for role in factor.roles if role.kind == "absent"}
    return ProductFamily([(n, f) for n, f in family.components if n not in absent])


def owners(packing: Packing | GroupMasks, count: int, key: str) -> Int[Array, "N"]:
    """Position of each row's group.

    Args:
        packing: rows of each chunk.
        count: N.
        key: of the partitioned axis.

    Returns:
        The positions; -1 for rows of none.
    """
    if isinstance(packing, GroupMasks):
        return packing.group_of_row[key]
    rows = jnp.where(packing.mask, packing.rows, count)
    nobody = jnp.full((count,), -1, packing.chunk_group.dtype)
    return nobody.at[rows].set(packing.chunk_group[:, None], mode="drop")


def _along(rows: Array, axis: int, rank: int) -> Array:
    """Flags of rows in a shape that broadcasts against members."""
    return rows.reshape((1,) * axis + (-1,) + (1,) * (rank - axis - 1))


def latent_values(blocks: tuple[JointBlock, ...], values: Mapping[str, Array]) -> dict[str, Any]:
    """Latent -> value, of component -> value.

    Args:
        blocks: joint blocks, whose values are vectors.
        values: by component.

    Returns:
        Values by latent, in their own shapes.
    """
    found = dict(values)
    for block in blocks:
        found |= block.split(found.pop(block.name))
    return found
