"""Wishart distributions of precision matrices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from jaxtyping import Array, Bool, Float

from .._numerics import (
    above_minus_one,
    clip_to_psd,
    diagonal,
    inverse_root,
    lower_to_symmetric,
    scaled_cholesky,
    snap_to_positive,
    symmetric_to_lower,
    symmetrise,
)
from ._base import FamilyDefaults, Vector, base_of, implicit_inverse, natural_parameters, register_family
from ._special import (
    HALF_LOG_2PI,
    lgamma_bregman_rest,
    log_minus_digamma,
    relative_entropy,
    stirling_remainder,
    trigamma_excess,
)


@natural_parameters
class WishartNatural(Vector):
    """Natural parameters of a Wishart: ``log_det = (n - D - 1)/2``, the exponent of det X, and the rate matrix V^-1."""

    log_det: Float[Array, "*batch"]
    rate: Float[Array, "*batch D D"]


@natural_parameters
class WishartMean(Vector):
    """Mean parameters of a Wishart: ``log_det = E[log det X]`` and ``matrix = -1/2 E[X]``."""

    log_det: Float[Array, "*batch"]
    matrix: Float[Array, "*batch D D"]


@dataclasses.dataclass(frozen=True)
class WishartFamily(FamilyDefaults):
    """Wishart distributions, ``T(X) = (log det X, -X/2)``; conjugate to the precision of a multivariate normal.

    With concentration (degrees of freedom) n and scale V the density is ``det(X)^((n-D-1)/2) exp(-tr(V^-1 X)/2)``, up
    to its constant, with respect to the D(D+1)/2 free entries of X.

    Args:
        dim: D.
    """

    dim: int

    @property
    def event_shape(self) -> tuple[int, ...]:
        """``(D, D)``."""
        return (self.dim, self.dim)

    def _concentration(self, natural: WishartNatural):
        return 2 * natural.log_det + self.dim + 1

    def _halves(self, natural: WishartNatural) -> Float[Array, "*batch D"]:
        """``(n + 1 - i)/2`` for i = 1 .. D, of which the last is 1 plus the natural parameter."""
        return natural.log_det[..., None] + 1 + 0.5 * jnp.arange(self.dim - 1, -1, -1, dtype=natural.log_det.dtype)

    def _log_det_rate(self, natural: WishartNatural):
        factor, valid = scaled_cholesky(natural.rate)
        return 2 * jnp.sum(jnp.log(diagonal(factor)), axis=-1), factor, valid

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> WishartNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return WishartNatural(jnp.zeros(batch_shape, dtype), jnp.zeros((*batch_shape, self.dim, self.dim), dtype))

    def sufficient_statistics(self, theta: Float[Array, "*batch D D"]) -> WishartMean:
        """``(log det X, -X/2)``."""
        factor, valid = scaled_cholesky(theta)
        return WishartMean(jnp.where(valid, 2 * jnp.sum(jnp.log(diagonal(factor)), axis=-1), jnp.nan), -0.5 * theta)

    def log_partition(self, natural: WishartNatural) -> Float[Array, "*batch"]:
        """``n/2 (D log 2 - log det V^-1) + log Gamma_D(n/2)`` in nats; NaN where not normalisable."""
        log_det = self._log_det_rate(natural)[0]
        half = 0.5 * self._concentration(natural)
        value = half * (self.dim * math.log(2) - log_det) + jnp.sum(gammaln(self._halves(natural)), axis=-1)
        value = value + 0.25 * self.dim * (self.dim - 1) * math.log(math.pi)
        return jnp.where(self.in_domain(natural), value, jnp.nan)

    def natural_to_mean(self, natural: WishartNatural) -> WishartMean:
        """``sum_i psi((n+1-i)/2) + D log 2 - log det V^-1`` and ``-n V/2``."""
        log_det, factor, _ = self._log_det_rate(natural)
        halves = self._halves(natural)
        digammas = jnp.sum(jnp.log(2 * halves) - log_minus_digamma(halves), axis=-1)
        root = inverse_root(factor)
        scale = jnp.einsum("...ik,...jk->...ij", root, root)
        return WishartMean(digammas - log_det, -0.5 * self._concentration(natural)[..., None, None] * scale)

    def invert(self, mean_params: WishartMean) -> WishartNatural:
        """:meth:`mean_to_natural` without its derivative."""
        mean = -2 * symmetrise(mean_params.matrix)
        factor, valid = scaled_cholesky(mean)
        log_det = 2 * jnp.sum(jnp.log(diagonal(factor)), axis=-1)
        eps = jnp.finfo(log_det.dtype).eps
        resolution = 0.25 * eps * self.dim * (1 + jnp.abs(log_det) + jnp.abs(mean_params.log_det))
        gap = snap_to_positive(log_det - mean_params.log_det, resolution)
        excess = self._excess_of_gap(gap)
        root = inverse_root(factor)
        rate = (excess + self.dim - 1)[..., None, None] * jnp.einsum("...ik,...jk->...ij", root, root)
        return WishartNatural(jnp.where(valid, 0.5 * excess - 1, jnp.nan), rate)

    def _excess_of_gap(self, gap: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
        """``n - D + 1`` from ``log det E[X] - E[log det X]``, a function of n alone; Newton on their logarithms."""
        places = jnp.arange(self.dim - 1, -1, -1, dtype=gap.dtype)  # 2 x_i = n - D + 1 + places

        def step(_, log_excess):
            excess = jnp.exp(log_excess)[..., None]
            twice = excess + places
            whole = excess + (self.dim - 1)
            # log(n/2) - psi(x) = phi(x) - log(x/(n/2)); its derivative in n is 1/n - psi'(x)/2.
            share = (places - (self.dim - 1)) / whole
            value = jnp.sum(log_minus_digamma(twice / 2) - jnp.log1p(share), axis=-1)
            loss = jnp.sum((trigamma_excess(twice / 2) - share) / twice, axis=-1)
            move = (jnp.log(value) - jnp.log(gap)) * value / (loss * excess[..., 0])
            return log_excess + jnp.clip(move, -4.0, 4.0)

        # n large: the gap is D(D+1)/(2n).  n - D + 1 small: it is 2/(n - D + 1).
        many = 0.5 * self.dim * (self.dim + 1) / gap
        start = jnp.log(jnp.where(many > 2 * self.dim, many - self.dim + 1, 2 / (1 + gap)))
        return jnp.exp(jax.lax.fori_loop(0, 20, step, start))

    def mean_to_natural(self, mean_params: WishartMean) -> WishartNatural:
        """The inverse of :meth:`natural_to_mean`; NaN outside the domain ``E[log det X] < log det E[X]``."""
        return implicit_inverse(self, mean_params)

    def to_distribution(self, natural: WishartNatural) -> dist.Distribution:
        """``Wishart(concentration, rate_matrix=...)``."""
        return dist.Wishart(self._concentration(natural), rate_matrix=natural.rate)

    def from_distribution(self, distribution: dist.Distribution) -> WishartNatural:
        """Natural parameters of a ``Wishart``."""
        base: Any = base_of(distribution)
        shape = distribution.batch_shape + distribution.event_shape[:-2]
        root = inverse_root(base.scale_tril)
        rate = jnp.broadcast_to(jnp.einsum("...ik,...jk->...ij", root, root), (*shape, self.dim, self.dim))
        concentration = jnp.broadcast_to(jnp.asarray(base.concentration, rate.dtype), shape)
        return WishartNatural(0.5 * (concentration - self.dim - 1), rate)

    def in_domain(self, natural: WishartNatural) -> Bool[Array, "*batch"]:
        """Whether both are finite, n > D - 1 and the rate is positive definite."""
        return jnp.isfinite(natural.log_det) & (natural.log_det > -1) & scaled_cholesky(natural.rate)[1]

    def nearest_valid(self, natural: WishartNatural) -> WishartNatural:
        """Raise n to what the precision can hold above D - 1, negative eigenvalues of the scaled rate to a small floor."""
        floor = 10 * self.dim * float(jnp.finfo(natural.rate.dtype).eps)
        valid = scaled_cholesky(natural.rate)[1][..., None, None]
        rate = jnp.where(valid, natural.rate, clip_to_psd(symmetrise(natural.rate), floor))
        return WishartNatural(above_minus_one(natural.log_det), rate)

    def entropy(self, natural: WishartNatural) -> Float[Array, "*batch"]:
        """Entropy in nats, without the cancellation of the textbook's form."""
        size, halves = self.dim, self._halves(natural)
        weights = 0.5 * jnp.arange(size, 0, -1, dtype=halves.dtype)
        each = weights * jnp.log(halves) + stirling_remainder(halves)
        each = each + natural.log_det[..., None] * log_minus_digamma(halves)
        constant = size * HALF_LOG_2PI + 0.5 * size * (size + 1) * math.log(2)
        constant = constant + 0.25 * size * (size - 1) * (math.log(math.pi) + 1)
        return constant + jnp.sum(each, axis=-1) - 0.5 * (size + 1) * self._log_det_rate(natural)[0]

    def kl(self, natural: WishartNatural, other: WishartNatural) -> Float[Array, "*batch"]:
        """KL(q || p) in nats, by the eigenvalues of p's rate where q's is the identity."""
        root = inverse_root(self._log_det_rate(natural)[1])
        relative = symmetrise(jnp.einsum("...ji,...jk,...kl->...il", root, other.rate, root))
        e = jnp.linalg.eigvalsh(relative - jnp.eye(self.dim, dtype=relative.dtype))
        half = 0.5 * self._concentration(natural)
        d = ((other.log_det - natural.log_det) / half)[..., None]
        f, ratio = (d - e) / (1 + e), (1 + d) / (1 + e)
        value = half * jnp.sum((1 + e) * relative_entropy(f, ratio), axis=-1)
        q, p = self._halves(natural), self._halves(other)
        rest = q * relative_entropy((p - q) / q, p / q) - half[..., None] * relative_entropy(d, 1 + d)
        return value + jnp.sum(rest + lgamma_bregman_rest(p, q), axis=-1)

    def to_minimal(self, natural: WishartNatural) -> Float[Array, "*batch P"]:
        """The exponent of the determinant, then the lower triangle of the rate."""
        return jnp.concatenate([natural.log_det[..., None], symmetric_to_lower(natural.rate)], axis=-1)

    def from_minimal(self, coordinates: Float[Array, "*batch P"]) -> WishartNatural:
        """The inverse of :meth:`to_minimal`."""
        return WishartNatural(coordinates[..., 0], lower_to_symmetric(coordinates[..., 1:], self.dim))

    def fisher_product(self, natural: WishartNatural, tangent: WishartNatural) -> WishartMean:
        """``d_mu`` of ``d_eta`` by products of D x D matrices; see :class:`Family`."""
        root = inverse_root(self._log_det_rate(natural)[1])
        scale = jnp.einsum("...ik,...jk->...ij", root, root)
        halves = self._halves(natural)
        curvature = jnp.sum((1 + trigamma_excess(halves)) / halves, axis=-1)
        moved = jnp.einsum("...ij,...jk,...kl->...il", scale, tangent.rate, scale)
        log_det = curvature * tangent.log_det - jnp.einsum("...ij,...ji->...", scale, tangent.rate)
        half = 0.5 * self._concentration(natural)[..., None, None]
        return WishartMean(log_det, half * moved - tangent.log_det[..., None, None] * scale)

    def symmetrise(self, natural: WishartNatural) -> WishartNatural:
        """Rate matrices are symmetric."""
        return WishartNatural(natural.log_det, symmetrise(natural.rate))

    def fisher_solve(self, natural: WishartNatural, tangent: WishartMean) -> WishartNatural:
        """``d_eta`` of ``d_mu`` by products of D x D matrices; see :class:`Family`."""
        n, halves = self._concentration(natural), self._halves(natural)
        matrix = symmetrise(tangent.matrix)
        trace = jnp.einsum("...ij,...ji->...", matrix, natural.rate)
        # sum_i psi'(x_i) - 2 D/n, every difference on its own.
        places = jnp.arange(self.dim, dtype=halves.dtype)
        schur = jnp.sum((trigamma_excess(halves) * n[..., None] + places) / halves, axis=-1) / n
        log_det = (tangent.log_det + 2 / n * trace) / schur
        moved = jnp.einsum("...ij,...jk,...kl->...il", natural.rate, matrix, natural.rate)
        rate = (moved + natural.rate * log_det[..., None, None]) * (2 / n)[..., None, None]
        return WishartNatural(log_det, rate)


register_family(dist.Wishart, lambda distribution: WishartFamily(distribution.event_shape[-1]))
