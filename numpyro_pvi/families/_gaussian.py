"""Gaussian families: scalar, log-normal, and over a flat vector with full or diagonal covariance; conditionals.

Both take ``T(theta) = (theta, -1/2 theta theta^T)`` (its diagonal for the mean-field family), so the natural parameters
are the precision-mean ``h = Lambda m`` and the precision ``Lambda`` themselves.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float

from .._numerics import (
    clip_to_psd,
    congruent,
    diagonal,
    inside_support,
    inverse_root,
    invert_lower,
    keep_positive,
    lower_to_symmetric,
    scaled_cholesky,
    symmetric_to_lower,
    symmetrise,
)
from ._base import FamilyDefaults, ScalarDefaults, Vector, base_of, natural_parameters, read_parameters, register_family
from ._special import HALF_LOG_2PI, log_ratio_excess

# ---------------------------------------------------------------------------------------- parameters over a flat vector
# Parameters of Gaussians over a flat vector, and what their families share.

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

    Returns ``V_i W_j + C_ij^2 + m_i^2 W_j + n_j^2 V_i + 2 m_i n_j C_ij``.
    """
    x, v, y, w = loc[..., :, None], variance[..., :, None], other[..., None, :], other_variance[..., None, :]
    return v * w + covariance**2 + x**2 * w + y**2 * v + 2 * x * y * covariance


@dataclasses.dataclass(frozen=True)
class GaussianWhitening:
    """Changes of a Gaussian's natural parameters as whitened coordinates, whose length is that in q's Fisher metric.

    With ``V = S S^T`` and ``u = (dh, dLambda)``: ``a = S^T (dh - dLambda m)`` and ``B = S^T dLambda S``. As a function of
    ``theta = m + S eps`` the change is ``a^T eps - 1/2 eps^T B eps`` up to a constant, of variance ``|a|^2 + |B|^2 / 2``; the
    coordinates are a, B's diagonal times the root of 1/2, and its entries below the diagonal.
    """

    family: Any
    moments: GaussianMoments

    @property
    def size(self) -> int:
        """Numbers in x."""
        dim = self.family.dim
        return dim + (dim * (dim + 1) // 2 if self.family.full else dim)

    def coordinates(self, change: GaussianNatural) -> Float[Array, "K"]:
        """x of a change of natural parameters."""
        scale, loc = self.moments.scale, self.moments.loc
        pulled = self.family.pull(change, loc)
        if not self.family.full:
            return jnp.concatenate([scale * pulled, math.sqrt(0.5) * scale**2 * change.precision])
        bend = symmetric_to_lower(congruent(scale.T, change.precision))
        return jnp.concatenate([pulled @ scale, bend * self._weights(bend.dtype)])

    def change(self, x: Float[Array, "K"]) -> GaussianNatural:
        """The change of natural parameters that has these coordinates."""
        scale, loc, dim = self.moments.scale, self.moments.loc, self.family.dim
        if not self.family.full:
            precision = math.sqrt(2.0) * x[dim:] / scale**2
            return GaussianNatural(x[:dim] / scale + precision * loc, precision)
        back = invert_lower(scale.T)
        precision = congruent(back, lower_to_symmetric(x[dim:] / self._weights(x.dtype), dim))
        return GaussianNatural(back @ x[:dim] + precision @ loc, precision)

    def _weights(self, dtype: Any) -> Float[Array, "P"]:
        rows, columns = np.tril_indices(self.family.dim)
        return jnp.asarray(np.where(rows == columns, math.sqrt(0.5), 1.0), dtype)


class GaussianDefaults(FamilyDefaults):
    """Entropy, divergence, draws and Fisher metric of a Gaussian family that has ``moments``."""

    dim: int
    full: bool
    # A member is a location and a scale, and moves are of these.
    located = True

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

    def whitening(self: Any, natural: GaussianNatural) -> GaussianWhitening:
        """Whitened coordinates of changes at one q: see :func:`numpyro_pvi.families.whitening`."""
        return GaussianWhitening(self, self.moments(natural))

    def metric_root(self, natural: GaussianNatural) -> tuple[()]:
        """Nothing."""
        return ()

    def whitened(self: Any, natural: GaussianNatural, root: Any, change: GaussianNatural) -> GaussianNatural:
        """In closed form: see :class:`GaussianWhitening`."""
        return self.from_minimal(self.whitening(natural).coordinates(change))

    def inner_products(self: Any, moments: GaussianMoments, change: GaussianNatural) -> Float[Array, "W W"]:
        """Inner products of W changes of the naturals (leading axis) in q's Fisher metric.

        Half that of a small change with itself is its divergence.
        """
        white = jax.vmap(GaussianWhitening(self, moments).coordinates)(change)
        return white @ white.T

    def standard(self: Any, dtype: Any) -> GaussianMoments:
        """The standard normal, to fill a memory with before there is a q."""
        return self.moments(self.from_loc_sd(jnp.zeros((self.dim,), dtype), jnp.ones((self.dim,), dtype)))

    def displacement(self, new: GaussianMoments, old: GaussianMoments) -> Float[Array, "D"]:
        """What rounds by draws remember of a move: the change of the location."""
        return new.loc - old.loc

    def displacement_sds(self: Any, moments: GaussianMoments) -> Float[Array, "D"]:
        """What that is measured by."""
        return self.sds(moments)

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

        ``change``: of the natural parameters; a leading axis may stack several; ``exact``: whether log sds are wanted of many
        coordinates with full covariance, which takes D x D products; 0 without. Returns ``(V (dh - dLambda m)) / sd`` and
        ``-1/2 diag(V dLambda V) / sd^2``.
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


# -------------------------------------------------------------------------------------------------------------- scalars
# The scalar normal and the log-normal: one location and one precision per batch entry.


@natural_parameters
class ScalarNormalNatural(Vector):
    """Natural parameters of a scalar normal: precision times location, and precision."""

    precision_mean: Float[Array, "*batch"]
    precision: Float[Array, "*batch"]


@natural_parameters
class ScalarNormalMean(Vector):
    """Mean parameters ``first = E[x]`` and ``second = -1/2 E[x^2]``."""

    first: Float[Array, "*batch"]
    second: Float[Array, "*batch"]


def _normal_kl(precision, loc, other_precision, other_loc):
    delta = (other_precision - precision) / precision
    excess = log_ratio_excess(delta, other_precision / precision)
    return -0.5 * excess + 0.5 * other_precision * (loc - other_loc) ** 2


@dataclasses.dataclass(frozen=True)
class ScalarNormalFamily(ScalarDefaults):
    """Scalar normals, ``T(x) = (x, -x^2/2)``: all axes of the parameters are batch axes.

    The Gaussian families over a flat vector are :class:`NormalFamily`, :class:`MultivariateNormalFamily` and
    :class:`BlockNormalFamily`.
    """

    _natural = ScalarNormalNatural

    def sufficient_statistics(self, theta: Float[Array, "*batch"]) -> ScalarNormalMean:
        """``(x, -x^2/2)``."""
        return ScalarNormalMean(theta, -0.5 * theta**2)

    def log_partition(self, natural: ScalarNormalNatural) -> Float[Array, "*batch"]:
        """``h^2 / (2 lambda) - 1/2 log lambda + 1/2 log 2 pi`` in nats; NaN where not normalisable."""
        loc = natural.precision_mean / natural.precision
        return 0.5 * natural.precision_mean * loc - 0.5 * jnp.log(natural.precision) + HALF_LOG_2PI

    def natural_to_mean(self, natural: ScalarNormalNatural) -> ScalarNormalMean:
        """``(m, -(v + m^2)/2)``."""
        loc = natural.precision_mean / natural.precision
        return ScalarNormalMean(loc, -0.5 * (1 / natural.precision + loc**2))

    def mean_to_natural(self, mean_params: ScalarNormalMean) -> ScalarNormalNatural:
        """The inverse of :meth:`natural_to_mean`."""
        precision = 1 / (-2 * mean_params.second - mean_params.first**2)
        return ScalarNormalNatural(precision * mean_params.first, precision)

    def to_distribution(self, natural: ScalarNormalNatural) -> dist.Distribution:
        """``Normal(loc, scale)``."""
        return dist.Normal(natural.precision_mean / natural.precision, 1 / jnp.sqrt(natural.precision))

    def from_distribution(self, distribution: dist.Distribution) -> ScalarNormalNatural:
        """Natural parameters of a ``Normal``."""
        loc, scale = read_parameters(distribution, "loc", "scale")
        return ScalarNormalNatural(loc / scale**2, 1 / scale**2)

    def in_domain(self, natural: ScalarNormalNatural) -> Bool[Array, "*batch"]:
        """Whether both are finite and the precision is positive."""
        return jnp.isfinite(natural.precision_mean) & jnp.isfinite(natural.precision) & (natural.precision > 0)

    def nearest_valid(self, natural: ScalarNormalNatural) -> ScalarNormalNatural:
        """Raise a non-positive precision to the smallest normal number's root."""
        return ScalarNormalNatural(natural.precision_mean, keep_positive(natural.precision))

    def entropy(self, natural: ScalarNormalNatural) -> Float[Array, "*batch"]:
        """``1/2 (1 + log 2 pi - log lambda)`` in nats."""
        return 0.5 + HALF_LOG_2PI - 0.5 * jnp.log(natural.precision)

    def kl(self, natural: ScalarNormalNatural, other: ScalarNormalNatural) -> Float[Array, "*batch"]:
        """KL(q || p) in nats, without cancellation where the two are close."""
        loc, other_loc = natural.precision_mean / natural.precision, other.precision_mean / other.precision
        return _normal_kl(natural.precision, loc, other.precision, other_loc)

    def metric_root(self, natural: ScalarNormalNatural) -> Float[Array, "2 2"]:
        """In closed form: ``x = (s (dh - m dlambda), sqrt(1/2) v dlambda)``."""
        loc, variance = natural.precision_mean / natural.precision, 1 / natural.precision
        sd = jnp.sqrt(variance)
        return jnp.stack([jnp.stack([sd, 0 * sd]), jnp.stack([-sd * loc, math.sqrt(0.5) * variance])])

    def fisher_solve(self, natural: ScalarNormalNatural, tangent: ScalarNormalMean) -> ScalarNormalNatural:
        """``d_eta`` of ``d_mu`` in closed form; see :class:`Family`."""
        loc = natural.precision_mean / natural.precision
        d_variance = -2 * tangent.second - 2 * loc * tangent.first
        d_precision = -(natural.precision**2) * d_variance
        return ScalarNormalNatural(d_precision * loc + natural.precision * tangent.first, d_precision)


@natural_parameters
class LogNormalNatural(Vector):
    """Natural parameters of a log-normal, a normal in log x.

    With location m and precision lambda of log x they are ``log = lambda m - 1``, the 1 from the Jacobian, and
    ``precision = lambda``.
    """

    log: Float[Array, "*batch"]
    precision: Float[Array, "*batch"]


@natural_parameters
class LogNormalMean(Vector):
    """Mean parameters ``log = E[log x]`` and ``log_squared = -1/2 E[log^2 x]``."""

    log: Float[Array, "*batch"]
    log_squared: Float[Array, "*batch"]


@dataclasses.dataclass(frozen=True)
class LogNormalFamily(ScalarDefaults):
    """Log-normals over x > 0, ``T(x) = (log x, -(log x)^2/2)``."""

    ends = (0.0, math.inf)
    _natural = LogNormalNatural

    def _normal(self, natural: LogNormalNatural) -> ScalarNormalNatural:
        return ScalarNormalNatural(natural.log + 1, natural.precision)

    def sufficient_statistics(self, theta: Float[Array, "*batch"]) -> LogNormalMean:
        """``(log x, -(log x)^2/2)``."""
        log = jnp.log(theta)
        return LogNormalMean(log, -0.5 * log**2)

    def log_partition(self, natural: LogNormalNatural) -> Float[Array, "*batch"]:
        """That of the normal in log x, in nats; NaN where not normalisable."""
        return ScalarNormalFamily().log_partition(self._normal(natural))

    def natural_to_mean(self, natural: LogNormalNatural) -> LogNormalMean:
        """``(m, -(v + m^2)/2)`` of log x."""
        found = ScalarNormalFamily().natural_to_mean(self._normal(natural))
        return LogNormalMean(found.first, found.second)

    def mean_to_natural(self, mean_params: LogNormalMean) -> LogNormalNatural:
        """The inverse of :meth:`natural_to_mean`."""
        found = ScalarNormalFamily().mean_to_natural(ScalarNormalMean(mean_params.log, mean_params.log_squared))
        return LogNormalNatural(found.precision_mean - 1, found.precision)

    def to_distribution(self, natural: LogNormalNatural) -> dist.Distribution:
        """``LogNormal(loc, scale)``."""
        return dist.LogNormal((natural.log + 1) / natural.precision, 1 / jnp.sqrt(natural.precision))

    def from_distribution(self, distribution: dist.Distribution) -> LogNormalNatural:
        """Natural parameters of a ``LogNormal``."""
        loc, scale = read_parameters(distribution, "loc", "scale")
        return LogNormalNatural(loc / scale**2 - 1, 1 / scale**2)

    def metric_root(self, natural: LogNormalNatural) -> Float[Array, "2 2"]:
        """That of the normal in log x."""
        return ScalarNormalFamily().metric_root(self._normal(natural))

    def in_domain(self, natural: LogNormalNatural) -> Bool[Array, "*batch"]:
        """Whether both are finite and the precision is positive."""
        return ScalarNormalFamily().in_domain(self._normal(natural))

    def nearest_valid(self, natural: LogNormalNatural) -> LogNormalNatural:
        """Raise a non-positive precision to the smallest normal number's root."""
        return LogNormalNatural(natural.log, keep_positive(natural.precision))

    def sample(self, natural: LogNormalNatural, key: Array, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Draws, kept above 0 where they underflow; reparameterised."""
        return inside_support(self.to_distribution(natural).sample(key, shape))

    def entropy(self, natural: LogNormalNatural) -> Float[Array, "*batch"]:
        """``1/2 (1 + log 2 pi - log lambda) + m`` in nats."""
        return ScalarNormalFamily().entropy(self._normal(natural)) + (natural.log + 1) / natural.precision

    def kl(self, natural: LogNormalNatural, other: LogNormalNatural) -> Float[Array, "*batch"]:
        """KL(q || p) in nats, that of the normals in log x."""
        return ScalarNormalFamily().kl(self._normal(natural), self._normal(other))

    def fisher_solve(self, natural: LogNormalNatural, tangent: LogNormalMean) -> LogNormalNatural:
        """``d_eta`` of ``d_mu`` in closed form; see :class:`Family`."""
        direction = ScalarNormalMean(tangent.log, tangent.log_squared)
        found = ScalarNormalFamily().fisher_solve(self._normal(natural), direction)
        return LogNormalNatural(found.precision_mean, found.precision)


register_family(dist.LogNormal, LogNormalFamily())
register_family(dist.Normal, ScalarNormalFamily())


# ----------------------------------------------------------------------------------------- full and diagonal covariance


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


# ---------------------------------------------------------------------------------- local latents given the shared ones
# Gaussians of local latents given the shared ones: what is left of a joint Gaussian once its marginal has been taken.
#
# A row's local latents z and the shared latents theta are jointly Gaussian with natural parameters
#
#     precision [[A, C^T], [C, B]],  precision-mean (a, b)      (blocks theta, z),
#
# so that ``q(z | theta)`` has precision B and mean ``B^-1 (b - C theta)``, and what the row says about theta alone is
# the Schur complement ``(a - C^T B^-1 b, A - C^T B^-1 C)``. Rows are independent given theta, so the joint precision of
# all of them is an arrowhead and only these blocks are ever held. Under a mean-field q the cross blocks are absent.

# A step may lower the precision of a local latent given the shared ones at most to this share of what it was: where the
# log density is not concave the curvature can be anything.
_SMALLEST_SHARE = 0.1


@natural_parameters
class ConditionalNatural(Vector):
    """Natural parameters of local latents given the shared ones, one entry per row."""

    # b.
    linear: Float[Array, "*rows K"]
    # B: K x K, or its diagonal under a mean-field q.
    precision: Float[Array, "..."]
    # C; K x 0 under a mean-field q.
    cross: Float[Array, "*rows K D"]

    @property
    def full(self) -> bool:
        """Whether local latents are correlated with each other and with the shared ones."""
        return self.precision.ndim > self.linear.ndim


class ConditionalMoments(NamedTuple):
    """The same Gaussians as an affine mean and a square root of the covariance."""

    # Mean at theta = 0, and its slope in theta (K x 0 under a mean-field q).
    offset: Float[Array, "*rows K"]
    slope: Float[Array, "*rows K D"]
    # Full: S with S S^T the covariance given theta. Mean-field: standard deviations.
    root: Float[Array, "..."]
    # Entropy given theta, in nats.
    entropy: Float[Array, "*rows"]
    valid: Bool[Array, "*rows"]

    def mean(self, theta: Float[Array, "D"]) -> Float[Array, "*rows K"]:
        """Mean at given values of the shared latents."""
        return self.offset if not self.slope.shape[-1] else self.offset + self.slope @ theta

    def draw(self, theta: Float[Array, "D"], noise: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
        """``mean(theta) + S eps`` for standard normal ``eps``."""
        spread = jnp.einsum("...kj,...j->...k", self.root, noise) if self.root.ndim > noise.ndim else self.root * noise
        return self.mean(theta) + spread

    def marginal_sd(self, shared: GaussianMoments) -> Float[Array, "*rows K"]:
        """Standard deviations with the shared latents integrated out."""
        if not self.slope.shape[-1]:
            return self.root
        inherited = self.slope @ shared.scale
        return jnp.sqrt(jnp.sum(self.root**2, axis=-1) + jnp.sum(inherited**2, axis=-1))


def conditional_moments(natural: ConditionalNatural) -> ConditionalMoments:
    """Means, slopes, roots and entropies of every row's local latents.

    ``natural``: natural parameters. Returns the moments; ``valid`` is False where a precision is not positive definite.
    """
    size = natural.linear.shape[-1]
    if not natural.full:
        good = jnp.isfinite(natural.precision) & (natural.precision > 0)
        precision = jnp.where(good, natural.precision, 1.0)
        entropy = 0.5 * size * (1 + _LOG_2PI) - 0.5 * jnp.sum(jnp.log(precision), axis=-1)
        valid = jnp.all(good & jnp.isfinite(natural.linear), axis=-1)
        return ConditionalMoments(natural.linear / precision, natural.cross, 1.0 / jnp.sqrt(precision), entropy, valid)
    factor, good = scaled_cholesky(natural.precision)
    root = inverse_root(factor)
    covariance = jnp.einsum("...ik,...jk->...ij", root, root)
    entropy = 0.5 * size * (1 + _LOG_2PI) - jnp.sum(jnp.log(diagonal(factor)), axis=-1)
    valid = good & jnp.all(jnp.isfinite(natural.linear), axis=-1) & jnp.all(jnp.isfinite(natural.cross), axis=(-2, -1))
    return ConditionalMoments(
        jnp.einsum("...ij,...j->...i", covariance, natural.linear),
        -jnp.einsum("...ij,...jd->...id", covariance, natural.cross),
        root,
        entropy,
        valid,
    )


def conditional_products(
    natural: ConditionalNatural, shared: GaussianMoments, change: ConditionalNatural
) -> Float[Array, "W W"]:
    """Of changes of Gaussians given the shared latents, inner products in the Fisher metric of the joint one.

    With ``A theta + a`` the mean, ``V = B^-1`` the covariance given theta, ``S`` that of theta and ``m`` its mean, a change of b, B
    and C moves the mean by ``u + U (theta - m)``, ``u = V (db - dB E z - dC m)`` and ``U = -V (dC + dB A)``: the sum over rows of

        u^T B u' + tr(U^T B U' S) + 1/2 tr(dB V dB' V).

    ``natural``: natural parameters of every row's, under a full covariance; ``shared``: of theta; ``change``: Float[W ...] each.
    """
    moments, root = conditional_moments(natural), shared.scale
    mean = moments.mean(shared.loc)

    def white(own: ConditionalNatural) -> Float[Array, "N"]:
        force = own.linear - jnp.einsum("...ij,...j->...i", own.precision, mean) - own.cross @ shared.loc
        slope = own.cross + own.precision @ moments.slope
        inner = jnp.swapaxes(moments.root, -1, -2)
        parts = (
            jnp.einsum("...ij,...j->...i", inner, force),
            inner @ slope @ root,
            jnp.sqrt(0.5) * inner @ own.precision @ moments.root,
        )
        return jnp.concatenate([x.reshape(-1) for x in parts])

    found = jax.vmap(white)(change)
    return found @ found.T


def schur_complement(
    natural: ConditionalNatural,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D D"]]:
    """What integrating local latents out takes away from their rows' say about the shared ones, summed over rows.

    ``natural``: natural parameters of full conditionals; the last row axis is summed over. Returns ``(C^T B^-1 b, C^T B^-1
    C)``, precision-mean and precision.
    """
    moments = conditional_moments(natural)
    vector = -jnp.einsum("...rkd,...rk->...d", moments.slope, natural.linear)
    matrix = -jnp.einsum("...rkd,...rke->...de", natural.cross, moments.slope)
    return vector, symmetrise(matrix)


def bounded_precision(wanted: Float[Array, "..."], natural: ConditionalNatural) -> Float[Array, "..."]:
    """A proposed precision of local latents, raised where it would fall below a share of the present one.

    ``wanted``: proposed precisions (K x K or diagonal), possibly not positive; ``natural``: the present natural parameters,
    valid. Returns positive precisions; proposals that are already large enough come back up to rounding.
    """
    if not natural.full:
        return jnp.maximum(wanted, _SMALLEST_SHARE * natural.precision)
    if natural.linear.shape[-1] == 1:
        return jnp.maximum(wanted, _SMALLEST_SHARE * natural.precision)
    # In coordinates where the present precision is the identity, eigenvalues are the shares.
    factor, _ = scaled_cholesky(natural.precision)
    inverse = jnp.swapaxes(inverse_root(factor), -1, -2)
    share = jnp.einsum("...ij,...jk,...lk->...il", inverse, wanted, inverse)
    values = jnp.linalg.eigvalsh(symmetrise(jnp.where(jnp.isfinite(share), share, 0.0)))
    low = (values[..., 0] < _SMALLEST_SHARE)[..., None, None]
    eye = jnp.eye(share.shape[-1], dtype=share.dtype)
    raised = clip_to_psd(symmetrise(share) - _SMALLEST_SHARE * eye) + _SMALLEST_SHARE * eye
    return jnp.where(low, symmetrise(jnp.einsum("...ij,...jk,...lk->...il", factor, raised, factor)), wanted)


def conditional_divergence(
    new: ConditionalNatural, old: ConditionalNatural, shared: GaussianMoments
) -> Float[Array, "*rows"]:
    """Symmetrised Kullback-Leibler divergence between two conditionals, expected over the shared latents.

    ``new``: natural parameters; ``old``: others; ``shared``: the Gaussian of theta under which to expect. Returns ``KL(new |
    old) + KL(old | new)`` in nats, one per row: ``1/2 E[d^T (B + B') d] + 1/2 tr (B - B')(S' - S)`` with ``d`` the difference
    of the means at theta, ``B`` and ``S`` precisions and covariances.
    """
    to, before = conditional_moments(new), conditional_moments(old)
    change, total = old.precision - new.precision, old.precision + new.precision
    shift = to.mean(shared.loc) - before.mean(shared.loc)
    if not new.full:
        return 0.5 * jnp.sum(total * shift**2 + change * (to.root**2 - before.root**2), axis=-1)
    spread = jnp.einsum("...ik,...jk->...ij", to.root, to.root) - jnp.einsum(
        "...ik,...jk->...ij", before.root, before.root
    )
    tilt = (to.slope - before.slope) @ shared.scale
    second = shift[..., :, None] * shift[..., None, :] + jnp.einsum("...is,...js->...ij", tilt, tilt)
    return 0.5 * jnp.sum(total * second + change * spread, axis=(-2, -1))
