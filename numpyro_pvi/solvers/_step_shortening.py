"""A group's own step, shortened while its moves turn back on each other."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..families import GaussianFamily
from ..sites import next_step


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
    stretch = -0.5 * family.precision_diagonal(change) * family.variances(moments)
    move = jnp.concatenate([family.shift(change, moments), stretch])
    new = next_step(step, jnp.dot(move, last), jnp.dot(move, move), jnp.dot(last, last), largest)
    return new, jnp.where(usable, move, last)
