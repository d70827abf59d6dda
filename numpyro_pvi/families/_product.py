"""Products of named families, and block-diagonal Gaussians."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.linalg import block_diag
from jaxtyping import Array, Bool, Float

from ._base import FamilyDefaults, Vector, natural_parameters
from ._family_for import family_for
from ._gaussian import MultivariateNormalFamily
from ._independent import repeated
from ._metric import MetricDefaults


@natural_parameters
class ProductNatural(Vector):
    """Natural parameters of a product: those of every component, in a dict (or a tuple, for blocks)."""

    parts: Any


@natural_parameters
class ProductMean(Vector):
    """Mean parameters of a product: those of every component, in a dict (or a tuple, for blocks)."""

    parts: Any


@dataclasses.dataclass(frozen=True)
class ProductFamily(MetricDefaults):
    """Independent latents of different families, by name: theta is a dict of values.

    All components share their batch axes; a component with axes of its own is an :class:`IndependentFamily`.

    Args:
        components: name -> family.
    """

    components: Any

    def __post_init__(self):
        given = self.components
        pairs = given.items() if isinstance(given, Mapping) else given
        object.__setattr__(self, "components", tuple(sorted((str(name), family) for name, family in pairs)))

    @classmethod
    def for_distributions(cls, distributions: Mapping[str, dist.Distribution]) -> ProductFamily:
        """The product of the families registered for some distributions, whose batch axes become members'.

        Args:
            distributions: name -> NumPyro distribution.

        Returns:
            A family without batch axes.
        """
        return cls({name: repeated(family_for(d), d.batch_shape) for name, d in distributions.items()})

    @property
    def event_shape(self) -> Any:
        """Name -> event shape."""
        return {name: family.event_shape for name, family in self.components}

    def _map(self, function: Callable[..., Any], *trees: Any) -> dict[str, Any]:
        """``function(family, *parts)`` by name, of parameters or of dicts."""
        picked = [tree.parts if isinstance(tree, ProductNatural | ProductMean) else tree for tree in trees]
        return {name: function(family, *(tree[name] for tree in picked)) for name, family in self.components}

    def _sum(self, function: Callable[..., Any], *trees: Any) -> Any:
        return sum(self._map(function, *trees).values())

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> ProductNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return ProductNatural(self._map(lambda family: family.zeros(batch_shape, dtype)))

    def sufficient_statistics(self, theta: Any) -> ProductMean:
        """Every component's, of a dict of values."""
        return ProductMean(self._map(lambda family, x: family.sufficient_statistics(x), theta))

    def log_base_measure(self, theta: Any) -> Float[Array, "*batch"]:
        """The components', summed."""
        return self._sum(lambda family, x: family.log_base_measure(x), theta)

    def log_partition(self, natural: ProductNatural) -> Float[Array, "*batch"]:
        """The components', summed, in nats."""
        return self._sum(lambda family, x: family.log_partition(x), natural)

    def natural_to_mean(self, natural: ProductNatural) -> ProductMean:
        """Every component's."""
        return ProductMean(self._map(lambda family, x: family.natural_to_mean(x), natural))

    def mean_to_natural(self, mean_params: ProductMean) -> ProductNatural:
        """Every component's."""
        return ProductNatural(self._map(lambda family, x: family.mean_to_natural(x), mean_params))

    def to_distribution(self, natural: ProductNatural) -> dict[str, dist.Distribution]:
        """Name -> NumPyro distribution."""
        return self._map(lambda family, x: family.to_distribution(x), natural)

    def from_distribution(self, distribution: Any) -> ProductNatural:
        """Natural parameters of a dict of distributions."""
        return ProductNatural(self._map(lambda family, x: family.from_distribution(x), distribution))

    def in_domain(self, natural: ProductNatural) -> Bool[Array, "*batch"]:
        """Whether every component is."""
        flags = self._map(lambda family, x: family.in_domain(x), natural).values()
        return jnp.all(jnp.stack(list(flags)), axis=0)

    def nearest_valid(self, natural: ProductNatural) -> ProductNatural:
        """Every component's."""
        return ProductNatural(self._map(lambda family, x: family.nearest_valid(x), natural))

    def sample(self, natural: ProductNatural, key: Array, shape: tuple[int, ...] = ()) -> dict[str, Any]:
        """Name -> draws, every component with a key of its own."""
        keys = dict(
            zip([name for name, _ in self.components], jax.random.split(key, len(self.components)), strict=True)
        )
        return self._map(lambda family, x, k: family.sample(x, k, shape), natural, keys)

    def inner(self, natural: ProductNatural, mean_params: ProductMean) -> Float[Array, "*batch"]:
        """The components' pairings, summed, in nats."""
        return self._sum(lambda family, a, b: family.inner(a, b), natural, mean_params)

    def entropy(self, natural: ProductNatural) -> Float[Array, "*batch"]:
        """The components', summed, in nats."""
        return self._sum(lambda family, x: family.entropy(x), natural)

    def kl(self, natural: ProductNatural, other: ProductNatural) -> Float[Array, "*batch"]:
        """The components', summed, in nats."""
        return self._sum(lambda family, q, p: family.kl(q, p), natural, other)

    def fisher_product(self, natural: ProductNatural, tangent: ProductNatural) -> ProductMean:
        """Every component's."""
        return ProductMean(self._map(lambda family, x, d: family.fisher_product(x, d), natural, tangent))

    def fisher_diagonal(self, natural: ProductNatural) -> ProductNatural:
        """Every component's."""
        return ProductNatural(self._map(lambda family, x: family.fisher_diagonal(x), natural))

    def symmetrise(self, natural: ProductNatural) -> ProductNatural:
        """Every component's."""
        return ProductNatural(self._map(lambda family, x: family.symmetrise(x), natural))

    def fisher_solve(self, natural: ProductNatural, tangent: ProductMean) -> ProductNatural:
        """Every component's."""
        return ProductNatural(self._map(lambda family, x, d: family.fisher_solve(x, d), natural, tangent))

    def to_minimal(self, natural: ProductNatural) -> Float[Array, "*batch P"]:
        """The components' coordinates, one after another."""
        parts = self._map(lambda family, x: family.to_minimal(x), natural)
        return jnp.concatenate(list(parts.values()), axis=-1)

    def from_minimal(self, coordinates: Float[Array, "*batch P"]) -> ProductNatural:
        """The inverse of :meth:`to_minimal`."""
        parts, begin = {}, 0
        for name, family in self.components:
            end = begin + jax.eval_shape(lambda f=family: f.to_minimal(f.zeros())).shape[-1]
            parts[name] = family.from_minimal(coordinates[..., begin:end])
            begin = end
        return ProductNatural(parts)


@dataclasses.dataclass(frozen=True)
class BlockNormalFamily(FamilyDefaults):
    """Gaussians over a flat vector with full covariance inside blocks of consecutive entries and none between them.

    Natural parameters are a tuple with one :class:`GaussianNatural` per block, so nothing of size D x D is held.

    Args:
        blocks: sizes of the blocks, in order.
    """

    blocks: tuple[int, ...]

    @property
    def event_shape(self) -> tuple[int, ...]:
        """``(D,)``, D the sum of the sizes."""
        return (sum(self.blocks),)

    @property
    def families(self) -> tuple[MultivariateNormalFamily, ...]:
        """One full-covariance family per block."""
        return tuple(MultivariateNormalFamily(size) for size in self.blocks)

    def _map(self, name: str, *trees: Any) -> tuple[Any, ...]:
        """One method of every block's family, of parameters or of tuples."""
        picked = [tree.parts if isinstance(tree, ProductNatural | ProductMean) else tree for tree in trees]
        return tuple(getattr(family, name)(*parts) for family, *parts in zip(self.families, *picked, strict=True))

    def _split(self, values: Any, sizes: Any) -> list[Any]:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [values[..., end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> ProductNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return ProductNatural(tuple(family.zeros(batch_shape, dtype) for family in self.families))

    def sufficient_statistics(self, theta: Float[Array, "*batch D"]) -> ProductMean:
        """``(theta_b, -1/2 theta_b theta_b^T)`` of every block."""
        return ProductMean(self._map("sufficient_statistics", self._split(theta, self.blocks)))

    def log_partition(self, natural: ProductNatural) -> Float[Array, "*batch"]:
        """The blocks', summed, in nats; NaN where not normalisable."""
        return reduce(operator.add, self._map("log_partition", natural))

    def natural_to_mean(self, natural: ProductNatural) -> ProductMean:
        """Every block's."""
        return ProductMean(self._map("natural_to_mean", natural))

    def mean_to_natural(self, mean_params: ProductMean) -> ProductNatural:
        """Every block's."""
        return ProductNatural(self._map("mean_to_natural", mean_params))

    def to_distribution(self, natural: ProductNatural) -> dist.Distribution:
        """A ``MultivariateNormal`` with a block-diagonal Cholesky factor."""
        parts = self._map("to_distribution", natural)
        stack = jnp.vectorize(block_diag, signature=",".join(f"({n},{n})" for n in self.blocks) + "->(d,d)")
        loc = jnp.concatenate([part.mean for part in parts], axis=-1)
        return dist.MultivariateNormal(loc, scale_tril=stack(*(part.scale_tril for part in parts)))

    def from_distribution(self, distribution: Any) -> ProductNatural:
        """Natural parameters of a ``MultivariateNormal`` without covariance between blocks."""
        locs, covariance = self._split(distribution.mean, self.blocks), distribution.covariance_matrix
        rows = self._split(jnp.swapaxes(covariance, -1, -2), self.blocks)
        own = [self._split(jnp.swapaxes(row, -1, -2), self.blocks)[i] for i, row in enumerate(rows)]
        return ProductNatural(self._map("from_loc_covariance", locs, own))

    def in_domain(self, natural: ProductNatural) -> Bool[Array, "*batch"]:
        """Whether every block is."""
        return jnp.all(jnp.stack(self._map("in_domain", natural)), axis=0)

    def nearest_valid(self, natural: ProductNatural) -> ProductNatural:
        """Every block's."""
        return ProductNatural(self._map("nearest_valid", natural))

    def sample(self, natural: ProductNatural, key: Array, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Draws of shape ``shape + batch + (D,)``; reparameterised."""
        keys = jax.random.split(key, len(self.blocks))
        return jnp.concatenate(self._map("sample", natural, keys, [shape] * len(self.blocks)), axis=-1)

    def entropy(self, natural: ProductNatural) -> Float[Array, "*batch"]:
        """The blocks', summed, in nats."""
        return reduce(operator.add, self._map("entropy", natural))

    def kl(self, natural: ProductNatural, other: ProductNatural) -> Float[Array, "*batch"]:
        """The blocks', summed, in nats."""
        return reduce(operator.add, self._map("kl", natural, other))

    def fisher_product(self, natural: ProductNatural, tangent: ProductNatural) -> ProductMean:
        """Every block's."""
        return ProductMean(self._map("fisher_product", natural, tangent))

    def fisher_solve(self, natural: ProductNatural, tangent: ProductMean) -> ProductNatural:
        """Every block's."""
        return ProductNatural(self._map("fisher_solve", natural, tangent))

    def to_minimal(self, natural: ProductNatural) -> Float[Array, "*batch P"]:
        """The blocks' coordinates, one after another."""
        return jnp.concatenate(self._map("to_minimal", natural), axis=-1)

    def from_minimal(self, coordinates: Float[Array, "*batch P"]) -> ProductNatural:
        """The inverse of :meth:`to_minimal`."""
        sizes = [size + size * (size + 1) // 2 for size in self.blocks]
        return ProductNatural(self._map("from_minimal", self._split(coordinates, sizes)))
