"""Expectations by antithetic draws with automatic derivatives: the fallback where no structure is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._derivatives import hessian_of, value_and_grad
from .._numerics import clip_to_psd
from ..families import GaussianFamily, GaussianMoments
from ._expected import Expected


@dataclasses.dataclass(frozen=True)
class DrawsProgram:
    """``E_q`` by pairs ``loc +- S eps``, with the Hessian of every draw.

    A pair is exact for linear and cubic terms; the quadratic part of the value is replaced by its closed form, so that
    a quadratic factor comes out exactly from a single pair.

    Args:
        log_density: ``(data, point) -> nats``, the factor on one chunk's rows.
        family: the Gaussian family of q.
    """

    log_density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]]
    family: GaussianFamily
    noisy: bool = dataclasses.field(default=True, init=False)

    def prepare(self, data: Any, mask: Bool[Array, "R"] | None) -> tuple:
        """Keep one chunk's arguments and mask."""
        return data, mask

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: not known of a model in general."""
        del chunks
        return 0

    def expected(
        self, chunk: tuple, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        Args:
            chunk: ``(data, mask)``.
            moments: q.
            probe: Float[D] vector for the curvature product, or None.
            level: unused; there is no rule to choose.
            noise: Float[S D] standard normal draws; each is used with both signs. One row of zeros evaluates at
                ``loc``.
            clip: whether (a bool, traced or not) to raise the curvature to positive semi-definite.

        Returns:
            The chunk's expectations.
        """
        del level
        eps = jnp.concatenate([noise, -noise])
        points = self.family.draw(moments, eps)

        def one(point):
            value, gradient = value_and_grad(self.log_density, argnums=1)(chunk, point)
            hessian = hessian_of(self.log_density, argnums=1)(chunk, point)
            return value, gradient, hessian

        value, gradient, hessian = jax.tree.map(lambda x: jnp.mean(x, axis=0), jax.vmap(one)(points))
        value = value + self._quadratic_correction(hessian, moments, points - moments.loc)
        curvature = -0.5 * (hessian + hessian.T)
        if clip is not False:
            curvature = jnp.where(clip, clip_to_psd(curvature), curvature)
        product = jnp.zeros_like(moments.loc) if probe is None else curvature @ probe
        precision = curvature if self.family.full else jnp.diagonal(curvature)
        vector = gradient + (precision @ moments.loc if self.family.full else precision * moments.loc)
        return Expected(value, self.family.natural(vector, precision), product, *(jnp.zeros_like(value),) * 3)

    def _quadratic_correction(self, hessian, moments: GaussianMoments, deviation: Float[Array, "S D"]):
        sampled = jnp.mean(jnp.einsum("si,ij,sj->s", deviation, hessian, deviation))
        if self.family.full:
            exact = jnp.sum(moments.scale * (hessian @ moments.scale))
        else:
            exact = jnp.sum(jnp.diagonal(hessian) * moments.scale**2)
        return 0.5 * (exact - sampled)
