"""A Gaussian process given sites in its values at pseudo-inputs, and the covariance functions that there are.

With the sites ``t(u) = exp(c + h^T u - 1/2 u^T Lambda u)``, ``Lambda = R R^T`` block by block and ``h = R g``, everything
follows from the Cholesky factor of ``C = I + R^T K R``:

    mean(x)   = k(x, u) R C^-1 g,
    cov(x, z) = k(x, z) - k(x, u) R C^-1 R^T k(u, z),
    log int p(u) t(u) du = c + 1/2 (g^T g - g^T C^-1 g) - 1/2 log det C.

C has no eigenvalue below 1 whatever the kernel, and rows of R that are zero change nothing: arrays have room for blocks to
come, so that a batch of the same size runs the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from .._numerics import diagonal, psd_root, scaled_cholesky, symmetrise, with_jitter
from ..errors import PVIError
from ..families import GaussianNatural

# ------------------------------------------------------------------------------------------------- covariance functions
# Covariance functions as plain functions of parameters and two sets of inputs, and which rows to put pseudo-inputs at.

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

    ``column``: a row's index to the covariances of f there with f at all rows, under what is known before; ``count``: how many,
    at most N. Returns their indices, without repetition. Costs O(N count^2) and ``count`` columns.
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


# -------------------------------------------------------------------------------------------------------------- process


class Prior(NamedTuple):
    """A kernel at one value of its parameters; pseudo-values carry noise of a share of their prior variance."""

    kernel: Kernel
    params: Any
    jitter: float | None

    def covariance(self, x: Float[Array, "N D"], z: Float[Array, "J D"]) -> Float[Array, "N J"]:
        """Of f at two sets of inputs."""
        return self.kernel(self.params, x, z)

    def variance(self, x: Float[Array, "N D"]) -> Float[Array, "N"]:
        """Of f at inputs."""
        return variances(self.kernel, self.params, x)

    def gram(self, z: Float[Array, "m D"]) -> Float[Array, "m m"]:
        """Of the pseudo-values at inputs."""
        return with_jitter(self.covariance(z, z), self.variance(z), self.jitter)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Process:
    """Sites at pseudo-inputs with the factor of ``I + R^T K R``; rows from the last block on are zero."""

    inputs: Float[Array, "C D"]
    root: Float[Array, "C C"]
    target: Float[Array, "C"]
    constant: Float[Array, ""]
    factor: Float[Array, "C C"]
    valid: Bool[Array, ""]


class Block(NamedTuple):
    """One site in root form."""

    inputs: Float[Array, "m D"]
    root: Float[Array, "m m"]
    target: Float[Array, "m"]
    constant: Float[Array, ""]


def block_of(inputs: Float[Array, "m D"], natural: GaussianNatural, constant: Float[Array, ""]) -> Block:
    """A site's natural parameters in root form: ``R R^T = Lambda``, ``R g = h``."""
    root, inverse = psd_root(natural.precision)
    return Block(inputs, root, inverse @ natural.precision_mean, constant)


def empty(capacity: int, dim: int, dtype: Any) -> Process:
    """The prior, with room."""
    zeros = jnp.zeros((capacity, capacity), dtype)
    eye = jnp.eye(capacity, dtype=dtype)
    return Process(
        jnp.zeros((capacity, dim), dtype),
        zeros,
        jnp.zeros((capacity,), dtype),
        jnp.zeros((), dtype),
        eye,
        jnp.asarray(True),
    )


def grown(process: Process, capacity: int) -> Process:
    """The same with more room."""
    more = capacity - len(process.inputs)
    eye = jnp.eye(more, dtype=process.root.dtype)
    factor = jnp.pad(process.factor, ((0, more), (0, more)))
    return Process(
        jnp.pad(process.inputs, ((0, more), (0, 0))),
        jnp.pad(process.root, ((0, more), (0, more))),
        jnp.pad(process.target, (0, more)),
        process.constant,
        factor.at[-more:, -more:].set(eye),
        process.valid,
    )


def placed(process: Process, block: Block, offset: Any) -> Process:
    """A block's site in the place that begins at an offset; the factor is left as it was."""
    put = jax.lax.dynamic_update_slice
    zero = jnp.zeros((), jnp.int32)
    offset = jnp.asarray(offset, jnp.int32)
    return dataclasses.replace(
        process,
        inputs=put(process.inputs, block.inputs, (offset, zero)),
        root=put(process.root, block.root, (offset, offset)),
        target=put(process.target, block.target, (offset,)),
        constant=process.constant + block.constant,
    )


def conditioned(prior: Prior, process: Process) -> Process:
    """The factor anew, at the prior's parameters: O(C^3)."""
    gram = process.root.T @ prior.gram(process.inputs) @ process.root
    eye = jnp.eye(len(gram), dtype=gram.dtype)
    factor, valid = scaled_cholesky(eye + symmetrise(gram))
    return dataclasses.replace(process, factor=factor, valid=valid)


def appended(prior: Prior, process: Process, block: Block, offset: Any) -> Process:
    """One more block, its rows of the factor alone: O(C^2 m).

    ``prior``: at the parameters that the factor was made with; ``process``: with zero rows from the offset on. Returns the
    process given all of them.
    """
    cross = process.root.T @ prior.covariance(process.inputs, block.inputs) @ block.root
    lower = solve_triangular(process.factor, cross, lower=True).T
    own = block.root.T @ prior.gram(block.inputs) @ block.root - lower @ lower.T
    corner, valid = scaled_cholesky(jnp.eye(len(own), dtype=own.dtype) + symmetrise(own))
    put, zero = jax.lax.dynamic_update_slice, jnp.zeros((), jnp.int32)
    offset = jnp.asarray(offset, jnp.int32)
    factor = put(put(process.factor, lower, (offset, zero)), corner, (offset, offset))
    return dataclasses.replace(placed(process, block, offset), factor=factor, valid=process.valid & valid)


def evidence(process: Process) -> Float[Array, ""]:
    """``log int p(u) prod_m t_m(u_m) du`` in nats."""
    solved = solve_triangular(process.factor, process.target, lower=True)
    square = 0.5 * (jnp.vdot(process.target, process.target) - jnp.vdot(solved, solved))
    return process.constant + square - jnp.sum(jnp.log(diagonal(process.factor)))


def reach(prior: Prior, process: Process, x: Float[Array, "N D"]) -> tuple[Float[Array, "N"], Float[Array, "C N"]]:
    """Means of f at inputs, and B with ``cov(x, z) = k(x, z) - B(x)^T B(z)``: O(N C^2)."""
    half = solve_triangular(process.factor, process.root.T @ prior.covariance(process.inputs, x), lower=True)
    return half.T @ solve_triangular(process.factor, process.target, lower=True), half


def marginals(prior: Prior, process: Process, x: Float[Array, "N D"]) -> tuple[Float[Array, "N"], Float[Array, "N"]]:
    """Means and variances of f at inputs, given the sites."""
    mean, half = reach(prior, process, x)
    return mean, jnp.maximum(prior.variance(x) - jnp.sum(half**2, axis=0), 0.0)
