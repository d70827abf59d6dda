"""How far apart two Gaussians are, in a metric that adds up along the way."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def marginal_distance(
    loc: Float[Array, "*batch D"],
    sd: Float[Array, "*batch D"],
    other_loc: Float[Array, "*batch D"],
    other_sd: Float[Array, "*batch D"],
) -> Float[Array, "*batch"]:
    """Fisher-Rao distance between independent Gaussians, root mean square over coordinates.

    With ``u = ((m - m')^2 / 2 + (s - s')^2) / (s s')`` a coordinate's distance is ``2 sqrt(2) arsinh(sqrt(u) / 2)``: about
    ``|m - m'| / s`` for small shifts, and logarithmic for large ones. It is a metric, so that a path is never shorter than
    what it bridges.

    Args:
        loc: locations.
        sd: standard deviations.
        other_loc: locations of the other.
        other_sd: standard deviations of the other.

    Returns:
        The distance, in standard deviations where it is small.

    References:
        Costa, Santos and Strapasson, Fisher information distance: a geometrical reading, Discrete Appl. Math. 197 (2015),
        eq. 5.
    """
    square = (0.5 * (loc - other_loc) ** 2 + (sd - other_sd) ** 2) / (sd * other_sd)
    each = 2 * 2**0.5 * jnp.arcsinh(0.5 * jnp.sqrt(square))
    return jnp.sqrt(jnp.mean(each**2, axis=-1))
