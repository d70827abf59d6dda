"""The Fisher metric of any exponential family in flat vectors: what schedules measure moves of q by."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import symmetrise
from ._base import FamilyDefaults


class FamilyMoments(NamedTuple):
    """One member of a family as its mean statistics, their sds, and what else rounds ask of it."""

    natural: Any
    # E_q[T] and the sds of T under q, entry by entry in one vector.
    loc: Float[Array, "P"]
    scale: Float[Array, "P"]
    # A(eta) in nats.
    log_partition: Float[Array, ""]
    valid: Bool[Array, ""]


class MetricDefaults(FamilyDefaults):
    """Moves of q in its own Fisher metric; a Gaussian family has the same verbs over its coordinates.

    Sufficient statistics stand where a Gaussian has coordinates: a move is a change of their means in units of their sds, as
    the mean of a Gaussian moves in units of posterior sds.
    """

    @property
    def dim(self: Any) -> int:
        """P, the number of sufficient statistics."""
        return sum(math.prod(shape) for shape in self._leaf_shapes())

    def flat(self: Any, tree: Any) -> Float[Array, "*batch P"]:
        """Natural or mean parameters, or a stack of them, as vectors."""
        parts = [
            leaf.reshape(leaf.shape[: leaf.ndim - len(shape)] + (math.prod(shape),))
            for shape, leaf in zip(self._leaf_shapes(), jax.tree.leaves(tree), strict=True)
        ]
        return jnp.concatenate(parts, axis=-1)

    def unflat(self: Any, vector: Float[Array, "P"]) -> Any:
        """Natural parameters of a vector."""
        leaves, begin = [], 0
        for shape in self._leaf_shapes():
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
        return FamilyMoments(natural, self.flat(mean), scale, self.log_partition(natural), valid)

    def sds(self, moments: FamilyMoments) -> Float[Array, "P"]:
        """Sds of the sufficient statistics."""
        return moments.scale

    def variances(self, moments: FamilyMoments) -> Float[Array, "P"]:
        """Variances of the sufficient statistics."""
        return moments.scale**2

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
        return FamilyMoments(self.zeros((), dtype), 0 * one, one, jnp.zeros((), dtype), jnp.array(True))

    def moves(self, new: FamilyMoments, old: FamilyMoments) -> Float[Array, "P"]:
        """How far apart two members are: differences of mean statistics in the new one's sds."""
        return (new.loc - old.loc) / new.scale

    def pull(self: Any, change: Any, loc: Float[Array, "P"]) -> Float[Array, "*batch P"]:
        """A change of natural parameters as a vector: its slope in the statistics is the same everywhere."""
        del loc
        return self.flat(change)

    def covariance_product(
        self: Any, moments: FamilyMoments, vector: Float[Array, "*batch P"]
    ) -> Float[Array, "*batch P"]:
        """``F(eta) v``: the change of mean statistics by a change of natural parameters, or by each of a stack of them."""

        def one(own: Array) -> Array:
            return self.flat(self.fisher_product(moments.natural, self.unflat(own)))

        return one(vector) if vector.ndim == 1 else jax.vmap(one)(vector)

    def precision_product(self: Any, natural: Any, vector: Float[Array, "P"]) -> Float[Array, "P"]:
        """``F(eta)^-1 v`` by the metric's diagonal: for angles between moves, not for their lengths."""
        return vector / self.flat(self.fisher_diagonal(natural))

    def shift(self: Any, change: Any, moments: FamilyMoments) -> Float[Array, "*batch P"]:
        """First-order change of the mean statistics by a change of natural parameters, in sds."""
        return self.covariance_product(moments, self.pull(change, moments.loc)) / moments.scale

    def effect(self: Any, change: Any, moments: FamilyMoments, exact: Any = True) -> Float[Array, "*batch P"]:
        """The same: a family's statistics tell all of its spread as well."""
        del exact
        return self.shift(change, moments)

    def expect_quadratic(self: Any, natural: Any, moments: FamilyMoments) -> Float[Array, "*batch"]:
        """``<eta, mu>`` of (a batch of) natural parameters under one member, in nats."""
        return self.flat(natural) @ moments.loc

    def log_partition_parts(self, natural: Any, moments: FamilyMoments) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """A(eta) up to a constant, in two parts: nothing, and all of it."""
        del natural
        return jnp.zeros_like(moments.log_partition), moments.log_partition


def minimal_mean(family: Any, natural: Any, mean_params: Any) -> Float[Array, "P"]:
    """Mean parameters, or a change of them, in minimal coordinates: paired with those of natural ones they give ``<eta, mu>``.

    Args:
        family: any.
        natural: any of its natural parameters, for their shapes.
        mean_params: of the mean parameters' type, or any tree with their leaves.

    Returns:
        As many numbers as ``family.to_minimal`` gives.
    """
    like = jax.tree.unflatten(jax.tree.structure(natural), jax.tree.leaves(mean_params))
    return jax.linear_transpose(family.from_minimal, family.to_minimal(natural))(like)[0]


def fisher_matrix(family: Any, natural: Any) -> Float[Array, "P P"]:
    """The Fisher metric in minimal coordinates, the covariance of the statistics that belong to them.

    Args:
        family: any.
        natural: where.

    Returns:
        A symmetric matrix, singular nowhere in the domain.
    """
    size = jax.eval_shape(family.to_minimal, natural)

    def image(column: Array) -> Array:
        return minimal_mean(family, natural, family.fisher_product(natural, family.from_minimal(column)))

    return symmetrise(jax.vmap(image)(jnp.eye(size.shape[-1], dtype=size.dtype)))
