"""Pareto shape of importance weights, from whichever ArviZ is installed."""

from __future__ import annotations

import math

import numpy as np

# Fewest weights in a tail that a generalised Pareto distribution is fitted to, and fewest draws for a usable tail:
# ArviZ 1.3 finds no fit in tails of five.
_TAIL = 5
MIN_SAMPLES = 100


def pareto_khat(log_weights: np.ndarray, rounding: float) -> float:
    """Shape of the generalised Pareto distribution fitted to the largest importance weights.

    The tail is the ``min(S / 5, 3 sqrt(S))`` largest of S weights. Two cases have no fit and are decided here, because
    ArviZ 0.23 and 1.x answer them differently: where the tail is flat up to rounding the weights are as good as equal,
    and k-hat is 0.0; where fewer than five weights are distinguishable from zero next to the largest, k-hat is inf.

    Args:
        log_weights: Float[S]; unnormalised log importance weights, in nats. -inf is a weight of zero.
        rounding: spread, in nats, below which weights count as equal.

    Returns:
        k-hat; NaN when a weight is NaN or +inf.

    References:
        Vehtari et al., Pareto Smoothed Importance Sampling, section 3.
    """
    values = np.asarray(log_weights, np.float64)
    if np.any(np.isnan(values) | (values == np.inf)) or np.all(values == -np.inf):
        return math.nan
    ordered = np.sort(values - values.max())
    cut = ordered[-int(min(len(values) / 5, 3 * math.sqrt(len(values)))) - 1]
    if -cut <= rounding:
        return 0.0
    if ordered[-_TAIL] < math.log(np.finfo(np.float64).tiny):
        return math.inf
    with np.errstate(all="ignore"):
        shape = _fit(values)
    return math.inf if math.isnan(shape) else shape


def _fit(values: np.ndarray) -> float:
    # Imported here: ArviZ takes seconds to import. The psislw of 1.x takes log-likelihoods, that is, *negative* log
    # weights; its pareto_khat(log_weights=True) ignores that flag in the fit (1.3).
    import arviz

    if hasattr(arviz, "psislw"):
        return float(arviz.psislw(values)[1])
    from arviz_stats.base import array_stats  # pyright: ignore[reportMissingImports]

    return float(array_stats.psislw(-values, axis=-1)[1])
