"""What solvers that match moments keep of a factor's chains, when chains take over from weights, and what to say of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from ..expectations import (
    LEAST_PER_LATENT,
    LEAST_SHARE,
    Chains,
    ImportanceMoments,
    MCMCMoments,
    Moments,
    Tilted,
    no_chains,
    with_settings,
)
from ..families import GaussianFamily

# Visits running in which a group's weights have collapsed before it goes over to chains: those of first rounds often do.
COLLAPSES = 3
# Share of divergent transitions, split R-hat, and share of the draws that the effective sample size is below, to be said.
_DIVERGENT, _RHAT, _EFFICIENCY = 0.01, 1.1, 0.05

# Kinds of trouble, beside those of :mod:`numpyro_pvi.solvers._power_ep`, which end before.
DIVERGENT, NOT_MIXED, SLOW = range(32, 35)
CHAIN_SENTENCES = {
    DIVERGENT: "{divergent:.0%} of its chains' transitions diverged, so that parts of its tilted distribution may be missing: "
    "use MCMCMoments(target_accept=0.95), latents on a common scale (LocScaleReparam), or a smaller power",
    NOT_MIXED: "its chains do not agree (R-hat {rhat:.2f}): use MCMCMoments with a larger num_warmup or num_samples; where the "
    "tilted distribution has several modes, a smaller power or solver=NaturalGradient(), which settles in one",
    SLOW: "the effective sample size of its chains is {ess:.0f}: use MCMCMoments with a larger num_samples or max_tree_depth",
}


def first_chains(moments: Moments, family: GaussianFamily, dtype: Any) -> Chains | None:
    """Chains that have not started, where they take a solver's moments from the first visit on.

    Args:
        moments: the solver's setting.
        family: the Gaussian family of q.
        dtype: floating dtype.

    Returns:
        Them, or None where moments are taken otherwise.
    """
    wanted = with_settings(moments)
    return no_chains(wanted, family.dim, dtype, True) if isinstance(wanted, MCMCMoments) else None


def after_visit(
    moments: Moments, family: GaussianFamily, found: Tilted, state: Any
) -> tuple[Int[Array, ""], Chains | None, list]:
    """What a visit leaves for the next one, and what there is to say of its chains.

    Args:
        moments: the solver's setting.
        family: the Gaussian family of q.
        found: the factor's tilted moments.
        state: the solver's state for the factor, with ``collapses`` and ``chains``.

    Returns:
        Visits running in which weights collapsed (0 where nothing could take over), the chains (None without any), and
        pairs of a flag and the kind of trouble it stands for.
    """
    collapses, least = jnp.zeros_like(state.collapses), LEAST_PER_LATENT * family.dim
    if isinstance(moments, str) and moments == "auto":
        collapsed = found.ess < max(LEAST_SHARE * ImportanceMoments().num_draws, least)
        collapses = jnp.where(collapsed, state.collapses + 1, 0)
    chains = found.memory
    if chains is None:
        return collapses, state.chains, []
    said = chain_troubles(moments, chains, found.ess, least)
    collapses = jnp.where(chains.used, 0, collapses)
    return collapses, chains._replace(used=chains.used | (collapses >= COLLAPSES)), said


def chain_troubles(moments: Moments, chains: Chains, ess: Array, least: float) -> list:
    """What there is to say of a visit by chains.

    Args:
        moments: the solver's setting.
        chains: after the visit.
        ess: effective sample size.
        least: the smallest one that is not worth a word.

    Returns:
        Pairs of a flag and the kind of trouble it stands for.
    """
    settings = with_settings(moments)
    draws = (settings if isinstance(settings, MCMCMoments) else MCMCMoments()).num_draws
    return [
        (chains.used & (chains.divergent > _DIVERGENT), DIVERGENT),
        (chains.used & ~(chains.rhat <= _RHAT), NOT_MIXED),
        (chains.used & (ess < max(_EFFICIENCY * draws, least)), SLOW),
    ]
