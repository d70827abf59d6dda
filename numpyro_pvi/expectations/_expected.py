"""What an expectation hands to a solver."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..families import GaussianFamily


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Expected:
    """Expectations of one factor's log density f under a Gaussian q; sums over rows, so chunks add up.

    ``target`` is ``grad_mu E_q[f]`` in natural coordinates (PVI eq. 10): precision ``-E[hess f]`` (its diagonal for a
    mean-field q) and precision-mean ``E[grad f] - E[hess f] loc``.
    """

    # E_q[f], nats.
    value: Float[Array, "*M"]
    # None where only values were asked for; what moment matching asks for is summed in its place (RowReport).
    target: Any
    # -E[hess f] @ probe, for the step cap of a mean-field q; zeros when q has full covariance.
    product: Float[Array, "*M D"] | None
    # Estimated quadrature error of the rows' second derivatives and the size of those derivatives (sums over rows:
    # their ratio is the factor's relative error), and the largest predictor sd; zeros when there is no quadrature.
    error: Float[Array, "*M"]
    weight: Float[Array, "*M"]
    spread: Float[Array, "*M"]
    # Natural parameters over local latents that the rows want (per row, never summed), or None.
    local: Any = None


def zero_expected(family: GaussianFamily, dtype) -> Expected:
    """The expectations of a factor without rows."""
    return Expected(
        jnp.zeros((), dtype),
        family.zeros((), dtype),
        jnp.zeros((family.dim,), dtype),
        jnp.zeros((), dtype),
        jnp.zeros((), dtype),
        jnp.zeros((), dtype),
    )


def add_expected(left: Expected, right: Expected) -> Expected:
    """Sum two sets of rows."""
    return Expected(
        left.value + right.value,
        jax.tree.map(jnp.add, left.target, right.target),
        jax.tree.map(jnp.add, left.product, right.product),
        left.error + right.error,
        left.weight + right.weight,
        jnp.maximum(left.spread, right.spread),
    )


def sum_by_group(chunks: Expected, chunk_group: Int[Array, "C"], num_groups: int) -> Expected:
    """Segment-sum chunk results (leading axis C, sorted by group) to groups (leading axis M)."""

    def total(x):
        return jax.ops.segment_sum(x, chunk_group, num_groups, indices_are_sorted=True)

    return Expected(
        total(chunks.value),
        jax.tree.map(total, chunks.target),
        total(chunks.product),
        total(chunks.error),
        total(chunks.weight),
        jax.ops.segment_max(chunks.spread, chunk_group, num_groups, indices_are_sorted=True),
        chunks.local,
    )
