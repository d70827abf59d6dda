"""The contract of an exponential family: arithmetic of natural parameters, the Fisher metric, and the registry."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, dataclass_transform, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Bool, Float

from .._numerics import scaled_cholesky, symmetrise
from ..errors import lacking


@dataclass_transform(frozen_default=True)
def natural_parameters(cls):
    """Class decorator: a frozen dataclass registered as a pytree, with ``+ - *`` defined leaf by leaf.

    Args:
        cls: a class with annotated array fields only.

    Returns:
        The registered class. ``a + b`` and ``a - b`` need the same class on both sides; ``a * s`` scales by a number or
        by an array that broadcasts against the *leading* (batch) axes.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


class Vector:
    """Arithmetic of an element of a parameter space; the base of natural and mean parameters and of stacks of sites."""

    def __add__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return jax.tree.map(jnp.add, self, other)

    def __sub__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return jax.tree.map(jnp.subtract, self, other)

    def combine(self, other):
        """The product of two factors, each of them 1 in latents that it says nothing of: a sum over the latents of both.

        References:
            Shafer and Shenoy, Axioms for probability and belief-function propagation, 1990 (combination of valuations).
        """
        return self + other

    def __mul__(self, scale):
        scale = jnp.asarray(scale)
        return jax.tree.map(
            lambda x: x * scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim)).astype(x.dtype), self
        )

    __rmul__ = __mul__

    def __neg__(self):
        return jax.tree.map(jnp.negative, self)


def leaf_shapes(family: Any) -> list[tuple[int, ...]]:
    """Shapes of the unbatched natural parameters' leaves."""
    return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(lambda: family.zeros()))]


class _FamilyVerbs(Protocol):
    """What follows from a family's own members, exact but general."""

    def log_base_measure(self: Any, theta: Any) -> Float[Array, "*batch"]:
        """log h(theta), 0 for a unit base measure."""
        theta = jnp.asarray(theta)
        return jnp.zeros(theta.shape[: theta.ndim - len(self.event_shape)])

    def sample(self: Any, natural: Any, key: Array, shape: tuple[int, ...] = ()) -> Any:
        """Draws of shape ``shape + batch + event``, by NumPyro's sampler.

        Args:
            natural: natural parameters.
            key: a JAX random key.
            shape: leading axes of the draws.

        Returns:
            The draws, differentiable in the natural parameters where NumPyro's sampler is.
        """
        return self.to_distribution(natural).sample(key, shape)

    def inner(self: Any, natural: Any, mean_params: Any) -> Float[Array, "*batch"]:
        """The pairing ``<eta, mu>`` over all but the batch axes, in nats.

        Args:
            natural: natural parameters, ``*batch`` leading.
            mean_params: mean parameters or statistics, with batch axes that broadcast against them.

        Returns:
            One number per batch entry.
        """
        total: Any = 0.0
        leaves = zip(leaf_shapes(self), jax.tree.leaves(natural), jax.tree.leaves(mean_params), strict=True)
        for shape, a, b in leaves:
            total = total + jnp.sum(a * b, axis=tuple(range(-len(shape), 0)))
        return total

    def entropy(self: Any, natural: Any) -> Float[Array, "*batch"]:
        """Entropy of q in nats: ``A - <eta, mu>``, for a unit base measure."""
        return self.log_partition(natural) - self.inner(natural, self.natural_to_mean(natural))

    def kl(self: Any, natural: Any, other: Any) -> Float[Array, "*batch"]:
        """KL(q || p), ``A(p) - A(q) - <eta_p - eta_q, mu_q>`` in nats, q at ``natural`` and p at ``other``."""
        gap = self.inner(other - natural, self.natural_to_mean(natural))
        return self.log_partition(other) - self.log_partition(natural) - gap

    def to_minimal(self: Any, natural: Any) -> Float[Array, "*batch P"]:
        """As many numbers as the family has degrees of freedom, linear in the natural parameters: these, end to end."""
        parts = [
            leaf.reshape(leaf.shape[: leaf.ndim - len(shape)] + (math.prod(shape),))
            for shape, leaf in zip(leaf_shapes(self), jax.tree.leaves(natural), strict=True)
        ]
        return jnp.concatenate(parts, axis=-1)

    def from_minimal(self: Any, coordinates: Float[Array, "*batch P"]) -> Any:
        """Natural parameters of minimal coordinates, a linear map: the inverse of :meth:`to_minimal`."""
        batch, leaves, begin = coordinates.shape[:-1], [], 0
        for shape in leaf_shapes(self):
            end = begin + math.prod(shape)
            leaves.append(coordinates[..., begin:end].reshape(batch + shape))
            begin = end
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(lambda: self.zeros())), leaves)

    def fisher_product(self: Any, natural: Any, tangent: Any) -> Any:
        """``F(eta) d_eta = d_mu``, the derivative of :meth:`natural_to_mean` along a direction.

        Args:
            natural: where.
            tangent: a direction in natural space, of the natural parameters' type.

        Returns:
            The direction in mean space, of the mean parameters' type.
        """
        return jax.jvp(self.natural_to_mean, (natural,), (tangent,))[1]

    def metric_root(self: Any, natural: Any) -> Any:
        """What :meth:`whitened` reads of the Fisher metric at one member: to override with it.

        Args:
            natural: where, without batch axes.

        Returns:
            A lower root of the metric in minimal coordinates; of more than 64 the sds of the mean statistics. 0 where the metric
            vanishes (a latent that has come to one value).
        """
        if jax.eval_shape(self.to_minimal, natural).shape[-1] <= FACTORISED:
            return _metric_root(fisher_matrix(self, natural))
        return jax.tree.map(jnp.sqrt, self.fisher_diagonal(natural))

    def whitened(self: Any, natural: Any, root: Any, change: Any) -> Any:
        """A change of one member's natural parameters in orthonormal coordinates of its Fisher metric, in the places of these.

        To override where there is a closed form: of narrow members far from 0 the metric is nearly singular in these parameters.

        Args:
            natural: where, without batch axes.
            root: :meth:`metric_root` there.
            change: a tangent, likewise.

        Returns:
            Natural parameters of minimal coordinates ``R^T u``, with u the change's and ``R R^T`` the metric; of more than 64
            coordinates the change of the mean statistics in their sds, to first order. Along directions in which the metric
            vanishes there are no moves.
        """
        if jax.eval_shape(self.to_minimal, natural).shape[-1] <= FACTORISED:
            return self.from_minimal(self.to_minimal(change) @ root)
        images = self.fisher_product(natural, change)
        like = jax.tree.unflatten(jax.tree.structure(change), jax.tree.leaves(images))
        return jax.tree.map(lambda x, sd: jnp.where(sd > 0, x / jnp.where(sd > 0, sd, 1.0), 0.0), like, root)

    def fisher_diagonal(self: Any, natural: Any) -> Any:
        """Variances of the sufficient statistics under q, by as many Fisher products as there are statistics.

        Args:
            natural: where.

        Returns:
            The diagonal of the metric, entry by entry in the places of the natural parameters.
        """
        if self.by_coordinate is not None:
            structure = jax.tree.structure(jax.eval_shape(lambda: self.by_coordinate.zeros()))
            own = self.by_coordinate.fisher_diagonal(jax.tree.unflatten(structure, jax.tree.leaves(natural)))
            return jax.tree.unflatten(jax.tree.structure(natural), jax.tree.leaves(own))
        leaves, tree = jax.tree.flatten(natural)
        shapes = leaf_shapes(self)
        ends = [int(e) for e in itertools.accumulate(math.prod(s) for s in shapes)]
        places = list(zip(leaves, shapes, ends, strict=True))

        def row(one: Array) -> list[Array]:
            steps = [jnp.broadcast_to(one[e - math.prod(s) : e].reshape(s), x.shape) for x, s, e in places]
            found = self.fisher_product(natural, self.symmetrise(tree.unflatten(steps)))
            return [
                jnp.sum(f * d, axis=tuple(range(-len(s), 0)))
                for f, d, s in zip(jax.tree.leaves(found), steps, shapes, strict=True)
            ]

        # One at a time: side by side they would take the memory of the whole metric.
        columns = jax.lax.map(row, jnp.eye(ends[-1], dtype=leaves[0].dtype))
        parts = [
            jnp.moveaxis(column[e - math.prod(s) : e], 0, -1).reshape(x.shape)
            for column, (x, s, e) in zip(columns, places, strict=True)
        ]
        return tree.unflatten(parts)

    def symmetrise(self: Any, natural: Any) -> Any:
        """Natural parameters without the rounding asymmetry of matrices; as they are where none is among them."""
        return natural

    def fisher_solve(self: Any, natural: Any, tangent: Any) -> Any:
        """``F(eta)^-1 d_mu = d_eta``, the inverse of :meth:`fisher_product`, by Cholesky of the metric in minimal coordinates.

        Args:
            natural: where.
            tangent: a direction in mean space, of the mean parameters' type.

        Returns:
            The direction in natural space, of the natural parameters' type.
        """
        point = self.to_minimal(natural)
        treedef = jax.tree.structure(natural)

        def to_coordinates(direction):
            # Coordinates of a mean-space direction: paired with each basis direction of natural space.
            dual = jax.tree.unflatten(treedef, jax.tree.leaves(direction))
            return jax.linear_transpose(self.from_minimal, point)(dual)[0]

        basis = jnp.broadcast_to(jnp.eye(point.shape[-1], dtype=point.dtype), (*point.shape, point.shape[-1]))
        columns = jax.vmap(
            lambda v: to_coordinates(self.fisher_product(natural, self.from_minimal(v))), in_axes=-2, out_axes=-1
        )
        factor, _ = scaled_cholesky(symmetrise(columns(basis)))
        solved = cho_solve((factor, True), to_coordinates(tangent)[..., None])[..., 0]
        return self.from_minimal(solved)


@runtime_checkable
class Family(_FamilyVerbs, Protocol):
    """An exponential family ``exp(<eta, T(theta)> - A(eta))``: what every implementor owes.

    A family is a frozen, hashable dataclass of settings. Natural parameters are frozen registered dataclasses with
    ``+ - *`` (:func:`natural_parameters`, :class:`Vector`), mean parameters likewise with their leaves in the same
    order; both take leading batch axes. The functions are pure, keep the inputs' dtype, and hold no key and no data.
    ``in_domain`` says whether the distribution is normalisable, ``nearest_valid`` is idempotent and leaves valid
    parameters alone. ``log_partition`` is in nats and belongs to a *unit* base measure, so that ``<eta, T> - A`` is
    NumPyro's ``log_prob`` exactly; where that cannot be, ``log_base_measure`` is added to it.

    The members from ``event_shape`` to ``nearest_valid`` are every family's own; :class:`FamilyDefaults` gives the rest.
    """

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one theta."""
        ...

    @property
    def full(self) -> bool:
        """Whether parameters hold a D x D matrix."""
        ...

    @property
    def chained(self) -> bool:
        """Whether members are the states of a chain, each tied to the next."""
        ...

    @property
    def periodic(self) -> bool:
        """Whether theta is an angle, whose transform to the line is cut somewhere."""
        ...

    @property
    def ends(self) -> tuple[float, float]:
        """Between which numbers every entry of theta lies, infinite where that is not known."""
        ...

    @property
    def by_coordinate(self) -> Family | None:
        """The family of one coordinate where an event's coordinates are independent, their parameters side by side; else None."""
        ...

    @property
    def grid_rule(self) -> Any:
        """Coordinates for quadrature, of a family from outside (:func:`grid_rule`); None without any."""
        ...

    @property
    def pair_rule(self) -> Any:
        """Where expectations are tested for closed forms, of a family from outside (:func:`pair_rule`); None without any."""
        ...

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> Any:
        """The natural parameters of a unit factor, ``exp(0)``."""
        ...

    def sufficient_statistics(self, theta: Any) -> Any:
        """T(theta), as mean parameters of a point mass."""
        ...

    def log_partition(self, natural: Any) -> Float[Array, "*batch"]:
        """A(eta) in nats; its gradient is the mean parameter."""
        ...

    def natural_to_mean(self, natural: Any) -> Any:
        """mu = E_q[T] = grad A(eta)."""
        ...

    def mean_to_natural(self, mean_params: Any) -> Any:
        """The inverse of :meth:`natural_to_mean`."""
        ...

    def to_distribution(self, natural: Any) -> Any:
        """The NumPyro distribution with these natural parameters."""
        ...

    def from_distribution(self, distribution: dist.Distribution) -> Any:
        """Natural parameters of a NumPyro distribution of this family."""
        ...

    def in_domain(self, natural: Any) -> Bool[Array, "*batch"]:
        """Whether the parameters are finite and normalisable."""
        ...

    def nearest_valid(self, natural: Any) -> Any:
        """A normalisable neighbour; valid parameters come back unchanged."""
        ...


class FamilyDefaults(_FamilyVerbs):
    """What follows from a family's own members (see :class:`Family`): a base class to derive a family from.

    The defaults are exact but general: an entropy or divergence that is a difference of large numbers, and a Fisher
    solve by a dense P x P Cholesky factor, are worth overriding where something better is known. ``to_minimal`` flattens
    the natural parameters; a family whose coordinates are redundant (symmetric matrices) must override it.
    """

    full: bool = False
    chained: bool = False
    periodic: bool = False
    ends: tuple[float, float] = (-math.inf, math.inf)
    by_coordinate: Any = None
    grid_rule: Any = None
    pair_rule: Any = None

    def sample_with_statistics(self: Any, natural: Any, key: Array, shape: tuple[int, ...] = ()) -> tuple[Any, Any]:
        """:meth:`sample`, and the draws' sufficient statistics.

        To override where a draw as rounded no longer tells its statistics: the logarithm of one that underflows.

        Args:
            natural: natural parameters.
            key: a JAX random key.
            shape: leading axes of the draws.

        Returns:
            ``(draws, statistics)``, both differentiable in the natural parameters where :meth:`sample` is.
        """
        draws = self.sample(natural, key, shape)
        return draws, self.sufficient_statistics(draws)


class ScalarDefaults(FamilyDefaults):
    """Of laws of single numbers, all axes of whose natural parameters are batch axes."""

    # Class of the natural parameters.
    _natural: Any = None

    @property
    def event_shape(self) -> tuple[int, ...]:
        """``()``."""
        return ()

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> Any:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return self._natural(*(jnp.zeros(batch_shape, dtype) for _ in dataclasses.fields(self._natural)))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def implicit_inverse(family: Any, mean_params: Any) -> Any:
    """``family.invert(mean_params)``, differentiated by the implicit function theorem: ``d_eta = F(eta)^-1 d_mu``.

    Args:
        family: a family whose ``invert`` finds natural parameters by iteration.
        mean_params: mean parameters.

    Returns:
        The natural parameters.
    """
    return family.invert(mean_params)


@implicit_inverse.defjvp
def _implicit_inverse_jvp(family, primals, tangents):
    natural = implicit_inverse(family, primals[0])
    return natural, family.fisher_solve(natural, tangents[0])


def inner(natural: Any, mean_params: Any) -> Float[Array, ""]:
    """The pairing ``<eta, mu>`` of one (unbatched) natural and mean parameter, in nats."""
    pairs = zip(jax.tree.leaves(natural), jax.tree.leaves(mean_params), strict=True)
    return sum((jnp.vdot(a, b) for a, b in pairs), start=jnp.zeros(()))


# ------------------------------------------------------------------------------------------------------------- registry
# Which exponential family a NumPyro distribution belongs to.

# Distribution class -> family, or a function that makes the family from a distribution of that class.
_REGISTRY: dict[type, Family | Callable[[Any], Family]] = {}


def register_family(distribution_class: type, family: Any) -> None:
    """Say which family a latent whose prior is a distribution of this class is given.

    Args:
        distribution_class: a subclass of ``numpyro.distributions.Distribution``. Its subclasses are covered too, unless
            they have an entry of their own.
        family: the family, or a function of the distribution that makes it, for families that depend on a size. Its
            ``from_distribution`` must accept distributions of this class. A later entry replaces an earlier one.

    Raises:
        TypeError: when the first argument is not a distribution class, or the second neither a family nor a function.
    """
    if not (isinstance(distribution_class, type) and issubclass(distribution_class, dist.Distribution)):
        raise TypeError(
            f"register_family: {distribution_class!r} is not a distribution class. numpyro.distributions.Bernoulli, "
            "Categorical and a few others are functions: register the classes they return, such as BernoulliProbs."
        )
    if not callable(family):
        check_family(family, f"register_family({distribution_class.__name__}, ...)")
    _REGISTRY[distribution_class] = family


def check_family(family: Any, where: str) -> None:
    """Refuse what is no family, saying what it lacks. Raises TypeError naming what is missing."""
    if not isinstance(family, Family):
        said = lacking(family, Family, FamilyDefaults, "numpyro_pvi.families")
        raise TypeError(f"{where}: {family!r} is not a family.{said}")


def registered_families() -> dict[type, Any]:
    """A copy of the registry: distribution class -> family, or function of the distribution."""
    return dict(_REGISTRY)


def base_of(distribution: dist.Distribution) -> Any:
    """The distribution inside ``expand`` and ``to_event``."""
    while isinstance(distribution, dist.ExpandedDistribution | dist.Independent):
        distribution = distribution.base_dist
    return distribution


def read_parameters(distribution: dist.Distribution, *names: str) -> list[Float[Array, "..."]]:
    """Scalar parameters of a distribution, broadcast to its batch and independent axes, in one dtype.

    ``distribution``: a distribution of scalar events, possibly inside ``expand`` and ``to_event``.
    """
    base = base_of(distribution)
    shape = distribution.batch_shape + distribution.event_shape
    values = [getattr(base, name) for name in names]
    dtype = jnp.result_type(float, *values)
    return [jnp.broadcast_to(jnp.asarray(value, dtype), shape) for value in values]


# ---------------------------------------------------------------------------------------------------- the Fisher metric
# The Fisher metric of any exponential family in flat vectors: what schedules measure moves of q by.


class FamilyMoments(NamedTuple):
    """One member of a family as its mean statistics, their sds, and what else rounds ask of it."""

    natural: Any
    # What changes are measured by: see FamilyDefaults.metric_root.
    root: Any
    # E_q[T] and the sds of T under q, entry by entry in one vector.
    loc: Float[Array, "P"]
    scale: Float[Array, "P"]
    # A(eta) in nats.
    log_partition: Float[Array, ""]
    valid: Bool[Array, ""]


class MetricDefaults(FamilyDefaults):
    """Moves of q in its own Fisher metric; a Gaussian family has the same verbs over its coordinates.

    A move is the change of natural parameters in coordinates that this metric makes orthonormal, member by member: for a shift of
    a normal, one is one posterior sd. Mean statistics in units of their own sds would not do: of a narrow member (x and x^2 of a
    normal far from 0, log x and x of a gamma of a large shape) they move together, and a change of its width, which is what they
    differ by, would hardly count.
    """

    # Of a Gaussian True: a member is a location and a scale, and moves are of these.
    located = False

    @property
    def dim(self: Any) -> int:
        """P, the number of sufficient statistics."""
        return sum(math.prod(shape) for shape in leaf_shapes(self))

    def flat(self: Any, tree: Any) -> Float[Array, "*batch P"]:
        """Natural or mean parameters, or a stack of them, as vectors."""
        parts = [
            leaf.reshape(leaf.shape[: leaf.ndim - len(shape)] + (math.prod(shape),))
            for shape, leaf in zip(leaf_shapes(self), jax.tree.leaves(tree), strict=True)
        ]
        return jnp.concatenate(parts, axis=-1)

    def unflat(self: Any, vector: Float[Array, "P"]) -> Any:
        """Natural parameters of a vector."""
        leaves, begin = [], 0
        for shape in leaf_shapes(self):
            end = begin + math.prod(shape)
            leaves.append(vector[begin:end].reshape(shape))
            begin = end
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(lambda: self.zeros())), leaves)

    def moments(self: Any, natural: Any) -> FamilyMoments:
        """Mean statistics with their sds; ``valid`` is False where the member is not normalisable."""
        valid, mean = self.in_domain(natural), self.natural_to_mean(natural)
        variances = self.flat(self.fisher_diagonal(natural))
        # A latent that has come to one value has no sd to measure moves by, and makes none.
        scale = jnp.sqrt(jnp.maximum(variances, jnp.finfo(variances.dtype).tiny))
        root = self.metric_root(natural)
        return FamilyMoments(natural, root, self.flat(mean), scale, self.log_partition(natural), valid)

    def sds(self, moments: FamilyMoments) -> Float[Array, "P"]:
        """Sds of the sufficient statistics."""
        return moments.scale

    def variances(self, moments: FamilyMoments) -> Float[Array, "P"]:
        """Variances of the sufficient statistics."""
        return moments.scale**2

    def inner_products(self: Any, moments: FamilyMoments, change: Any) -> Float[Array, "W W"]:
        """Inner products of W changes of the naturals (leading axis) in the Fisher metric of q."""
        images = jax.vmap(lambda own: self.fisher_product(moments.natural, own))(change)
        return self.flat(change) @ self.flat(images).T

    @property
    def num_moves(self) -> int:
        """Length of what :meth:`moves` gives."""
        return self.dim

    @property
    def degrees(self: Any) -> int:
        """Degrees of freedom, which an optimiser of q moves: as many as there are minimal coordinates."""
        return jax.eval_shape(lambda: self.to_minimal(self.zeros())).shape[-1]

    def standard(self: Any, dtype: Any) -> FamilyMoments:
        """Numbers of the right shapes, to fill a memory with before there is a q."""
        one = jnp.ones((self.dim,), dtype)
        zeros = self.zeros((), dtype)
        root = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(self.metric_root, zeros))
        return FamilyMoments(zeros, root, 0 * one, one, jnp.zeros((), dtype), jnp.array(True))

    def moves(self: Any, new: FamilyMoments, old: FamilyMoments) -> Float[Array, "P"]:
        """How far apart two members are: the difference of natural parameters in orthonormal coordinates at the new one."""
        return self.shift(new.natural - old.natural, new)

    def displacement(self, new: FamilyMoments, old: FamilyMoments) -> Float[Array, "P"]:
        """What rounds by draws remember of a move; of a Gaussian the change of its location."""
        return self.moves(new, old)

    def displacement_sds(self, moments: FamilyMoments) -> Float[Array, "P"]:
        """What that is measured by: nothing else."""
        return jnp.ones_like(moments.loc)

    def pull(self: Any, change: Any, loc: Float[Array, "P"]) -> Float[Array, "*batch P"]:
        """A change of natural parameters as a vector: its slope in the statistics is the same everywhere."""
        return self.flat(change)

    def covariance_product(
        self: Any, moments: FamilyMoments, vector: Float[Array, "*batch P"]
    ) -> Float[Array, "*batch P"]:
        """``F(eta) v``: the change of mean statistics by a change of natural parameters, or by each of a stack of them."""

        def one(own: Array) -> Array:
            return self.flat(self.fisher_product(moments.natural, self.unflat(own)))

        return one(vector) if vector.ndim == 1 else jax.vmap(one)(vector)

    def precision_product(self, natural: Any, vector: Float[Array, "P"]) -> Float[Array, "P"]:
        """The metric of :meth:`displacement`, whose coordinates are orthonormal."""
        return vector

    def shift(self: Any, change: Any, moments: FamilyMoments) -> Float[Array, "*batch P"]:
        """A change of natural parameters (or a batch of them) as :meth:`moves` would tell of it."""
        return self.flat(self.whitened(moments.natural, moments.root, change))

    def effect(self: Any, change: Any, moments: FamilyMoments, exact: Any = True) -> Float[Array, "*batch P"]:
        """The same: natural parameters tell all of a member's spread as well."""
        return self.shift(change, moments)

    def expect_quadratic(self: Any, natural: Any, moments: FamilyMoments) -> Float[Array, "*batch"]:
        """``<eta, mu>`` of (a batch of) natural parameters under one member, in nats."""
        return self.flat(natural) @ moments.loc

    def log_partition_parts(self, natural: Any, moments: FamilyMoments) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """A(eta) up to a constant, in two parts: nothing, and all of it."""
        return jnp.zeros_like(moments.log_partition), moments.log_partition


def minimal_mean(family: Any, natural: Any, mean_params: Any) -> Float[Array, "*batch P"]:
    """Mean parameters, or a change of them, in minimal coordinates: paired with those of natural ones they give ``<eta, mu>``.

    ``family``: any; ``natural``: any of its natural parameters, for their shapes; ``mean_params``: of the mean parameters'
    type, or any tree with their leaves. Returns as many numbers as ``family.to_minimal`` gives.
    """
    like = jax.tree.unflatten(jax.tree.structure(natural), jax.tree.leaves(mean_params))
    return jax.linear_transpose(family.from_minimal, family.to_minimal(natural))(like)[0]


def fisher_matrix(family: Any, natural: Any) -> Float[Array, "P P"]:
    """The Fisher metric in minimal coordinates, the covariance of the statistics that belong to them.

    ``family``: any; ``natural``: where. Returns a symmetric matrix, singular nowhere in the domain.
    """
    size = jax.eval_shape(family.to_minimal, natural)

    def image(column: Array) -> Array:
        return minimal_mean(family, natural, family.fisher_product(natural, family.from_minimal(column)))

    return symmetrise(jax.vmap(image)(jnp.eye(size.shape[-1], dtype=size.dtype)))


# Minimal coordinates of a member up to which its metric is factorised for the length of moves.
FACTORISED = 64
# Units in the last place that a metric's diagonal is raised by, relative to itself, so that it has a root.
_RAISED = 16


def _metric_root(metric: Float[Array, "P P"]) -> Float[Array, "P P"]:
    """Its lower Cholesky factor, after a scaling to a unit diagonal that is raised by some rounding; 0 where that is 0."""
    sds = jnp.sqrt(jnp.maximum(jnp.diagonal(metric), 0.0))
    scale = jnp.where(sds > 0, sds, 1.0)
    unit = jnp.where(
        jnp.eye(len(sds), dtype=bool), 1 + _RAISED * jnp.finfo(sds.dtype).eps, metric / jnp.outer(scale, scale)
    )
    return scaled_cholesky(unit)[0] * sds[:, None]


# ------------------------------------------------------------------------------------------------ distance of Gaussians
# How far apart two Gaussians are, in a metric that adds up along the way.


def marginal_distance(
    loc: Float[Array, "*batch D"],
    sd: Float[Array, "*batch D"],
    other_loc: Float[Array, "*batch D"],
    other_sd: Float[Array, "*batch D"],
) -> Float[Array, "*batch"]:
    """Fisher-Rao distance between independent Gaussians, root mean square over coordinates.

    With ``u = ((m - m')^2 / 2 + (s - s')^2) / (s s')`` a coordinate's distance is ``2 sqrt(2) arsinh(sqrt(u) / 2)``: about ``|m
    - m'| / s`` for small shifts, and logarithmic for large ones. It is a metric, so that a path is never shorter than what it
    bridges. ``loc``: locations; ``sd``: standard deviations; ``other_loc``: locations of the other; ``other_sd``: standard
    deviations of the other. Returns the distance, in standard deviations where it is small.

    References:
        Costa, Santos and Strapasson, Fisher information distance: a geometrical reading, Discrete Appl. Math. 197 (2015),
        eq. 5.
    """
    square = (0.5 * (loc - other_loc) ** 2 + (sd - other_sd) ** 2) / (sd * other_sd)
    each = 2 * 2**0.5 * jnp.arcsinh(0.5 * jnp.sqrt(square))
    return jnp.sqrt(jnp.mean(each**2, axis=-1))
