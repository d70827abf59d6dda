"""Points to weigh: quasi-random or random draws of a standard normal, and dense grids in one and two dimensions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jaxtyping import Array

from .._numerics import scaled_cholesky
from ._tilted import PointCloud

# Dimensions up to which quasi-random points are worth their static table.
_QUASI_DIM = 32
# Grids: half-width in sds of q and spacing.
_GRIDS = {"float64": (12.0, 0.25), "float32": (12.0, 0.4)}
# Latents that a dense grid can have.
GRID_DIM = 2


def normal_cloud(key: Any, dim: int, count: int, dtype: Any) -> PointCloud:
    """Standard normal draws whose own mean is 0 and whose own covariance is the identity.

    Up to 32 dimensions they are Sobol points, shifted at random (modulo 1) by the key; beyond, pairs of both signs.

    Args:
        key: random key.
        dim: D.
        count: S, more than D + 1.
        dtype: floating dtype.

    Returns:
        The points, of equal weight.
    """
    if dim <= _QUASI_DIM:
        shifted = (jnp.asarray(_sobol(dim, count), dtype) + jax.random.uniform(key, (dim,), dtype)) % 1.0
        # Within the open unit interval: as far from its ends as half of the mean distance of the points.
        eps = ndtri(jnp.clip(shifted, 0.5 / count, 1.0 - 0.5 / count))
    else:
        half = jax.random.normal(key, (-(-count // 2), dim), dtype)
        eps = jnp.concatenate([half, -half])[:count]
    eps = eps - jnp.mean(eps, axis=0)
    factor, _ = scaled_cholesky(eps.T @ eps / count)
    eps = jax.scipy.linalg.solve_triangular(factor, eps.T, lower=True).T
    return PointCloud(eps, jnp.zeros((count,), dtype), jnp.zeros((count,), bool))


def shifted_normals(key: Any, dim: int, width: int, count: int, units: int, dtype: Any) -> tuple[Array, Array]:
    """Standard normal draws for shared latents and for those of every unit, even jointly: unbiased, each as if drawn alone.

    Up to 32 dimensions together, the shared draws and those of any one unit are Sobol points shifted at random (modulo 1),
    with a shift of its own for every unit; beyond, they are independent.

    Args:
        key: random key.
        dim: D, shared latents.
        width: K, latents of a unit; 0 without any.
        count: S.
        units: U.
        dtype: floating dtype.

    Returns:
        Float[S D] and Float[U S K].
    """
    shared_key, own_key = jax.random.split(key)
    shape = (units, count, width)
    if dim + width > _QUASI_DIM:
        return jax.random.normal(shared_key, (count, dim), dtype), jax.random.normal(own_key, shape, dtype)
    table = jnp.asarray(_sobol(dim + width, count), dtype)
    shared = (table[:, :dim] + jax.random.uniform(shared_key, (dim,), dtype)) % 1.0
    own = (table[:, dim:] + jax.random.uniform(own_key, (units, 1, width), dtype)) % 1.0
    # As random.normal does, which is cheaper than ndtri; the ends of the interval are kept out.
    most = 1.0 - 0.5 * float(jnp.finfo(dtype).eps)
    shared, own = (np.sqrt(2) * jax.lax.erf_inv(jnp.clip(2.0 * u - 1.0, -most, most)) for u in (shared, own))
    return shared, own


def grid_cloud(dim: int, dtype: Any) -> PointCloud:
    """A trapezoidal grid over plus and minus 12 sds in one or two dimensions, coarser in float32.

    As wide in both precisions, because a long tail needs the width: where its mass reaches the border, less of the power is
    taken. Its error is of the order of rounding for tilted distributions down to about half the sd of q, in each direction.

    Args:
        dim: 1 or 2.
        dtype: floating dtype.

    Returns:
        The points with the standard normal's log density for weights.
    """
    eps, border = _grid(dim, jnp.dtype(dtype).name)
    return PointCloud(jnp.asarray(eps, dtype), jnp.asarray(-0.5 * np.sum(eps**2, axis=-1), dtype), jnp.asarray(border))


@functools.cache
def _sobol(dim: int, count: int) -> np.ndarray:
    from scipy.stats import qmc

    power = max(int(np.ceil(np.log2(count))), 0)
    return qmc.Sobol(dim, scramble=True, rng=np.random.default_rng(0)).random_base2(power)[:count]


@functools.cache
def _grid(dim: int, dtype_name: str) -> tuple[np.ndarray, np.ndarray]:
    limit, step = _GRIDS[dtype_name]
    axis = np.linspace(-limit, limit, 2 * round(limit / step) + 1)
    eps = np.stack([g.ravel() for g in np.meshgrid(*[axis] * dim, indexing="ij")], axis=-1)
    return eps, np.max(np.abs(eps), axis=-1) >= limit
