"""Visits of solvers that match moments of products of families: steps, and what a group remembers of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..expectations import LEAST_PER_LATENT, Chains, Tilted
from ..families import FamilyMoments, ProductFamily
from ..sites import MAX_HALVINGS, back_off, next_step, select
from ._base import LocalResult
from ._chained import CHAIN_SENTENCES, COLLAPSES, chain_troubles

# Standard errors that a change must exceed to count as a swing.
_NOISES = 3.0

# Why a group's moments were not what was asked for.
FINE, NOT_FINITE, NO_TILTED, NO_STEP, COLLAPSED, IMPROPER = range(6)
_SMALLER = "a smaller power (PowerEP(power=0.5), AlphaDivergence(0.5)) or a smaller damping"
_LARGER = "a larger beta (SNEP(beta=2.0)) or a smaller step_size"
_SENTENCES = {
    NOT_FINITE: "its log density is not finite anywhere under q: narrow the prior, scale the columns, or check that "
    "the observations lie in the likelihood's support",
    NO_TILTED: "its tilted distribution cannot be normalised at any power tried, because its cavity (q without its site) is "
    "improper, or the points that its moments were taken from did not reach it: use {smaller}, moments taken another way "
    "('importance', 'laplace' or 'mcmc') or with more draws, or solver=NaturalGradient(), which needs no proper cavity",
    NO_STEP: "no step towards its tilted moments left q normalisable: use {smaller}",
    COLLAPSED: "the effective sample size of its weights is {ess:.0f}, so its moments were taken at {temper:.2g} of the power: "
    "pass more draws (ImportanceMoments(num_draws=...)), moments='laplace' or 'mcmc', {smaller}, or split the group",
    IMPROPER: "its tilted distribution is improper at the full power, so its moments were taken at {temper:.2g} of it: where "
    "this lasts the limit is not that of the power asked for; use {smaller}",
}


def trouble_sentence(
    trouble: int, ess: float, temper: float, chains: Chains | None = None, smaller: str = _SMALLER
) -> str | None:
    """What went wrong in a visit, and the remedy, without the group's name.

    Args:
        trouble: code of :class:`MatchState`.
        ess: effective sample size.
        temper: share of the power that was used.
        chains: the factor's, if it has any.
        smaller: what there is to make the steps smaller.

    Returns:
        A sentence; None where nothing did.
    """
    found = (_SENTENCES | CHAIN_SENTENCES).get(trouble)
    if found is None:
        return None
    said = {} if chains is None else {"rhat": float(chains.rhat), "divergent": float(chains.divergent)}
    return found.format(ess=ess, temper=temper, smaller=smaller, **said)


class MatchRules(NamedTuple):
    """What a visit reads beside the moments."""

    # The largest step, in (0, 1], and how moments were asked for.
    damping: float
    moments: Any
    # Smallest effective sample size that is believed, and numbers that are matched.
    least: float
    size: int
    # Whether chains may take over from weights that keep collapsing.
    may_chain: bool = False


class MatchState(NamedTuple):
    """One group's memory, and what its last visit found."""

    # The step that it takes: halved while its moves turn back, grown again while they do not.
    step: Float[Array, ""]
    # The last change that was asked for, natural parameters; None where the site is all groups', whose changes say nothing of
    # each other.
    last: Any
    # Effective sample size (NaN where nothing is sampled), and the standard error of a full step's move, in sds of q.
    ess: Float[Array, ""]
    noise: Float[Array, ""]
    # Share of the power that was used, and what went wrong (0: nothing).
    temper: Float[Array, ""]
    trouble: Int[Array, ""]
    # Visits running in which weights have collapsed where chains may take over, and the chains; None where there are none.
    collapses: Int[Array, ""]
    chains: Chains | None = None
    # Of a solver whose tilted distributions are taken at a q of its own: its natural parameters, the steps taken since the
    # start, and one over the power.
    anchor: Any = None
    age: Int[Array, ""] | None = None
    beta: Float[Array, ""] | None = None

    def asked(self, family: ProductFamily, moments: FamilyMoments) -> Float[Array, "*M P"]:
        """The full move that the last visit asked for, as of ``family.moves``, to first order; empty where none is kept."""
        return self.step[..., None][..., :0] if self.last is None else family.effect(self.last, moments)

    def sentence(self) -> str | None:
        """What went wrong in the last visit, and the remedy, without the group's name; None where nothing did."""
        smaller = _SMALLER if self.anchor is None else _LARGER
        return trouble_sentence(int(self.trouble), float(self.ess), float(self.temper), self.chains, smaller)


def first_match_state(zeros: Any, damping: float, dtype: Any, chains: Chains | None = None) -> MatchState:
    """The memory of a group that nobody has visited.

    Args:
        zeros: natural parameters of a unit site.
        damping: largest step in (0, 1]; 1 is the full step.
        dtype: floating dtype.
        chains: those that take its moments from the first visit on.

    Returns:
        The memory.
    """
    zero, none = jnp.zeros((), dtype), jnp.int32(0)
    return MatchState(zero + damping, zeros, zero + jnp.nan, zero, zero + 1.0, jnp.int32(FINE), none, chains)


def match_visit(
    family: ProductFamily, q: Any, site: Any, found: Tilted, state: MatchState, rules: MatchRules
) -> LocalResult:
    """One visit: ``eta_m <- eta_m + step (eta_qhat - eta_q) / power``, as much of it as leaves q normalisable.

    Args:
        family: of q.
        q: natural parameters of q.
        site: the group's site.
        found: what matching moments asks for.
        state: the group's memory.
        rules: the largest step, and what collapsed weights are.

    Returns:
        The site, the new memory, and how it went.
    """
    usable = found.valid & all_finite(found.change)
    change = select(usable, found.change, jax.tree.map(jnp.zeros_like, site))
    noise = jnp.where(usable, found.noise, state.noise)
    own = own_family_step(family, q, change, noise, state, rules.damping)
    taken, tries = back_off(lambda step: family.in_domain(q + change * step), own)
    good = usable & family.in_domain(q + change * taken)
    new = after_match(found, state, rules, found.valid, usable & ~good)._replace(
        step=jnp.where(good, own, state.step),
        last=None if state.last is None else select(good, change, state.last),
        noise=noise,
    )
    halvings = jnp.round(-jnp.log2(found.temper)).astype(jnp.int32)
    tries = jnp.minimum(tries, MAX_HALVINGS) + jnp.where(usable, halvings, 0)
    return LocalResult(select(good, site + change * taken, site), new, tries, good, jnp.where(good, taken, 0.0))


def after_match(
    found: Tilted, state: MatchState, rules: MatchRules, valid: Bool[Array, ""], stuck: Bool[Array, ""]
) -> MatchState:
    """What a visit leaves of its moments in a group's memory: effective sample size, share of the power, trouble and chains.

    Args:
        found: the moments.
        state: the memory before.
        rules: what collapsed weights are.
        valid: whether there were moments of a normalisable member.
        stuck: whether there were, and no step towards them left q normalisable.

    Returns:
        The memory; steps and what they are compared with as they were.
    """
    by_chains = jnp.array(False) if state.chains is None else state.chains.used
    weighed = ~jnp.isnan(found.ess) & ~by_chains
    collapsed = weighed & (found.ess < rules.least)
    collapses, chains, said = _after(found, state, collapsed, rules)
    reasons = [
        (~found.finite, NOT_FINITE),
        (~valid, NO_TILTED),
        (stuck, NO_STEP),
        *said,
        ((found.temper < 1) & collapsed, COLLAPSED),
        (found.temper < 1, IMPROPER),
    ]
    trouble = jnp.select([flag for flag, _ in reasons], [jnp.int32(code) for _, code in reasons], FINE)
    return state._replace(
        ess=found.ess, temper=found.temper, trouble=trouble.astype(jnp.int32), collapses=collapses, chains=chains
    )


def _after(
    found: Tilted, state: MatchState, collapsed: Bool[Array, ""], rules: MatchRules
) -> tuple[Int[Array, ""], Chains | None, list]:
    """Visits running in which weights collapsed, the chains, and pairs of a flag and the trouble that it stands for."""
    collapses = jnp.zeros_like(state.collapses)
    if rules.may_chain:
        collapses = jnp.where(collapsed, state.collapses + 1, 0)
    chains = found.memory
    if chains is None:
        return collapses, state.chains, []
    said = chain_troubles(rules.moments, chains, found.ess, LEAST_PER_LATENT * rules.size)
    return collapses, chains._replace(used=chains.used | (collapses >= COLLAPSES)), said


def own_family_step(
    family: ProductFamily, q: Any, change: Any, noise: Any, state: MatchState, damping: float
) -> Float[Array, ""]:
    """The step of a visit: halved where the change asked for turns back on the last one, and grown again where it goes on.

    Args:
        family: of q.
        q: natural parameters.
        change: what a full step would add to the site.
        noise: standard error of that, in sds of q.
        state: the group's memory.
        damping: the largest step in (0, 1]; 1 is the full step.

    Returns:
        The step; the last one where no changes are kept to compare with.
    """
    if state.last is None:
        return state.step
    image = family.fisher_product(q, change)
    size, last = family.inner(change, image), family.inner(state.last, family.fisher_product(q, state.last))
    # Of draws' noise late rounds are averaged.
    return next_step(state.step, family.inner(state.last, image), size, last, damping, _NOISES * noise)
