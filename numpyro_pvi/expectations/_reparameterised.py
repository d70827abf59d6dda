"""Expectations by antithetic reparameterised draws for a mean-field q in many dimensions: nothing is D x D."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._derivatives import grad, value_and_grad
from ..families import GaussianMoments, NormalFamily
from ._expected import Expected

# Pairs from which the correction by the others' coefficient lowers the variance.
_ENOUGH = 6


@dataclasses.dataclass(frozen=True)
class ReparameterisedProgram:
    """``E_q`` by pairs ``theta = loc +- sd * eps``, with two gradients and no Hessian a pair.

    The gradient is ``E[grad f]``; the diagonal of the curvature is Stein's identity under the reparameterisation,

        -E[hess f]_dd = -E[(eps_d / sd_d) grad_d f],

    from the half-difference of a pair's gradients, which the gradient at ``loc`` has left. The part of it that is
    proportional to ``eps_d^2 - 1`` (all of it for a factor that is quadratic and separable) is taken off with the
    coefficient that the *other* draws give, so that the estimate stays unbiased (of S pairs this leaves a variance of
    8 / (S (S - 1)) squared curvatures in place of 2 / S, so it is done from six pairs on). It needs no second derivative, hence is
    right where the gradient jumps (ReLU, Laplace). Memory is a handful of vectors of length D, whatever the number of
    draws.

    Args:
        log_density: ``(data, point) -> nats``, the factor on one chunk's rows.
        family: the mean-field Gaussian family of q.

    References:
        Khan and Rue, The Bayesian Learning Rule, eq. 10 and 11 (Bonnet's and Price's theorems).
    """

    log_density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]]
    family: NormalFamily
    noisy: bool = dataclasses.field(default=True, init=False)

    def prepare(self, data: Any, mask: Bool[Array, "R"] | None) -> tuple:
        """Keep one chunk's arguments and mask."""
        return data, mask

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: a few vectors of length D."""
        del chunks
        return 8 * self.family.dim * jnp.dtype(jnp.result_type(float)).itemsize

    def expected(
        self, chunk: tuple, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        Args:
            chunk: ``(data, mask)``.
            moments: q.
            probe: Float[D] vector for the curvature product, or None. The product is a central difference of the mean
                gradient along it, on the same draws.
            level: unused; there is no rule to choose.
            noise: Float[S D] standard normal draws; each is used with both signs.
            clip: whether (a bool, traced or not) to raise negative curvatures to zero.

        Returns:
            The chunk's expectations.
        """
        del level
        loc, sd = moments.loc, moments.scale
        value_and_gradient = value_and_grad(self.log_density, argnums=1)
        zero = jnp.zeros_like(loc)

        def pair(total, eps):
            value, gradient, bend, weighted, product = total
            up, grad_up = value_and_gradient(chunk, loc + sd * eps)
            down, grad_down = value_and_gradient(chunk, loc - sd * eps)
            turn = 0.5 * eps * (grad_up - grad_down)
            product = product if probe is None else product + self._secant(chunk, moments, eps, probe)
            added = (value + 0.5 * (up + down), gradient + 0.5 * (grad_up + grad_down))
            return (*added, bend + turn, weighted + turn * eps**2, product), None

        first = (jnp.zeros((), loc.dtype), zero, zero, zero, zero)
        totals, _ = jax.lax.scan(pair, first, noise)
        count = noise.shape[0]
        value, gradient, bend, weighted, product = totals
        if count >= _ENOUGH:
            square = jnp.sum(noise**2, axis=0)
            bend = bend - (bend * (square - count + 1) - weighted) / (count - 1)
        precision = -bend / (count * sd)
        if clip is not False:
            precision = jnp.where(clip, jnp.clip(precision, 0.0, None), precision)
        gradient = gradient / count
        target = self.family.natural(gradient + precision * loc, precision)
        nothing = jnp.zeros((), loc.dtype)
        return Expected(value / count, target, product / count, nothing, nothing, nothing)

    def _secant(self, chunk: tuple, moments: GaussianMoments, eps, probe) -> Float[Array, "D"]:
        """``-E[hess f] @ probe`` from one draw: a difference of gradients sees the jumps that a Hessian misses."""
        gradient = grad(self.log_density, argnums=1)
        point = moments.loc + moments.scale * eps
        return 0.5 * (gradient(chunk, point - probe) - gradient(chunk, point + probe))
