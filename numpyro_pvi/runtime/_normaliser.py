"""The normaliser of the exactly held prior."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..families import GaussianFamily, GaussianNatural


def exact_log_partition(family: GaussianFamily, natural: GaussianNatural, exact: Bool[Array, "D"]) -> Float[Array, ""]:
    """Log partition function of the exactly held prior over the coordinates that it covers, in nats.

    Args:
        family: the family of q.
        natural: the prior's natural parameters, zero on every other coordinate.
        exact: the coordinates it covers.

    Returns:
        ``A(eta_0)``, flat coordinates left out; NaN where the prior is not normalisable on the others.
    """
    diagonal = family.precision_diagonal(natural)
    # A flat (improper) prior has log density 0 and nothing to normalise.
    flat = (diagonal == 0) & (natural.precision_mean == 0)
    outside = (~exact | flat).astype(natural.precision.dtype)
    padding = jnp.diag(outside) if family.full else outside
    padded = GaussianNatural(natural.precision_mean, natural.precision + padding)
    return family.log_partition(padded) - 0.5 * jnp.sum(outside) * math.log(2 * math.pi)
