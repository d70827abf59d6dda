"""Expectations from values and gradients at symmetric points: sigma points, and random rotations of them.

A set of P antithetic pairs ``loc +- S eps_k`` with weights ``w_k``, ``sum_k w_k eps_k eps_k^T = I``, and its centre give

    E[f]      =  f(loc) + sum_k w_k ((f_k^+ + f_k^-) / 2 - f(loc)),
    E[grad f] =  the same sum over gradients,
    E[hess f] =  sym S^-T sum_k w_k eps_k (g_k^+ - g_k^-)^T / 2         (Stein's identity, E[Lambda (theta - m) grad f^T]),

all exact for cubic f. The gradient may jump: no second derivative is ever taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .._derivatives import value_and_grad
from .._numerics import clip_to_psd, invert_lower
from ..families import GaussianFamily, GaussianMoments
from ._expected import Expected

# Low-discrepancy steps of the radii: any run of them is spread evenly.
_GOLDEN = 0.6180339887498949
_QUANTILES = 1025


class PointSet(NamedTuple):
    """Antithetic pairs in whitened coordinates, in blocks that are complete rules of their own; their mean counts."""

    eps: Float[Array, "R P D"]
    weight: Float[Array, "R P"]
    # How many of the blocks are in use; the others have weight 0.
    count: Int[Array, ""] | int
    # Whether gradients are wanted; values alone cost a third.
    slopes: Bool[Array, ""] | bool = True


@dataclasses.dataclass(frozen=True)
class PointsProgram:
    """``E_q`` of a factor without structure, by values and gradients.

    Args:
        log_density: ``(data, point) -> nats``, the factor on one chunk's rows.
        family: the Gaussian family of q.
        mode: "sigma_points" (the same points at every q), "stein" (fresh random rotations and radii every round), or
            "auto" (sigma points while a few random draws agree with them).
        num_pairs: antithetic pairs of a random set, rounded up to whole rotations.
    """

    log_density: Callable[[Any, Float[Array, "D"]], Float[Array, ""]]
    family: GaussianFamily
    mode: str = "auto"
    num_pairs: int = 16

    @property
    def noisy(self) -> bool:
        """Whether rounds need draws."""
        return self.mode != "sigma_points"

    def prepare(self, data: Any, mask: Bool[Array, "R"] | None) -> tuple:
        """Keep one chunk's arguments and mask."""
        return data, mask

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one chunk holds beside its arrays, in bytes: not known of a model in general."""
        del chunks
        return 0

    def draw(self, key: Any, dtype: Any) -> PointSet | None:
        """A round's random points, or None where none are needed."""
        if not self.noisy:
            return None
        return random_points(key, self.family.dim, self.num_pairs, dtype)

    def choose(
        self, random: PointSet | None, sampled: Bool[Array, ""] | bool, dtype: Any, trial: bool = False
    ) -> PointSet:
        """The points to use.

        Args:
            random: what :meth:`draw` gave, or None.
            sampled: whether random points take the place of sigma points ("auto" only).
            dtype: of the sigma points.
            trial: whether values alone will do of random points.

        Returns:
            Sigma points or the random ones, as the mode and the flag say.
        """
        sigma = sigma_points(self.family.dim, dtype)
        if random is None or self.mode == "sigma_points":
            return sigma
        if self.mode == "stein":
            return random._replace(slopes=not trial)
        spare = random.eps.shape[0] - sigma.eps.shape[0]
        padded = [jnp.pad(x, [(0, spare)] + [(0, 0)] * (x.ndim - 1)) for x in (sigma.eps, sigma.weight)]
        return PointSet(
            jnp.where(sampled, random.eps, padded[0]),
            jnp.where(sampled, random.weight, padded[1]),
            jnp.where(sampled, random.count, sigma.count),
            jnp.logical_not(sampled) if trial else True,
        )

    def expected(
        self, chunk: Any, moments: GaussianMoments, probe: Any, level: Any, noise: PointSet, clip: Any
    ) -> Expected:
        """Expectations of one chunk.

        Args:
            chunk: the chunk's data.
            moments: q.
            probe: Float[D] vector for the curvature product, or None.
            level: a Python int where the result is to be differentiated in reverse mode; not used otherwise.
            noise: the points.
            clip: whether (a bool, traced or not) to raise the curvature to positive semi-definite.

        Returns:
            The chunk's expectations.
        """
        if noise.slopes is True:
            value, gradient, cross = self._sums(chunk, moments, noise, unrolled=isinstance(level, int))
        elif noise.slopes is False:
            value, gradient, cross = self._values(chunk, moments, noise)
        else:
            value, gradient, cross = jax.lax.cond(
                noise.slopes,
                lambda: self._sums(chunk, moments, noise, unrolled=False),
                lambda: self._values(chunk, moments, noise),
            )
        curvature = -self._from_whitened(moments, cross)
        if clip is not False:
            clipped = clip_to_psd(curvature) if self.family.full else jnp.clip(curvature, 0.0, None)
            curvature = jnp.where(clip, clipped, curvature)
        product = jnp.zeros_like(moments.loc)
        if probe is not None:
            product = curvature @ probe if self.family.full else self._dense(moments, cross) @ probe
        pull = curvature @ moments.loc if self.family.full else curvature * moments.loc
        return Expected(value, self.family.natural(gradient + pull, curvature), product, *(jnp.zeros_like(value),) * 3)

    def pair(self, chunk: Any, moments: GaussianMoments, eps: Float[Array, "D"]) -> Expected:
        """One antithetic pair of draws, in the form that chunks are summed in.

        Args:
            chunk: the chunk's data.
            moments: q.
            eps: a standard normal draw.

        Returns:
            ``value`` and ``target.precision_mean`` are the means of the two values and gradients, ``product`` is half
            the difference of the gradients; the rest is zero.
        """
        points = self.family.draw(moments, jnp.stack([eps, -eps]))
        value, gradient = self._look(chunk, points)
        zeros = self.family.zeros((), eps.dtype)
        target = dataclasses.replace(zeros, precision_mean=jnp.mean(gradient, axis=0))
        odd = 0.5 * (gradient[0] - gradient[1])
        return Expected(jnp.mean(value), target, odd, *(jnp.zeros((), eps.dtype),) * 3)

    def _values(self, chunk, moments: GaussianMoments, points: PointSet):
        """As :meth:`_sums` with zeros for everything but the value."""
        dim = self.family.dim
        eps = points.eps.reshape(-1, dim)
        at = self.family.draw(moments, jnp.concatenate([jnp.zeros((1, dim), eps.dtype), eps, -eps]))
        value = jax.vmap(lambda point: self.log_density(chunk, point))(at)
        plus, minus = jnp.split(value[1:], 2)
        even = points.weight.reshape(-1) @ (0.5 * (plus + minus) - value[0])
        total = value[0] + even / jnp.asarray(points.count, even.dtype)
        return total, jnp.zeros((dim,), eps.dtype), jnp.zeros((dim, dim), eps.dtype)

    def _look(self, chunk, points):
        return jax.vmap(lambda point: value_and_grad(self.log_density, argnums=1)(chunk, point))(points)

    def _sums(self, chunk, moments: GaussianMoments, points: PointSet, unrolled: bool):
        """Value, gradient and ``sum_k w_k eps_k (g_k^+ - g_k^-)^T / 2``, averaged over the blocks in use."""
        blocks, pairs, dim = points.eps.shape

        def block(eps, weight):
            centre = jnp.zeros((1, dim), eps.dtype)
            value, gradient = self._look(chunk, self.family.draw(moments, jnp.concatenate([centre, eps, -eps])))
            plus, minus = slice(1, pairs + 1), slice(pairs + 1, None)
            even = weight @ (0.5 * (value[plus] + value[minus]) - value[0])
            slope = weight @ (0.5 * (gradient[plus] + gradient[minus]) - gradient[0])
            cross = (weight[:, None] * eps).T @ (0.5 * (gradient[plus] - gradient[minus]))
            return value[0] + even, gradient[0] + slope, cross

        if blocks == 1:
            return block(points.eps[0], points.weight[0])
        if unrolled:
            used = jnp.arange(blocks) < points.count
            found = jax.lax.map(lambda xs: block(*xs), (points.eps, points.weight))
            totals = jax.tree.map(lambda x: jnp.tensordot(used.astype(x.dtype), x, axes=1), found)
        else:
            # One trace serves for the shapes and for the loop.
            block = jax.jit(block, inline=True)
            shapes = jax.eval_shape(block, points.eps[0], points.weight[0])
            zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            totals = jax.lax.fori_loop(
                0,
                points.count,
                lambda i, total: jax.tree.map(jnp.add, total, block(points.eps[i], points.weight[i])),
                zero,
            )
        return jax.tree.map(lambda x: x / jnp.asarray(points.count, x.dtype), totals)

    def _dense(self, moments: GaussianMoments, cross: Float[Array, "D D"]) -> Float[Array, "D D"]:
        """``-E[hess f]`` under a mean-field q, its off-diagonal entries included."""
        scaled = cross / moments.scale[:, None]
        return -0.5 * (scaled + scaled.T)

    def _from_whitened(self, moments: GaussianMoments, cross: Float[Array, "D D"]) -> Array:
        if not self.family.full:
            return jnp.diagonal(cross) / moments.scale
        hessian = invert_lower(moments.scale.T) @ cross
        return 0.5 * (hessian + hessian.T)


@cache
def _sigma_arrays(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs and weights of the sigma points: exact to degree 7 or more in one dimension, 5 in two and three, 3 above."""
    if dim == 1:
        nodes, weights = np.polynomial.hermite_e.hermegauss(8)
        return nodes[4:, None], 2 * weights[4:] / weights.sum()
    if dim == 2:
        angles = np.pi / 4 * np.arange(4)
        return 2 * np.stack([np.cos(angles), np.sin(angles)], axis=1), np.full(4, 1 / 8)
    if dim == 3:
        golden = (1 + 5**0.5) / 2
        corners = [np.roll([0, 1, sign * golden], k) for k in range(3) for sign in (1, -1)]
        return np.sqrt(5 / (1 + golden**2)) * np.array(corners), np.full(6, 1 / 10)
    return np.sqrt(dim) * np.eye(dim), np.full(dim, 1 / dim)


def sigma_points(dim: int, dtype: Any) -> PointSet:
    """The same points at every q: ``+- sqrt(D) e_i``, and rules of higher degree in up to three dimensions.

    Args:
        dim: D.
        dtype: of the arrays.

    Returns:
        One block of D pairs (4, 4 and 6 for D = 1, 2, 3).
    """
    eps, weight = _sigma_arrays(dim)
    return PointSet(jnp.asarray(eps[None], dtype), jnp.asarray(weight[None], dtype), 1)


@cache
def _radius_quantiles(dim: int) -> np.ndarray:
    """Quantiles of the chi distribution with ``dim + 2`` degrees of freedom at evenly spaced levels."""
    grid = np.linspace(0.0, np.sqrt(dim + 2) + 9.0, 200_001)
    with np.errstate(divide="ignore"):
        log_density = (dim + 1) * np.log(grid) - 0.5 * grid**2
    cumulative = np.cumsum(np.exp(log_density - log_density.max()))
    levels = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return np.interp(levels, cumulative / cumulative[-1], grid)


def random_points(key: Any, dim: int, num_pairs: int, dtype: Any) -> PointSet:
    """Randomly rotated orthogonal axes with random radii: unbiased, and exact for cubics in every draw.

    Along a random axis a pair at radius r has weight ``1 / r^2``; the density of a standard normal's radius times
    ``r^2 / D`` is that of a chi variable with D + 2 degrees of freedom, so radii are drawn from that, evenly spread.

    Args:
        key: random key.
        dim: D.
        num_pairs: pairs wanted, rounded up to whole blocks.
        dtype: of the arrays.

    Returns:
        Blocks of as many pairs as :func:`sigma_points` has.

    References:
        Genz and Monahan, Stochastic integration rules for infinite regions, SIAM J. Sci. Comput. 19 (1998), degree 3.
    """
    pairs = _sigma_arrays(dim)[0].shape[0]
    blocks, rotations = -(-num_pairs // pairs), pairs // dim
    axes_key, shift_key = jax.random.split(key)
    gaussian = jax.random.normal(axes_key, (blocks * rotations, dim, dim), dtype)
    axes = jnp.linalg.qr(gaussian)[0].reshape(blocks, pairs, dim)
    steps = np.asarray(_GOLDEN * np.arange(blocks * pairs) % 1.0)
    level = (jax.random.uniform(shift_key, (), dtype) + jnp.asarray(steps, dtype)) % 1.0
    table = jnp.asarray(_radius_quantiles(dim), dtype)
    radius = jnp.interp(level * _QUANTILES - 0.5, jnp.arange(_QUANTILES, dtype=dtype), table).reshape(blocks, pairs)
    return PointSet(axes * radius[..., None], 1.0 / (rotations * radius**2), blocks)
