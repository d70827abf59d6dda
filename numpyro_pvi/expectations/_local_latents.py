"""Expectations of factors with local latents: over the shared and the local ones together, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._derivatives import grad, value_and_grad
from ..families import (
    ConditionalMoments,
    ConditionalNatural,
    GaussianFamily,
    GaussianMoments,
    bounded_precision,
    conditional_moments,
)
from ._expected import Expected


class LocalNoise(NamedTuple):
    """Standard normal draws of one round."""

    # For the shared latents; all groups use the same.
    shared: Float[Array, "S D"]
    # For every unit's (plate index's) local latents, so that a unit's draws do not depend on the partition.
    local: Float[Array, "U S K"]


class LocalChunk(NamedTuple):
    """One chunk of rows, and what q says about their local latents."""

    data: Any
    # Unit of every slot, and whether the slot is one (no padding, not another group's).
    units: Int[Array, "R"]
    mask: Bool[Array, "R"]
    rows: ConditionalNatural


class _Curvature(NamedTuple):
    """-E[hess f]: blocks between shared (s) and local (l) latents; K x K and K x D ones per row."""

    shared: Array
    cross: Array
    local: Array


@dataclasses.dataclass(frozen=True)
class LocalLatentProgram:
    """``E_q`` of a chunk's log density and local entropy over shared and local latents, by antithetic draws with Hessians.

    The value is the local ELBO given q(theta), ``E_q[log p(y, z | theta)] + E_q[H(q(z | theta))]``; the target is the
    natural gradient in the joint natural space, blocks of ``-E[hess f]`` and ``E[grad f] - E[hess f] loc``. Rows are
    independent given theta, so one tangent per shared and per local coordinate serves all rows at once.

    Args:
        log_density: ``(data, theta, z) -> nats``, observed and local terms of one chunk, z Float[R K].
        family: the Gaussian family of q(theta).
    """

    log_density: Callable[[Any, Float[Array, "D"], Float[Array, "R K"]], Float[Array, ""]]
    family: GaussianFamily
    noisy: bool = dataclasses.field(default=True, init=False)

    def working_bytes(self, chunks: LocalChunk) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: the draws' tangents of every row."""
        rows, width = chunks.rows.linear.shape[1:]
        return 4 * rows * width * (self.family.dim + width) * 32

    def expected(
        self, chunk: LocalChunk, moments: GaussianMoments, probe: Any, level: Any, noise: LocalNoise, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        Args:
            chunk: rows and their conditionals.
            moments: q(theta).
            probe: Float[D] vector for the curvature product, or None.
            level: unused; there is no rule to choose.
            noise: the round's draws; each is used with both signs.
            clip: unused; precisions of local latents are always bounded from below.

        Returns:
            The chunk's expectations; ``target`` is the shared block, ``local`` the rows' targets.
        """
        del level, clip
        q = conditional_moments(chunk.rows)
        shared, local = noise.shared, jnp.swapaxes(noise.local[chunk.units], 0, 1)
        theta = self.family.draw(moments, jnp.concatenate([shared, -shared]))
        z = jax.vmap(q.draw)(theta, jnp.concatenate([local, -local]))
        value, (slope, slope_local), curvature = self._derivatives(chunk.data, theta, z)
        mean = q.mean(moments.loc)
        value = value - self._quadratic_correction(curvature, moments, q, theta - moments.loc, z - mean)
        value = value + jnp.sum(jnp.where(chunk.mask, q.entropy, 0.0))
        own = self._own_precision(chunk, curvature.local)
        product = jnp.zeros_like(moments.loc) if probe is None else _times(curvature.shared, probe)
        vector = slope + _times(curvature.shared, moments.loc)
        linear = slope_local + _times(own, mean)
        cross = jnp.zeros_like(chunk.rows.cross)
        if self.family.full:
            cross = jnp.where(chunk.mask[:, None, None], curvature.cross, 0.0)
            vector = vector + jnp.einsum("rkd,rk->d", cross, mean)
            linear = linear + cross @ moments.loc
        rows = ConditionalNatural(jnp.where(chunk.mask[:, None], linear, 0.0), own, cross)
        zero = jnp.zeros_like(value)
        target = self.family.natural(vector, curvature.shared)
        return Expected(value, target, product, zero, zero, zero, rows)

    def _derivatives(self, data, theta: Float[Array, "S D"], z: Float[Array, "S R K"]):
        """Means over draws of value, gradients and curvature blocks (their diagonals under a mean-field q)."""
        dim, width, full = theta.shape[-1], z.shape[-1], self.family.full

        def one(theta, z):
            density = value_and_grad(lambda a, b: self.log_density(data, a, b), argnums=(0, 1))
            (value, gradient), tangent = jax.linearize(density, theta, z)
            zero, none = jnp.zeros_like(z), jnp.zeros_like(theta)
            shared, cross = jax.vmap(lambda e: tangent(e, zero)[1])(jnp.eye(dim, dtype=theta.dtype))
            # Rows do not see each other's local latents: one tangent moves the k-th coordinate of all of them.
            local = jax.vmap(lambda e: tangent(none, zero + e)[1][1])(jnp.eye(width, dtype=z.dtype))
            cross, local = jnp.moveaxis(cross, 0, -1), jnp.moveaxis(local, 0, -1)
            if not full:
                shared, cross = jnp.diagonal(shared), jnp.zeros((0,), theta.dtype)
                local = jnp.diagonal(local, axis1=-2, axis2=-1)
            return value, gradient, _Curvature(-shared, -cross, -local)

        value, gradient, curvature = jax.tree.map(lambda x: jnp.mean(x, axis=0), jax.vmap(one)(theta, z))
        if full:
            curvature = curvature._replace(
                shared=0.5 * (curvature.shared + curvature.shared.T),
                local=0.5 * (curvature.local + jnp.swapaxes(curvature.local, -1, -2)),
            )
        return value, gradient, curvature

    def _own_precision(self, chunk: LocalChunk, wanted: Array) -> Array:
        bounded = bounded_precision(wanted, chunk.rows)
        shape = chunk.mask.shape + (1,) * (bounded.ndim - 1)
        width = chunk.rows.linear.shape[-1]
        unit = jnp.eye(width, dtype=bounded.dtype) if chunk.rows.full else jnp.ones((width,), bounded.dtype)
        return jnp.where(chunk.mask.reshape(shape), bounded, unit)

    def _quadratic_correction(
        self, curvature: _Curvature, moments: GaussianMoments, q: ConditionalMoments, shared, local
    ) -> Float[Array, ""]:
        """Exact less sampled mean of half the quadratic form, so that a quadratic factor comes out exactly."""
        scale = moments.scale
        if not self.family.full:
            sampled = jnp.mean(shared**2 @ curvature.shared) + jnp.mean(jnp.sum(local**2 * curvature.local, (1, 2)))
            exact = jnp.sum(curvature.shared * scale**2) + jnp.sum(curvature.local * q.root**2)
            return 0.5 * (exact - sampled)
        towards = jnp.einsum("rkj,srj->srk", curvature.local, local) + 2 * jnp.einsum(
            "rkd,sd->srk", curvature.cross, shared
        )
        sampled = jnp.mean(jnp.sum(shared @ curvature.shared * shared, -1) + jnp.sum(towards * local, (1, 2)))
        inherited = q.slope @ scale
        both = curvature.local @ inherited + 2 * curvature.cross @ scale
        exact = jnp.sum(scale * (curvature.shared @ scale)) + jnp.sum(inherited * both)
        exact = exact + jnp.sum(q.root * (curvature.local @ q.root))
        return 0.5 * (exact - sampled)


@dataclasses.dataclass(frozen=True)
class MaskedLocalProgram(LocalLatentProgram):
    """The same for models in which every group is a full pass over all rows: one pass for all groups together.

    Every group's density of the same draw is a vector, whose derivatives in theta go forward: D^2 passes, whatever the
    number of groups, instead of a reverse pass and its D tangents for each of them.

    Args:
        densities: ``(theta, z) -> nats``, Float[M], one log density per group; z Float[U K] of all units.
        group_of_unit: Int[U].
    """

    densities: Callable[[Float[Array, "D"], Float[Array, "U K"]], Float[Array, "M"]] = dataclasses.field(kw_only=True)
    group_of_unit: Int[Array, "U"] = dataclasses.field(kw_only=True)

    def expected_all(self, chunks: LocalChunk, moments: GaussianMoments, probe: Any, noise: LocalNoise) -> Expected:
        """Expectations of every group: see :meth:`expected`; leading axis M.

        Args:
            chunks: one chunk per group, of all units, stacked.
            moments: q(theta).
            probe: Float[D] vector for the curvature product, or None.
            noise: the round's draws.

        Returns:
            The groups' expectations.
        """
        group, units = self.group_of_unit, jnp.arange(self.group_of_unit.shape[0])
        num_groups = chunks.mask.shape[0]
        own = jax.tree.map(lambda x: x[group, units], chunks.rows)
        q, mean = conditional_moments(own), None
        theta = self.family.draw(moments, jnp.concatenate([noise.shared, -noise.shared]))
        local = jnp.swapaxes(noise.local, 0, 1)
        z = jax.vmap(q.draw)(theta, jnp.concatenate([local, -local]))
        mean = q.mean(moments.loc)
        value, slope, shared, slope_local, cross, wanted = self._all_derivatives(theta, z)
        away, out = theta - moments.loc, z - mean

        def total(x):
            return jax.ops.segment_sum(x, group, num_groups)

        sampled, exact = self._quadratic_parts(shared, cross, wanted, moments, q, away, out)
        value = value - 0.5 * (exact[0] - sampled[0] + total(exact[1] - sampled[1])) + total(q.entropy)
        precision = bounded_precision(wanted, own)
        curve = (lambda v: shared @ v) if self.family.full else (lambda v: shared * v)
        vector, linear = slope + curve(moments.loc), slope_local + _times(precision, mean)
        if self.family.full:
            vector = vector + total(jnp.einsum("ukd,uk->ud", cross, mean))
            linear = linear + cross @ moments.loc
        else:
            cross = own.cross
        new = ConditionalNatural(linear, precision, cross)
        rows = jax.tree.map(lambda x, y: x.at[group, units].set(y), chunks.rows, new)
        zero = jnp.zeros_like(value)
        product = jnp.zeros_like(slope) if probe is None else curve(probe)
        return Expected(value, self.family.natural(vector, shared), product, zero, zero, zero, rows)

    def _all_derivatives(self, theta: Float[Array, "S D"], z: Float[Array, "S U K"]):
        full, width = self.family.full, z.shape[-1]

        def one(theta, z):
            forward = jax.jacfwd(lambda a: self.densities(a, z))
            value, slope = self.densities(theta, z), forward(theta)
            shared = jax.jacfwd(forward)(theta)
            pull = grad(lambda a, b: jnp.sum(self.densities(a, b)), argnums=1)
            slope_local, tangent = jax.linearize(pull, theta, z)
            zero, none = jnp.zeros_like(z), jnp.zeros_like(theta)
            local = jax.vmap(lambda e: tangent(none, zero + e))(jnp.eye(width, dtype=z.dtype))
            local = jnp.moveaxis(local, 0, -1)
            cross = jnp.zeros((0,), theta.dtype)
            if full:
                cross = jax.vmap(lambda e: tangent(e, zero))(jnp.eye(theta.shape[0], dtype=theta.dtype))
                cross = jnp.moveaxis(cross, 0, -1)
            else:
                shared = jnp.diagonal(shared, axis1=-2, axis2=-1)
                local = jnp.diagonal(local, axis1=-2, axis2=-1)
            return value, slope, -shared, slope_local, -cross, -local

        value, slope, shared, slope_local, cross, local = jax.tree.map(
            lambda x: jnp.mean(x, axis=0), jax.vmap(one)(theta, z)
        )
        if full:
            local = 0.5 * (local + jnp.swapaxes(local, -1, -2))
        return value, slope, shared, slope_local, cross, local

    def _quadratic_parts(self, shared, cross, local, moments: GaussianMoments, q: ConditionalMoments, away, out):
        """Sampled and exact means of the quadratic form: of theta by group, and of everything with z by unit."""
        scale = moments.scale
        if not self.family.full:
            sampled = jnp.mean(away**2 @ shared.T, axis=0), jnp.mean(jnp.sum(out**2 * local, -1), axis=0)
            return sampled, (shared @ scale**2, jnp.sum(local * q.root**2, -1))
        by_group = jnp.mean(jnp.einsum("sd,mde,se->sm", away, shared, away, optimize="greedy"), axis=0)
        towards = jnp.einsum("ukj,suj->suk", local, out) + 2 * jnp.einsum("ukd,sd->suk", cross, away)
        by_unit = jnp.mean(jnp.sum(towards * out, -1), axis=0)
        inherited = q.slope @ scale
        both = local @ inherited + 2 * cross @ scale
        exact = jnp.sum(inherited * both, (-2, -1)) + jnp.sum(q.root * (local @ q.root), (-2, -1))
        return (by_group, by_unit), (jnp.sum(scale * (shared @ scale), (-2, -1)), exact)


def _times(matrix: Array, vector: Array) -> Array:
    """Matrix-vector product, or the elementwise one with a diagonal."""
    return matrix * vector if matrix.ndim == vector.ndim else jnp.einsum("...ij,...j->...i", matrix, vector)
