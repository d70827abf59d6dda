"""Beta and Dirichlet distributions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.core import Tracer
from jax.scipy.special import gammaln
from jaxtyping import Array, Bool, Float

from .._numerics import above_minus_one, inside_support, newton_in_bracket, snap_to_positive
from ..errors import GuideError
from ._base import (
    FamilyDefaults,
    ScalarDefaults,
    Vector,
    base_of,
    implicit_inverse,
    natural_parameters,
    read_parameters,
    register_family,
)
from ._special import (
    HALF_LOG_2PI,
    digamma,
    inverse_digamma,
    lgamma_bregman_rest,
    log_minus_digamma,
    relative_entropy,
    stirling_remainder,
    trigamma,
    trigamma_excess,
)


@natural_parameters
class DirichletNatural(Vector):
    """Natural parameters of a Dirichlet: ``log = concentration - 1``, the exponents."""

    log: Float[Array, "*batch K"]


@natural_parameters
class DirichletMean(Vector):
    """Mean parameters of a Dirichlet: ``log = E[log x]``."""

    log: Float[Array, "*batch K"]


@natural_parameters
class BetaNatural(Vector):
    """Natural parameters of a beta: ``log = concentration1 - 1``, ``log_complement = concentration0 - 1``."""

    log: Float[Array, "*batch"]
    log_complement: Float[Array, "*batch"]


@natural_parameters
class BetaMean(Vector):
    """Mean parameters of a beta: ``log = E[log x]`` and ``log_complement = E[log (1 - x)]``."""

    log: Float[Array, "*batch"]
    log_complement: Float[Array, "*batch"]


# Functions of the concentrations a (..., K).


def _partition(a):
    return jnp.sum(gammaln(a), axis=-1) - gammaln(jnp.sum(a, axis=-1))


def _mean(a):
    total = jnp.sum(a, axis=-1, keepdims=True)
    return jnp.log(a / total) - log_minus_digamma(a) + log_minus_digamma(total)


def _invert(log):
    """Concentrations of E[log x]; NaN outside the domain ``sum exp E[log x] < 1``.

    Given the total s, every concentration is ``psi^-1(mu_k + psi(s))``; that they add up to s is one equation in log s
    with one root, found by safeguarded Newton. Two Newton steps on all concentrations take away its rounding.
    """
    info = jnp.finfo(log.dtype)
    size = log.shape[-1]
    # Sign of the equation for large totals; about (K - 1)/(2 s) when s is large, (K - 1)/s when it is small.
    peak = jnp.max(log, axis=-1)
    room = -peak - jnp.log(jnp.sum(jnp.exp(log - peak[..., None]), axis=-1))
    room = snap_to_positive(room, 0.25 * info.eps * size * (1 + jnp.min(-log, axis=-1)))
    start = jnp.log((size - 1) * (1 + room) / (room * (2 + room)))

    def gap(log_total):
        total = jnp.exp(log_total)
        a = inverse_digamma(log + digamma(total)[..., None])
        weight = a / jnp.sum(a, axis=-1, keepdims=True)
        own, whole = trigamma_excess(a), trigamma_excess(total)[..., None]
        # Newton for log(sum a / s): what is positive left of the root; its slope is negative.
        return jnp.log(jnp.sum(a, axis=-1) / total), jnp.sum(weight * (whole - own) / (1 + own), axis=-1)

    # The start is too high by any factor when one concentration is tiny, too low by at most 2.
    lowest = jnp.full_like(start, 0.5 * math.log(info.tiny))
    start = jnp.maximum(start, lowest + 1.0)
    log_total = newton_in_bracket(gap, lowest, start + 2.0, start, 40, increasing=False)
    a = inverse_digamma(log + digamma(jnp.exp(log_total))[..., None])

    def polish(_, a):
        return a * jnp.exp(jnp.clip(_solve(a, log - _mean(a)) / a, -1.0, 1.0))

    return jax.lax.fori_loop(0, 2, polish, a)


def _divergence(a, other):
    """KL in nats: the leading terms of all log-gammas combine to one sum of relative entropies of proportions."""
    total, other_total = jnp.sum(a, axis=-1, keepdims=True), jnp.sum(other, axis=-1, keepdims=True)
    whole = jnp.sum(other - a, axis=-1, keepdims=True) / total
    each = (other - a) / a
    share = other_total / total
    ratio = other / a / share
    # Where the other is much wider both are near -1, and their difference, which share divides, is rounding.
    leading = share * a * relative_entropy(jnp.where(share > 0.5, (each - whole) / share, ratio - 1), ratio)
    rest = lgamma_bregman_rest(jnp.append(other, other_total, axis=-1), jnp.append(a, total, axis=-1))
    return jnp.sum(leading + rest[..., :-1], axis=-1) - rest[..., -1]


def _entropy(a):
    total, size = jnp.sum(a, axis=-1), a.shape[-1]
    each = 0.5 * jnp.log(a) + stirling_remainder(a) + (a - 1) * log_minus_digamma(a)
    whole = stirling_remainder(total) + (size - 0.5) * jnp.log(total) + (total - size) * log_minus_digamma(total)
    return jnp.sum(each, axis=-1) + (size - 1) * HALF_LOG_2PI - whole


def _product(a, direction):
    whole = trigamma(jnp.sum(a, axis=-1, keepdims=True))
    return trigamma(a) * direction - whole * jnp.sum(direction, axis=-1, keepdims=True)


def _solve(a, direction):
    """Sherman-Morrison, with ``1/psi'(s) - sum 1/psi'(a_k)`` from what each lacks to its argument."""

    def shortfall(x):  # x - 1/psi'(x), between 0 and 1/2
        excess = trigamma_excess(x)
        return x * excess / (1 + excess)

    own = a / (1 + trigamma_excess(a))
    total = jnp.sum(a, axis=-1)
    remaining = jnp.sum(shortfall(a), axis=-1) - shortfall(total)
    common = jnp.sum(own * direction, axis=-1) / remaining
    return own * (direction + common[..., None])


class _DirichletLaws(FamilyDefaults):
    """What a Dirichlet and a beta, one of two proportions, share: concentrations are ``_read`` of natural parameters, plus 1."""

    ends = (0.0, 1.0)
    _natural: Any = None
    _mean: Any = None

    def _read(self, params: Any) -> Float[Array, "*batch K"]:
        """Natural or mean parameters side by side."""
        return params.log

    def _as(self, kind: Any, values: Float[Array, "*batch K"]) -> Any:
        """Natural or mean parameters of what stands side by side."""
        return kind(values)

    def log_partition(self: Any, natural: Any) -> Float[Array, "*batch"]:
        """``sum_k lgamma(a_k) - lgamma(sum_k a_k)`` in nats; NaN where not normalisable."""
        return jnp.where(self.in_domain(natural), _partition(self._read(natural) + 1), jnp.nan)

    def natural_to_mean(self, natural: Any) -> Any:
        """``psi(a_k) - psi(sum a)``."""
        return self._as(self._mean, _mean(self._read(natural) + 1))

    def invert(self, mean_params: Any) -> Any:
        """:meth:`mean_to_natural` without its derivative."""
        return self._as(self._natural, _invert(self._read(mean_params)) - 1)

    def mean_to_natural(self, mean_params: Any) -> Any:
        """The inverse of :meth:`natural_to_mean`; NaN outside the domain ``sum_k exp E[log x_k] < 1``."""
        return implicit_inverse(self, mean_params)

    def entropy(self, natural: Any) -> Float[Array, "*batch"]:
        """Entropy in nats, without the cancellation of the textbook's form."""
        return _entropy(self._read(natural) + 1)

    def kl(self, natural: Any, other: Any) -> Float[Array, "*batch"]:
        """KL(q || p) in nats, without cancellation where concentrations are large or the two are close."""
        return _divergence(self._read(natural) + 1, self._read(other) + 1)

    def fisher_product(self, natural: Any, tangent: Any) -> Any:
        """``d_mu`` of ``d_eta`` in O(K); see :class:`Family`."""
        return self._as(self._mean, _product(self._read(natural) + 1, self._read(tangent)))

    def fisher_solve(self, natural: Any, tangent: Any) -> Any:
        """``d_eta`` of ``d_mu`` in O(K) by Sherman-Morrison; see :class:`Family`."""
        return self._as(self._natural, _solve(self._read(natural) + 1, self._read(tangent)))


@dataclasses.dataclass(frozen=True)
class DirichletFamily(_DirichletLaws):
    """Dirichlet distributions over ``dim`` proportions, ``T(x) = log x``; conjugate to categorical probabilities.

    Args:
        dim: K, the number of categories.
    """

    dim: int

    _natural, _mean = DirichletNatural, DirichletMean

    @property
    def event_shape(self) -> tuple[int, ...]:
        """``(K,)``."""
        return (self.dim,)

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> DirichletNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        return DirichletNatural(jnp.zeros((*batch_shape, self.dim), dtype))

    def sufficient_statistics(self, theta: Float[Array, "*batch K"]) -> DirichletMean:
        """``log x``."""
        return DirichletMean(jnp.log(theta))

    def to_distribution(self, natural: DirichletNatural) -> dist.Distribution:
        """``Dirichlet(concentration)``."""
        return dist.Dirichlet(natural.log + 1)

    def from_distribution(self, distribution: dist.Distribution) -> DirichletNatural:
        """Natural parameters of a ``Dirichlet``."""
        base: Any = base_of(distribution)
        concentration = jnp.asarray(base.concentration, jnp.result_type(float, base.concentration))
        shape = distribution.batch_shape + distribution.event_shape
        return DirichletNatural(jnp.broadcast_to(concentration, shape) - 1)

    def in_domain(self, natural: DirichletNatural) -> Bool[Array, "*batch"]:
        """Whether every concentration is finite and positive."""
        return jnp.all(jnp.isfinite(natural.log) & (natural.log > -1), axis=-1)

    def nearest_valid(self, natural: DirichletNatural) -> DirichletNatural:
        """Raise non-positive concentrations to the smallest that the precision can hold."""
        return DirichletNatural(above_minus_one(natural.log))

    def sample(self, natural: DirichletNatural, key: Array, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Draws, kept inside the simplex where they underflow; implicitly reparameterised."""
        return inside_support(self.to_distribution(natural).sample(key, shape))

    def fisher_diagonal(self, natural: DirichletNatural) -> DirichletNatural:
        """``psi'(a_k) - psi'(sum a)``; see :class:`Family`."""
        a = natural.log + 1
        return DirichletNatural(trigamma(a) - trigamma(jnp.sum(a, axis=-1, keepdims=True)))


@dataclasses.dataclass(frozen=True)
class BetaFamily(_DirichletLaws, ScalarDefaults):
    """Beta distributions over (0, 1), ``T(x) = (log x, log (1 - x))``; conjugate to Bernoulli probabilities."""

    _natural, _mean = BetaNatural, BetaMean

    def _read(self, params: Any) -> Float[Array, "*batch 2"]:
        return jnp.stack([params.log, params.log_complement], axis=-1)

    def _as(self, kind: Any, values: Float[Array, "*batch 2"]) -> Any:
        return kind(values[..., 0], values[..., 1])

    def sufficient_statistics(self, theta: Float[Array, "*batch"]) -> BetaMean:
        """``(log x, log (1 - x))``."""
        return BetaMean(jnp.log(theta), jnp.log1p(-theta))

    def to_distribution(self, natural: BetaNatural) -> dist.Distribution:
        """``Beta(concentration1, concentration0)``."""
        return dist.Beta(natural.log + 1, natural.log_complement + 1)

    def from_distribution(self, distribution: dist.Distribution) -> BetaNatural:
        """Natural parameters of a ``Beta``, a ``BetaProportion`` or a ``Uniform`` between 0 and 1."""
        if isinstance(base_of(distribution), dist.Uniform):
            return self.zeros(distribution.batch_shape + distribution.event_shape)
        one, zero = read_parameters(distribution, "concentration1", "concentration0")
        return BetaNatural(one - 1, zero - 1)

    def in_domain(self, natural: BetaNatural) -> Bool[Array, "*batch"]:
        """Whether both concentrations are finite and positive."""
        finite = jnp.isfinite(natural.log) & jnp.isfinite(natural.log_complement)
        return finite & (natural.log > -1) & (natural.log_complement > -1)

    def nearest_valid(self, natural: BetaNatural) -> BetaNatural:
        """Raise non-positive concentrations to the smallest that the precision can hold."""
        return BetaNatural(above_minus_one(natural.log), above_minus_one(natural.log_complement))

    def sample(self, natural: BetaNatural, key: Array, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Draws, kept inside (0, 1) where they round to an end; implicitly reparameterised."""
        return inside_support(self.to_distribution(natural).sample(key, shape), 0.0, 1.0)


register_family(dist.Dirichlet, lambda distribution: DirichletFamily(distribution.event_shape[-1]))
register_family(dist.Beta, BetaFamily())


def _of_uniform(distribution: Any) -> BetaFamily:
    """Beta(1, 1). Raises GuideError where the ends are not known to be 0 and 1."""
    ends = distribution.low, distribution.high
    if any(isinstance(end, Tracer) for end in ends) or not (np.all(ends[0] == 0) and np.all(ends[1] == 1)):
        raise GuideError(
            "a Uniform between other ends than 0 and 1 belongs to no exponential family with densities to choose from."
        )
    return BetaFamily()


register_family(dist.Uniform, _of_uniform)
