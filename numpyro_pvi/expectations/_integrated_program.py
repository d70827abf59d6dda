"""Factors whose groups have latents of their own, as functions of the shared latents alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._derivatives import value_and_grad
from .._numerics import inverse_root, scaled_cholesky, symmetrise
from ..families import (
    ConditionalNatural,
    GaussianFamily,
    GaussianMoments,
    GaussianNatural,
    conditional_moments,
)
from ._clouds import normal_cloud
from ._expected import Expected
from ._integrated import Integrated, as_conditional, integrate_units, nodes_of
from ._local_latents import LocalChunk

# Points of q under which values and conditionals are averaged: at least so many, and so many per latent.
_POINTS, _PER_LATENT = 32, 4
# Numbers of rows, nodes and points that are held at once.
_AT_ONCE = 1 << 20
# Seed of the points: the same at every q, so that values of two q compare.
_SEED = 0x1A7


@dataclasses.dataclass(frozen=True)
class IntegratedProgram:
    """``E_q`` of ``log p(y_m | theta)`` with a group's own latents integrated out at every theta.

    The value is that of q(theta) with the exact conditional of the local latents, ``E_q[log int p(y, z | theta) dz]``, a
    tighter bound than that of any Gaussian over both. Averages are over a fixed set of points of q whose own mean and
    covariance are q's, so that they are exact for quadratic factors.

    Args:
        unit_values: ``(data, theta, z) -> nats``, log density of every unit's observations and latents, Float[R]; z
            Float[R K] unconstrained.
        family: the Gaussian family of q(theta).
        rows: most rows that one evaluation of a chunk reads, beside the units.
    """

    unit_values: Callable[[Any, Float[Array, "D"], Float[Array, "R K"]], Float[Array, "R"]]
    family: GaussianFamily
    rows: int
    noisy: bool = dataclasses.field(default=False, init=False)

    # One pass serves all groups.
    whole = False

    def working_bytes(self, chunks: LocalChunk) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes."""
        return 4 * min(self.cost(chunks.rows.linear.shape[-1]) * self._count, 4 * _AT_ONCE)

    def cost(self, width: int) -> int:
        """Numbers that one evaluation at one theta holds."""
        return max(1, self.rows * nodes_of(width))

    @property
    def _count(self) -> int:
        return max(_POINTS, _PER_LATENT * self.family.dim)

    def integrate(self, chunk: LocalChunk, theta: Float[Array, "D"]) -> Integrated:
        """The units' integrals at one theta, searched from where their conditionals lie."""
        start = jax.lax.stop_gradient(conditional_moments(chunk.rows).mean(theta))
        return self._integrate(lambda at, z: self.unit_values(chunk.data, at, z), start, chunk.mask, theta)

    def _integrate(self, values: Callable, start, mask, theta) -> Integrated:
        still = jax.lax.stop_gradient(theta)
        start = jnp.where(jnp.isfinite(start), start, 0.0)
        return integrate_units(lambda z: values(theta, z), lambda z: values(still, z), start, mask)

    def log_density(self, chunk: LocalChunk, theta: Float[Array, "D"]) -> Float[Array, ""]:
        """``log int p(y, z | theta) dz`` of one chunk, nats; differentiable in theta."""
        return jnp.sum(self.integrate(chunk, theta).value)

    def expected(
        self, chunk: LocalChunk, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        Args:
            chunk: rows, and the conditionals from which modes are searched.
            moments: q(theta).
            probe: Float[D] vector for the curvature product, or None.
            level: unused; there is no rule to choose.
            noise: unused.
            clip: unused.

        Returns:
            The chunk's expectations, without anything of the local latents.
        """
        del level, noise, clip
        eps = self.points(moments.loc.dtype)
        look = value_and_grad(lambda theta: self.log_density(chunk, theta))
        value, slope = self._map(look, self.family.draw(moments, eps), chunk)
        return self._expected(value, slope, eps, moments, probe)

    def match(self, chunk: LocalChunk, q: GaussianNatural, moments: GaussianMoments) -> ConditionalNatural:
        """The Gaussians of the units' latents with the moments of ``q(theta) p(z | theta, y)``.

        Args:
            chunk: rows, and their conditionals as they stand.
            q: natural parameters of q(theta).
            moments: the same as moments.

        Returns:
            Natural parameters by unit: affine in theta (full), or the marginals (mean-field). A unit whose moments are
            not finite keeps its own.
        """
        eps = self.points(moments.loc.dtype)
        found = self._map(lambda theta: self.integrate(chunk, theta), self.family.draw(moments, eps), chunk)
        return self._matched(found, chunk.rows, chunk.mask, eps, q, moments)

    def points(self, dtype: Any) -> Float[Array, "S D"]:
        """The points of a standard normal that stand for q."""
        return normal_cloud(jax.random.key(_SEED), self.family.dim, self._count, dtype).eps

    def _map(self, look: Callable, points: Float[Array, "S D"], chunk: LocalChunk) -> Any:
        batch = max(1, _AT_ONCE // self.cost(chunk.rows.linear.shape[-1]))
        if batch >= points.shape[0]:
            return jax.vmap(look)(points)
        return jax.lax.map(look, points, batch_size=batch)

    def _expected(self, value, slope, eps, moments: GaussianMoments, probe: Any) -> Expected:
        """Averages over points (leading axis S; any group axis behind it), curvature by Stein's identity."""
        mean, force = jnp.mean(value, axis=0), jnp.mean(slope, axis=0)
        tilt = jnp.einsum("sd,s...e->...de", eps, slope) / eps.shape[0]
        if self.family.full:
            # S^-T E[eps g^T] is the expected Hessian.
            curve = -symmetrise(jnp.linalg.solve(moments.scale.T, tilt))
            times = lambda v: curve @ v  # noqa: E731
        else:
            curve = -jnp.diagonal(tilt, axis1=-2, axis2=-1) / moments.scale
            times = lambda v: curve * v  # noqa: E731
        zero = jnp.zeros_like(mean)
        product = jnp.zeros_like(force) if probe is None else times(probe)
        return Expected(mean, GaussianNatural(force + times(moments.loc), curve), product, zero, zero, zero)

    def _matched(self, found: Integrated, old: ConditionalNatural, mask, eps, q, moments) -> ConditionalNatural:
        center, slope, left = as_conditional(found.mean, found.covariance, eps)
        if self.family.full:
            factor, good = scaled_cholesky(left)
            root = inverse_root(factor)
            precision = root @ jnp.swapaxes(root, -1, -2)
            # S^-T: whitened slopes in theta.
            slope = slope @ (q.precision @ moments.scale).T
            cross = -precision @ slope
            linear = jnp.einsum("rkj,rj->rk", precision, center - slope @ moments.loc)
        else:
            spread = jnp.diagonal(left, axis1=-2, axis2=-1) + jnp.sum(slope**2, axis=-1)
            good = jnp.all(spread > 0, axis=-1)
            precision, cross = 1.0 / spread, old.cross
            linear = precision * center
        for x in (linear, precision, cross):
            good = good & jnp.all(jnp.isfinite(x).reshape(x.shape[0], -1), axis=-1)
        keep = good & mask & moments.valid
        return jax.tree.map(
            lambda a, b: jnp.where(keep.reshape(keep.shape + (1,) * (a.ndim - 1)), a, b),
            ConditionalNatural(linear, precision, cross),
            old,
        )


@dataclasses.dataclass(frozen=True)
class MaskedIntegratedProgram(IntegratedProgram):
    """The same for models in which every group is a full pass over all rows: one pass for all groups together.

    Args:
        group_of_unit: Int[U].
        num_groups: M.
        rest: theta to the log density of the rows that depend on no unit's latents, by group, Float[M]; None where there are
            none.
    """

    group_of_unit: Int[Array, "U"] = dataclasses.field(kw_only=True)
    num_groups: int = dataclasses.field(kw_only=True)
    rest: Callable[[Float[Array, "D"]], Float[Array, "M"]] | None = dataclasses.field(kw_only=True)

    whole = True

    def log_density(self, chunk: LocalChunk, theta: Float[Array, "D"]) -> Float[Array, ""]:
        """See :meth:`IntegratedProgram.log_density`."""
        own = super().log_density(chunk, theta)
        return own if self.rest is None else own + self.rest(theta)[chunk.data]

    def own(self, chunks: LocalChunk) -> LocalChunk:
        """All units once, each with its own group's conditional.

        Args:
            chunks: one chunk per group, of all units, stacked.

        Returns:
            One chunk.
        """
        units = jnp.arange(self.group_of_unit.shape[0])
        rows = jax.tree.map(lambda x: x[self.group_of_unit, units], chunks.rows)
        return LocalChunk(jnp.int32(0), units, self.group_of_unit >= 0, rows)

    def log_densities(self, chunks: LocalChunk, theta: Float[Array, "D"]) -> Float[Array, "M"]:
        """Every group's log density at one theta, from one pass over all rows."""
        values = self.integrate(self.own(chunks), theta).value
        total = jax.ops.segment_sum(values, self.group_of_unit, self.num_groups)
        return total if self.rest is None else total + self.rest(theta)

    def log_densities_at(self, chunks: LocalChunk, points: Float[Array, "S D"]) -> Float[Array, "S M"]:
        """The same at many points."""
        return self._map(lambda theta: self.log_densities(chunks, theta), points, chunks)

    def expected_all(self, chunks: LocalChunk, moments: GaussianMoments, probe: Any, noise: Any) -> Expected:
        """Expectations of every group: see :meth:`expected`; leading axis M.

        Args:
            chunks: one chunk per group, of all units, stacked.
            moments: q(theta).
            probe: Float[D] vector for the curvature product, or None.
            noise: unused.

        Returns:
            The groups' expectations.
        """
        del noise
        eps = self.points(moments.loc.dtype)

        def look(theta):
            value, tangent = jax.linearize(lambda at: self.log_densities(chunks, at), theta)
            return value, jax.vmap(tangent)(jnp.eye(theta.shape[0], dtype=theta.dtype)).T

        value, slope = self._map(look, self.family.draw(moments, eps), chunks)
        return self._expected(value, slope, eps, moments, probe)

    def match_all(self, chunks: LocalChunk, q: GaussianNatural, moments: GaussianMoments) -> ConditionalNatural:
        """Every unit's conditional: see :meth:`match`; in the slots of all groups' chunks."""
        found = self.match(self.own(chunks), q, moments)
        units = jnp.arange(self.group_of_unit.shape[0])
        return jax.tree.map(lambda x, y: x.at[self.group_of_unit, units].set(y), chunks.rows, found)


def owners(
    values: Callable[[Float[Array, "D"], Float[Array, "U K"]], dict[str, Float[Array, "N"]]],
    dim: int,
    shape: tuple[int, int],
    dtype: Any,
) -> dict[str, Int[Array, "N"]]:
    """Which unit's latents each row depends on, read off derivatives at a few points.

    With ``t = a_u w_k`` for a tangent of unit u's k-th latent, a row of unit u has a derivative ``a_u`` times that with
    ``a = 1``: the ratio names the unit.

    Args:
        values: ``(theta, z) -> nats`` by row and sample site.
        dim: D.
        shape: U and K.
        dtype: floating dtype.

    Returns:
        Units by sample site; -1 for rows that depend on none.
    """
    count, width = shape
    units = jnp.arange(count)
    # Two digits, each small enough to be read off a float32.
    base = max(1, int(count**0.5) + 1)
    high, low = (units // base + 1).astype(dtype), (units % base + 1).astype(dtype)
    found: dict[str, Any] = {}
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), 3)
        theta = 0.5 * jax.random.normal(keys[0], (dim,), dtype)
        z, weight = 0.5 * jax.random.normal(keys[1], shape, dtype), jax.random.uniform(keys[2], (width,), dtype) + 0.5
        _, tangent = jax.linearize(lambda z, theta=theta: values(theta, z), z)
        one, tall, small = (tangent(a[:, None] * weight) for a in (jnp.ones_like(high), high, low))
        for name in one:
            slope = one[name]
            known = jnp.isfinite(slope) & (slope != 0)
            digits = (jnp.round(x[name] / jnp.where(known, slope, 1.0)) - 1 for x in (tall, small))
            first, second = (jnp.where(known, x, 0.0).astype(jnp.int32) for x in digits)
            unit = jnp.where(known, first * base + second, -1)
            found[name] = jnp.where(found.get(name, unit) < 0, unit, found.get(name, unit))
    return found
