"""A Gaussian process given sites in its values at pseudo-inputs: one factor, to which a batch's block is appended.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from .._numerics import diagonal, psd_root, scaled_cholesky, symmetrise, with_jitter
from ..families import GaussianNatural
from ._kernels import Kernel, variances


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

    Args:
        prior: at the parameters that the factor was made with.
        process: with zero rows from the offset on.
        block: the site.
        offset: where the block begins.

    Returns:
        The process given all of them.
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
