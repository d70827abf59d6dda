"""Von Mises distributions of angles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import i0e
from jaxtyping import Array, Bool, Float

from .._numerics import inside_unit, keep_positive
from ._base import (
    ScalarDefaults,
    Vector,
    implicit_inverse,
    natural_parameters,
    read_parameters,
    register_family,
)
from ._special import bessel_ratio_parts, inverse_bessel_ratio, log_bessel_i0

_LOG_2PI = math.log(2 * math.pi)


@natural_parameters
class VonMisesNatural(Vector):
    """Natural parameters of a von Mises: the concentration times the unit vector of the location."""

    cos: Float[Array, "*batch"]
    sin: Float[Array, "*batch"]


@natural_parameters
class VonMisesMean(Vector):
    """Mean parameters of a von Mises: ``E[cos x]`` and ``E[sin x]``."""

    cos: Float[Array, "*batch"]
    sin: Float[Array, "*batch"]


def _polar(params: Any):
    """Length and unit vector, (1, 0) at the origin; differentiable there."""
    zero = (params.cos == 0) & (params.sin == 0)
    cos, sin = jnp.where(zero, 1.0, params.cos), params.sin
    length = jnp.hypot(cos, sin)
    return jnp.where(zero, 0.0, length), cos / length, sin / length


@dataclasses.dataclass(frozen=True)
class VonMisesFamily(ScalarDefaults):
    """Von Mises distributions over an angle, ``T(x) = (cos x, sin x)``; 0 is the uniform distribution."""

    periodic = True
    ends = (-math.pi, math.pi)
    _natural = VonMisesNatural

    def sufficient_statistics(self, theta: Float[Array, "*batch"]) -> VonMisesMean:
        """``(cos x, sin x)``."""
        return VonMisesMean(jnp.cos(theta), jnp.sin(theta))

    def log_partition(self, natural: VonMisesNatural) -> Float[Array, "*batch"]:
        """``log(2 pi I_0(kappa))`` in nats."""
        return _LOG_2PI + log_bessel_i0(_polar(natural)[0])

    def natural_to_mean(self, natural: VonMisesNatural) -> VonMisesMean:
        """``I_1(kappa)/I_0(kappa)`` times the unit vector of the location."""
        length, cos, sin = _polar(natural)
        ratio = bessel_ratio_parts(length)[0]
        return VonMisesMean(ratio * cos, ratio * sin)

    def invert(self, mean_params: VonMisesMean) -> VonMisesNatural:
        """:meth:`mean_to_natural` without its derivative."""
        length, cos, sin = _polar(mean_params)
        kappa = inverse_bessel_ratio(inside_unit(length))
        return VonMisesNatural(kappa * cos, kappa * sin)

    def mean_to_natural(self, mean_params: VonMisesMean) -> VonMisesNatural:
        """The inverse of :meth:`natural_to_mean`; NaN outside the unit disc.

        The concentration comes from 1 minus the length, about 1/(2 kappa): what rounding leaves of it limits kappa to
        about 1/eps.
        """
        return implicit_inverse(self, mean_params)

    def to_distribution(self, natural: VonMisesNatural) -> dist.Distribution:
        """``VonMises(loc, concentration)``, whose concentration must be positive: 0 becomes a negligible one."""
        length, cos, sin = _polar(natural)
        return dist.VonMises(jnp.arctan2(sin, cos), keep_positive(length))

    def from_distribution(self, distribution: dist.Distribution) -> VonMisesNatural:
        """Natural parameters of a ``VonMises``."""
        loc, concentration = read_parameters(distribution, "loc", "concentration")
        return VonMisesNatural(concentration * jnp.cos(loc), concentration * jnp.sin(loc))

    def in_domain(self, natural: VonMisesNatural) -> Bool[Array, "*batch"]:
        """Whether both are finite: the whole plane is the domain."""
        return jnp.isfinite(natural.cos) & jnp.isfinite(natural.sin)

    def nearest_valid(self, natural: VonMisesNatural) -> VonMisesNatural:
        """All finite parameters are valid and come back unchanged."""
        return natural

    def entropy(self, natural: VonMisesNatural) -> Float[Array, "*batch"]:
        """``log 2 pi I_0(kappa) - kappa I_1(kappa)/I_0(kappa)`` in nats, without its cancellation."""
        length = _polar(natural)[0]
        return _LOG_2PI + jnp.log(i0e(length)) + length * bessel_ratio_parts(length)[2]

    def kl(self, natural: VonMisesNatural, other: VonMisesNatural) -> Float[Array, "*batch"]:
        """KL(q || p) in nats."""
        q, cos, sin = _polar(natural)
        p, other_cos, other_sin = _polar(other)
        ratio, _, complement = bessel_ratio_parts(q)
        apart = 0.5 * ((cos - other_cos) ** 2 + (sin - other_sin) ** 2)
        return jnp.log(i0e(p) / i0e(q)) + (p - q) * complement + p * ratio * apart

    def _metric(self, natural: VonMisesNatural):
        """Unit vector, and the metric along it and across it: ``A'(kappa)`` and ``A(kappa)/kappa``."""
        length, cos, sin = _polar(natural)
        ratio, slope, _ = bessel_ratio_parts(length)
        safe = jnp.where(length > 0, length, 1.0)
        return cos, sin, slope, jnp.where(length > 0, ratio / safe, 0.5)

    def fisher_product(self, natural: VonMisesNatural, tangent: VonMisesNatural) -> VonMisesMean:
        """``d_mu`` of ``d_eta``, along and across the location; see :class:`Family`."""
        cos, sin, along, across = self._metric(natural)
        a = along * (cos * tangent.cos + sin * tangent.sin)
        b = across * (cos * tangent.sin - sin * tangent.cos)
        return VonMisesMean(a * cos - b * sin, a * sin + b * cos)

    def fisher_solve(self, natural: VonMisesNatural, tangent: VonMisesMean) -> VonMisesNatural:
        """``d_eta`` of ``d_mu``, along and across the location; see :class:`Family`."""
        cos, sin, along, across = self._metric(natural)
        a = (cos * tangent.cos + sin * tangent.sin) / along
        b = (cos * tangent.sin - sin * tangent.cos) / across
        return VonMisesNatural(a * cos - b * sin, a * sin + b * cos)


register_family(dist.VonMises, VonMisesFamily())
