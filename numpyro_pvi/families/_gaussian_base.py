"""Parameters of Gaussians over a flat vector, and what their families share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._numerics import lower_to_symmetric, symmetric_to_lower, symmetrise
from ._base import FamilyDefaults, Vector, natural_parameters

_LOG_2PI = math.log(2 * math.pi)


@natural_parameters
class GaussianNatural(Vector):
    """Natural parameters of a Gaussian: full (``precision`` is D x D) or diagonal (``precision`` is D)."""

    precision_mean: Float[Array, "*batch D"]
    precision: Float[Array, "..."]


@natural_parameters
class GaussianMean(Vector):
    """Mean parameters ``E[T]``: ``first = E[theta]`` and ``second = -1/2 E[theta theta^T]`` (or its diagonal)."""

    first: Float[Array, "*batch D"]
    second: Float[Array, "..."]


class GaussianMoments(NamedTuple):
    """A Gaussian as a location and a square root of its covariance, with its log determinant and a validity flag."""

    loc: Float[Array, "*batch D"]
    # Full: S with S S^T the covariance. Diagonal: standard deviations.
    scale: Float[Array, "..."]
    # log det of the precision, in nats.
    log_det_precision: Float[Array, "*batch"]
    valid: Bool[Array, "*batch"]


# Coordinates up to which D x D products are next to nothing.
_SMALL = 256


def product_variances(
    loc: Float[Array, "*batch I"],
    variance: Float[Array, "*batch I"],
    other: Float[Array, "*batch J"],
    other_variance: Float[Array, "*batch J"],
    covariance: Float[Array, "*batch I J"],
) -> Float[Array, "*batch I J"]:
    """Variances of the products ``x_i y_j`` of jointly Gaussian x and y (Isserlis).

    Args:
        loc: means of x.
        variance: its variances.
        other: means of y.
        other_variance: its variances.
        covariance: of x with y.

    Returns:
        ``V_i W_j + C_ij^2 + m_i^2 W_j + n_j^2 V_i + 2 m_i n_j C_ij``.
    """
    x, v, y, w = loc[..., :, None], variance[..., :, None], other[..., None, :], other_variance[..., None, :]
    return v * w + covariance**2 + x**2 * w + y**2 * v + 2 * x * y * covariance


class GaussianDefaults(FamilyDefaults):
    """Entropy, divergence, draws and Fisher metric of a Gaussian family that has ``moments``."""

    dim: int
    full: bool

    @property
    def event_shape(self) -> tuple[int, ...]:
        """``(D,)``."""
        return (self.dim,)

    def sample(self: Any, natural: GaussianNatural, key: Array, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Draws ``loc + S eps`` of shape ``shape + batch + (D,)``; reparameterised."""
        moments = self.moments(natural)
        noise = jax.random.normal(key, (*shape, *moments.loc.shape), moments.loc.dtype)
        spread = jnp.einsum("...ij,...j->...i", moments.scale, noise) if self.full else moments.scale * noise
        return moments.loc + spread

    def entropy(self: Any, natural: GaussianNatural) -> Float[Array, "*batch"]:
        """``D/2 (1 + log 2 pi) - 1/2 log det Lambda`` in nats."""
        return 0.5 * self.dim * (1 + _LOG_2PI) - 0.5 * self.moments(natural).log_det_precision

    def kl(self: Any, natural: GaussianNatural, other: GaussianNatural) -> Float[Array, "*batch"]:
        """KL(q || p) in nats: ``1/2 {tr(Lambda_p V_q) - D + d^T Lambda_p d + log det Lambda_q - log det Lambda_p}``."""
        q, p = self.moments(natural), self.moments(other)
        gap = q.loc - p.loc
        square = jnp.sum(gap * self.precision_product(other, gap), axis=-1)
        if self.full:
            trace = jnp.einsum("...ij,...ik,...kj->...", q.scale, other.precision, q.scale)
        else:
            trace = jnp.sum(other.precision * q.scale**2, axis=-1)
        return 0.5 * (trace - self.dim + square + q.log_det_precision - p.log_det_precision)

    def sds(self: Any, moments: GaussianMoments) -> Float[Array, "*batch D"]:
        """Marginal standard deviations."""
        return jnp.sqrt(self.variances(moments))

    @property
    def num_moves(self) -> int:
        """Length of what :meth:`moves` gives: means and log sds."""
        return 2 * self.dim

    @property
    def degrees(self) -> int:
        """Coordinates that an optimiser of q moves: those of the location."""
        return self.dim

    def standard(self: Any, dtype: Any) -> GaussianMoments:
        """The standard normal, to fill a memory with before there is a q."""
        return self.moments(self.from_loc_sd(jnp.zeros((self.dim,), dtype), jnp.ones((self.dim,), dtype)))

    def moves(self: Any, new: GaussianMoments, old: GaussianMoments) -> Float[Array, "two_D"]:
        """How far apart two Gaussians are: differences of means in the new one's sds, then of log sds."""
        sd, before = self.sds(new), self.sds(old)
        return jnp.concatenate([(new.loc - old.loc) / sd, jnp.log(sd) - jnp.log(before)])

    def pull(self: Any, change: GaussianNatural, loc: Float[Array, "..."]) -> Float[Array, "*batch D"]:
        """``dh - dLambda m``: what a change of natural parameters is to the gradient of log q at its location."""
        return change.precision_mean - self.precision_product(change, loc)

    def shift(self: Any, change: GaussianNatural, moments: GaussianMoments) -> Float[Array, "*batch D"]:
        """First-order change of the location by a change (or a stack of them) of natural parameters, in sds."""
        return self.covariance_product(moments, self.pull(change, moments.loc)) / self.sds(moments)

    def effect(
        self: Any, change: GaussianNatural, moments: GaussianMoments, exact: Any = True
    ) -> Float[Array, "*batch two_D"]:
        """First-order change of the location, in sds, and of the log sds, by a change of natural parameters.

        Args:
            change: of the natural parameters; a leading axis may stack several.
            moments: where.
            exact: whether log sds are wanted of many coordinates with full covariance, which takes D x D products; 0 without.

        Returns:
            ``(V (dh - dLambda m)) / sd`` and ``-1/2 diag(V dLambda V) / sd^2``.
        """
        variance, shift = self.variances(moments), self.shift(change, moments)
        if not self.full:
            return jnp.concatenate([shift, -0.5 * change.precision * variance], axis=-1)

        def bent(precision: Array) -> Array:
            return jnp.sum((moments.scale @ (moments.scale.T @ precision @ moments.scale)) * moments.scale, axis=-1)

        if self.dim <= _SMALL:
            stretch = bent(change.precision) if change.precision.ndim == 2 else jax.lax.map(bent, change.precision)
        else:
            zeros = jnp.zeros_like(shift)
            stretch = zeros if shift.ndim > 1 else jax.lax.cond(exact, lambda: bent(change.precision), lambda: zeros)
        return jnp.concatenate([shift, -0.5 * stretch / variance], axis=-1)

    def log_partition_parts(
        self, natural: GaussianNatural, moments: GaussianMoments
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """A(eta) up to a constant, in nats, in two parts: ``1/2 h^T m`` and ``-1/2 log det Lambda``."""
        return 0.5 * jnp.vdot(natural.precision_mean, moments.loc), -0.5 * moments.log_det_precision

    def to_minimal(self, natural: GaussianNatural) -> Float[Array, "*batch P"]:
        """The precision-mean, then the precision (its lower triangle for a full covariance)."""
        second = symmetric_to_lower(natural.precision) if self.full else natural.precision
        return jnp.concatenate([natural.precision_mean, second], axis=-1)

    def from_minimal(self, coordinates: Float[Array, "*batch P"]) -> GaussianNatural:
        """The inverse of :meth:`to_minimal`."""
        first, second = coordinates[..., : self.dim], coordinates[..., self.dim :]
        return GaussianNatural(first, lower_to_symmetric(second, self.dim) if self.full else second)

    def fisher_product(self: Any, natural: GaussianNatural, tangent: GaussianNatural) -> GaussianMean:
        """``dm = V (dh - dLambda m)``, ``dV = -V dLambda V`` as mean parameters; see :class:`Family`."""
        moments = self.moments(natural)
        loc = moments.loc
        if not self.full:
            variance = moments.scale**2
            first = variance * (tangent.precision_mean - tangent.precision * loc)
            return GaussianMean(first, 0.5 * variance**2 * tangent.precision - loc * first)
        covariance = jnp.einsum("...ik,...jk->...ij", moments.scale, moments.scale)
        pulled = self.pull(tangent, loc)
        first = jnp.einsum("...ij,...j->...i", covariance, pulled)
        spread = jnp.einsum("...ij,...jk,...kl->...il", covariance, tangent.precision, covariance)
        return GaussianMean(first, symmetrise(0.5 * spread - loc[..., :, None] * first[..., None, :]))

    def fisher_diagonal(self: Any, natural: GaussianNatural) -> GaussianNatural:
        """Variances of ``theta`` and of ``-1/2 theta theta^T``, in the places of the natural parameters."""
        moments = self.moments(natural)
        loc, variance = moments.loc, self.variances(moments)
        if not self.full:
            return GaussianNatural(variance, variance * (0.5 * variance + loc**2))
        covariance = jnp.einsum("...ik,...jk->...ij", moments.scale, moments.scale)
        return GaussianNatural(variance, 0.25 * product_variances(loc, variance, loc, variance, covariance))

    def fisher_solve(self: Any, natural: GaussianNatural, tangent: GaussianMean) -> GaussianNatural:
        """``dLambda = -Lambda dV Lambda``, ``dh = dLambda m + Lambda dm``: products only; see :class:`Family`."""
        loc, first = self.moments(natural).loc, tangent.first
        if not self.full:
            precision = natural.precision**2 * (2 * tangent.second + 2 * loc * first)
            return GaussianNatural(precision * loc + natural.precision * first, precision)
        spread = symmetrise(2 * tangent.second + 2 * loc[..., :, None] * first[..., None, :])
        precision = symmetrise(jnp.einsum("...ij,...jk,...kl->...il", natural.precision, spread, natural.precision))
        vector = jnp.einsum("...ij,...j->...i", precision, loc) + self.precision_product(natural, first)
        return GaussianNatural(vector, precision)
