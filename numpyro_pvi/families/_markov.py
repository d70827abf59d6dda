"""Gaussian Markov chains: precision that is block-tridiagonal over time, eliminated in parallel, everything in O(T)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float
from numpyro.distributions import constraints

from .._numerics import (
    clip_to_psd,
    diagonal,
    inverse_root,
    lower_to_symmetric,
    polar_parts,
    scaled_cholesky,
    symmetric_to_lower,
    symmetrise,
)
from ._base import FamilyDefaults, Vector, base_of, natural_parameters, register_family
from ._gaussian import product_variances

# ---------------------------------------------------------------------------------------------------------- elimination
# Gaussian chains with block-tridiagonal precision, eliminated in parallel over time.
#
# The exponent of a chain x_1 .. x_T with precision blocks P_t, lower blocks L_t (between t + 1 and t) and vectors h_t
# is
#
#     sum_t (h_t^T x_t - 1/2 x_t^T P_t x_t) - sum_t x_(t+1)^T L_t x_t.
#
# A *segment* is what a stretch of the chain says about its two ends once the states between have been integrated out;
# segments join by integrating out the state they share, which is associative, so all prefixes come from a scan that is
# parallel over time (:func:`prefixes`). Every pivot is a Schur complement of a principal block: all of them are
# positive definite exactly when the whole precision is, and the elimination is as stable as Cholesky.
#
# References:
#     S. Sarkka and A. F. Garcia-Fernandez, *Temporal parallelization of Bayesian smoothers*, 2021 (the scans; here in
#     precision form).


class _Segment(NamedTuple):
    """Precision blocks and vectors over the left and the right end of a stretch, and whether its pivots were valid."""

    left: Float[Array, "T *batch D D"]
    # Between left (rows) and right (columns).
    cross: Float[Array, "T *batch D D"]
    right: Float[Array, "T *batch D D"]
    left_vector: Float[Array, "T *batch D"]
    right_vector: Float[Array, "T *batch D"]
    valid: Bool[Array, "T *batch"]


def pivot_root(matrix: Float[Array, "*batch D D"]) -> tuple[Float[Array, "*batch D D"], Bool[Array, "*batch"]]:
    """``S`` with ``S S^T`` the inverse, and whether the matrix is positive definite (S is the identity where not)."""
    if matrix.shape[-1] == 1:
        good = jnp.isfinite(matrix) & (matrix > 0)
        return 1 / jnp.sqrt(jnp.where(good, matrix, 1.0)), good[..., 0, 0]
    factor, good = scaled_cholesky(matrix)
    return inverse_root(factor), good


def _join(a: _Segment, b: _Segment) -> _Segment:
    root, good = pivot_root(symmetrise(a.right + b.left))
    to_left, to_right = a.cross @ root, jnp.swapaxes(root, -1, -2) @ b.cross
    vector = jnp.einsum("...ji,...j->...i", root, a.right_vector + b.left_vector)
    return _Segment(
        a.left - to_left @ jnp.swapaxes(to_left, -1, -2),
        -to_left @ to_right,
        b.right - jnp.swapaxes(to_right, -1, -2) @ to_right,
        a.left_vector - jnp.einsum("...ij,...j->...i", to_left, vector),
        b.right_vector - jnp.einsum("...ji,...j->...i", to_right, vector),
        a.valid & b.valid & good,
    )


def prefixes(join: Callable[[Any, Any], Any], elements: Any) -> Any:
    """All prefixes ``x_1, x_1 * x_2, ...`` of an associative operation, in O(T) work and about 2 sqrt(T) dependent steps.

    sqrt(T) stretches are scanned side by side, then their totals, then every stretch is joined to what precedes it.
    ``jax.lax.associative_scan`` has log T depth, but compiles the operation 2 log T times; here it is compiled three times
    whatever T, which for an operation with a Cholesky factor inside is seconds against minutes. ``join``: the operation, on
    arrays with any leading axes; ``elements``: a pytree of arrays, time first. Returns the prefixes, of the elements' shapes.
    """
    steps = jax.tree.leaves(elements)[0].shape[0]
    width = math.isqrt(steps - 1) + 1
    count = -(-steps // width)
    # What is joined after the end is thrown away.
    index = np.minimum(np.arange(count * width), steps - 1).reshape(count, width).T
    side_by_side = jax.tree.map(lambda x: x[index], elements)

    def step(carry, element):
        carry = join(carry, element)
        return carry, carry

    def inclusive(series):
        first = jax.tree.map(lambda x: x[0], series)
        rest = jax.lax.scan(step, first, jax.tree.map(lambda x: x[1:], series))[1]
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)

    within = inclusive(side_by_side)
    if count == 1:
        return jax.tree.map(lambda x: x[:, 0], within)
    totals = inclusive(jax.tree.map(lambda x: x[-1, :-1], within))
    before = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (width, *x.shape)), totals)
    later = join(before, jax.tree.map(lambda x: x[:, 1:], within))
    whole = jax.tree.map(lambda a, b: jnp.concatenate([a[:, :1], b], axis=1), within, later)
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape((-1, *x.shape[2:]))[:steps], whole)


def eliminate(
    vector: Float[Array, "T *batch D"], blocks: Float[Array, "T *batch D D"], lower: Float[Array, "T-1 *batch D D"]
) -> tuple[Float[Array, "T *batch D"], Float[Array, "T *batch D D"], Bool[Array, "*batch"]]:
    """What every state is told by itself and all states before it.

    ``blocks``: P, symmetric. Returns ``(h~, P~, valid)``: precision-means and precisions of x_t with x_1 .. x_(t-1) integrated
    out (the filter of a state-space model), the pivots of the block Cholesky factorisation; ``valid`` where all are positive
    definite.
    """
    zero = jnp.zeros_like(blocks)
    cross = jnp.concatenate([zero[:1], jnp.swapaxes(lower, -1, -2)], axis=0)
    none = jnp.zeros_like(vector)
    start = _Segment(zero, cross, blocks, none, vector, jnp.ones(vector.shape[:-1], bool))
    done = prefixes(_join, start)
    last = pivot_root(done.right[-1])[1]
    return done.right_vector, symmetrise(done.right), done.valid[-1] & last


class ChainMoments(NamedTuple):
    """Marginal means and covariances of a chain, covariances of neighbours, and validity."""

    loc: Float[Array, "T *batch D"]
    covariance: Float[Array, "T *batch D D"]
    # Cov(x_(t+1), x_t).
    lag_one: Float[Array, "T-1 *batch D D"]
    # log det of the precision, in nats.
    log_det: Float[Array, "*batch"]
    valid: Bool[Array, "*batch"]


def chain_moments(
    vector: Float[Array, "T *batch D"], blocks: Float[Array, "T *batch D D"], lower: Float[Array, "T-1 *batch D D"]
) -> ChainMoments:
    """Marginals of a chain: elimination from both ends at once, met in the middle everywhere.

    ``blocks``: P, symmetric. Returns the moments (the smoother of a state-space model).
    """
    # The chain and its mirror image are one batch.
    mirrored = jnp.swapaxes(lower[::-1], -1, -2)
    both = eliminate(
        jnp.stack([vector, vector[::-1]], axis=1),
        jnp.stack([blocks, blocks[::-1]], axis=1),
        jnp.stack([lower, mirrored], axis=1),
    )
    told, precision = both[0][:, 0], both[1][:, 0]
    from_right, precision_from_right = both[0][::-1, 1], both[1][::-1, 1]
    # Both sides count what the state says itself.
    root, good = pivot_root(symmetrise(precision + (precision_from_right - blocks)))
    covariance = root @ jnp.swapaxes(root, -1, -2)
    loc = jnp.einsum("...ij,...j->...i", covariance, told + (from_right - vector))
    pivots, _ = pivot_root(precision)
    before = pivots[:-1]
    lag_one = -covariance[1:] @ (lower @ (before @ jnp.swapaxes(before, -1, -2)))
    log_det = -2 * jnp.sum(jnp.log(jnp.abs(diagonal(pivots))), axis=(0, -1))
    return ChainMoments(loc, covariance, lag_one, log_det, jnp.all(both[2], axis=0) & jnp.all(good, axis=0))


def log_normaliser(
    vector: Float[Array, "T *batch D"], blocks: Float[Array, "T *batch D D"], lower: Float[Array, "T-1 *batch D D"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"], Bool[Array, "*batch"]]:
    """``(1/2 h^T Lambda^-1 h, log det Lambda, valid)`` of the whole chain, in nats.

    ``blocks``: P, symmetric. Returns both parts, and whether the precision is positive definite.
    """
    told, precision, valid = eliminate(vector, blocks, lower)
    root, _ = pivot_root(precision)
    square = jnp.sum(jnp.einsum("...ji,...j->...i", root, told) ** 2, axis=(0, -1))
    log_det = -2 * jnp.sum(jnp.log(jnp.abs(diagonal(root))), axis=(0, -1))
    return 0.5 * square, log_det, valid


def draw_chain(
    vector: Float[Array, "T *batch D"],
    blocks: Float[Array, "T *batch D D"],
    lower: Float[Array, "T-1 *batch D D"],
    noise: Float[Array, "T *batch D S"],
) -> Float[Array, "T *batch D S"]:
    """Draws, backward in time: ``x_t = P~_t^-1 (h~_t - L_t^T x_(t+1)) + P~_t^-1/2 eps_t``, itself a scan of affine maps.

    ``blocks``: P, symmetric; ``noise``: standard normals, S columns for as many draws.
    """
    told, precision, _ = eliminate(vector, blocks, lower)
    root, _ = pivot_root(precision)
    covariance = root @ jnp.swapaxes(root, -1, -2)
    shift = jnp.einsum("...ij,...j->...i", covariance, told)[..., None] + root @ noise
    slope = -covariance[:-1] @ jnp.swapaxes(lower, -1, -2)
    slope = jnp.concatenate([slope, jnp.zeros_like(covariance[-1:])], axis=0)

    def join(later, earlier):
        return earlier[0] @ later[0], earlier[0] @ later[1] + earlier[1]

    return prefixes(join, (slope[::-1], shift[::-1]))[1][::-1]


def assemble(
    covariance: Float[Array, "T *batch D D"], lag_one: Float[Array, "T-1 *batch D D"]
) -> tuple[Float[Array, "T *batch D D"], Float[Array, "T-1 *batch D D"], Bool[Array, "*batch"]]:
    """The block-tridiagonal precision whose inverse has these diagonal and neighbouring blocks; all times at once.

    With ``A_t = C_t V_t^-1`` and ``Q_t = V_(t+1) - A_t C_t^T``, the regression of x_(t+1) on x_t: ``P_1 = V_1^-1 + A_1^T Q_1^-1
    A_1``, ``P_t = Q_(t-1)^-1 + A_t^T Q_t^-1 A_t`` and ``L_t = -Q_t^-1 A_t``. ``lag_one``: C, covariances of x_(t+1) with x_t.
    Returns ``(P, L, valid)``.
    """
    root, good = pivot_root(symmetrise(covariance[:-1]))
    whitened = lag_one @ root
    slope = whitened @ jnp.swapaxes(root, -1, -2)
    noise_root, noise_good = pivot_root(symmetrise(covariance[1:] - whitened @ jnp.swapaxes(whitened, -1, -2)))
    noise_precision = noise_root @ jnp.swapaxes(noise_root, -1, -2)
    first, first_good = pivot_root(symmetrise(covariance[:1]))
    own = jnp.concatenate([first @ jnp.swapaxes(first, -1, -2), noise_precision], axis=0)
    lower = -noise_precision @ slope
    passed_on = jnp.swapaxes(slope, -1, -2) @ -lower
    blocks = own + jnp.concatenate([passed_on, jnp.zeros_like(covariance[:1])], axis=0)
    valid = jnp.all(good, axis=0) & jnp.all(noise_good, axis=0) & first_good[0]
    return symmetrise(blocks), lower, valid


# --------------------------------------------------------------------------------------------------------------- chains

_LOG_2PI = math.log(2 * math.pi)


@natural_parameters
class MarkovNatural(Vector):
    """Natural parameters of a Gaussian chain: precision-mean, diagonal blocks, and the blocks below them.

    ``lower[t]`` is the precision between x_(t+1) (rows) and x_t (columns).
    """

    precision_mean: Float[Array, "*batch T D"]
    precision: Float[Array, "*batch T D D"]
    lower: Float[Array, "*batch T-1 D D"]


@natural_parameters
class MarkovMean(Vector):
    """Mean parameters: ``first = E[x_t]``, ``second = -1/2 E[x_t x_t^T]`` and ``lag_one = -E[x_(t+1) x_t^T]``."""

    first: Float[Array, "*batch T D"]
    second: Float[Array, "*batch T D D"]
    lag_one: Float[Array, "*batch T-1 D D"]


def _outer(a, b):
    return a[..., :, None] * b[..., None, :]


@dataclasses.dataclass(frozen=True)
class MarkovGaussianFamily(FamilyDefaults):
    """Gaussian Markov chains over ``num_steps`` states: the posterior family of linear state-space latents.

    ``T(x) = (x_t, -1/2 x_t x_t^T, -x_(t+1) x_t^T)``. Marginals, log-partition and draws cost O(T D^3) work in about
    2 sqrt(T) dependent steps (a scan parallel over time); :meth:`mean_to_natural` and :meth:`fisher_solve` add only what
    is local in time. Nothing of size T D x T D is ever formed.

    Args:
        num_steps: T.
        dim: D, the size of a state; None for scalar states, whose event is ``(T,)`` as a ``GaussianRandomWalk``'s.
    """

    num_steps: int
    dim: int | None = None

    chained = True

    @property
    def event_shape(self) -> tuple[int, ...]:
        """``(T, D)``, or ``(T,)`` for scalar states."""
        return (self.num_steps,) if self.dim is None else (self.num_steps, self.dim)

    @property
    def _size(self) -> int:
        return 1 if self.dim is None else self.dim

    def _states(self, theta):
        return theta[..., None] if self.dim is None else theta

    def _in_time(self, *leaves):
        """Arrays with time first, from arrays with time before the last ``event`` axes."""
        ndims = (1, 2, 2)
        return [jnp.moveaxis(x, x.ndim - n - 1, 0) for x, n in zip(leaves, ndims, strict=False)]

    def _chain(self, natural: MarkovNatural):
        return self._in_time(natural.precision_mean, symmetrise(natural.precision), natural.lower)

    def zeros(self, batch_shape: tuple[int, ...] = (), dtype: Any = None) -> MarkovNatural:
        """The natural parameters of a unit factor, ``exp(0)``."""
        steps, size = self.num_steps, self._size
        shapes = ((steps, size), (steps, size, size), (steps - 1, size, size))
        return MarkovNatural(*(jnp.zeros((*batch_shape, *shape), dtype) for shape in shapes))

    def sufficient_statistics(self, theta: Float[Array, "*batch_and_event"]) -> MarkovMean:
        """``(x_t, -1/2 x_t x_t^T, -x_(t+1) x_t^T)``."""
        x = self._states(theta)
        return MarkovMean(x, -0.5 * _outer(x, x), -_outer(x[..., 1:, :], x[..., :-1, :]))

    def log_partition(self, natural: MarkovNatural) -> Float[Array, "*batch"]:
        """``1/2 h^T Lambda^-1 h - 1/2 log det Lambda + T D/2 log 2 pi`` in nats; NaN where not normalisable."""
        square, log_det, valid = log_normaliser(*self._chain(natural))
        value = square - 0.5 * log_det + 0.5 * self.num_steps * self._size * _LOG_2PI
        return jnp.where(valid, value, jnp.nan)

    def moments(self, natural: MarkovNatural) -> tuple[Array, Array, Array]:
        """Marginal means (..., T, D), covariances (..., T, D, D) and covariances of x_(t+1) with x_t (..., T-1, D, D)."""
        found = chain_moments(*self._chain(natural))
        return (
            jnp.moveaxis(found.loc, 0, -2),
            jnp.moveaxis(found.covariance, 0, -3),
            jnp.moveaxis(found.lag_one, 0, -3),
        )

    def natural_to_mean(self, natural: MarkovNatural) -> MarkovMean:
        """Marginal moments, lag one included: a Kalman smoother, parallel in time."""
        loc, covariance, lag_one = self.moments(natural)
        second = -0.5 * (covariance + _outer(loc, loc))
        return MarkovMean(loc, second, -(lag_one + _outer(loc[..., 1:, :], loc[..., :-1, :])))

    def fisher_diagonal(self, natural: MarkovNatural) -> MarkovNatural:
        """Variances of the sufficient statistics, from marginal moments of neighbours; see :class:`Family`."""
        loc, covariance, lag_one = self.moments(natural)
        variance = diagonal(covariance)
        own = product_variances(loc, variance, loc, variance, covariance)
        after, before = slice(1, None), slice(None, -1)
        lag = product_variances(
            loc[..., after, :], variance[..., after, :], loc[..., before, :], variance[..., before, :], lag_one
        )
        return MarkovNatural(variance, 0.25 * own, lag)

    def symmetrise(self, natural: MarkovNatural) -> MarkovNatural:
        """Diagonal blocks are symmetric."""
        return MarkovNatural(natural.precision_mean, symmetrise(natural.precision), natural.lower)

    def mean_to_natural(self, mean_params: MarkovMean) -> MarkovNatural:
        """The inverse of :meth:`natural_to_mean`, from the regressions of every state on the one before."""
        loc = mean_params.first
        covariance = -2 * symmetrise(mean_params.second) - _outer(loc, loc)
        lag_one = -mean_params.lag_one - _outer(loc[..., 1:, :], loc[..., :-1, :])
        return self.from_moments(loc, covariance, lag_one)

    def from_moments(
        self, loc: Float[Array, "*batch T D"], covariance: Float[Array, "*batch T D D"], lag_one: Float[Array, "..."]
    ) -> MarkovNatural:
        """Natural parameters of marginal moments.

        Args:
            loc: means.
            covariance: marginal covariances.
            lag_one: covariances of x_(t+1) with x_t, (..., T-1, D, D).

        Returns:
            The natural parameters; NaN precisions where the moments belong to no Gaussian chain.
        """
        blocks, lower, valid = assemble(jnp.moveaxis(covariance, -3, 0), jnp.moveaxis(lag_one, -3, 0))
        blocks = jnp.where(valid[..., None, None], blocks, jnp.nan)
        precision, below = jnp.moveaxis(blocks, 0, -3), jnp.moveaxis(lower, 0, -3)
        return MarkovNatural(self.precision_product(precision, below, loc), precision, below)

    def precision_product(
        self, precision: Float[Array, "*batch T D D"], lower: Float[Array, "..."], vector: Float[Array, "*S T D"]
    ) -> Float[Array, "*out T D"]:
        """``Lambda @ vector`` from the blocks of Lambda."""
        own = jnp.einsum("...ij,...j->...i", precision, vector)
        from_before = jnp.einsum("...ij,...j->...i", lower, vector[..., :-1, :])
        from_after = jnp.einsum("...ji,...j->...i", lower, vector[..., 1:, :])
        return own.at[..., 1:, :].add(from_before).at[..., :-1, :].add(from_after)

    def to_distribution(self, natural: MarkovNatural) -> dist.Distribution:
        """A :class:`MarkovNormal`."""
        return MarkovNormal(natural.precision_mean, natural.precision, natural.lower, scalar=self.dim is None)

    def from_distribution(self, distribution: dist.Distribution) -> MarkovNatural:
        """Natural parameters of a :class:`MarkovNormal`, a ``GaussianRandomWalk`` or a ``GaussianStateSpace``."""
        base: Any = base_of(distribution)
        if isinstance(base, MarkovNormal):
            return MarkovNatural(base.precision_mean, base.precision, base.lower)
        if isinstance(base, dist.GaussianRandomWalk):
            scale = jnp.asarray(base.scale, jnp.result_type(float, base.scale))
            noise = jnp.broadcast_to(scale, distribution.batch_shape)[..., None, None] ** -2.0
            return self._linear(noise, jnp.ones((1, 1), noise.dtype), jnp.zeros((1,), noise.dtype))
        root = inverse_root(base.scale_tril)
        noise = jnp.einsum("...ik,...jk->...ij", root, root)
        noise = jnp.broadcast_to(noise, (*distribution.batch_shape, self._size, self._size))
        return self._linear(noise, jnp.asarray(base.transition_matrix, noise.dtype), base.initial_value)

    def _linear(self, noise, transition, initial) -> MarkovNatural:
        """``x_t = A x_(t-1) + eps_t`` from x_0, noise precision (..., D, D)."""
        steps = self.num_steps
        coupling = -noise @ transition
        passed_on = jnp.swapaxes(transition, -1, -2) @ -coupling
        own = jnp.arange(steps) < steps - 1
        precision = noise[..., None, :, :] + jnp.where(own[:, None, None], passed_on[..., None, :, :], 0.0)
        lower = jnp.broadcast_to(coupling[..., None, :, :], (*coupling.shape[:-2], steps - 1, *coupling.shape[-2:]))
        start = jnp.einsum("...ij,...j->...i", -coupling, jnp.asarray(initial, noise.dtype))
        vector = jnp.where((jnp.arange(steps) == 0)[:, None], start[..., None, :], 0.0)
        return MarkovNatural(vector, symmetrise(precision), lower)

    def in_domain(self, natural: MarkovNatural) -> Bool[Array, "*batch"]:
        """Whether everything is finite and the whole precision is positive definite."""
        finite = jnp.all(jnp.isfinite(natural.precision_mean), axis=(-2, -1))
        finite &= jnp.all(jnp.isfinite(natural.lower), axis=(-3, -2, -1))
        return log_normaliser(*self._chain(natural))[2] & finite

    def nearest_valid(self, natural: MarkovNatural) -> MarkovNatural:
        """Raise diagonal blocks until they outweigh the blocks below; valid parameters are unchanged."""
        floor = 10 * self._size * float(jnp.finfo(natural.precision.dtype).eps)
        # [[|L|_right, L^T], [L, |L|_left]] is positive semi-definite; what is left over must be positive.
        onto_later, onto_earlier = polar_parts(natural.lower)
        none = jnp.zeros_like(natural.precision[..., :1, :, :])
        needed = jnp.concatenate([onto_earlier, none], axis=-3) + jnp.concatenate([none, onto_later], axis=-3)
        eye = jnp.eye(self._size, dtype=needed.dtype)
        scale = jnp.max(jnp.abs(needed), axis=(-2, -1), keepdims=True)
        margin = jnp.maximum(floor * scale, jnp.sqrt(jnp.finfo(needed.dtype).tiny)) * eye
        raised = needed + margin + clip_to_psd(symmetrise(natural.precision) - needed - margin)
        valid = self.in_domain(natural)[..., None, None, None]
        return MarkovNatural(natural.precision_mean, jnp.where(valid, natural.precision, raised), natural.lower)

    def sample(self, natural: MarkovNatural, key: Array, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Draws of shape ``shape + batch + event``, parallel in time; reparameterised."""
        vector, blocks, lower = self._chain(natural)
        count = math.prod(shape)
        noise = jax.random.normal(key, (*vector.shape, count), vector.dtype)
        draws = jnp.moveaxis(draw_chain(vector, blocks, lower, noise), (-1, 0), (0, -2))
        draws = draws.reshape((*shape, *draws.shape[1:]))
        return draws[..., 0] if self.dim is None else draws

    def entropy(self, natural: MarkovNatural) -> Float[Array, "*batch"]:
        """``T D/2 (1 + log 2 pi) - 1/2 log det Lambda`` in nats."""
        log_det = log_normaliser(*self._chain(natural))[1]
        return 0.5 * self.num_steps * self._size * (1 + _LOG_2PI) - 0.5 * log_det

    def kl(self, natural: MarkovNatural, other: MarkovNatural) -> Float[Array, "*batch"]:
        """KL(q || p) in nats, from q's marginal moments and both log determinants."""
        q, p = chain_moments(*self._chain(natural)), chain_moments(*self._chain(other))
        gap = jnp.moveaxis(q.loc - p.loc, 0, -2)
        square = jnp.sum(gap * self.precision_product(other.precision, other.lower, gap), axis=(-2, -1))
        trace = jnp.sum(other.precision * jnp.moveaxis(q.covariance, 0, -3), axis=(-3, -2, -1))
        trace = trace + 2 * jnp.sum(other.lower * jnp.moveaxis(q.lag_one, 0, -3), axis=(-3, -2, -1))
        return 0.5 * (trace - self.num_steps * self._size + square + q.log_det - p.log_det)

    def to_minimal(self, natural: MarkovNatural) -> Float[Array, "*batch P"]:
        """Precision-means, lower triangles of the diagonal blocks, and the blocks below, each over all times."""
        batch = natural.precision_mean.shape[:-2]
        parts = (natural.precision_mean, symmetric_to_lower(natural.precision), natural.lower)
        return jnp.concatenate([part.reshape((*batch, -1)) for part in parts], axis=-1)

    def from_minimal(self, coordinates: Float[Array, "*batch P"]) -> MarkovNatural:
        """The inverse of :meth:`to_minimal`."""
        batch, steps, size = coordinates.shape[:-1], self.num_steps, self._size
        first, second = steps * size, steps * size + steps * size * (size + 1) // 2
        triangles = coordinates[..., first:second].reshape((*batch, steps, -1))
        return MarkovNatural(
            coordinates[..., :first].reshape((*batch, steps, size)),
            lower_to_symmetric(triangles, size),
            coordinates[..., second:].reshape((*batch, steps - 1, size, size)),
        )

    def fisher_solve(self, natural: MarkovNatural, tangent: MarkovMean) -> MarkovNatural:
        """``d_eta`` of ``d_mu``: the derivative of :meth:`mean_to_natural`, local in time; see :class:`Family`."""
        return jax.jvp(self.mean_to_natural, (self.natural_to_mean(natural),), (tangent,))[1]


class MarkovNormal(dist.Distribution):
    """A Gaussian over T states whose precision is block-tridiagonal, with an O(T) density and sampler.

    Args:
        precision_mean: Lambda m, (..., T, D).
        precision: diagonal blocks, (..., T, D, D).
        lower: blocks between x_(t+1) (rows) and x_t (columns), (..., T-1, D, D).
        scalar: states are scalars (D = 1) and events have the shape (T,).
        validate_args: as for every NumPyro distribution.
    """

    arg_constraints = {
        "precision_mean": constraints.real_matrix,
        "precision": constraints.independent(constraints.positive_definite, 1),
        "lower": constraints.independent(constraints.real_matrix, 1),
    }
    pytree_aux_fields = ("scalar",)

    def __init__(self, precision_mean, precision, lower, *, scalar: bool = False, validate_args=None):
        self.precision_mean, self.precision, self.lower = precision_mean, precision, lower
        self.scalar = scalar
        event = precision_mean.shape[-2:-1] if scalar else precision_mean.shape[-2:]
        super().__init__(precision_mean.shape[:-2], event, validate_args=validate_args)

    @constraints.dependent_property(is_discrete=False)
    def support(self):
        """All real chains."""
        return constraints.real_vector if self.scalar else constraints.real_matrix

    @property
    def _family(self) -> MarkovGaussianFamily:
        steps, size = self.precision_mean.shape[-2:]
        return MarkovGaussianFamily(steps, None if self.scalar else size)

    @property
    def _natural(self) -> MarkovNatural:
        return MarkovNatural(self.precision_mean, self.precision, self.lower)

    def sample(self, key, sample_shape=()):
        """Draws of shape ``sample_shape + batch_shape + event_shape``."""
        return self._family.sample(self._natural, key, sample_shape)

    def log_prob(self, value):
        """``-1/2 (x - m)^T Lambda (x - m) + 1/2 log det Lambda - T D/2 log 2 pi`` in nats."""
        family = self._family
        states = value[..., None] if self.scalar else value
        found = chain_moments(*family._chain(self._natural))
        gap = states - jnp.moveaxis(found.loc, 0, -2)
        square = jnp.sum(gap * family.precision_product(self.precision, self.lower, gap), axis=(-2, -1))
        return -0.5 * square + 0.5 * found.log_det - 0.5 * states.shape[-1] * states.shape[-2] * _LOG_2PI

    @property
    def mean(self):
        """Marginal means."""
        loc = self._family.moments(self._natural)[0]
        return loc[..., 0] if self.scalar else loc

    @property
    def variance(self):
        """Marginal variances."""
        found = jnp.diagonal(self._family.moments(self._natural)[1], axis1=-2, axis2=-1)
        return found[..., 0] if self.scalar else found


register_family(
    MarkovNormal,
    lambda d: MarkovGaussianFamily(d.precision_mean.shape[-2], None if d.scalar else d.precision_mean.shape[-1]),
)
register_family(dist.GaussianRandomWalk, lambda distribution: MarkovGaussianFamily(distribution.num_steps))
register_family(dist.GaussianStateSpace, lambda distribution: MarkovGaussianFamily(*distribution.event_shape))
