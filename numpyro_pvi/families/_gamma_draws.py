"""Logarithms of gamma draws with their implicit derivative, in a fixed number of vector operations for each.

Draws are Marsaglia and Tsang's, of the concentration raised by 1 where it is below 1. The derivative of a draw in its
concentration at a fixed quantile, ``w = d log x / da = -dP(a, x)/da / (x p(x; a))``, is what reparameterised gradients of a
gamma take their time with. Written as ``w(s)``, ``s = log(x / a)``, it solves

    w' + a (1 - e^s) w = psi(a) - log a - s,

whose solution without a pole at s = 0 is ``sum_k h_k(s) / a^(k+1)`` with ``h_0 = s / (e^s - 1)`` and ``h_k = (h_(k-1)' - c_k) /
(e^s - 1)``, where ``psi(a) - log a = sum_k c_k / a^k``. Small concentrations are raised by 8, since

    P(a, x) = P(a + 1, x) + x^a e^-x / Gamma(a + 1).

References:
    Marsaglia and Tsang, A simple method for generating gamma variables, 2000. Figurnov, Mohamed and Mnih, Implicit
    reparameterization gradients, 2018.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._special import digamma

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

    Args:
        key: a random key.
        concentration: positive.
        shape: of draws, before the batch axes.

    Returns:
        Finite for concentrations from 1e-30 on, also where x itself underflows; NaN where they are not positive and finite.
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
    first, second = jax.random.split(key)
    log_x, fine = _propose(first, flat + small)
    log_x = _drawn_again(second, flat + small, log_x, fine)
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


def _drawn_again(key: Any, a: Float[Array, "n"], log_x: Float[Array, "n"], fine: Array) -> Float[Array, "n"]:
    """Rejected draws once more, a fraction of all at a time, until none is left."""
    count = a.shape[0]
    size = min(count, max(_LEAST, count // _AGAIN))

    def left(state: tuple) -> Array:
        return ~jnp.all(state[2])

    def again(state: tuple) -> tuple:
        key, log_x, fine = state
        key, own = jax.random.split(key)
        (at,) = jnp.nonzero(~fine, size=size, fill_value=count)
        new, good = _propose(own, a.at[at].get(mode="fill", fill_value=1.0))
        at = jnp.where(good, at, count)
        return key, log_x.at[at].set(new, mode="drop"), fine.at[at].set(True, mode="drop")

    return jax.lax.while_loop(left, again, (key, log_x, fine))[1]


def log_gamma_slope(log_x: Float[Array, "..."], a: Float[Array, "..."]) -> Float[Array, "..."]:
    """``d log x / da`` of a draw ``x ~ Gamma(a, 1)`` at a fixed quantile.

    Args:
        log_x: logarithm of the draw.
        a: its concentration, positive.

    Returns:
        Positive; its error times the density of ``log x`` is at most about 1e-6 in float32 and 1e-9 in float64.
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
