"""What a worker of SNEP remembers, and what its last visit found."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..expectations import Chains, Moments, Tilted
from ..families import GaussianFamily
from ._chained import CHAIN_SENTENCES, after_visit

# Why a visit was not what was asked for.
FINE, NOT_FINITE, NO_TILTED, NO_STEP, COLLAPSED, IMPROPER, HELD = range(7)
_LARGER = "a larger beta (SNEP(beta=2.0)) or a smaller step_size"


class SNEPState(NamedTuple):
    """One worker's memory, and what its last visit found."""

    # theta': the natural parameters that its tilted distribution is anchored at, and the inner steps taken since the start.
    anchor: Any
    age: Int[Array, ""]
    beta: Float[Array, ""]
    # Its own share of the step size: halved while its moves turn back. The last move, in sds of q.
    share: Float[Array, ""]
    last: Float[Array, "two_D"]
    # Effective sample size (NaN where nothing is sampled), and the standard error of a visit's move, in sds of q.
    ess: Float[Array, ""]
    noise: Float[Array, ""]
    # Share of the power that was used, rows that kept their sites, and what went wrong (0: nothing).
    temper: Float[Array, ""]
    held: Int[Array, ""]
    trouble: Int[Array, ""]
    # Whether quadrature asked for a finer rule than was compiled in.
    missed: Bool[Array, ""]
    # Inner steps running in which the weights of draws of the anchor have collapsed, where chains may take over.
    collapses: Int[Array, ""]
    # Where the factor's chains stand; None where there are none.
    chains: Chains | None = None

    def asked(self, family: Any, moments: Any) -> Float[Array, "*M two_D"]:
        """The full move that the last visit asked for, as of ``family.moves``."""
        del family, moments
        return self.last

    def sentence(self) -> str | None:
        """What went wrong in the last visit of one group, and the remedy, without the group's name."""
        trouble = int(self.trouble)
        if self.chains is not None and trouble in CHAIN_SENTENCES:
            found = {"rhat": float(self.chains.rhat), "divergent": float(self.chains.divergent), "ess": float(self.ess)}
            return CHAIN_SENTENCES[trouble].format(**found)
        return {
            NOT_FINITE: "its log density is not finite anywhere under its anchor: narrow the prior, scale the columns, or check "
            "that the observations lie in the likelihood's support",
            NO_TILTED: "its tilted distribution cannot be normalised at any power tried, because its cavity is improper or its "
            f"weights have collapsed: use {_LARGER}, moments='laplace', or solver=NaturalGradient(), which needs no proper "
            "cavity",
            NO_STEP: f"no step towards its tilted moments left q normalisable: use {_LARGER}",
            COLLAPSED: f"the effective sample size of its weights is {float(self.ess):.0f}, so its moments were taken at "
            f"{float(self.temper):.2g} of the power: pass more draws (ImportanceMoments(num_draws=...)), moments='laplace', a "
            "larger beta, or split the group",
            IMPROPER: "its cavity (its anchor without its site) is improper at the full power, so these moments were taken at "
            f"less: where this lasts the limit is not that of the beta asked for; use {_LARGER}",
            HELD: f"the moments of {int(self.held)} row(s) were not finite, and these kept their sites: look for observations "
            "that are all but impossible",
        }.get(trouble)


def reported(
    moments: Moments,
    family: GaussianFamily,
    state: SNEPState,
    found: Tilted,
    weight: Float[Array, ""],
    usable: Bool[Array, ""],
    good: Bool[Array, ""],
) -> SNEPState:
    """The state with what an inner step found.

    Args:
        moments: the solver's setting.
        family: the Gaussian family of q.
        state: the state before the step.
        found: the tilted moments.
        weight: share of a full step's move that was taken.
        usable: whether the moments were those of a normalisable Gaussian.
        good: whether a step was taken.

    Returns:
        The state; its anchor, age and steps are as they were.
    """
    sampled = ~jnp.isnan(found.ess)
    collapses, chains, said = after_visit(moments, family, found, state)
    reasons = [
        (~found.finite, NOT_FINITE),
        (~usable, NO_TILTED),
        (~good, NO_STEP),
        *said,
        ((found.temper < 1) & sampled & ~(False if chains is None else chains.used), COLLAPSED),
        (found.temper < 1, IMPROPER),
        (found.held > 0, HELD),
    ]
    trouble = jnp.select([flag for flag, _ in reasons], [jnp.int32(code) for _, code in reasons], FINE)
    return state._replace(
        ess=found.ess,
        noise=found.noise * weight,
        temper=found.temper,
        held=found.held,
        trouble=trouble.astype(jnp.int32),
        missed=found.missed,
        collapses=collapses,
        chains=chains,
    )
