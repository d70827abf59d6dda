"""Products of named families, independent repetitions, the family of a distribution, and whitened coordinates."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.linalg import block_diag, solve_triangular
from jaxtyping import Array, Bool, Float

from .._numerics import scaled_cholesky, symmetrise
from ..errors import GuideError, PVIError
from ._base import (
    FACTORISED,
    Family,
    FamilyDefaults,
    FamilyMoments,
    MetricDefaults,
    Vector,
    minimal_mean,
    natural_parameters,
    registered_families,
)
from ._gaussian import GaussianDefaults, MultivariateNormalFamily, NormalFamily, ScalarNormalFamily

# ---------------------------------------------------------------------------------------------- independent repetitions
# Independent repetitions of a family.


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

    ``base``: the family of one member; ``shape``: the axes. Returns ``base`` itself without axes, the diagonal
    :class:`NormalFamily` for a vector of scalar normals.
    """
    if not shape:
        return base
    if base == ScalarNormalFamily() and len(shape) == 1:
        return NormalFamily(shape[0])
    return IndependentFamily(base, shape)


def member_family(family: Family, *trees: Any) -> tuple[Any, ...]:
    """The family of one member: repetitions looked through, and coordinates that are independent of one another taken apart.

    ``family``: a family; ``trees``: natural parameters of it. Returns a family under which all axes of the parameters that are
    no single member's are batch axes, and the parameters as its own.
    """
    base = base_family(family)
    own = base.by_coordinate or base
    structure = jax.tree.structure(jax.eval_shape(lambda: own.zeros()))
    return own, *(jax.tree.unflatten(structure, jax.tree.leaves(tree)) for tree in trees)


def base_family(family: Family) -> Family:
    """The family of one member, repetitions looked through.

    ``family``: a family. Returns the family itself where it is no repetition.
    """
    while isinstance(family, IndependentFamily):
        family = family.base
    return family


# ----------------------------------------------------------------------------------------- the family of a distribution
# The family of a distribution.


def family_for(distribution: dist.Distribution) -> Family:
    """The family of a distribution.

    Batch axes of the distribution stay leading axes of the parameters; axes that ``to_event`` has made part of an event
    become an :class:`IndependentFamily` (for a normal, the diagonal :class:`NormalFamily`).

    Args:
        distribution: a NumPyro distribution; ``expand`` and ``to_event`` are looked through.

    Returns:
        The family, such that ``family_for(d).from_distribution(d)`` are the natural parameters of ``d``.

    Raises:
        GuideError: where no family is registered for the distribution's class.
    """
    if isinstance(distribution, dist.ExpandedDistribution):
        return family_for(distribution.base_dist)
    if isinstance(distribution, dist.Independent):
        base = distribution.base_dist
        shape = base.batch_shape[len(base.batch_shape) - distribution.reinterpreted_batch_ndims :]
        return repeated(family_for(base), tuple(shape))
    known = registered_families()
    for cls in type(distribution).__mro__:
        if cls in known:
            found = known[cls]
            return found if isinstance(found, Family) else found(distribution)
    names = ", ".join(sorted(cls.__name__ for cls in known))
    raise GuideError(
        f"no exponential family is registered for {type(distribution).__name__}. Registered are {names}. Name a family "
        f"for this latent, or add one with numpyro_pvi.families.register_family({type(distribution).__name__}, family)."
    )


# -------------------------------------------------------------------------------------------------------------- product


@natural_parameters
class ProductNatural(Vector):
    """Natural parameters of a product: those of every component, in a dict (or a tuple, for blocks).

    Sums and differences are of the same components; :meth:`combine` is of factors that say nothing of some.
    """

    parts: Any

    def __add__(self, other):
        self._refuse_others(other)
        return super().__add__(other)

    def __sub__(self, other):
        self._refuse_others(other)
        return super().__sub__(other)

    def combine(self, other):
        """See :meth:`numpyro_pvi.families.Vector.combine`: a component that one of them lacks is the other's."""
        alone = {n: x for n, x in other.parts.items() if n not in self.parts}
        return ProductNatural({n: x + other.parts[n] if n in other.parts else x for n, x in self.parts.items()} | alone)

    def _refuse_others(self, other: Any) -> None:
        """Raise for parameters of other components, which are those of another product.

        Raises PVIError naming what is on one side only.
        """
        if type(other) is not type(self) or not (isinstance(self.parts, dict) and isinstance(other.parts, dict)):
            return
        if alone := sorted(self.parts.keys() ^ other.parts.keys()):
            raise PVIError(
                f"natural parameters of different products: {', '.join(map(repr, alone))} on one side only. Where a factor says "
                "nothing of a latent, write one.combine(other)."
            )


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
        """Every component's, of those that the parameters have."""
        own, families = natural.parts, dict(self.components)
        return ProductNatural({name: families[name].symmetrise(x) for name, x in own.items()})

    def fisher_solve(self, natural: ProductNatural, tangent: ProductMean) -> ProductNatural:
        """Every component's."""
        return ProductNatural(self._map(lambda family, x, d: family.fisher_solve(x, d), natural, tangent))

    def of(self, names: Collection[str]) -> ProductFamily:
        """The product of some of the components."""
        return ProductFamily([(name, family) for name, family in self.components if name in names])

    def shift(self, change: Any, moments: FamilyMoments) -> Float[Array, "*batch P"]:
        """A change of natural parameters in orthonormal coordinates, of the components that it has."""
        if not change.parts:
            return jnp.zeros((1, 1))
        return self.of(change.parts).flat(self.whitened(moments.natural, moments.root, change))

    def metric_root(self, natural: ProductNatural) -> dict[str, Any]:
        """Every member's."""

        def of_members(family: Any, natural: Any) -> Any:
            own, at = member_family(family, natural)
            return _over_members(own.metric_root, own, at)(at)

        return self._map(of_members, natural)

    def whitened(self, natural: ProductNatural, root: dict[str, Any], change: ProductNatural) -> ProductNatural:
        """Member by member, of the components that a change (or a batch of them) has."""
        at, families = natural.parts, dict(self.components)
        return ProductNatural(
            {name: _whitened(families[name], at[name], root[name], own) for name, own in change.parts.items()}
        )

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


# ------------------------------------------------------------------------------------------------- whitened coordinates
# Coordinates of natural parameters in which the Fisher metric at one q is the identity: optimisers of q take their
# steps there.


@dataclasses.dataclass(frozen=True)
class Whitening:
    """Changes of natural parameters as whitened coordinates ``x = R^T u``, with u minimal and ``R R^T`` the Fisher metric at q.

    A step of length 1 in x is one of length 1 in that metric: for a shift of a normal, one posterior sd. Each member has an R of
    its own. Of one with more than 64 coordinates R is the root of the metric's diagonal (for entries off a matrix's diagonal, up
    to a factor), and lengths are right along axes only.

    Args:
        family: of q.
        roots: by component, of every member the lower Cholesky factor ``[*members, P, P]``, or roots of the diagonal
            ``[*members, P]``.
    """

    family: ProductFamily
    roots: dict[str, Array]

    @property
    def size(self) -> int:
        """Numbers in x."""
        return self.family.degrees

    def coordinates(self, change: ProductNatural) -> Float[Array, "K"]:
        """x of a change of natural parameters."""
        parts = {}
        for name, family in self.family.components:
            own, step = member_family(family, change.parts[name])
            parts[name] = self._times(name, own.to_minimal(step), transposed=True)
        return _joined(parts)

    def change(self, x: Float[Array, "K"]) -> ProductNatural:
        """The change of natural parameters that has these coordinates."""
        found, begin = {}, 0
        for name, family in self.family.components:
            zeros = family.zeros((), x.dtype)
            own, step = member_family(family, zeros)
            shape = own.to_minimal(step).shape
            end = begin + math.prod(shape)
            part = own.from_minimal(self._solve(name, x[begin:end].reshape(shape), transposed=True))
            # A member's parameters are those of its family under another name.
            found[name] = jax.tree.unflatten(jax.tree.structure(zeros), jax.tree.leaves(part))
            begin = end
        return ProductNatural(found)

    def slope(self, gradient: Any) -> Float[Array, "K"]:
        """The gradient in x of a function of the natural parameters.

        ``gradient``: its gradient in natural parameters, which has the type of mean parameters. Returns ``R^-1 J^T g``, with J
        the linear map from minimal coordinates.
        """
        parts = {}
        for name, family in self.family.components:
            zeros = family.zeros((), jax.tree.leaves(gradient)[0].dtype)
            dual = jax.tree.unflatten(jax.tree.structure(zeros), jax.tree.leaves(gradient.parts[name]))
            own, dual = member_family(family, dual)
            parts[name] = self._solve(name, minimal_mean(own, dual, dual), transposed=False)
        return _joined(parts)

    def _times(self, name: str, u: Float[Array, "*members P"], transposed: bool) -> Array:
        root = self.roots[name]
        if root.ndim == u.ndim:
            return root * u
        return jnp.einsum("...ji,...j->...i" if transposed else "...ij,...j->...i", root, u)

    def _solve(self, name: str, x: Float[Array, "*members P"], transposed: bool) -> Array:
        root = self.roots[name]
        if root.ndim == x.ndim:
            return x / root
        return solve_triangular(root, x[..., None], trans=1 if transposed else 0, lower=True)[..., 0]


def whitening(family: Any, natural: Any) -> Any:
    """The whitened coordinates of changes at one q.

    ``family``: of q: a product of families, or a Gaussian; ``natural``: natural parameters of q. Returns the coordinates:
    ``size``, ``coordinates(change)`` and ``change(x)``, of a linear map that q alone decides.
    """
    if not isinstance(family, ProductFamily):
        return family.whitening(natural)
    roots = {}
    for name, part in family.components:
        own, at = member_family(part, natural.parts[name])
        if own.to_minimal(at).shape[-1] <= FACTORISED:
            roots[name] = member_roots(part, natural.parts[name])
            continue
        spread = own.to_minimal(_over_members(partial(FamilyDefaults.metric_root, own), own, at)(at))
        roots[name] = jnp.where(spread > 0, spread, 1.0)
    return Whitening(family, roots)


def _over_members(function: Callable[..., Any], own: Any, natural: Any) -> Callable[..., Any]:
    """A function of one member, mapped over all of a component's; ``own``: the family of one of them."""
    for _ in range(own.to_minimal(natural).ndim - 1):
        function = jax.vmap(function)
    return function


def _whitened(family: Any, natural: Any, root: Any, change: Any) -> Any:
    """A change of all members of a component (or a batch of them), each in coordinates of its own."""
    own, at, step = member_family(family, natural, change)
    for_all = _over_members(own.whitened, own, at)
    for _ in range(jax.tree.leaves(step)[0].ndim - jax.tree.leaves(at)[0].ndim):
        for_all = jax.vmap(for_all, in_axes=(None, None, 0))
    return jax.tree.unflatten(jax.tree.structure(change), jax.tree.leaves(for_all(at, root, step)))


def member_roots(family: Any, natural: Any) -> Float[Array, "*members P P"]:
    """A lower root of the Fisher metric of every member of a component, in minimal coordinates; closed where its family has that.

    ``family``: of the component; ``natural``: its natural parameters. Returns triangular matrices, none of them singular: along
    directions that the metric says nothing of, any coordinate will do.
    """
    own, at = member_family(family, natural)
    size = own.to_minimal(at).shape[-1]
    if size > FACTORISED:
        return scaled_cholesky(_member_metrics(family, natural))[0]
    # Of a Gaussian vector moves have a closed form, which is no triangular root.
    root_of = partial(FamilyDefaults.metric_root, own) if isinstance(own, GaussianDefaults) else own.metric_root
    root = _over_members(root_of, own, at)(at)
    diagonal = jnp.diagonal(root, axis1=-2, axis2=-1)
    return root + jnp.eye(size, dtype=root.dtype) * jnp.where(diagonal > 0, 0.0, 1.0)[..., None]


def _member_metrics(family: Any, natural: Any) -> Float[Array, "*members P P"]:
    """The Fisher metric of every member of a component, in minimal coordinates.

    ``family``: of the component; ``natural``: its natural parameters. Returns symmetric matrices, singular nowhere in the
    domain; of all members together they are the blocks of the whole metric.
    """
    own, at = member_family(family, natural)
    point = own.to_minimal(at)
    eye = jnp.eye(point.shape[-1], dtype=point.dtype)
    basis = jnp.broadcast_to(eye, (*point.shape, point.shape[-1]))
    columns = jax.vmap(
        lambda v: minimal_mean(own, at, own.fisher_product(at, own.from_minimal(v))), in_axes=-2, out_axes=-1
    )
    return symmetrise(columns(basis))


def _joined(parts: dict[str, Array]) -> Float[Array, "K"]:
    return jnp.concatenate([x.reshape(-1) for x in parts.values()])
