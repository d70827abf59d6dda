"""Gamma, inverse gamma and exponential distributions over x > 0, and draws with their implicit derivative."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from jaxtyping import Array, Bool, Float

from .._numerics import above_minus_one, inside_support, keep_positive, snap_to_positive
from ._base import (
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
    inverse_log_minus_digamma,
    lgamma_bregman_rest,
    log_minus_digamma,
    log_ratio_excess,
    relative_entropy,
    stirling_remainder,
    trigamma_excess,
)

# ---------------------------------------------------------------------------------------------------------------- draws
# Logarithms of gamma draws with their implicit derivative, in a fixed number of vector operations for each.
#
# Draws are Marsaglia and Tsang's, of the concentration raised by 1 where it is below 1. The derivative of a draw in its
# concentration at a fixed quantile, ``w = d log x / da = -dP(a, x)/da / (x p(x; a))``, is what reparameterised
# gradients of a gamma take their time with. Written as ``w(s)``, ``s = log(x / a)``, it solves
#
#     w' + a (1 - e^s) w = psi(a) - log a - s,
#
# whose solution without a pole at s = 0 is ``sum_k h_k(s) / a^(k+1)`` with ``h_0 = s / (e^s - 1)`` and ``h_k =
# (h_(k-1)' - c_k) / (e^s - 1)``, where ``psi(a) - log a = sum_k c_k / a^k``. Small concentrations are raised by 8,
# since
#
#     P(a, x) = P(a + 1, x) + x^a e^-x / Gamma(a + 1).
#
# References:
#     Marsaglia and Tsang, A simple method for generating gamma variables, 2000. Figurnov, Mohamed and Mnih, Implicit
#     reparameterization gradients, 2018.

# Concentrations are raised by this many, and the derivative's series in 1/a and in s end here.
_RAISED, _ORDERS, _TERMS = 8, 7, 26
# |s| up to which the series is evaluated: for a >= 8 larger ones have no weight that a float would hold.
_FAR = 2.5
# Rejected draws that are drawn again together: one in so many, of which at most one in twenty is expected.
_AGAIN = 8
_LEAST = 64


def log_gamma_draws(
    key: Any, concentration: Float[Array, "*batch"], shape: tuple[int, ...] = ()
) -> Float[Array, "..."]:
    """``log x`` of draws ``x ~ Gamma(concentration, 1)``, differentiable in the concentration.

    ``concentration``: positive; ``shape``: of draws, before the batch axes. Returns finite for concentrations from 1e-30 on,
    also where x itself underflows; NaN where they are not positive and finite.
    """
    return _draw(key, jnp.broadcast_to(concentration, (*shape, *jnp.shape(concentration))))


@jax.custom_jvp
def _draw(key: Any, a: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    wanted = a.reshape(-1)
    # Nothing is ever accepted of a concentration that is none.
    valid = (wanted > 0) & jnp.isfinite(wanted)
    flat = jnp.where(valid, wanted, 1.0)
    lift_key, key = jax.random.split(key)
    small = flat < 1
    log_x = _accepted(key, flat + small)
    lift = jnp.log1p(-jax.random.uniform(lift_key, flat.shape, flat.dtype)) / flat
    return jnp.where(valid, jnp.where(small, log_x + lift, log_x), jnp.nan).reshape(a.shape)


@_draw.defjvp
def _draw_jvp(primals: tuple, tangents: tuple) -> tuple:
    key, a = primals
    log_x = _draw(key, a)
    return log_x, log_gamma_slope(log_x, a) * tangents[1]


def _propose(key: Any, a: Float[Array, "n"]) -> tuple[Array, Array]:
    """One proposal each, as a logarithm, and whether it is taken."""
    d = a - 1 / 3
    one, other = jax.random.split(key)
    x = jax.random.normal(one, a.shape, a.dtype)
    root = 1 + x / jnp.sqrt(9 * d)
    positive = root > 0
    log_v = 3 * jnp.log(jnp.where(positive, root, 1.0))
    bound = 0.5 * x**2 + d * (1 - jnp.exp(log_v) + log_v)
    fine = positive & (jnp.log1p(-jax.random.uniform(other, a.shape, a.dtype)) < bound)
    return jnp.log(d) + log_v, fine


def _accepted(key: Any, a: Float[Array, "n"]) -> Float[Array, "n"]:
    """Draws of concentrations of 1 and more: proposals, and of those that are rejected a fraction of all at a time, until none is.

    A few are all proposed in the loop: a proposal is long, and compiled once for every place where it stands.
    """
    count = a.shape[0]
    size = min(count, max(_LEAST, count // _AGAIN))
    own, key = jax.random.split(key)

    def left(state: tuple) -> Array:
        return ~jnp.all(state[3])

    def again(state: tuple) -> tuple:
        own, key, log_x, fine = state
        (at,) = jnp.nonzero(~fine, size=size, fill_value=count)
        new, good = _propose(own, a.at[at].get(mode="fill", fill_value=1.0))
        at = jnp.where(good, at, count)
        key, own = jax.random.split(key)
        return own, key, log_x.at[at].set(new, mode="drop"), fine.at[at].set(True, mode="drop")

    state = own, key, jnp.zeros_like(a), jnp.zeros((count,), bool)
    if size < count:
        log_x, fine = _propose(own, a)
        key, own = jax.random.split(key)
        state = own, key, log_x, fine
    return jax.lax.while_loop(left, again, state)[2]


def log_gamma_slope(log_x: Float[Array, "..."], a: Float[Array, "..."]) -> Float[Array, "..."]:
    """``d log x / da`` of a draw ``x ~ Gamma(a, 1)`` at a fixed quantile.

    ``log_x``: logarithm of the draw; ``a``: its concentration, positive. Returns positive; its error times the density of ``log
    x`` is at most about 1e-6 in float32 and 1e-9 in float64.
    """
    small = a < _RAISED
    high = jnp.where(small, a + _RAISED, a)
    at_high = _slope_series(log_x - jnp.log(high), 1 / high)
    # w(a) = sum_j x^j / (a ... (a + j)) (psi(a + j + 1) - log x) + x^8 / (a ... (a + 7)) w(a + 8); x stays where a is below 8.
    x = jnp.exp(jnp.where(small, jnp.minimum(log_x, 6.0), 0.0))
    base = jnp.where(small, a, 1.0)
    gap = digamma(base + 1) - log_x
    weight, total = 1 / base, jnp.zeros_like(log_x)
    for j in range(_RAISED):
        total = total + weight * gap
        gap = gap + 1 / (base + j + 1)
        # The last weight belongs to w(a + 8): x^8 over eight factors.
        weight = weight * x / (base + j + 1) if j < _RAISED - 1 else weight * x
    return jnp.where(small, total + weight * at_high, at_high)


def _slope_series(s: Float[Array, "..."], inverse: Float[Array, "..."]) -> Float[Array, "..."]:
    s = jnp.clip(s, -_FAR, _FAR)
    total = jnp.zeros_like(s)
    for coefficients in reversed(_series()):
        own = jnp.zeros_like(s)
        for c in reversed(coefficients):
            own = own * s + c
        total = (total + own) * inverse
    return total


@cache
def _series() -> tuple[tuple[float, ...], ...]:
    """Taylor coefficients of ``h_0, h_1, ...`` in s."""
    length = _TERMS + 2 * _ORDERS
    # (e^s - 1) / s, and the expansion of psi(a) - log a in 1/a.
    bottom = [1 / math.factorial(n + 1) for n in range(length)]
    c = [0.0, -1 / 2, -1 / 12, 0.0, 1 / 120, 0.0, -1 / 252, 0.0, 1 / 240]
    found = [_divide([1.0] + [0.0] * (length - 1), bottom)]
    for k in range(1, _ORDERS):
        slope = [n * x for n, x in enumerate(found[-1])][1:]
        slope[0] -= c[k]
        # Its zero at s = 0 is that of e^s - 1.
        found.append(_divide(slope[1:], bottom))
    return tuple(tuple(x[:_TERMS]) for x in found)


def _divide(top: list[float], bottom: list[float]) -> list[float]:
    """Power series of a quotient; ``bottom`` begins with 1."""
    found: list[float] = []
    for n, x in enumerate(top):
        found.append(x - sum(found[i] * bottom[n - i] for i in range(n)))
    return found


# ---------------------------------------------------------------------------------------------------------------- gamma


@natural_parameters
class GammaNatural(Vector):
    """Natural parameters of a gamma: ``log = concentration - 1``, the exponent of x, and ``rate``."""

    log: Float[Array, "*batch"]
    rate: Float[Array, "*batch"]


@natural_parameters
class GammaMean(Vector):
    """Mean parameters ``log = E[log x]`` and ``negative = -E[x]``."""

    log: Float[Array, "*batch"]
    negative: Float[Array, "*batch"]


@natural_parameters
class InverseGammaNatural(Vector):
    """Natural parameters of an inverse gamma: ``log = concentration + 1``, minus the exponent of x, and ``rate``."""

    log: Float[Array, "*batch"]
    rate: Float[Array, "*batch"]


@natural_parameters
class InverseGammaMean(Vector):
    """Mean parameters ``log = -E[log x]`` and ``inverse = -E[1/x]``."""

    log: Float[Array, "*batch"]
    inverse: Float[Array, "*batch"]


@natural_parameters
class ExponentialNatural(Vector):
    """The natural parameter of an exponential distribution: its rate."""

    rate: Float[Array, "*batch"]


@natural_parameters
class ExponentialMean(Vector):
    """The mean parameter of an exponential distribution: ``-E[x]``."""

    negative: Float[Array, "*batch"]


# Both gammas are one family in (concentration a, rate b) with statistics (log y, -y), y ~ Gamma(a, b).


def _partition(a, b):
    return gammaln(a) - a * jnp.log(b)


def _mean(a, b):
    return jnp.log(a) - log_minus_digamma(a) - jnp.log(b), -a / b


def _invert(log, negative):
    """(a, b) of (E log y, -E y); NaN outside the domain ``E log y < log E y``."""
    log_mean = jnp.log(-negative)
    eps = jnp.finfo(log.dtype).eps
    resolution = 0.25 * eps * (1 + jnp.abs(log) + jnp.abs(log_mean))
    a = inverse_log_minus_digamma(snap_to_positive(log_mean - log, resolution))
    return a, a / -negative


def _divergence(a, b, other_a, other_b):
    """KL between gammas in nats, as the sum of what the leading terms make together and the rest."""
    d, e = (other_a - a) / a, (other_b - b) / b
    # (1 + f) = (1 + d)/(1 + e): the ratio of the two means; 1 + e itself would round to zero for rates far apart.
    share = other_b / b
    ratio = (other_a / a) / share
    # Where the other is much wider both are near -1, and their difference, which share divides, is rounding.
    f = jnp.where(share > 0.5, (d - e) / share, ratio - 1)
    return a * share * relative_entropy(f, ratio) + lgamma_bregman_rest(other_a, a)


def _product(a, b, d_a, d_b):
    return (1 + trigamma_excess(a)) / a * d_a - d_b / b, a / b**2 * d_b - d_a / b


def _solve(a, b, d_log, d_negative):
    # F = [[psi'(a), -1/b], [-1/b, a/b^2]] has the determinant w(a)/b^2.
    d_a = (a * d_log + b * d_negative) / trigamma_excess(a)
    return d_a, b / a * (b * d_negative + d_a)


def _log_draws(a, b, key, shape):
    a, b = jnp.broadcast_arrays(a, b)
    return log_gamma_draws(key, a, shape) - jnp.log(b)


class _GammaLaws(ScalarDefaults):
    """What a gamma and the law of its inverse share: natural parameters a + ``_more`` and b, mean parameters of y ~ Gamma(a, b)."""

    ends = (0.0, math.inf)
    _mean: Any = None
    _more = -1

    def log_partition(self, natural: Any) -> Float[Array, "*batch"]:
        """``lgamma(a) - a log b`` in nats; NaN where not normalisable."""
        return jnp.where(self.in_domain(natural), _partition(*self._read(natural)), jnp.nan)

    def natural_to_mean(self, natural: Any) -> Any:
        """``(psi(a) - log b, -a/b)``."""
        return self._mean(*_mean(*self._read(natural)))

    def invert(self, mean_params: Any) -> Any:
        """:meth:`mean_to_natural` without its derivative."""
        a, b = _invert(*jax.tree.leaves(mean_params))
        return self._natural(a + self._more, b)

    def mean_to_natural(self, mean_params: Any) -> Any:
        """The inverse of :meth:`natural_to_mean`; NaN outside the domain ``E[log y] < log E[y]``.

        The concentration a comes from the gap ``log E[y] - E[log y]``, about 1/(2a): what rounding leaves of it limits
        a to about 1/eps.
        """
        return implicit_inverse(self, mean_params)

    def in_domain(self, natural: Any) -> Bool[Array, "*batch"]:
        """Whether both are finite, the concentration positive and the rate positive."""
        finite = jnp.isfinite(natural.log) & jnp.isfinite(natural.rate)
        return finite & (natural.log > self._more) & (natural.rate > 0)

    def kl(self, natural: Any, other: Any) -> Float[Array, "*batch"]:
        """KL(q || p) in nats, without cancellation where concentrations are large or the two are close."""
        return _divergence(*self._read(natural), *self._read(other))

    def metric_root(self, natural: Any) -> Float[Array, "2 2"]:
        """In closed form: of large shapes the metric itself no longer tells how far it is from singular, which the root does."""
        a, b = self._read(natural)
        excess = trigamma_excess(a)
        first = jnp.sqrt((1 + excess) / a)
        return jnp.stack([jnp.stack([first, 0 * first]), jnp.stack([-1.0 + 0 * b, jnp.sqrt(excess)]) / (b * first)])

    def fisher_product(self, natural: Any, tangent: Any) -> Any:
        """``d_mu`` of ``d_eta`` in closed form; see :class:`Family`."""
        return self._mean(*_product(*self._read(natural), tangent.log, tangent.rate))

    def fisher_solve(self, natural: Any, tangent: Any) -> Any:
        """``d_eta`` of ``d_mu`` in closed form; see :class:`Family`."""
        return self._natural(*_solve(*self._read(natural), *jax.tree.leaves(tangent)))

    def _read(self, natural: Any) -> tuple[Array, Array]:
        """a and b."""
        return natural.log - self._more, natural.rate


@dataclasses.dataclass(frozen=True)
class GammaFamily(_GammaLaws):
    """Gamma distributions, ``T(x) = (log x, -x)``; conjugate to Poisson rates, precisions, exponential rates.

    An ``Exponential`` prior is the gamma of concentration 1 and has this family too; :class:`ExponentialLawFamily` keeps
    the concentration there.
    """

    _natural, _mean = GammaNatural, GammaMean

    def sufficient_statistics(self, theta: Float[Array, "*batch"]) -> GammaMean:
        """``(log x, -x)``."""
        return GammaMean(jnp.log(theta), -theta)

    def to_distribution(self, natural: GammaNatural) -> dist.Distribution:
        """``Gamma(concentration, rate)``."""
        return dist.Gamma(natural.log + 1, natural.rate)

    def from_distribution(self, distribution: dist.Distribution) -> GammaNatural:
        """Natural parameters of a ``Gamma``, a ``Chi2`` or an ``Exponential``."""
        if isinstance(base_of(distribution), dist.Exponential):
            (rate,) = read_parameters(distribution, "rate")
            return GammaNatural(jnp.zeros_like(rate), rate)
        concentration, rate = read_parameters(distribution, "concentration", "rate")
        return GammaNatural(concentration - 1, rate)

    def nearest_valid(self, natural: GammaNatural) -> GammaNatural:
        """Raise the concentration and the rate to the smallest that the precision can hold."""
        return GammaNatural(above_minus_one(natural.log), keep_positive(natural.rate))

    def sample(self, natural: GammaNatural, key: Array, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Draws, kept above 0 where they underflow; implicitly reparameterised."""
        return self.sample_with_statistics(natural, key, shape)[0]

    def sample_with_statistics(
        self, natural: GammaNatural, key: Array, shape: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "..."], GammaMean]:
        """:meth:`sample` and ``(log x, -x)`` with the logarithm of draws that underflow, too."""
        log_x = _log_draws(natural.log + 1, natural.rate, key, shape)
        # A product of two draws that underflow is a number still, as densities with rates need it.
        x = jnp.maximum(jnp.exp(log_x), jnp.sqrt(jnp.finfo(log_x.dtype).tiny))
        return x, GammaMean(log_x, -x)

    def entropy(self, natural: GammaNatural) -> Float[Array, "*batch"]:
        """``a - log b + lgamma(a) + (1 - a) psi(a)`` in nats, without its cancellation."""
        a = natural.log + 1
        stable = 0.5 * jnp.log(a) + HALF_LOG_2PI + stirling_remainder(a) + natural.log * log_minus_digamma(a)
        return stable - jnp.log(natural.rate)


@dataclasses.dataclass(frozen=True)
class InverseGammaFamily(_GammaLaws):
    """Inverse gammas, ``T(x) = (-log x, -1/x)``; conjugate to variances."""

    _natural, _mean, _more = InverseGammaNatural, InverseGammaMean, 1

    def sufficient_statistics(self, theta: Float[Array, "*batch"]) -> InverseGammaMean:
        """``(-log x, -1/x)``."""
        return InverseGammaMean(-jnp.log(theta), -1 / theta)

    def to_distribution(self, natural: InverseGammaNatural) -> dist.Distribution:
        """``InverseGamma(concentration, rate)``."""
        return dist.InverseGamma(natural.log - 1, natural.rate)

    def from_distribution(self, distribution: dist.Distribution) -> InverseGammaNatural:
        """Natural parameters of an ``InverseGamma``."""
        concentration, rate = read_parameters(distribution, "concentration", "rate")
        return InverseGammaNatural(concentration + 1, rate)

    def nearest_valid(self, natural: InverseGammaNatural) -> InverseGammaNatural:
        """Raise the concentration and the rate to the smallest that the precision can hold."""
        return InverseGammaNatural(above_minus_one(natural.log - 2) + 2, keep_positive(natural.rate))

    def sample(self, natural: InverseGammaNatural, key: Array, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Draws, kept inside (0, largest number); implicitly reparameterised."""
        return self.sample_with_statistics(natural, key, shape)[0]

    def sample_with_statistics(
        self, natural: InverseGammaNatural, key: Array, shape: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "..."], InverseGammaMean]:
        """:meth:`sample` and ``(-log x, -1/x)`` with the logarithm of draws that overflow, too."""
        log_y = _log_draws(natural.log - 1, natural.rate, key, shape)
        y = inside_support(jnp.exp(log_y))
        return inside_support(1 / y), InverseGammaMean(log_y, -y)

    def entropy(self, natural: InverseGammaNatural) -> Float[Array, "*batch"]:
        """``a + log b + lgamma(a) - (1 + a) psi(a)`` in nats, without its cancellation."""
        a = natural.log - 1
        stable = HALF_LOG_2PI - 1.5 * jnp.log(a) + stirling_remainder(a) + natural.log * log_minus_digamma(a)
        return stable + jnp.log(natural.rate)


@dataclasses.dataclass(frozen=True)
class ExponentialLawFamily(ScalarDefaults):
    """The exponential distributions themselves, ``T(x) = -x``: gammas whose concentration stays 1."""

    ends = (0.0, math.inf)
    _natural = ExponentialNatural

    def sufficient_statistics(self, theta: Float[Array, "*batch"]) -> ExponentialMean:
        """``-x``."""
        return ExponentialMean(-theta)

    def log_partition(self, natural: ExponentialNatural) -> Float[Array, "*batch"]:
        """``-log b`` in nats; NaN where not normalisable."""
        return jnp.where(self.in_domain(natural), -jnp.log(natural.rate), jnp.nan)

    def natural_to_mean(self, natural: ExponentialNatural) -> ExponentialMean:
        """``-1/b``."""
        return ExponentialMean(-1 / natural.rate)

    def mean_to_natural(self, mean_params: ExponentialMean) -> ExponentialNatural:
        """The inverse of :meth:`natural_to_mean`."""
        return ExponentialNatural(-1 / mean_params.negative)

    def to_distribution(self, natural: ExponentialNatural) -> dist.Distribution:
        """``Exponential(rate)``."""
        return dist.Exponential(natural.rate)

    def from_distribution(self, distribution: dist.Distribution) -> ExponentialNatural:
        """Natural parameters of an ``Exponential``."""
        return ExponentialNatural(*read_parameters(distribution, "rate"))

    def in_domain(self, natural: ExponentialNatural) -> Bool[Array, "*batch"]:
        """Whether the rate is finite and positive."""
        return jnp.isfinite(natural.rate) & (natural.rate > 0)

    def nearest_valid(self, natural: ExponentialNatural) -> ExponentialNatural:
        """Raise a non-positive rate to the smallest normal number's root."""
        return ExponentialNatural(keep_positive(natural.rate))

    def entropy(self, natural: ExponentialNatural) -> Float[Array, "*batch"]:
        """``1 - log b`` in nats."""
        return 1 - jnp.log(natural.rate)

    def kl(self, natural: ExponentialNatural, other: ExponentialNatural) -> Float[Array, "*batch"]:
        """KL(q || p) in nats, without cancellation where the two are close."""
        return -log_ratio_excess((other.rate - natural.rate) / natural.rate, other.rate / natural.rate)

    def fisher_solve(self, natural: ExponentialNatural, tangent: ExponentialMean) -> ExponentialNatural:
        """``d_eta`` of ``d_mu`` in closed form; see :class:`Family`."""
        return ExponentialNatural(natural.rate**2 * tangent.negative)


register_family(dist.Gamma, GammaFamily())
register_family(dist.Exponential, GammaFamily())
register_family(dist.InverseGamma, InverseGammaFamily())
