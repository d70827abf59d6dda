"""What an expectation hands to a solver, and the closed form of factors that are quadratic in theta."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._numerics import hessian_of, inverse_root, scaled_cholesky, value_and_grad
from ..families import GaussianFamily, GaussianMoments, GaussianNatural, MultivariateNormalFamily


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


def read_quadratic(density: Callable[[Float[Array, "D"]], Float[Array, ""]], point: Float[Array, "D"]) -> Expected:
    """Read a quadratic log density, nats, off its derivatives at a point: its value there, and the natural parameters (h, P)."""
    value, gradient = value_and_grad(density)(point)
    hessian = hessian_of(density)(point)
    nothing = jnp.zeros_like(value)
    precision = -0.5 * (hessian + hessian.T)
    target = MultivariateNormalFamily(point.shape[0]).natural(gradient + precision @ point, precision)
    return Expected(value, target, jnp.zeros_like(point), nothing, nothing, nothing)


class QuadraticFactor(NamedTuple):
    """``f(theta) = f(t) + (h - P t)^T (theta - t) - 1/2 (theta - t)^T P (theta - t)`` in nats, or one of every group."""

    # f(t), and (h, P) as the natural parameters of a full-covariance Gaussian.
    value: Float[Array, "*M"]
    target: GaussianNatural
    # t, where it was read.
    point: Float[Array, "*M D"]

    @property
    def slope(self) -> Float[Array, "D"]:
        """``h - P t``, the gradient where one factor was read."""
        return self.target.precision_mean - self.target.precision @ self.point

    @property
    def constant(self) -> Float[Array, ""]:
        """One factor's value at the origin, nats."""
        return self.value - 0.5 * (self.target.precision_mean + self.slope) @ self.point


# Nats of rounding in a factor's value from which it is worth another look at the rows.
_WORTH_READING = 1e-3


def read_well(
    read: Callable[[Float[Array, "D"]], Expected], prior: GaussianNatural, roughly: bool = False
) -> QuadraticFactor:
    """Read all groups' quadratic factors where their values are no small differences of large numbers.

    At the origin, a location some thousand sds away is such a difference: of an intercept of 2000 with rows of sd 1 single
    precision has lost the units. Read at their joint maximum beside the prior, values are of the size of residuals. ``read``:
    factors at a point, values and natural parameters by group; a second look is taken only where the first one is not worth a
    thousandth of a nat; ``prior``: what is held exactly of it; ``roughly``: whether the first look will do in any case.
    """
    zero = jnp.zeros_like(prior.precision_mean)
    dim, held = zero.shape[0], prior.precision if prior.precision.ndim == 2 else jnp.diag(prior.precision)

    def told(point: Array, found: Expected) -> QuadraticFactor:
        return QuadraticFactor(found.value, found.target, jnp.broadcast_to(point, (*found.value.shape, dim)))

    if roughly or zero.dtype == jnp.float64:
        return told(zero, read(zero))

    def look(carry: tuple, _: None) -> tuple:
        at, point, found, needed = carry
        found = jax.lax.cond(needed, lambda: read(point), lambda: found)
        at = jnp.where(needed, point, at)
        vector, precision = (jnp.sum(x, axis=0) for x in (found.target.precision_mean, found.target.precision))
        vector, precision = vector + prior.precision_mean, precision + held
        # Near the maximum will do, and along directions that nothing determines any point.
        damped = precision + 1e-5 * jnp.diag(jnp.maximum(jnp.diagonal(precision), jnp.finfo(zero.dtype).tiny ** 0.5))
        factor, good = scaled_cholesky(damped)
        inverse = inverse_root(factor)
        best = jax.lax.stop_gradient(inverse @ (vector @ inverse))
        parts = found.value, found.target.precision_mean @ best, 0.5 * (found.target.precision @ best) @ best
        rounding = jnp.finfo(zero.dtype).eps * jnp.max(sum(jnp.abs(x) for x in parts))
        good = good & jnp.all(jnp.isfinite(best)) & jnp.isfinite(rounding)
        return (at, jnp.where(good, best, 0.0), found, good & (rounding > _WORTH_READING)), None

    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read, zero))
    (at, _, found, _), _ = jax.lax.scan(look, (zero, zero, empty, jnp.array(True)), None, length=2)
    return told(at, found)


@dataclasses.dataclass(frozen=True)
class QuadraticProgram(ProgramDefaults):
    """Factors that are quadratic in theta, one :class:`QuadraticFactor` per group.

    ``family``: the Gaussian family of q.
    """

    family: GaussianFamily
    noisy: bool = dataclasses.field(default=False, init=False)

    def working_bytes(self, chunks: Any) -> int:
        """What a pass over one group holds beside its arrays, in bytes: nothing to speak of."""
        return 0

    def expected(
        self, factor: QuadraticFactor, moments: GaussianMoments, probe: Any, level: Any, noise: Any, clip: Any
    ) -> Expected:
        """Closed-form expectations of one group's factor.

        ``moments``: q; ``probe``: Float[D] vector for the curvature product, or None; ``level``, ``noise``, ``clip``: unused: a
        quadratic factor is what it is. Returns the group's expectations; for a full-covariance q the target is (h, P) itself, to
        the last bit.
        """
        full = MultivariateNormalFamily(self.family.dim)
        vector, precision = factor.target.precision_mean, factor.target.precision
        loc, scale = moments.loc, moments.scale if self.family.full else jnp.diag(moments.scale)
        around = moments._replace(loc=loc - factor.point, scale=scale)
        value = factor.value + full.expect_quadratic(full.natural(factor.slope, precision), around)
        product = jnp.zeros_like(loc) if probe is None else precision @ probe
        if self.family.full:
            target = factor.target
        else:
            diag = jnp.diagonal(precision)
            target = self.family.natural(vector - precision @ loc + diag * loc, diag)
        return Expected(value, target, product, *(jnp.zeros_like(value),) * 3)
