"""Local latents integrated out, unit by unit, by quadrature about their mode at each value of the shared latents."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._derivatives import grad
from .._numerics import diagonal, inverse_root, scaled_cholesky, symmetrise

# Nodes per axis of the product rules, by the number of a unit's latents; beyond, so many quasi-random points.
_NODES = {1: 15, 2: 7, 3: 5}
_POINTS = 256
# Newton steps at most, and the step in sds after which the mode is near enough to centre a rule at.
_NEWTON_STEPS = 40
_CENTRED = 1e-3
# Roundings of its value by which a step towards the mode may fall.
_ROUNDING = 8
# Curvatures are raised to this share of the largest one, and to this number.
_LEAST_SHARE, _LEAST = 1e-6, 1e-10
_LOG_2PI = math.log(2 * math.pi)


class Integrated(NamedTuple):
    """What is left of units when their own latents z have been integrated out at one theta."""

    # log of the integral of exp f_u(theta, z) over z, nats.
    value: Float[Array, "R"]
    # Mean and covariance of z given theta and the data.
    mean: Float[Array, "R K"]
    covariance: Float[Array, "R K K"]


class _Climb(NamedTuple):
    z: Float[Array, "R K"]
    value: Float[Array, "R"]
    # Newton's step from here, the inverse root S of the curvature (S S^T its inverse), and the share of the step tried next.
    step: Float[Array, "R K"]
    root: Float[Array, "R K K"]
    share: Float[Array, "R"]
    # Length of the step in sds.
    length: Float[Array, "R"]
    count: Any


def integrate_units(
    values: Callable[[Float[Array, "R K"]], Float[Array, "R"]],
    frozen: Callable[[Float[Array, "R K"]], Float[Array, "R"]],
    start: Float[Array, "R K"],
    mask: Bool[Array, "R"],
) -> Integrated:
    r"""Integrate every unit's own latents out of ``exp f_u(theta, z_u)``.

    With ``z^`` the mode of ``f_u(theta, .)``, ``S S^T`` the inverse of its curvature there and nodes ``x_i`` with weights
    ``w_i`` for the standard normal, adaptive Gauss-Hermite quadrature is

        log int exp f(z) dz = log |S| + K/2 log 2 pi + log sum_i w_i exp(f(z^ + S x_i) + 1/2 |x_i|^2),

    exact where f is quadratic in z, whatever its width. Nodes do not move with theta when this is differentiated: the
    derivative is the mean of ``df/dtheta`` over z given theta and the data, as it is of the integral itself.

    Args:
        values: z of all units to the log density of every unit, nats; differentiable in what it closes over.
        frozen: the same with theta held fixed for differentiation, for the search of the mode.
        start: where to search from.
        mask: which units count; the others' values are zero.

    Returns:
        The integrals, and the moments of z.

    References:
        Liu and Pierce, A note on Gauss-Hermite quadrature, Biometrika 81 (1994), eq. 3. Pinheiro and Bates, Approximations
        to the log-likelihood function in the nonlinear mixed-effects model, JCGS 4 (1995), section 2.4.
    """
    width, dtype = start.shape[-1], start.dtype
    nodes, log_weight = (jnp.asarray(x, dtype) for x in _rule(width))
    found = jax.lax.stop_gradient(_climb(lambda z: jnp.where(mask, frozen(z), 0.0), start, mask))
    z = found.z + jnp.einsum("rkj,ij->irk", found.root, nodes)
    logs = jax.vmap(lambda z: jnp.where(mask, values(z), 0.0))(z)
    logs = logs + (log_weight + 0.5 * jnp.sum(nodes**2, axis=-1))[:, None]
    # A node where the density overflows has no weight.
    logs = jnp.where(jnp.isnan(logs), -jnp.inf, logs)
    scale = jnp.sum(jnp.log(jnp.abs(diagonal(found.root))), axis=-1) + 0.5 * width * _LOG_2PI
    value = jnp.where(mask, jax.nn.logsumexp(logs, axis=0) + scale, 0.0)
    share = jax.nn.softmax(logs, axis=0)
    mean = jnp.einsum("ir,irk->rk", share, z)
    gap = z - mean
    return Integrated(value, mean, symmetrise(jnp.einsum("ir,irk,irj->rkj", share, gap, gap)))


def _climb(values: Callable, start: Float[Array, "R K"], mask: Bool[Array, "R"]) -> _Climb:
    """The mode of every unit by Newton's method, each unit's step halved while its value would fall."""
    basis = jnp.eye(start.shape[-1], dtype=start.dtype)
    eps = jnp.finfo(start.dtype).eps

    def slope(z):
        return grad(lambda z: (jnp.sum(own := values(z)), own), has_aux=True)(z)

    def look(z):
        # Units do not see each other's latents: one tangent moves the k-th coordinate of all of them.
        (gradient, value), tangent = jax.linearize(slope, z)
        hessian = jax.vmap(lambda e: tangent(jnp.zeros_like(z) + e)[0])(basis)
        root = _curvature_root(-jnp.moveaxis(hessian, 0, -1), mask)
        white = jnp.einsum("rkj,rk->rj", root, gradient)
        length = jnp.sqrt(jnp.sum(white**2, axis=-1))
        return value, jnp.einsum("rkj,rj->rk", root, white), root, length

    def unfinished(climb: _Climb):
        busy = mask & ~(climb.length < _CENTRED) & (climb.share > 1e-6)
        return jnp.any(busy) & (climb.count < _NEWTON_STEPS)

    def advance(climb: _Climb) -> _Climb:
        z = climb.z + climb.share[:, None] * climb.step
        value, step, root, length = look(z)
        usable = jnp.isfinite(value) & jnp.isfinite(length) & jnp.all(jnp.isfinite(root), axis=(-2, -1))
        lowest = climb.value - _ROUNDING * eps * jnp.abs(climb.value)
        good = usable & ((value >= lowest) | ~jnp.isfinite(climb.value))
        share = jnp.where(good, jnp.minimum(2 * climb.share, 1.0), 0.25 * climb.share)
        new = _Climb(z, value, step, root, share, length, climb.count + 1)
        old = climb._replace(share=share, count=climb.count + 1)
        return _Climb(*(_pick(good, a, b) for a, b in zip(new[:-1], old[:-1], strict=True)), climb.count + 1)

    # The first step is none: the place where the search starts is looked at in the loop, so that one program does both.
    count = start.shape[0]
    low, one = jnp.full((count,), -jnp.inf, start.dtype), jnp.ones((count,), start.dtype)
    root = jnp.broadcast_to(basis, (count, *basis.shape))
    first = _Climb(start, low, jnp.zeros_like(start), root, one, jnp.inf * one, jnp.int32(0))
    return jax.lax.while_loop(unfinished, advance, first)


def _pick(good: Bool[Array, "R"], new: Array, old: Array) -> Array:
    return jnp.where(good.reshape(good.shape + (1,) * (new.ndim - 1)), new, old)


def _curvature_root(curvature: Float[Array, "R K K"], mask: Bool[Array, "R"]) -> Float[Array, "R K K"]:
    """``S`` with ``S S^T`` the inverse of the curvature, its eigenvalues by size: a saddle is left, not approached."""
    width = curvature.shape[-1]
    curvature = jnp.where(mask[:, None, None], curvature, jnp.eye(width, dtype=curvature.dtype))
    if width == 1:
        return 1.0 / jnp.sqrt(jnp.maximum(jnp.abs(curvature), _LEAST))
    values, vectors = jnp.linalg.eigh(symmetrise(jnp.where(jnp.isfinite(curvature), curvature, 0.0)))
    size = jnp.abs(values)
    size = jnp.maximum(size, jnp.maximum(_LEAST_SHARE * jnp.max(size, axis=-1, keepdims=True), _LEAST))
    factor, _ = scaled_cholesky(jnp.einsum("rik,rk,rjk->rij", vectors, size, vectors))
    return inverse_root(factor)


@functools.cache
def _rule(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and log weights for a standard normal in so many dimensions."""
    if width in _NODES:
        nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES[width])
        points = np.stack([g.ravel() for g in np.meshgrid(*[nodes] * width, indexing="ij")], axis=-1)
        logs = np.log(weights / weights.sum())
        return points, np.sum([g.ravel() for g in np.meshgrid(*[logs] * width, indexing="ij")], axis=0)
    from scipy.special import ndtri
    from scipy.stats import qmc

    sobol = qmc.Sobol(width, scramble=True, rng=np.random.default_rng(0)).random(_POINTS // 2)
    half = ndtri(np.clip(sobol, 1.0 / _POINTS, 1.0 - 1.0 / _POINTS))
    points = np.concatenate([half, -half])
    back = np.linalg.inv(np.linalg.cholesky(points.T @ points / _POINTS))
    return points @ back.T, np.full(_POINTS, -math.log(_POINTS))


def nodes_of(width: int) -> int:
    """Points at which a unit's density is looked at for one integral over ``width`` latents."""
    return _NODES[width] ** width if width in _NODES else _POINTS


def as_conditional(
    mean: Float[Array, "S R K"], covariance: Float[Array, "S R K K"], eps: Float[Array, "S D"]
) -> tuple[Float[Array, "R K"], Float[Array, "R K D"], Float[Array, "R K K"]]:
    """The affine Gaussian of z given whitened theta with the first two moments of (theta, z).

    Args:
        mean: of z given theta, at the points.
        covariance: of z given theta.
        eps: the points, whose own mean is 0 and whose own covariance is the identity.

    Returns:
        Mean at the centre, slope, and what covariance is left.
    """
    center = jnp.mean(mean, axis=0)
    slope = jnp.einsum("srk,sd->rkd", mean, eps) / eps.shape[0]
    # What the line leaves is squared itself: no difference of large numbers.
    rest = mean - center - jnp.einsum("rkd,sd->srk", slope, eps)
    left = jnp.mean(covariance, axis=0) + jnp.einsum("srk,srj->rkj", rest, rest) / eps.shape[0]
    return center, slope, symmetrise(left)
