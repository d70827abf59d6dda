"""Log-likelihoods of a group's rows at points: what stochastic solvers take their steps from, and rounds are tested by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._derivatives import hessian_of, value_and_grad
from ..factors import GroupMasks, Packing
from ..sites import take
from ..solvers import Derivatives


@dataclasses.dataclass(frozen=True)
class GroupRows:
    """The rows of all groups, gathered when they are asked for and never copied as a whole.

    Args:
        density: ``(chunk, point) -> nats``, the log-likelihood of the rows that a chunk names.
        packing: where each group's rows stand.
        sizes: rows of each group; with ``padded``, those there is room for.
        padded: whether the packing's masks say how many of them there are.
    """

    density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]]
    packing: Packing | GroupMasks
    sizes: tuple[int, ...]
    padded: bool = False

    # Rows give derivatives at points.
    pointwise = True

    @property
    def equal(self) -> bool:
        """Whether all groups have as many rows."""
        return len(set(self.sizes)) == 1

    def num_rows(self, group: Int[Array, ""]) -> int | Int[Array, ""]:
        """Rows of one group: a number known beforehand where it is the same for all."""
        if self.padded and isinstance(self.packing, Packing):
            counts = jnp.sum(self.packing.mask, axis=1, dtype=jnp.int32)
            return jax.ops.segment_sum(counts, self.packing.chunk_group, len(self.sizes))[group]
        return self.sizes[0] if self.equal else jnp.asarray(self.sizes, jnp.int32)[group]

    def derivatives(
        self, group: Int[Array, ""], points: Float[Array, "S D"], rows: Int[Array, "B"] | None, hessian: bool
    ) -> Derivatives:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.derivatives`.

        Args:
            group: which group.
            points: where.
            rows: positions within the group, or None for all.
            hessian: whether second derivatives are wanted.

        Returns:
            Value, gradient and Hessian of the sum over those rows at every point.
        """
        packing = self.packing
        # Masks have no rows to take; settings that ask for some are refused beforehand.
        if rows is None or isinstance(packing, GroupMasks):
            return self._all(group, points, hessian)
        length = packing.rows.shape[1]
        taken = packing.rows[packing.offsets[group] + rows // length, rows % length]
        return self._at((taken, jnp.ones(taken.shape, bool)), points, hessian)

    def values(self, points: Float[Array, "S D"]) -> Float[Array, "M"]:
        """Each group's log-likelihood in nats, averaged over points; one chunk of rows at a time."""
        chunks, owner, count = self.packing.chunks, self.packing.chunk_group, len(self.sizes)

        def one(chunk):
            if points.shape[0] == 1:
                return self.density(chunk, points[0])
            return jnp.mean(jax.lax.map(lambda point: self.density(chunk, point), points))

        return jax.ops.segment_sum(jax.lax.map(one, chunks), owner, count, indices_are_sorted=True)

    def _all(self, group, points, hessian: bool) -> Derivatives:
        chunks, offsets = self.packing.chunks, self.packing.offsets
        if offsets.shape[0] - 1 == self.packing.chunk_group.shape[0]:
            return self._at(take(chunks, group), points, hessian)
        shapes = jax.eval_shape(lambda: self._at(take(chunks, 0), points, hessian))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(chunk, total):
            return jax.tree.map(jnp.add, total, self._at(take(chunks, chunk), points, hessian))

        return jax.lax.fori_loop(offsets[group], offsets[group + 1], add, zero)

    def _at(self, chunk, points, hessian: bool) -> Derivatives:
        def one(point):
            value, gradient = value_and_grad(self.density, argnums=1)(chunk, point)
            bend = hessian_of(self.density, argnums=1)(chunk, point) if hessian else None
            return Derivatives(value, gradient, bend)

        if points.shape[0] == 1:
            return jax.tree.map(lambda x: x[None], one(points[0]))
        return jax.vmap(one)(points)
