"""A group's own step, shortened while its moves turn back on each other."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..families import GaussianFamily

# Cosine between successive moves below which a site counts as swinging, and the least step that swinging leads to.
SWING, LEAST_STEP = -0.5, 2.0**-6


def own_step(
    family: GaussianFamily,
    q: Any,
    change: Any,
    step: Float[Array, ""],
    last: Float[Array, "two_D"],
    usable: Bool[Array, ""],
    largest: float,
) -> tuple[Float[Array, ""], Float[Array, "two_D"]]:
    """The step of a visit: halved where the move asked for turns back on the last one, and grown again where it goes on.

    Args:
        family: the family of q.
        q: natural parameters of q.
        change: what a full step would add to the site.
        step: the step of the last visit.
        last: the move that the last visit asked for.
        usable: whether ``change`` means anything.
        largest: the largest step in (0, 1]; 1 is the full step.

    Returns:
        ``(step, move)``; the move is the change of q's location in sds and, to first order, of its log sds.
    """
    moments = family.moments(q)
    variance = family.variances(moments)
    force = change.precision_mean - family.precision_product(change, moments.loc)
    shift = family.covariance_product(moments, force) / jnp.sqrt(variance)
    stretch = -0.5 * family.precision_diagonal(change) * variance
    move = jnp.concatenate([shift, stretch])
    size = jnp.linalg.norm(move) * jnp.linalg.norm(last)
    cosine = jnp.dot(move, last) / jnp.where(size > 0, size, 1.0)
    # A swing that dies out by itself needs no help.
    swings = (cosine < SWING) & (jnp.linalg.norm(move) > 0.5 * jnp.linalg.norm(last))
    new = jnp.where(swings, jnp.maximum(0.5 * step, min(LEAST_STEP, largest)), step)
    new = jnp.where(cosine > 0, jnp.minimum(1.25 * new, largest), new)
    return new.astype(step.dtype), jnp.where(usable, move, last)
