"""Arrays that a problem is made of: those of its factors, and a round's draws."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from ..expectations import PointSet
from ..families import GaussianNatural


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactorData:
    """Arrays of all factors, prepared once per run from the model's arguments."""

    # Leading chunk axis C; a quadratic likelihood has one "chunk" per group.
    chunks: Any
    chunk_group: Int[Array, "C"]
    offsets: Int[Array, "ends"]
    prior: Any
    prior_natural: GaussianNatural
    # Which flat coordinates the exactly held prior covers, and minus its log density at the origin in nats: its log partition
    # function, where it is normalised.
    exact: Bool[Array, "D"]
    prior_partition: Float[Array, ""]
    # Product of the sites of groups whose rows are not at hand; None without any.
    others: GaussianNatural | None = None


class Draws(NamedTuple):
    """A round's standard normal draws; one row of zeros among ``pairs`` evaluates at the location."""

    pairs: Float[Array, "S D"]
    # For the comparison with sigma points.
    compared: Float[Array, "K D"]
    # Random point sets of the likelihood and of the prior factor, where they have no structure.
    points: PointSet | None
    prior_points: PointSet | None
    # For every unit's local latents, Float[U S K], so that a unit's draws do not depend on the partition; or None.
    local: Float[Array, "U S K"] | None = None
