"""Expectations of terms over their affine predictors that have a closed form, so that no rule is needed.

Terms ``f(u, v) = -v - h((u - a) exp(-v))`` with u a distance and v the log of a scale, under a normal law of both. Weighing the
law by ``exp(-k v)`` moves the mean of u by ``-k cov(u, v)``, leaves its variance as it is, and weighs ``exp(-k E v + k^2 var(v) /
2)``; what is left is an expectation over u alone. Its derivatives in the law are those of f (Bonnet's and Price's theorems).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import erf
from jaxtyping import Array, Float

from ..factors import OWN_VALUE, TermData, TermSpec

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# Smallest sd of a distance that is told from none.
_LEAST_SD = 1e-30

# E f, its slopes in the means of u and v, and the expectations of its second derivatives by pair.
_Expected = tuple[Array, tuple[Array, Array], dict[tuple[int, int], Array]]


def _normal(distance: Array, v: Array, within: Array, across: Array, apart: Array) -> _Expected:
    """``E[(u - a)^2 exp(-2 v)] = exp(-2 E v + 2 var(v)) ((E u - 2 cov(u, v) - a)^2 + var(u))``."""
    weight, at = jnp.exp(2.0 * (apart - v)), distance - 2.0 * across
    square = weight * (at**2 + within)
    bends = {(0, 0): -weight, (0, 1): 2.0 * weight * at, (1, 1): -2.0 * square}
    return -v - _HALF_LOG_2PI - 0.5 * square, (-weight * at, square - 1.0), bends


def _laplace(distance: Array, v: Array, within: Array, across: Array, apart: Array) -> _Expected:
    """``E[|u - a| exp(-v)]`` is ``exp(-E v + var(v) / 2)`` times the mean of a folded normal."""
    weight, at = jnp.exp(0.5 * apart - v), distance - across
    sd = jnp.sqrt(jnp.maximum(within, _LEAST_SD**2))
    slope = weight * erf(at / (sd * math.sqrt(2.0)))
    bend = weight * jnp.exp(-0.5 * (at / sd) ** 2 - _HALF_LOG_2PI) * 2.0 / sd
    size = bend * sd**2 + slope * at
    return -v - math.log(2.0) - size, (-slope, size - 1.0), {(0, 0): -bend, (0, 1): slope, (1, 1): -size}


_FORMS: dict[type, Callable[..., _Expected]] = {dist.Normal: _normal, dist.Laplace: _laplace}


def has_closed_form(spec: TermSpec, fn: Any) -> bool:
    """Whether a term is such a density, of a distance that is one predictor and the log of a scale that is another.

    ``fn``: the term's distribution.
    """
    fn, prefix = _inside(fn)
    if type(fn) not in _FORMS or len(spec.predictors) != 2:
        return False
    distance, log_scale = spec.predictors
    made = {leaf.path: leaf.coefficients for leaf in spec.leaves}
    loc, scale = f"{prefix}loc", f"{prefix}scale"
    if (log_scale.path, log_scale.link) != (scale, "log") or made.pop(scale, None) != (0.0, 1.0):
        return False
    if spec.latent:
        return distance.path == OWN_VALUE and made == ({loc: (0.0, 0.0)} if distance.location else {})
    return (distance.path, distance.link) == (loc, "identity") and made == {loc: (1.0, 0.0)}


def _inside(fn: Any) -> tuple[Any, str]:
    """A distribution without what spreads it over a batch, and what its parameters' paths begin with."""
    prefix = ""
    while isinstance(fn, dist.ExpandedDistribution):
        fn, prefix = fn.base_dist, f"{prefix}base_dist/"
    return fn, prefix


def closed_form(
    spec: TermSpec,
    data: TermData,
    mean: tuple[Float[Array, "E"], ...],
    spread: Mapping[tuple[int, int], Float[Array, "E"]],
) -> tuple[Array, tuple[Array, Array], dict[tuple[int, int], Array], Array]:
    """Expectations of a term that :func:`has_closed_form`.

    ``data``: the term's arrays; ``mean``, ``spread``: of the predictors, and their covariances by pair. Returns, as quadrature
    over predictors does, E f in nats, its derivatives in the means, E of its second derivatives by pair, and an error of 0.
    """
    shape, fn = data.fn.batch_shape, _inside(data.fn)[0]
    centre = data.value if not spec.latent else 0.0 if spec.predictors[0].location else fn.loc
    distance = mean[0] - jnp.broadcast_to(jnp.asarray(centre, mean[0].dtype), shape).reshape(-1)
    count = jnp.broadcast_to(data.scale, shape).reshape(-1).astype(distance.dtype)
    found = _FORMS[type(fn)](distance, mean[1], spread[0, 0], spread[0, 1], spread[1, 1])
    value, slopes, bends = found
    return count * value, (count * slopes[0], count * slopes[1]), {k: count * x for k, x in bends.items()}, 0.0 * value
