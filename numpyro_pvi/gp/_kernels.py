"""Covariance functions as plain functions of parameters and two sets of inputs, and which rows to put pseudo-inputs at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..errors import PVIError

Kernel = Callable[[Any, Float[Array, "N D"], Float[Array, "J D"]], Float[Array, "N J"]]
"""``kernel(params, x, z)``: covariances of f(x_n) with f(z_j); params is any tree of unconstrained floating arrays."""

_NUS = (0.5, 1.5, 2.5)


def kernel_params(dim: int, sd: float = 1.0, length: float = 1.0, dtype: Any = None) -> dict[str, Array]:
    """Parameters of the kernels of this module, unconstrained, the same length-scale in every direction.

    Args:
        dim: D, the number of inputs' columns.
        sd: prior standard deviation of f.
        length: length-scale, in the units of the inputs.
        dtype: floating dtype.

    Returns:
        ``{"log_sd": (), "log_length": (D,)}``.
    """
    return {
        "log_sd": jnp.log(jnp.asarray(sd, dtype or float)),
        "log_length": jnp.full((dim,), jnp.log(jnp.asarray(length, dtype or float))),
    }


def _squares(
    params: Mapping[str, Any], x: Float[Array, "N D"], z: Float[Array, "J D"]
) -> tuple[Float[Array, "N J"], Float[Array, ""]]:
    """Squared distances in length-scales, and the prior variance."""
    x, z = (a * jnp.exp(-params["log_length"]) for a in (x, z))
    # By differences and not by the expanded square, whose rounding is that of the inputs' size and not of their distance.
    return jnp.sum((x[:, None, :] - z[None, :, :]) ** 2, axis=-1), jnp.exp(2 * params["log_sd"])


def squared_exponential(
    params: Mapping[str, Any], x: Float[Array, "N D"], z: Float[Array, "J D"]
) -> Float[Array, "N J"]:
    """``sd^2 exp(-1/2 sum_d (x_d - z_d)^2 / length_d^2)``: automatic relevance determination.

    Args:
        params: ``log_sd`` and ``log_length`` (of every column, or one), unconstrained; see :func:`kernel_params`.
        x: inputs.
        z: inputs.

    Returns:
        Covariances.
    """
    squares, variance = _squares(params, x, z)
    return variance * jnp.exp(-0.5 * squares)


def matern(nu: float) -> Kernel:
    """The Matern kernel of a smoothness, with a length-scale for every column.

    Args:
        nu: 0.5 (exponential), 1.5 or 2.5.

    Returns:
        The kernel; its parameters are those of :func:`squared_exponential`. The same function for the same ``nu``.

    Raises:
        PVIError: for another ``nu``.
    """
    if nu not in _NUS:
        raise PVIError(f"matern(nu={nu!r}): expected 0.5, 1.5 or 2.5.")
    return _MATERN[nu]


def _matern(nu: float, params: Mapping[str, Any], x: Array, z: Array) -> Array:
    squares, variance = _squares(params, x, z)
    # The distance has no derivative at 0, where the covariance has one (or, for nu = 1/2, is not asked for it).
    apart = squares > 0
    scaled = (2 * nu) ** 0.5 * jnp.where(apart, jnp.sqrt(jnp.where(apart, squares, 1.0)), 0.0)
    series = {0.5: 1.0, 1.5: 1 + scaled, 2.5: 1 + scaled + scaled**2 / 3}[nu]
    return variance * series * jnp.exp(-scaled)


def _made(nu: float) -> Kernel:
    def kernel(params: Mapping[str, Any], x: Array, z: Array) -> Array:
        return _matern(nu, params, x, z)

    return kernel


_MATERN = {nu: _made(nu) for nu in _NUS}


def variances(kernel: Kernel, params: Any, x: Float[Array, "N D"]) -> Float[Array, "N"]:
    """Prior variances ``k(x_n, x_n)`` without the matrix."""
    return jax.vmap(lambda row: kernel(params, row[None], row[None])[0, 0])(x)


def spread_rows(
    column: Callable[[Array], Float[Array, "N"]], variance: Float[Array, "N"], count: int
) -> Int[Array, "m"]:
    """Rows at which f is least known given those taken before: the pivots of a Cholesky factorisation.

    Args:
        column: a row's index to the covariances of f there with f at all rows, under what is known before.
        variance: of f at the rows.
        count: how many, at most N.

    Returns:
        Their indices, without repetition. Costs O(N count^2) and ``count`` columns.
    """

    def step(carry: tuple[Array, Array, Array], k: Array) -> tuple[tuple[Array, Array, Array], Array]:
        rest, free, columns = carry
        at = jnp.argmax(jnp.where(free, rest, -jnp.inf))
        # A row that is known already has no direction of its own left.
        left = jnp.where(rest[at] > 0, rest[at], jnp.inf)
        new = (column(at) - columns @ columns[at]) / jnp.sqrt(left)
        return (rest - new**2, free.at[at].set(False), columns.at[:, k].set(new)), at

    start = variance, jnp.ones(len(variance), bool), jnp.zeros((len(variance), count), variance.dtype)
    return jax.lax.scan(step, start, jnp.arange(count))[1]
