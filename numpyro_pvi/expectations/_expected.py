"""What an expectation hands to a solver, and the closed form of factors that are quadratic in theta."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._numerics import hessian_of, value_and_grad
from ..families import GaussianFamily, GaussianMoments, MultivariateNormalFamily


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


class ProgramDefaults:
    """What rounds ask every program: how its points are chosen, where it has any.

    ``mode``: "auto" where fixed points give way to draws; ``refinable``: whether a product rule may take the place of these;
    ``begins_finer``: whether such a rule is what is tried first.
    """

    mode: str = ""
    refinable: bool = False
    begins_finer: bool = False


# ------------------------------------------------------------------------------------------------------------ quadratic
# Expectations of factors that are quadratic in theta: read off once, in closed form ever after (CVI's conjugate
# computation).


def read_quadratic(density: Callable[[Float[Array, "D"]], Float[Array, ""]], origin: Float[Array, "D"]) -> Expected:
    """Read (c, h, P) of a quadratic log density, nats, off its derivatives at the origin."""
    value, gradient = value_and_grad(density)(origin)
    hessian = hessian_of(density)(origin)
    nothing = jnp.zeros_like(value)
    target = MultivariateNormalFamily(origin.shape[0]).natural(gradient, -0.5 * (hessian + hessian.T))
    return Expected(value, target, jnp.zeros_like(origin), nothing, nothing, nothing)


@dataclasses.dataclass(frozen=True)
class QuadraticProgram(ProgramDefaults):
    """``f(theta) = c + h^T theta - 1/2 theta^T P theta``, one (c, h, P) per group.

    ``family``: the Gaussian family of q.
    """

    family: GaussianFamily
    noisy: bool = dataclasses.field(default=False, init=False)

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one group holds beside its arrays, in bytes: nothing to speak of."""
        return 0

    def expected(
        self, factor: Expected, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Closed-form expectations of one group's factor.

        ``factor``: value c, and natural parameters (h, P) as the full-covariance target, read at the origin; ``moments``: q;
        ``probe``: Float[D] vector for the curvature product, or None; ``level``: unused; ``noise``: unused; ``clip``: unused; a
        quadratic factor is what it is. Returns the group's expectations; for a full-covariance q the target is (h, P) itself,
        to the last bit.
        """
        full = MultivariateNormalFamily(self.family.dim)
        vector, precision = factor.target.precision_mean, factor.target.precision
        loc = moments.loc
        dense = moments if self.family.full else moments._replace(scale=jnp.diag(moments.scale))
        value = factor.value + full.expect_quadratic(factor.target, dense)
        product = jnp.zeros_like(loc) if probe is None else precision @ probe
        if self.family.full:
            target = factor.target
        else:
            diag = jnp.diagonal(precision)
            target = self.family.natural(vector - precision @ loc + diag * loc, diag)
        return Expected(value, target, product, *(jnp.zeros_like(value),) * 3)
