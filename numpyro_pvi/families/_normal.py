"""The scalar normal and the log-normal: one location and one precision per batch entry."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float

from .._numerics import inside_support, keep_positive
from ._base import FamilyDefaults, Vector, natural_parameters
from ._registry import read_parameters, register_family
from ._special import HALF_LOG_2PI, log_ratio_excess


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
class ScalarNormalFamily(FamilyDefaults):
    """Scalar normals, ``T(x) = (x, -x^2/2)``: all axes of the parameters are batch axes.

    The Gaussian families over a flat vector are :class:`NormalFamily`, :class:`MultivariateNormalFamily` and
    :class:`BlockNormalFamily`.
    """

    @property
    def event_shape(self) -> tuple[int, ...]:
        """``()``."""
        return ()

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> ScalarNormalNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return ScalarNormalNatural(jnp.zeros(batch_shape, dtype), jnp.zeros(batch_shape, dtype))

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
class LogNormalFamily(FamilyDefaults):
    """Log-normals over x > 0, ``T(x) = (log x, -(log x)^2/2)``."""

    @property
    def event_shape(self) -> tuple[int, ...]:
        """``()``."""
        return ()

    def _normal(self, natural: LogNormalNatural) -> ScalarNormalNatural:
        return ScalarNormalNatural(natural.log + 1, natural.precision)

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> LogNormalNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return LogNormalNatural(jnp.zeros(batch_shape, dtype), jnp.zeros(batch_shape, dtype))

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
