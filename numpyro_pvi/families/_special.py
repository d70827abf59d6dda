"""Special functions that keep their relative accuracy in float32 for tiny and huge arguments.

With ``h = 1/2 log 2 pi`` the log-gamma function and its derivatives are kept as what Stirling's leading terms leave over,

    lgamma(a) = (a - 1/2) log a - a + h + r(a),   psi(a) = log a - phi(a),   a psi'(a) = 1 + w(a),

because entropies, divergences and Fisher metrics are made of ``r``, ``phi`` and ``w``: the leading terms cancel on paper
and must not be left to cancel in floating point. All functions are elementwise and differentiable.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln, i0e
from jaxtyping import Array, Float

from .._numerics import newton_in_bracket

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# From here on the asymptotic series below are exact to float64; smaller arguments are shifted up by recurrence.
_SHIFT = 8
# B_2k / (2k (2k-1)), B_2k / 2k and B_2k for k = 1, 2, ...
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_EULER = 0.5772156649015329


def _series(coefficients, inverse_square):
    """``c_0 + c_1 z + c_2 z^2 + ...`` by Horner's rule."""
    total = jnp.full_like(inverse_square, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * inverse_square + c
    return total


def _ladder(a, first=0, last=_SHIFT - 1):
    """``a + first, ..., a + last`` along a new last axis."""
    return a[..., None] + jnp.arange(first, last + 1, dtype=a.dtype)


def stirling_remainder(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """``r(a) = lgamma(a) - (a - 1/2) log a + a - 1/2 log 2 pi``, about 1/(12 a) for large a; a > 0."""
    small = jnp.minimum(a, _SHIFT)
    direct = gammaln(small) - (small - 0.5) * jnp.log(small) + small - HALF_LOG_2PI
    return jnp.where(a < _SHIFT, direct, _remainder_series(jnp.maximum(a, _SHIFT)))


def _remainder_series(a):
    """``r(a)`` for a >= 8."""
    return _series([b / ((2 * k + 2) * (2 * k + 1)) for k, b in enumerate(_BERNOULLI)], 1 / a**2) / a


def log_minus_digamma(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """``phi(a) = log a - psi(a)``: positive, decreasing, 1/(2a) for large and 1/a for small a; a > 0."""
    large = jnp.where(a < _SHIFT, a + _SHIFT, a)
    series = _digamma_series(large)
    shifted = jnp.log(a / large) + jnp.sum(1 / _ladder(a), axis=-1)
    return jnp.where(a < _SHIFT, series + shifted, series)


def _digamma_series(a):
    """``phi(a)`` for a >= 8."""
    inverse = 1 / a
    return 0.5 * inverse + inverse**2 * _series([b / (2 * k + 2) for k, b in enumerate(_BERNOULLI)], inverse**2)


def digamma(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """``psi(a)`` for a > 0."""
    return jnp.log(a) - log_minus_digamma(a)


def trigamma_excess(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """``w(a) = a psi'(a) - 1``: positive, decreasing, 1/(2a) for large and 1/a for small a; a > 0."""
    large = jnp.where(a < _SHIFT, a + _SHIFT, a)
    inverse = 1 / large
    series = 0.5 * inverse + inverse**2 * _series(_BERNOULLI, inverse**2)
    bounded = jnp.minimum(a, _SHIFT)
    rest = jnp.sum(1 / _ladder(bounded, 1) ** 2, axis=-1) + (1 + series) * inverse
    return jnp.where(a < _SHIFT, 1 / bounded + bounded * rest - 1, series)


def trigamma(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """``psi'(a)`` for a > 0."""
    return (1 + trigamma_excess(a)) / a


def inverse_log_minus_digamma(gap: Float[Array, "..."]) -> Float[Array, "..."]:
    """The a > 0 with ``log a - psi(a) = gap``, for any gap > 0: Newton on log phi against log a, almost a line."""
    log_gap = jnp.log(gap)

    def step(_, log_a):
        a = jnp.exp(log_a)
        phi = log_minus_digamma(a)
        return log_a + (jnp.log(phi) - log_gap) * phi / trigamma_excess(a)

    start = jnp.log((1 + gap) / (2 + gap)) - log_gap
    return jnp.exp(jax.lax.fori_loop(0, 8, step, start))


def inverse_digamma(value: Float[Array, "..."]) -> Float[Array, "..."]:
    """The a > 0 with ``psi(a) = value``, for any value whose answer is representable: Newton in log a.

    References:
        T. Minka, *Estimating a Dirichlet distribution*, 2000, appendix C (the starting point).
    """
    low = jnp.minimum(value, -2.22)
    start = jnp.where(value > -2.22, jnp.log(jnp.exp(value) + 0.5), -jnp.log(-low - _EULER))

    def step(_, log_a):
        a = jnp.exp(log_a)
        return log_a + (value - digamma(a)) / (1 + trigamma_excess(a))

    return jnp.exp(jax.lax.fori_loop(0, 6, step, start))


def log_ratio_excess(delta: Float[Array, "..."], ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """``log(1 + delta) - delta <= 0`` without cancellation.

    ``delta``: relative difference, computed without cancellation where it is small; ``ratio``: 1 + delta, computed without
    cancellation where it is small. Returns the excess of the log ratio over its first-order term.
    """
    small = jnp.abs(delta) < 0.3
    z = jnp.where(small, delta, 0.0)
    z = z / (2 + z)
    tail = _series([1 / (2 * k + 3) for k in range(11)], z**2)
    series = -2 * z**2 / (1 - z) + 2 * z**3 * tail
    return jnp.where(small, series, jnp.log(jnp.where(small, 1.0, ratio)) - delta)


def relative_entropy(delta: Float[Array, "..."], ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """``(1 + delta) log(1 + delta) - delta >= 0`` without cancellation; arguments as :func:`log_ratio_excess`."""
    return log_ratio_excess(delta, ratio) + delta * _log_ratio(delta, ratio)


def _log_ratio(delta, ratio):
    """``log(1 + delta)``, as a factor of delta: where that is small its own error is small as well."""
    return jnp.log(jnp.where(jnp.abs(delta) < 0.3, 1 + delta, ratio))


def lgamma_bregman_rest(p: Float[Array, "..."], q: Float[Array, "..."]) -> Float[Array, "..."]:
    """The Bregman divergence of lgamma beyond its leading term.

    With ``B(p, q) = lgamma(p) - lgamma(q) - psi(q) (p - q)`` and ``d = p/q - 1``, returns ``B(p, q) - q ((1 + d) log(1 + d) -
    d)``. What is left out is the same convex function everywhere, so that families of several concentrations can combine it
    exactly; the whole is nearly as accurate for 1e6 as for 1. ``p``: positive numbers; ``q``: positive numbers. Returns the
    rest, in nats.
    """
    gap, large = p - q, q >= _SHIFT
    lift = jnp.where(large, 0.0, float(_SHIFT)).astype(q.dtype)
    high_p, high_q = p + lift, q + lift
    # q large, whatever p is: from r and phi. What else would be large in all of it falls out.
    slope = _digamma_series(high_q) - 0.5 / high_q
    left = stirling_remainder(high_p) - _remainder_series(high_q) + slope * gap
    # Otherwise: lgamma(a) = lgamma(a + 8) - sum_k log(a + k), and every term is a positive divergence by itself. All at once, with
    # what is at q itself (the first) and at q + 8 (the last).
    rungs = _ladder(q, last=_SHIFT)
    deltas, ratios = gap[..., None] / rungs, _ladder(p, last=_SHIFT) / rungs
    excess = log_ratio_excess(deltas, ratios)
    entropy = rungs * (excess + deltas * _log_ratio(deltas, ratios))
    shifted = entropy[..., -1] - entropy[..., 0] - jnp.sum(excess[..., :-1], axis=-1)
    rest = left - 0.5 * jnp.where(large, excess[..., 0], excess[..., -1])
    return rest + jnp.where(large, 0.0, shifted)


# ------------------------------------------------------------------------------------------------------ Bessel functions

_FAR = 30.0
_DEPTH = 80


def _ratio_coefficients(count):
    """c_n in ``I_1(x) / I_0(x) = sum_n c_n x^-n``, from the Riccati equation ``A' = 1 - A/x - A^2``."""
    c = [1.0, -0.5]
    for n in range(2, count):
        c.append(0.5 * ((n - 2) * c[n - 1] - sum(c[i] * c[n - i] for i in range(1, n))))
    return c


_RATIO = _ratio_coefficients(24)


def _bessel_series(x):
    """``(A, A', 1 - A)`` for large x."""
    inverse = 1 / x
    complement = _series([-c for c in _RATIO[1:]], inverse) * inverse
    slope = _series([-n * c for n, c in enumerate(_RATIO) if n > 0], inverse) * inverse**2
    return 1 - complement, slope, complement


def _bessel_fraction(x):
    """``(A, A')`` for moderate x, by the continued fraction ``r_v = x / (2 (v + 1) + x r_(v+1))`` and its derivative."""

    def step(k, carry):
        ratio, slope = carry
        order = 2.0 * (_DEPTH - k)
        below = order + x * ratio
        return x / below, (order - x * x * slope) / below**2

    start = (jnp.zeros_like(x), jnp.zeros_like(x))
    return jax.lax.fori_loop(0, _DEPTH, step, start)


def bessel_ratio_parts(
    x: Float[Array, "..."],
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """``(A, A', 1 - A)`` of ``A(x) = I_1(x) / I_0(x)``, the mean resultant length of a von Mises, each without cancellation.

    ``x``: concentrations, >= 0. Returns the ratio, its derivative and its complement.
    """
    far = x >= _FAR
    ratio, slope = _bessel_fraction(jnp.where(far, 1.0, x))
    far_ratio, far_slope, far_complement = _bessel_series(jnp.where(far, x, _FAR))
    return (
        jnp.where(far, far_ratio, ratio),
        jnp.where(far, far_slope, slope),
        jnp.where(far, far_complement, 1 - ratio),
    )


def inverse_bessel_ratio(ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """The x >= 0 with ``I_1(x) / I_0(x) = ratio``, for ratio in [0, 1).

    Newton on ``log A/(1 - A)`` against ``log x``, whose slope is 1 at both ends; the start is off by a factor of at most
    2.

    References:
        A. Banerjee et al., *Clustering on the unit hypersphere*, 2005, equation 4.4 (the starting point).
    """
    safe = jnp.where(ratio > 0, ratio, 0.5)
    target = jnp.log(safe) - jnp.log1p(-safe)
    start = jnp.log(safe) + jnp.log(2 - safe**2) - jnp.log1p(-safe) - jnp.log1p(safe)

    def gap(log_x):
        x = jnp.exp(log_x)
        value, slope, complement = bessel_ratio_parts(x)
        return jnp.log(value) - jnp.log(complement) - target, x * slope / (value * complement)

    log_x = newton_in_bracket(gap, start - 1.0, start + 1.0, start, 12)
    return jnp.where(ratio > 0, jnp.exp(log_x), 0.0)


def log_bessel_i0(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``log I_0(x)``, about x for large and x^2/4 for small x; x >= 0."""
    return jnp.log(i0e(x)) + x
