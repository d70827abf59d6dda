"""Moves that turn back on each other: by overshooting, for which steps are too long, or by noise, which late rounds average.

Every schedule and solver that tells the one from the other does it here; what a move's length is, each knows for itself.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Cosine between successive moves below which they swing: 120 degrees.
_SWING = -0.5
# Growth of a step whose moves go on, and the least step that swinging leads to.
_GROWTH, LEAST_STEP = 1.25, 2.0**-6
# Of the steps c / (c + late).
_FORGETTING = 10.0


def swings(inner: Float[Array, "..."], size: Float[Array, "..."], last: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Whether a move turns back on the last one by more than 120 degrees without being half as short.

    A swing that dies out by itself needs no help.

    Args:
        inner: inner product of the move and the last one.
        size: squared length of the move, in the same metric.
        last: squared length of the last one.

    Returns:
        False where either is 0.
    """
    both = jnp.sqrt(jnp.maximum(size, 0.0)) * jnp.sqrt(jnp.maximum(last, 0.0))
    return (inner < _SWING * both) & (both > 0) & (4 * size > last)


def next_step(
    step: Float[Array, ""],
    inner: Float[Array, ""],
    size: Float[Array, ""],
    last: Float[Array, ""],
    largest: float,
    noise: Any = 0.0,
) -> Float[Array, ""]:
    """A group's own step after one more of the moves it asks for: half where they swing, longer where they go on.

    Args:
        step: the last one.
        inner: as of :func:`swings`.
        size: as of :func:`swings`.
        last: as of :func:`swings`.
        largest: the largest step in (0, 1]; 1 is the full step.
        noise: length of a move that draws alone explain; what is shorter is averaged by late rounds, not halved.

    Returns:
        The step.
    """
    back = swings(inner, size, last) & (size > noise**2)
    new = jnp.where(back, jnp.maximum(0.5 * step, min(LEAST_STEP, largest)), step)
    return jnp.where(inner > 0, jnp.minimum(_GROWTH * new, largest), new).astype(step.dtype)


def late_share(late: Any, dtype: Any) -> Float[Array, ""]:
    """The largest step of the next round, ``c / (c + late)`` with c = 10.

    In the limit q is the average of its targets with weights ``k^(c - 1)``. A plain mean (c = 1) forgets where it started
    only as ``1 / k^(1 - a)`` where targets move by a share ``a`` of what q moves; ``c > 1 / (2 - 2 a)`` keeps the rate of the
    noise, whose variance is ``c^2 / (2 c - 1)`` times that of the mean. Long steps also shake q out of poor local optima.

    Args:
        late: rounds in which the move turned back.
        dtype: of the result.

    Returns:
        A number in (0, 1].

    References:
        Kushner and Yin, Stochastic Approximation and Recursive Algorithms, chapter 10 (rate of convergence).
    """
    return _FORGETTING / (_FORGETTING + late.astype(dtype))
