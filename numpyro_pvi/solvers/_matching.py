"""What solvers that match moments share: settings, chains of a factor, shortened steps, and the visit, of every family of q."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..errors import PVIError
from ..expectations import (
    LEAST_PER_LATENT,
    MOMENTS,
    SAMPLED,
    Chains,
    Expected,
    MCMCMoments,
    Moments,
    Tilted,
    chain_settings,
    least_ess,
    no_chains,
    num_draws,
    with_settings,
)
from ..families import GaussianFamily, Vector
from ..sites import MAX_HALVINGS, back_off, next_step, select
from ._base import LocalResult, SolverDefaults, TiltedFactor
from ._minibatch import check_batch_size

# --------------------------------------------------------------------------------------------------- chains of a factor
# What solvers that match moments keep of a factor's chains, when chains take over from weights, and what to say of
# them.

# Visits running in which a group's weights have collapsed before it goes over to chains: those of first rounds often do.
COLLAPSES = 3
# Share of divergent transitions, split R-hat, and share of the draws that the effective sample size is below, to be said.
_DIVERGENT, _RHAT, _EFFICIENCY = 0.01, 1.1, 0.05

# Kinds of trouble, beside those of visits below, which end before.
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

    Returns them, or None where moments are taken otherwise.
    """
    wanted = with_settings(moments)
    return no_chains(wanted, family.dim, dtype, True) if isinstance(wanted, MCMCMoments) else None


def chain_troubles(moments: Moments, chains: Chains, ess: Array, least: float) -> list:
    """What there is to say of a visit by chains.

    ``chains``: after the visit; ``least``: the smallest one that is not worth a word. Returns pairs of a flag and the kind of
    trouble it stands for.
    """
    settings = chain_settings(moments)
    assert settings is not None  # there are chains
    return [
        (chains.used & (chains.divergent > _DIVERGENT), DIVERGENT),
        (chains.used & ~(chains.rhat <= _RHAT), NOT_MIXED),
        (chains.used & (ess < max(_EFFICIENCY * settings.num_draws, least)), SLOW),
    ]


# ------------------------------------------------------------------------------------------------------ shortened steps
# A group's own step, shortened while its moves turn back on each other.

# Standard errors that a change must exceed to count as a swing.
_NOISES = 3.0


def own_step(
    family: Any, q: Any, change: Any, noise: Any, state: MatchState, largest: float
) -> tuple[Float[Array, ""], Any]:
    """The step of a visit: halved where the move asked for turns back on the last one, and grown again where it goes on.

    ``change``: what a full step would add to the site; ``noise``: standard error of that, in sds of q; of Gaussians not looked
    at; ``largest``: the largest step in (0, 1]; 1 is the full step. Returns ``(step, move)``; the move is the change, of a
    Gaussian that of q's location in sds and, to first order, of its log sds. The last step, and None, where no moves are kept
    to compare with.
    """
    last, floor = state.last, 0.0
    if last is None:
        return state.step, None
    if family.located:
        moments = family.moments(q)
        stretch = -0.5 * family.precision_diagonal(change) * family.variances(moments)
        move = jnp.concatenate([family.shift(change, moments), stretch])
        lengths = jnp.dot(move, last), jnp.dot(move, move), jnp.dot(last, last)
    else:
        move, image = change, family.fisher_product(q, change)
        before = family.inner(last, family.fisher_product(q, last))
        # Of draws' noise late rounds are averaged.
        lengths, floor = (family.inner(last, image), family.inner(change, image), before), _NOISES * noise
    return next_step(state.step, *lengths, largest, floor), move


# ----------------------------------------------------------------------------------------------------------------- visits
# Visits of solvers that match moments, of Gaussians and of products of families: what a group remembers, and what went wrong.

# Why a group's moments were not what was asked for.
FINE, NOT_FINITE, NO_TILTED, NO_STEP, COLLAPSED, IMPROPER, HELD, UNKNOWN = range(8)
_SMALLER = "a smaller power (PowerEP(power=0.5), AlphaDivergence(0.5)) or a smaller damping"
_LARGER = "a larger beta (SNEP(beta=2.0)) or a smaller step_size"
_SENTENCES = {
    NOT_FINITE: "its log density is not finite anywhere under {there}: narrow the prior, scale the columns, or check that "
    "the observations lie in the likelihood's support",
    NO_TILTED: "its tilted distribution cannot be normalised at any power tried, because its cavity (q without its site) is "
    "improper, or the points that its moments were taken from did not reach it: use {smaller}, moments taken another way "
    "('importance', 'laplace' or 'mcmc') or with more draws, or solver=NaturalGradient(), which needs no proper cavity",
    NO_STEP: "no step towards its tilted moments left q normalisable: use {smaller}",
    COLLAPSED: "the effective sample size of its weights is {ess:.0f}, so its moments were taken at {temper:.2g} of the power: "
    "pass more draws (ImportanceMoments(num_draws=...)), moments='laplace' or 'mcmc', {smaller}, or split the group",
    IMPROPER: "its cavity, or its tilted distribution, is improper at the full power, so moments were taken at {temper:.2g} of "
    "it: where this lasts the limit is not that of the power asked for; use {smaller}",
    HELD: "the moments of {held} row(s) were not finite, and these kept their sites: look for observations that are all "
    "but impossible, or use {smaller}",
    UNKNOWN: "the integral over the own latents ({own}) of some row is not known at points with more than a hundredth of q's mass: "
    "its mass is beyond the row's grid or draws, or too narrow for them (a prior with heavy tails, far modes, an observation all "
    "but impossible), or infinite. Write the integral in the model (a StudentT, a NegativeBinomial, ...), give these latents a "
    "prior with lighter tails, enable x64 where what is left is rounding, or use solver=NaturalGradient(), which takes no integral",
}


# Kinds of trouble without those of chains, of which there may be none.
TROUBLES = len(_SENTENCES) + 1


def trouble_sentence(
    trouble: int,
    ess: float,
    temper: float,
    chains: Chains | None = None,
    held: int = 0,
    anchored: bool = False,
    own: tuple[str, ...] = (),
) -> str | None:
    """What went wrong in a visit, and the remedy, without the group's name.

    ``trouble``: code of :class:`MatchState`; ``ess``: effective sample size; ``temper``: share of the power that was used;
    ``chains``: the factor's, if it has any; ``held``: rows that kept their sites; ``anchored``: whether tilted distributions
    are taken at a q of the solver's own; ``own``: names of rows' own latents. Returns a sentence; None where nothing did.
    """
    found = (_SENTENCES | CHAIN_SENTENCES).get(trouble)
    if found is None:
        return None
    said: dict = {"ess": ess, "temper": temper, "held": held, "own": ", ".join(own)}
    said |= {"smaller": _LARGER, "there": "its anchor"} if anchored else {"smaller": _SMALLER, "there": "q"}
    said |= {} if chains is None else {"rhat": float(chains.rhat), "divergent": float(chains.divergent)}
    return found.format(**said)


def trouble_of(state: Any, index: int | None = None, own: tuple[str, ...] = ()) -> str | None:
    """What went wrong with a group's tilted moments in its last visit, and the remedy; None where nothing did.

    ``state``: the solver state of one group, or of all with ``index``; of any solver; ``index``: which group; ``own``: names of
    rows' own latents. Returns a sentence without the group's name.
    """
    found = matched(state)
    if found is None:
        return None
    return (found if index is None else jax.tree.map(lambda x: x[index], found)).sentence(own)


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
    # Whether all groups of a round share draws, which a factor takes where its key is None.
    shared: bool = False


class MatchState(NamedTuple):
    """One group's memory, and what its last visit found."""

    # The step that it takes: halved while its moves turn back, grown again while they do not.
    step: Float[Array, ""]
    # The last change that was asked for: natural parameters, of a Gaussian the change of q's location and of its log sds in sds.
    # None where the site is all groups', whose changes say nothing of each other.
    last: Any
    # Effective sample size (NaN where nothing is sampled), and the standard error of a full step's move, in sds of q.
    ess: Float[Array, ""]
    noise: Float[Array, ""]
    # Share of the power that was used, rows that kept their sites, and what went wrong (0: nothing).
    temper: Float[Array, ""]
    held: Int[Array, ""]
    trouble: Int[Array, ""]
    # Whether quadrature asked for a finer rule than was compiled in.
    missed: Bool[Array, ""]
    # Visits running in which weights have collapsed where chains may take over, and the chains; None where there are none.
    collapses: Int[Array, ""]
    chains: Chains | None = None
    # Of a solver whose tilted distributions are taken at a q of its own: its natural parameters, the steps taken since the
    # start, and one over the power.
    anchor: Any = None
    age: Int[Array, ""] | None = None
    beta: Float[Array, ""] | None = None

    @property
    def takes_chains(self) -> bool:
        """Whether the memory may still be given room for chains (:func:`numpyro_pvi.expectations.chain_settings`)."""
        return self.chains is None

    @property
    def wants_chains(self) -> Bool[Array, ""] | bool:
        """Whether some group's weights have collapsed so often that there should be some."""
        return jnp.any(self.collapses >= COLLAPSES) if self.takes_chains else False

    def asked(self, family: Any, moments: Any) -> Float[Array, "*M P"]:
        """The full move that the last visit asked for, as of ``family.moves``, to first order; empty where none is kept."""
        if self.last is None:
            return self.step[..., None][..., :0]
        return family.effect(self.last, moments) if isinstance(self.last, Vector) else self.last

    def sentence(self, own: tuple[str, ...] = ()) -> str | None:
        """What went wrong in the last visit, and the remedy, without the group's name; None where nothing did."""
        numbers = int(self.trouble), float(self.ess), float(self.temper)
        return trouble_sentence(*numbers, self.chains, int(self.held), self.anchor is not None, own)


class RowMatches(NamedTuple):
    """What a group's last visit found in its rows, each of which is a factor; sites and steps of rows are in :class:`RowVisits`."""

    # Smallest effective sample size (NaN where nothing is sampled), standard error of the group's full step in sds of q, and
    # smallest share of the power.
    ess: Float[Array, "M"]
    noise: Float[Array, "M"]
    temper: Float[Array, "M"]
    # What went wrong worst (0: nothing), and in how many rows.
    trouble: Int[Array, "M"]
    troubled: Int[Array, "M"]

    def asked(self, family: Any, moments: Any) -> Float[Array, "*M 0"]:
        """No numbers: what rows asked for is not kept of their groups."""
        del family, moments
        return self.ess[..., None][..., :0]

    def sentence(self, own: tuple[str, ...] = ()) -> str | None:
        """What went wrong in one group's last visit, and the remedy, without the group's name; None where nothing did."""
        del own
        found = trouble_sentence(int(self.trouble), float(self.ess), float(self.temper))
        return None if found is None else f"of {int(self.troubled)} of its rows, each a factor: {found}"

    @property
    def missed(self) -> Bool[Array, ""]:
        """Whether quadrature asked for a finer rule than was compiled in: of rows nothing tells."""
        return jnp.array(False)

    @property
    def chains(self) -> None:
        """Rows have no chains of their own."""
        return None

    @property
    def takes_chains(self) -> bool:
        """Whether the memory may be given room for chains: of single rows never."""
        return False

    @property
    def wants_chains(self) -> bool:
        """Whether there should be chains: never."""
        return False


# What solvers that ``matches_moments`` remember.
Matched = MatchState | RowMatches


def matched(state: Any) -> Matched | None:
    """A solver's memory as one of moments that were matched, of one factor or stacked; None where it is of anything else."""
    return state if isinstance(state, Matched) else None


def first_match_state(last: Any, damping: float, dtype: Any, chains: Chains | None = None) -> MatchState:
    """The memory of a group that nobody has visited.

    ``last``: zeros for the change that was asked for last; None where none is kept; ``damping``: largest step in (0, 1]; 1 is
    the full step; ``dtype``: floating dtype; ``chains``: those that take its moments from the first visit on. Returns the
    memory.
    """
    zero, none = jnp.zeros((), dtype), jnp.int32(0)
    found = zero + jnp.nan, zero, zero + 1.0, none, jnp.int32(FINE), jnp.array(False)
    return MatchState(zero + damping, last, *found, none, chains)


def match_rules(solver: Any, size: int, may_chain: bool = False, shared: bool = False) -> MatchRules:
    """What a visit reads beside the moments.

    ``solver``: whose ``damping`` and ``moments`` count; ``size``: numbers that are matched; ``may_chain``: as of
    :class:`MatchRules`; ``shared``: likewise. Returns the rules.
    """
    least = least_ess(num_draws(solver.moments), size)
    return MatchRules(float(solver.damping), solver.moments, least, size, may_chain, shared)


def match_visit(family: Any, q: Any, site: Any, found: Tilted, state: MatchState, rules: MatchRules) -> LocalResult:
    """One visit: ``eta_m <- eta_m + step (eta_qhat - eta_q) / power``, as much of it as leaves q normalisable.

    ``family``: of q; ``q``: natural parameters of q; ``site``: the group's site; ``found``: what matching moments asks for;
    ``state``: the group's memory; ``rules``: the largest step, and what collapsed weights are. Returns the site, the new
    memory, and how it went.
    """
    change = family.symmetrise(found.change)
    usable = found.valid & all_finite(change)
    change = select(usable, change, jax.tree.map(jnp.zeros_like, site))
    noise = jnp.where(usable, found.noise, state.noise)
    step, last = own_step(family, q, change, noise, state, rules.damping)
    # Weights that collapsed tell of what they were believed at, and nothing of what lies as many times further. Of that visit
    # alone: the next one's step knows nothing of it.
    reach = step * jnp.where(jnp.isnan(found.ess), 1.0, found.temper)
    taken, tries = back_off(lambda step: family.in_domain(q + change * step), reach)
    good = usable & family.in_domain(q + change * taken)
    new = after_match(found, state, rules, found.valid, usable & ~good)._replace(
        step=jnp.where(good, step, state.step),
        last=None if state.last is None else select(good, last, state.last),
        noise=noise,
    )
    halvings = jnp.round(-jnp.log2(jnp.maximum(found.temper, 1e-6))).astype(jnp.int32)
    tries = jnp.minimum(tries, MAX_HALVINGS) + jnp.where(usable, halvings, 0)
    return LocalResult(select(good, site + change * taken, site), new, tries, good, jnp.where(good, taken, 0.0))


def after_match(
    found: Tilted, state: MatchState, rules: MatchRules, valid: Bool[Array, ""], stuck: Bool[Array, ""]
) -> MatchState:
    """What a visit leaves of its moments in a group's memory: effective sample size, share of the power, trouble and chains.

    ``found``: the moments; ``state``: the memory before; ``valid``: whether there were moments of a normalisable member;
    ``stuck``: whether there were, and no step towards them left q normalisable. Returns the memory; steps and what they are
    compared with as they were.
    """
    by_chains = jnp.array(False) if state.chains is None else state.chains.used
    weighed = ~jnp.isnan(found.ess) & ~by_chains
    collapsed = weighed & (found.ess < rules.least)
    collapses, chains, said = _after(found, state, collapsed, rules)
    reasons = [
        *([] if found.unknown is None else [(found.unknown, UNKNOWN)]),
        (~found.finite, NOT_FINITE),
        (~valid, NO_TILTED),
        (stuck, NO_STEP),
        *said,
        ((found.temper < 1) & collapsed, COLLAPSED),
        (found.temper < 1, IMPROPER),
        (found.held > 0, HELD),
    ]
    trouble = jnp.select([flag for flag, _ in reasons], [jnp.int32(code) for _, code in reasons], FINE)
    return state._replace(
        ess=found.ess,
        temper=found.temper,
        held=found.held,
        trouble=trouble.astype(jnp.int32),
        missed=found.missed,
        collapses=collapses,
        chains=chains,
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


# ------------------------------------------------------------------------------------------------------------- matching


def check_share(owner: str, name: str, value: Any, remedy: str) -> None:
    """Refuse what is no number in (0, 1]. Raises PVIError naming all of them."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise PVIError(f"{owner}({name}={value!r}): expected a number in (0, 1]; {remedy}.")


def check_moments(owner: str, moments: Any, chains: bool = False) -> None:
    """Refuse ways to take moments that are none.

    ``moments``: a word, or an instance with settings; ``chains``: whether the solver takes draws of Markov chains. Raises
    PVIError listing the ways.
    """
    words, kinds = (MOMENTS, SAMPLED) if chains else (MOMENTS[:-1], SAMPLED[:-1])
    if moments not in words and not isinstance(moments, kinds):
        raise PVIError(
            f"{owner}(moments={moments!r}): expected one of {', '.join(words)}, or an instance with settings: "
            f"{', '.join(f'{kind.__name__}(...)' for kind in kinds)}."
        )


class MatchesMoments(SolverDefaults):
    """What solvers that match the moments of tilted distributions have in common: a base class of their settings."""

    # Rounds are accepted when q is valid; see numpyro_pvi.schedules.
    matches_moments = True
    keeps_conditionals = True
    moments: Moments
    damping: float

    def check(self, structure: str, full: bool, where: str) -> None:
        """Raise when forced moments do not fit what was found.

        ``structure``: "quadratic", "affine", "draws", "reparameterised" or "local"; ``full``: whether q has full covariance.
        Raises PVIError naming the factor and the choices that work.
        """
        owner = type(self).__name__
        if structure == "local" and self.moments_batch is not None:
            raise PVIError(
                f"{owner}(moments=MCMCMoments(batch_size={self.moments_batch})): the {where} has local latents, which are "
                "integrated out with all of a group's rows at hand. Leave moments='auto'."
            )
        if self.moments == "exact" and structure != "quadratic":
            raise PVIError(
                f"{owner}(moments='exact') needs a factor that is quadratic in the latents, but the {where} was found to be "
                f"{structure!r}; leave moments='auto'."
            )

    def init(self, family: Any, dtype: Any) -> MatchState:
        """Start every group at the largest step. Chains of what a factor sees of a product of families are its engine's to add."""
        last, chains = family.zeros((), dtype), None
        if family.located:
            last, chains = jnp.zeros((2 * family.dim,), dtype), first_chains(self.moments, family, dtype)
        return first_match_state(last, float(self.damping), dtype, chains)

    def solve(
        self,
        factor: TiltedFactor,
        cavity: Any,
        site: Any,
        state: MatchState,
        key: Any,
        start: Expected | None = None,
        guarded: bool = False,
    ) -> LocalResult:
        """One visit: ``eta_m <- eta_m + step (eta_qhat - eta_q) / power``; see :class:`numpyro_pvi.solvers.LocalSolver`."""
        q, known = cavity + site, () if state.chains is None else (state.chains,)
        found = factor.tilted(q, site, self.power, None if factor.rules.shared else key, *known)
        return match_visit(factor.family, q, site, found, state, factor.rules)

    def check_families(self) -> None:
        """Goes with every family whose tilted moments can be taken; which can is found at ``init``."""

    @property
    def moments_batch(self) -> int | None:
        """Rows of a mini-batch by which chains read a group, or None where they read all of it."""
        return self.moments.batch_size if isinstance(self.moments, MCMCMoments) else None

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """Raise when chains ask for mini-batches of a group that has fewer rows, or of one that is read by masks.

        ``sizes``: rows of each group, by label. Raises PVIError naming the group.
        """
        check_batch_size("MCMCMoments", self.moments_batch, sizes, mechanism, filled=True)
