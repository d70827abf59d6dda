"""Independent repetitions of a family."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float

from ._base import Family, FamilyDefaults
from ._gaussian import NormalFamily
from ._normal import ScalarNormalFamily


@dataclasses.dataclass(frozen=True)
class IndependentFamily(FamilyDefaults):
    """Independent members of one family along axes that belong to the event, as NumPyro's ``to_event`` makes them.

    Parameters are the base family's own, with ``shape`` as their last batch axes; densities, divergences and validity are
    taken together over those axes.

    Args:
        base: the family repeated.
        shape: the axes.
    """

    base: Any
    shape: tuple[int, ...] = ()

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The repeated axes, then the base's event."""
        return (*self.shape, *self.base.event_shape)

    def _sum(self, values):
        return jnp.sum(values, axis=tuple(range(-len(self.shape), 0)))

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> Any:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return self.base.zeros((*batch_shape, *self.shape), dtype)

    def sufficient_statistics(self, theta: Any) -> Any:
        """The base's, of every member."""
        return self.base.sufficient_statistics(theta)

    def log_base_measure(self, theta: Any) -> Float[Array, "*batch"]:
        """The base's, summed over members."""
        return self._sum(self.base.log_base_measure(theta))

    def log_partition(self, natural: Any) -> Float[Array, "*batch"]:
        """The base's, summed over members, in nats."""
        return self._sum(self.base.log_partition(natural))

    def natural_to_mean(self, natural: Any) -> Any:
        """The base's, of every member."""
        return self.base.natural_to_mean(natural)

    def mean_to_natural(self, mean_params: Any) -> Any:
        """The base's, of every member."""
        return self.base.mean_to_natural(mean_params)

    def to_distribution(self, natural: Any) -> dist.Distribution:
        """The base's distribution with ``to_event`` over the repeated axes."""
        return self.base.to_distribution(natural).to_event(len(self.shape))

    def from_distribution(self, distribution: dist.Distribution) -> Any:
        """Natural parameters of a distribution whose event has the repeated axes."""
        return self.base.from_distribution(distribution)

    def in_domain(self, natural: Any) -> Bool[Array, "*batch"]:
        """Whether all members are."""
        return jnp.all(self.base.in_domain(natural), axis=tuple(range(-len(self.shape), 0)))

    def nearest_valid(self, natural: Any) -> Any:
        """The base's, of every member."""
        return self.base.nearest_valid(natural)

    def sample(self, natural: Any, key: Array, shape: tuple[int, ...] = ()) -> Any:
        """The base's draws."""
        return self.base.sample(natural, key, shape)

    def entropy(self, natural: Any) -> Float[Array, "*batch"]:
        """The base's, summed over members, in nats."""
        return self._sum(self.base.entropy(natural))

    def kl(self, natural: Any, other: Any) -> Float[Array, "*batch"]:
        """The base's, summed over members, in nats."""
        return self._sum(self.base.kl(natural, other))

    def fisher_product(self, natural: Any, tangent: Any) -> Any:
        """The base's, of every member."""
        return self.base.fisher_product(natural, tangent)

    def fisher_diagonal(self, natural: Any) -> Any:
        """The base's, of every member."""
        return self.base.fisher_diagonal(natural)

    def symmetrise(self, natural: Any) -> Any:
        """The base's, of every member."""
        return self.base.symmetrise(natural)

    def fisher_solve(self, natural: Any, tangent: Any) -> Any:
        """The base's, of every member."""
        return self.base.fisher_solve(natural, tangent)

    def to_minimal(self, natural: Any) -> Float[Array, "*batch P"]:
        """The base's coordinates of all members, one after another."""
        each = self.base.to_minimal(natural)
        return each.reshape(each.shape[: each.ndim - 1 - len(self.shape)] + (-1,))

    def from_minimal(self, coordinates: Float[Array, "*batch P"]) -> Any:
        """The inverse of :meth:`to_minimal`."""
        return self.base.from_minimal(coordinates.reshape((*coordinates.shape[:-1], *self.shape, -1)))


def repeated(base: Family, shape: tuple[int, ...]) -> Family:
    """The family of independent members along some event axes: :class:`IndependentFamily`, where nothing fits better.

    Args:
        base: the family of one member.
        shape: the axes.

    Returns:
        ``base`` itself without axes, the diagonal :class:`NormalFamily` for a vector of scalar normals.
    """
    if not shape:
        return base
    if base == ScalarNormalFamily() and len(shape) == 1:
        return NormalFamily(shape[0])
    return IndependentFamily(base, shape)


def member_family(family: Family, *trees: Any) -> tuple[Any, ...]:
    """The family of one member: repetitions looked through, and coordinates that are independent of one another taken apart.

    Args:
        family: a family.
        trees: natural parameters of it.

    Returns:
        A family under which all axes of the parameters that are no single member's are batch axes, and the parameters as its own.
    """
    base = base_family(family)
    own = base.by_coordinate or base
    structure = jax.tree.structure(jax.eval_shape(lambda: own.zeros()))
    return own, *(jax.tree.unflatten(structure, jax.tree.leaves(tree)) for tree in trees)


def base_family(family: Family) -> Family:
    """The family of one member, repetitions looked through.

    Args:
        family: a family.

    Returns:
        The family itself where it is no repetition.
    """
    while isinstance(family, IndependentFamily):
        family = family.base
    return family
