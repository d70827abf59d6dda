"""Gaussian chains with block-tridiagonal precision, eliminated in parallel over time.

The exponent of a chain x_1 .. x_T with precision blocks P_t, lower blocks L_t (between t + 1 and t) and vectors h_t is

    sum_t (h_t^T x_t - 1/2 x_t^T P_t x_t) - sum_t x_(t+1)^T L_t x_t.

A *segment* is what a stretch of the chain says about its two ends once the states between have been integrated out;
segments join by integrating out the state they share, which is associative, so all prefixes come from a scan that is
parallel over time (:func:`prefixes`). Every pivot is a Schur complement of a principal block: all of them are positive
definite exactly when the whole precision is, and the elimination is as stable as Cholesky.

References:
    S. Sarkka and A. F. Garcia-Fernandez, *Temporal parallelization of Bayesian smoothers*, 2021 (the scans; here in
    precision form).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._numerics import diagonal, inverse_root, scaled_cholesky, symmetrise


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
    ``jax.lax.associative_scan`` has log T depth, but compiles the operation 2 log T times; here it is compiled three
    times whatever T, which for an operation with a Cholesky factor inside is seconds against minutes.

    Args:
        join: the operation, on arrays with any leading axes.
        elements: a pytree of arrays, time first.

    Returns:
        The prefixes, of the elements' shapes.
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

    Args:
        vector: h.
        blocks: P, symmetric.
        lower: L.

    Returns:
        ``(h~, P~, valid)``: precision-means and precisions of x_t with x_1 .. x_(t-1) integrated out (the filter of a
        state-space model), the pivots of the block Cholesky factorisation; ``valid`` where all are positive definite.
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

    Args:
        vector: h.
        blocks: P, symmetric.
        lower: L.

    Returns:
        The moments (the smoother of a state-space model).
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

    Args:
        vector: h.
        blocks: P, symmetric.
        lower: L.

    Returns:
        Both parts, and whether the precision is positive definite.
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

    Args:
        vector: h.
        blocks: P, symmetric.
        lower: L.
        noise: standard normals, S columns for as many draws.

    Returns:
        The draws.
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

    With ``A_t = C_t V_t^-1`` and ``Q_t = V_(t+1) - A_t C_t^T``, the regression of x_(t+1) on x_t: ``P_1 = V_1^-1 +
    A_1^T Q_1^-1 A_1``, ``P_t = Q_(t-1)^-1 + A_t^T Q_t^-1 A_t`` and ``L_t = -Q_t^-1 A_t``.

    Args:
        covariance: V.
        lag_one: C, covariances of x_(t+1) with x_t.

    Returns:
        ``(P, L, valid)``.
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
