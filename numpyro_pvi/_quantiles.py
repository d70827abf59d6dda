"""Quantiles of the elements of a distribution, also where NumPyro has no inverse of its distribution function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Shaped
from numpyro.distributions.transforms import biject_to

_HALVINGS = {"float32": 40, "float64": 70}
_GRID = 4096
_DRAWS = 20_000
_CLOSED = (dist.Normal, dist.LogNormal, dist.Exponential)


def marginal_quantiles(distribution: Any, levels: Float[Array, "Q"]) -> Shaped[Array, "Q *shape"]:
    """Quantiles of every element of a distribution's values.

    To rounding for normals, log-normals and exponentials, and by bisection of the distribution function for gamma, inverse
    gamma and beta distributions and the elements of a Dirichlet; for von Mises angles, counted from -pi, by a grid of 4,096
    points; the smallest value whose probability is enough for discrete ones. What is left (elements of a Wishart matrix) is
    read off 20,000 draws, with a standard error of about ``sqrt(p (1 - p) / 20,000)`` in the level.

    Args:
        distribution: a NumPyro distribution.
        levels: numbers in [0, 1].

    Returns:
        Values, with the levels' axis first.
    """
    while isinstance(distribution, dist.Independent):
        distribution = distribution.base_dist
    if isinstance(distribution, dist.Dirichlet):
        alpha = distribution.concentration
        return marginal_quantiles(dist.Beta(alpha, jnp.sum(alpha, -1, keepdims=True) - alpha), levels)
    shape = distribution.batch_shape + distribution.event_shape
    column = levels.reshape(-1, *(1,) * len(shape))
    if isinstance(distribution, _CLOSED):
        return distribution.icdf(jnp.broadcast_to(column, (len(levels), *shape)))
    if isinstance(distribution, dist.VonMises):
        return _circular(distribution, levels)
    if distribution.support.is_discrete:
        return _discrete(distribution, levels)
    if distribution.event_shape and distribution.support in _REAL:
        return dist.Normal(distribution.mean, jnp.sqrt(distribution.variance)).icdf(
            jnp.broadcast_to(column, (len(levels), *shape))
        )
    if not distribution.event_shape and type(distribution).cdf is not dist.Distribution.cdf:
        return _bisected(distribution, column, shape)
    draws = distribution.sample(jax.random.key(0), (_DRAWS,))
    return jnp.quantile(draws, levels, axis=0)


_REAL = (dist.constraints.real_vector, dist.constraints.real_matrix)


def _bisected(distribution: Any, column: Array, shape: tuple[int, ...]) -> Array:
    """Bisection along the real line that the support is mapped to."""
    transform = biject_to(distribution.support)
    dtype = jnp.result_type(float)
    edge = -0.9 * jnp.log(jnp.finfo(dtype).tiny)
    start = jnp.broadcast_to(column, (column.shape[0], *shape)).astype(dtype)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        below = distribution.cdf(transform(middle)) < start
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    bounds = jnp.full(start.shape, -edge), jnp.full(start.shape, edge)
    low, high = jax.lax.fori_loop(0, _HALVINGS[dtype.name], halve, bounds)
    return transform(0.5 * (low + high))


def _circular(distribution: Any, levels: Array) -> Array:
    """Inverse of a trapezoid sum of the density over one turn."""
    grid = jnp.linspace(-jnp.pi, jnp.pi, _GRID + 1)
    shape = distribution.batch_shape
    density = jnp.exp(distribution.log_prob(grid.reshape(-1, *(1,) * len(shape)))).reshape(_GRID + 1, -1)
    cells = 0.5 * (density[1:] + density[:-1])
    total = jnp.concatenate([jnp.zeros_like(cells[:1]), jnp.cumsum(cells, axis=0)])
    found = jax.vmap(lambda mass: jnp.interp(levels, mass / mass[-1], grid), in_axes=1, out_axes=1)(total)
    return found.reshape(len(levels), *shape)


def _discrete(distribution: Any, levels: Array) -> Array:
    """The smallest value of the support whose cumulative probability reaches the level."""
    support = distribution.enumerate_support(expand=True)
    mass = jnp.cumsum(jnp.exp(distribution.log_prob(support)), axis=0)
    # A sum that rounding leaves below one still reaches level one.
    mass = mass / mass[-1]
    index = jax.vmap(lambda level: jnp.argmax(mass >= level, axis=0))(levels)
    return jnp.take_along_axis(support, index, axis=0)
