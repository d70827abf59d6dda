"""Moments of a tilted distribution of a product of families from weighted draws about its mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..expectations import (
    LaplaceMoments,
    Tilted,
    Unconstrained,
    normal_cloud,
    paired,
    tilted_by_draws,
    weighable,
)
from ..families import MultivariateNormalFamily, ProductNatural
from ._laplace import laplace_proposal

# Degrees of freedom of the Student's t that is drawn from; and the least curvature, that of q being 1.
_FREEDOM, _LEAST_CURVATURE = 5.0, 1e-2
# Nats below the heaviest draw from which on one weighs nothing.
_NOTHING = 60.0


def tilted_by_laplace(
    space: Unconstrained,
    look: Callable[[Float[Array, "D"]], tuple[Array, Array, Array]],
    factor: Callable[[dict], Float[Array, "S"]],
    q: ProductNatural,
    site: ProductNatural,
    power: float | Float[Array, ""],
    key: Any,
    settings: LaplaceMoments,
) -> Tilted:
    """What matching the moments of ``q (p / t)^power`` asks for, from a Laplace approximation in unconstrained coordinates.

    Draws are of the Student's t (5 degrees of freedom) with the mode and the curvature there.

    Args:
        space: coordinates of the components that the factor sees.
        look: coordinates to the factor's log density, nats, its gradient and its Hessian in them.
        factor: its log density at values by component with a leading axis of points.
        q: natural parameters of q, of these components.
        site: the factor's site.
        power: alpha.
        key: a random key.
        settings: draws, and steps of the search.

    Returns:
        What moment matching asks for: see :func:`numpyro_pvi.expectations.tilted_by_draws`.
    """
    family, cavity = space.family, q - site * power
    white_key, cloud_key = jax.random.split(key)
    white = space.whitening(q, white_key)
    gaussian = MultivariateNormalFamily(space.dim)
    dtype = white.loc.dtype
    eye = jnp.eye(space.dim, dtype=dtype)
    standard = gaussian.natural(jnp.zeros((space.dim,), dtype), eye)

    def rest(eps: Array) -> Array:
        return space.log_member(cavity, white.at(eps)) + 0.5 * jnp.sum(eps**2)

    def over_standard(eps: Array) -> tuple[Array, Array, Array]:
        value, slope, bend = look(white.at(eps))
        slope, bend = white.scale.T @ slope, white.scale.T @ bend @ white.scale
        own = rest(eps), jax.grad(rest)(eps), jax.hessian(rest)(eps)
        return own[0] + power * value, own[1] + power * slope, eye - _bent_down(eye - own[2] - power * bend)

    found = laplace_proposal(gaussian, over_standard, standard, standard * 0.0, 1.0, settings.num_steps)
    cloud_key, tail_key = jax.random.split(cloud_key)
    cloud = normal_cloud(cloud_key, space.dim, settings.num_draws, dtype).eps
    # Tails of gammas and betas fall off as an exponential of u, which no Gaussian's draws reach.
    spread = _FREEDOM / (2 * jax.random.gamma(tail_key, 0.5 * _FREEDOM, (settings.num_draws, 1), dtype))
    eps = gaussian.draw(found.moments, cloud * jnp.sqrt(spread))
    u = jax.vmap(white.at)(eps)
    values = jax.vmap(lambda point: space.values(point)[0])(u)
    statistics = {n: own.sufficient_statistics(values[n]) for n, own in family.components}
    log_q = jax.vmap(lambda point: space.log_member(q, point))(u) - family.log_partition(q)
    gap = eps - found.moments.loc
    square = jnp.sum(gap * jax.vmap(lambda x: gaussian.precision_product(found.natural, x))(gap), axis=-1)
    half = 0.5 * jnp.linalg.slogdet(found.natural.precision)[1] - jnp.sum(jnp.log(jnp.diagonal(white.scale)))
    most = 0.5 * (_FREEDOM + space.dim)
    log_g = half - most * jnp.log1p(square / _FREEDOM) - 0.5 * space.dim * math.log(_FREEDOM * math.pi)
    log_g = log_g + math.lgamma(most) - math.lgamma(0.5 * _FREEDOM)
    base, ratio = (log_q - log_g).astype(dtype), factor(values)
    site_says = paired(family, site, statistics)
    logs = base + power * (ratio - site_says)
    # Far out in the tails statistics overflow, and nothing is lost with draws that weigh nothing either way.
    finite = [jnp.isfinite(x.reshape(x.shape[0], -1)).all(axis=-1) for x in jax.tree.leaves(statistics)]
    seen = jnp.stack([jnp.isfinite(base), ~jnp.isnan(logs), *finite]).all(axis=0)
    near = seen & ((_relative(base, seen) > -_NOTHING) | (_relative(logs, seen) > -_NOTHING))
    first = jnp.argmax(near)
    statistics = jax.tree.map(lambda x: jnp.where(_like(near, x), x, x[first]), statistics)
    base, ratio = jnp.where(near, base, -jnp.inf), jnp.where(near, ratio, ratio[first])
    weights = jax.nn.softmax(jnp.where(near, logs, -jnp.inf))
    ready = weighable(family, q, values, statistics, weights)
    return tilted_by_draws(family, ready, ratio, q, site, power, base)


def _relative(logs: Float[Array, "S"], seen: Array) -> Float[Array, "S"]:
    """Below the largest of those seen."""
    return logs - jnp.max(jnp.where(seen, logs, -jnp.inf))


def _like(mask: Array, x: Array) -> Array:
    return mask.reshape(mask.shape + (1,) * (x.ndim - 1))


def _bent_down(precision: Float[Array, "D D"]) -> Float[Array, "D D"]:
    """A curvature with all eigenvalues positive: Newton's steps then go uphill, in directions that bend up as in others."""
    values, vectors = jnp.linalg.eigh(0.5 * (precision + precision.T))
    size = jnp.maximum(jnp.abs(values), _LEAST_CURVATURE)
    return (vectors * size) @ vectors.T
