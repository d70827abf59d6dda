"""Gaussian families over a flat unconstrained vector: full covariance and diagonal.

Both take ``T(theta) = (theta, -1/2 theta theta^T)`` (its diagonal for the mean-field family), so the natural parameters
are the precision-mean ``h = Lambda m`` and the precision ``Lambda`` themselves.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float

from .._numerics import clip_to_psd, diagonal, inverse_root, scaled_cholesky, symmetrise
from ._gaussian_base import GaussianDefaults, GaussianMean, GaussianMoments, GaussianNatural
from ._normal import ScalarNormalFamily
from ._registry import base_of, register_family

_LOG_2PI = math.log(2 * math.pi)


@dataclasses.dataclass(frozen=True)
class MultivariateNormalFamily(GaussianDefaults):
    """Gaussian with full covariance over ``dim`` unconstrained coordinates.

    Args:
        dim: D.
    """

    dim: int
    full: bool = dataclasses.field(default=True, init=False)

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype=None) -> GaussianNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return GaussianNatural(
            jnp.zeros((*batch_shape, self.dim), dtype), jnp.zeros((*batch_shape, self.dim, self.dim), dtype)
        )

    def natural(self, precision_mean, precision) -> GaussianNatural:
        """Natural parameters from a precision-mean (..., D) and a dense precision (..., D, D), symmetrised."""
        return GaussianNatural(precision_mean, symmetrise(precision))

    def symmetrise(self, natural: GaussianNatural) -> GaussianNatural:
        """Remove rounding asymmetry."""
        return GaussianNatural(natural.precision_mean, symmetrise(natural.precision))

    def precision_product(self, natural: GaussianNatural, vector) -> Float[Array, "*batch D"]:
        """``Lambda @ vector`` for a batch of precisions and one or more vectors."""
        return jnp.einsum("...ij,...j->...i", natural.precision, vector)

    def precision_diagonal(self, natural: GaussianNatural) -> Float[Array, "*batch D"]:
        """The diagonal of the precision."""
        return diagonal(natural.precision)

    def sufficient_statistics(self, theta: Float[Array, "*batch D"]) -> GaussianMean:
        """``T(theta) = (theta, -1/2 theta theta^T)``."""
        return GaussianMean(theta, -0.5 * theta[..., :, None] * theta[..., None, :])

    def moments(self, natural: GaussianNatural) -> GaussianMoments:
        """Location, covariance root and log determinant; ``valid`` is False where the precision is not positive definite."""
        factor, valid = scaled_cholesky(natural.precision)
        root = inverse_root(factor)
        loc = jnp.einsum("...ij,...kj,...k->...i", root, root, natural.precision_mean, optimize="greedy")
        # One step of iterative refinement: in float32 the location is what the sd units are measured against.
        residual = self.pull(natural, loc)
        loc = loc + jnp.einsum("...ij,...kj,...k->...i", root, root, residual, optimize="greedy")
        log_det = 2 * jnp.sum(jnp.log(diagonal(factor)), axis=-1)
        valid = valid & jnp.all(jnp.isfinite(loc), axis=-1)
        return GaussianMoments(loc, root, log_det, valid)

    def variances(self, moments: GaussianMoments) -> Float[Array, "*batch D"]:
        """Marginal variances."""
        return jnp.sum(moments.scale**2, axis=-1)

    def covariance_product(self, moments: GaussianMoments, vector) -> Float[Array, "*batch D"]:
        """``V @ vector``."""
        return jnp.einsum("ij,kj,...k->...i", moments.scale, moments.scale, vector, optimize="greedy")

    def draw(self, moments: GaussianMoments, noise: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """``loc + S @ eps`` for standard normal ``eps``."""
        return moments.loc + noise @ moments.scale.T

    def expect_quadratic(self, natural: GaussianNatural, moments: GaussianMoments) -> Float[Array, "*batch"]:
        """``<eta, mu>`` of (a batch of) natural parameters under one Gaussian given by its moments, in nats."""
        loc, root = moments.loc, moments.scale
        linear = jnp.einsum("...i,i->...", natural.precision_mean, loc)
        square = jnp.einsum("...i,i->...", self.precision_product(natural, loc), loc)
        trace = jnp.einsum("...ij,ij->...", natural.precision, root @ root.T)
        return linear - 0.5 * (square + trace)

    def log_partition(self, natural: GaussianNatural) -> Float[Array, "*batch"]:
        """``A = 1/2 h^T Lambda^-1 h - 1/2 log det Lambda + D/2 log 2 pi`` in nats; NaN where not normalisable."""
        moments = self.moments(natural)
        value = 0.5 * jnp.sum(natural.precision_mean * moments.loc, axis=-1)
        value = value - 0.5 * moments.log_det_precision + 0.5 * self.dim * _LOG_2PI
        return jnp.where(moments.valid, value, jnp.nan)

    def natural_to_mean(self, natural: GaussianNatural) -> GaussianMean:
        """``(m, -1/2 (V + m m^T))``."""
        moments = self.moments(natural)
        covariance = jnp.einsum("...ik,...jk->...ij", moments.scale, moments.scale)
        outer = moments.loc[..., :, None] * moments.loc[..., None, :]
        return GaussianMean(moments.loc, -0.5 * (covariance + outer))

    def mean_to_natural(self, mean_params: GaussianMean) -> GaussianNatural:
        """The inverse of :meth:`natural_to_mean`."""
        loc = mean_params.first
        covariance = -2 * mean_params.second - loc[..., :, None] * loc[..., None, :]
        return self.from_loc_covariance(loc, symmetrise(covariance))

    def from_loc_covariance(self, loc, covariance) -> GaussianNatural:
        """Natural parameters of a location (..., D) and a covariance (..., D, D)."""
        factor, _ = scaled_cholesky(covariance)
        root = inverse_root(factor)
        precision = jnp.einsum("...ik,...jk->...ij", root, root)
        return GaussianNatural(jnp.einsum("...ij,...j->...i", precision, loc), precision)

    def from_loc_sd(self, loc, sd) -> GaussianNatural:
        """Natural parameters of independent coordinates with locations and standard deviations (..., D)."""
        precision = 1.0 / sd**2
        return GaussianNatural(precision * loc, precision[..., :, None] * jnp.eye(self.dim, dtype=precision.dtype))

    def to_distribution(self, natural: GaussianNatural) -> dist.Distribution:
        """``MultivariateNormal`` with these natural parameters."""
        moments = self.moments(natural)
        covariance = jnp.einsum("...ik,...jk->...ij", moments.scale, moments.scale)
        return dist.MultivariateNormal(moments.loc, scale_tril=scaled_cholesky(symmetrise(covariance))[0])

    def from_distribution(self, distribution: dist.Distribution) -> GaussianNatural:
        """Natural parameters of a NumPyro ``MultivariateNormal``, in plates or not."""
        base: Any = base_of(distribution)
        shape = (*distribution.batch_shape, *distribution.event_shape)
        covariance = jnp.broadcast_to(base.covariance_matrix, (*shape, self.dim))
        return self.from_loc_covariance(jnp.broadcast_to(base.mean, shape), covariance)

    def in_domain(self, natural: GaussianNatural) -> Bool[Array, "*batch"]:
        """Whether the precision is finite and positive definite."""
        finite = jnp.all(jnp.isfinite(natural.precision_mean), axis=-1)
        return scaled_cholesky(natural.precision)[1] & finite

    def nearest_valid(self, natural: GaussianNatural) -> GaussianNatural:
        """Raise negative eigenvalues of the (scaled) precision to a small positive floor; valid parameters are unchanged."""
        floor = 10 * self.dim * float(jnp.finfo(natural.precision.dtype).eps)
        valid = self.in_domain(natural)
        clipped = clip_to_psd(natural.precision, floor)
        return GaussianNatural(natural.precision_mean, jnp.where(valid[..., None, None], natural.precision, clipped))


@dataclasses.dataclass(frozen=True)
class NormalFamily(GaussianDefaults):
    """Independent (mean-field) Gaussians over ``dim`` unconstrained coordinates.

    Args:
        dim: D.
    """

    dim: int
    full: bool = dataclasses.field(default=False, init=False)
    by_coordinate = ScalarNormalFamily()

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype=None) -> GaussianNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return GaussianNatural(jnp.zeros((*batch_shape, self.dim), dtype), jnp.zeros((*batch_shape, self.dim), dtype))

    def natural(self, precision_mean, precision) -> GaussianNatural:
        """Natural parameters from a precision-mean and a diagonal precision, both (..., D)."""
        return GaussianNatural(precision_mean, precision)

    def symmetrise(self, natural: GaussianNatural) -> GaussianNatural:
        """Diagonal precisions are symmetric already."""
        return natural

    def precision_product(self, natural: GaussianNatural, vector) -> Float[Array, "*batch D"]:
        """``Lambda * vector``."""
        return natural.precision * vector

    def precision_diagonal(self, natural: GaussianNatural) -> Float[Array, "*batch D"]:
        """The precision."""
        return natural.precision

    def sufficient_statistics(self, theta: Float[Array, "*batch D"]) -> GaussianMean:
        """``T(theta) = (theta, -1/2 theta^2)``."""
        return GaussianMean(theta, -0.5 * theta**2)

    def moments(self, natural: GaussianNatural) -> GaussianMoments:
        """Location, standard deviations and log determinant; ``valid`` is False where a precision is not positive."""
        good = jnp.isfinite(natural.precision) & (natural.precision > 0)
        precision = jnp.where(good, natural.precision, 1.0)
        loc = natural.precision_mean / precision
        valid = jnp.all(good, axis=-1) & jnp.all(jnp.isfinite(loc), axis=-1)
        return GaussianMoments(loc, 1.0 / jnp.sqrt(precision), jnp.sum(jnp.log(precision), axis=-1), valid)

    def variances(self, moments: GaussianMoments) -> Float[Array, "*batch D"]:
        """Marginal variances."""
        return moments.scale**2

    def covariance_product(self, moments: GaussianMoments, vector) -> Float[Array, "*batch D"]:
        """``V * vector``."""
        return moments.scale**2 * vector

    def draw(self, moments: GaussianMoments, noise: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        """``loc + sd * eps`` for standard normal ``eps``."""
        return moments.loc + noise * moments.scale

    def expect_quadratic(self, natural: GaussianNatural, moments: GaussianMoments) -> Float[Array, "*batch"]:
        """``<eta, mu>`` of (a batch of) natural parameters under one Gaussian given by its moments, in nats."""
        second = moments.loc**2 + moments.scale**2
        return jnp.sum(natural.precision_mean * moments.loc - 0.5 * natural.precision * second, axis=-1)

    def log_partition(self, natural: GaussianNatural) -> Float[Array, "*batch"]:
        """``A = sum_d h_d^2 / (2 lambda_d) - 1/2 log lambda_d + 1/2 log 2 pi`` in nats; NaN where not normalisable."""
        moments = self.moments(natural)
        value = 0.5 * jnp.sum(natural.precision_mean * moments.loc, axis=-1)
        value = value - 0.5 * moments.log_det_precision + 0.5 * self.dim * _LOG_2PI
        return jnp.where(moments.valid, value, jnp.nan)

    def natural_to_mean(self, natural: GaussianNatural) -> GaussianMean:
        """``(m, -1/2 (v + m^2))``."""
        moments = self.moments(natural)
        return GaussianMean(moments.loc, -0.5 * (moments.scale**2 + moments.loc**2))

    def mean_to_natural(self, mean_params: GaussianMean) -> GaussianNatural:
        """The inverse of :meth:`natural_to_mean`."""
        variance = -2 * mean_params.second - mean_params.first**2
        return GaussianNatural(mean_params.first / variance, 1.0 / variance)

    def from_loc_covariance(self, loc, covariance) -> GaussianNatural:
        """Natural parameters of a location and the diagonal of a covariance (..., D, D)."""
        return self.from_loc_sd(loc, jnp.sqrt(diagonal(covariance)))

    def from_loc_sd(self, loc, sd) -> GaussianNatural:
        """Natural parameters of locations and standard deviations (..., D)."""
        precision = 1.0 / sd**2
        return GaussianNatural(precision * loc, precision)

    def to_distribution(self, natural: GaussianNatural) -> dist.Distribution:
        """``Normal(...).to_event(1)`` with these natural parameters."""
        moments = self.moments(natural)
        return dist.Normal(moments.loc, moments.scale).to_event(1)

    def from_distribution(self, distribution: dist.Distribution) -> GaussianNatural:
        """Natural parameters of a NumPyro ``Normal(...).to_event(1)``."""
        return self.from_loc_sd(distribution.mean, jnp.sqrt(distribution.variance))

    def in_domain(self, natural: GaussianNatural) -> Bool[Array, "*batch"]:
        """Whether every precision is finite and positive."""
        good = jnp.isfinite(natural.precision) & (natural.precision > 0) & jnp.isfinite(natural.precision_mean)
        return jnp.all(good, axis=-1)

    def nearest_valid(self, natural: GaussianNatural) -> GaussianNatural:
        """Raise non-positive precisions to the smallest normal number's root; valid parameters are unchanged."""
        floor = jnp.sqrt(jnp.finfo(natural.precision.dtype).tiny)
        return GaussianNatural(natural.precision_mean, jnp.where(natural.precision > 0, natural.precision, floor))


GaussianFamily = MultivariateNormalFamily | NormalFamily

register_family(dist.MultivariateNormal, lambda distribution: MultivariateNormalFamily(distribution.event_shape[-1]))
register_family(
    dist.LowRankMultivariateNormal, lambda distribution: MultivariateNormalFamily(distribution.event_shape[-1])
)
