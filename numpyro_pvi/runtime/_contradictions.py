"""Expectations by draws with second derivatives: how many draws, and how far to believe their ELBO."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..expectations import PointsProgram
from ..families import GaussianFamily
from ..schedules import Evaluation, move_in_nats
from ..sites import SiteStack

# Local latents of few units are so cheap that a round takes more than the solver's pairs: up to so many, or so many tangents.
_MOST_PAIRS, _FEW_TANGENTS = 64, 1 << 14
# Falls of the ELBO on common draws, as a share of the gain a step promises, that are their own contradiction (up to 1.9
# were seen with 16 pairs at an optimum).
_NOISE_SHARE = 2.0
# Nats per coordinate that noise may promise at most: a jitter of one sd. At the optima of hierarchies of 10 to 90 coordinates
# it promised 0.1 to 2 nats in all; steps that throw a scale to the far side of its posterior promise hundreds.
_FARTHEST = 0.5


def affordable_pairs(units: int, width: int, dim: int) -> int:
    """Antithetic pairs that cost little where local latents are few: tangents of a draw, one per coordinate and unit.

    Args:
        units: how many units have local latents.
        width: local latents of each.
        dim: shared latents.

    Returns:
        The pairs; 0 where even one has more tangents than is little.
    """
    tangents = 2 * units * width * (dim + width)
    return min(_MOST_PAIRS, _FEW_TANGENTS // max(tangents, 1))


def fall_explained(
    family: GaussianFamily,
    noisy: list[Any],
    new: tuple[SiteStack, Evaluation],
    old: tuple[SiteStack, Evaluation],
    step: Float[Array, ""],
    units: tuple[int, int] | None = None,
) -> Any:
    """Twice what a joint step promises, its squared length over its share, where draws contradict themselves; else 0.

    Curvature from second derivatives is not the derivative of the draws' mean value, so that near the optimum their ELBO
    falls along most targets, in proportion to the step: no halving would mend it, and q would stand still where the noise
    of its last draws left it. The fall is of the size of the gain that a natural-gradient step promises to first order. A
    step that overshoots by far loses more, and is still halved; and what promises more than a jitter of one sd in every
    coordinate, half their number, is no noise but a step that far, and must keep its word. Random points with gradients
    do not contradict themselves: their curvature is the derivative of their mean value.

    Args:
        family: the family of q(theta).
        noisy: programs of the factors whose expectations are by draws.
        new: sites and evaluation after the step.
        old: before it, on the same draws.
        step: share of the way to the targets, in (0, 1].
        units: how many units have how many local latents each; None without any.

    Returns:
        Nats, or the number 0.
    """
    if all(isinstance(p, PointsProgram) for p in noisy):
        return 0.0
    (sites, after), (before, was) = new, old
    rows = None if sites.local is None else (sites.local.rows, before.local.rows)
    length = move_in_nats(family, after.q, was.q, after.moments, was.moments, rows)
    promised = length / jnp.maximum(step, jnp.finfo(length.dtype).tiny)
    coordinates = family.dim + (0 if units is None else units[0] * units[1])
    return jnp.where(promised <= _FARTHEST * coordinates, _NOISE_SHARE * promised, 0.0)
