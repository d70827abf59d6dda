"""What is decided beforehand about a fit whose q is a product of families."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._state import Plan
from ..expectations import FactorStructure


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
    """

    name: str
    axis: int
    family: Any


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
    """

    likelihood: FactorStructure = dataclasses.field(default_factory=lambda: FactorStructure(()))
    prior_factor: FactorStructure | None = None
    exact: tuple[str, ...] = ()
    blocks: tuple[JointBlock, ...] = ()
    turns: tuple[int, ...] = ()
    inside: tuple[RowLatent, ...] = ()

    @property
    def row_axes(self) -> dict[str, int]:
        """By latent inside the partitioned plate, the plate's axis."""
        return {latent.name: latent.axis for latent in self.inside}

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
    def noisy(self) -> bool:
        """Whether any expectation is by draws."""
        factors = (self.likelihood, self.prior_factor)
        return any(factor is not None and not factor.exact for factor in factors)

    def log_base_measures(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """log h of every shared component whose prior is a factor, in nats: its factor is the prior's density over h."""
        outside = {n: f for n, f in self.family.components if n not in self.exact and n not in self.row_axes}
        return {n: jnp.asarray(f.log_base_measure(values[n])) for n, f in outside.items()}

    def over_base_measure(self, values: Mapping[str, Array], name: str, term: Array) -> Array:
        """A term, over the base measure h where it is the prior of a latent inside the partitioned plate, in nats."""
        own = next((latent for latent in self.inside if latent.name == name), None)
        return term if own is None else term - own.family.log_base_measure(values[name])

    def latent_values(self, values: Mapping[str, Array]) -> dict[str, Any]:
        """Latent -> value, of component -> value."""
        return latent_values(self.blocks, values)


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
