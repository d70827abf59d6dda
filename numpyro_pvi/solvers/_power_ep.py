"""Power expectation propagation: match the moments of the tilted distribution; stochastic EP, one site for all groups."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..errors import PVIError
from ..expectations import SAMPLED, Chains, Expected, Moments, with_settings
from ..families import GaussianFamily
from ..sites import select
from ._base import LocalResult, TiltedFactor
from ._matching import (
    CHAIN_SENTENCES,
    MatchesMoments,
    MatchState,
    after_visit,
    check_moments,
    check_share,
    first_chains,
    own_step,
)

# Halvings after which a step is 1e-6 of a full one.
_MAX_TRIES = 20

# Why a group's moments were not what was asked for.
FINE, NOT_FINITE, NO_TILTED, NO_STEP, COLLAPSED, IMPROPER, HELD = range(7)
_SMALLER = "a smaller power (PowerEP(power=0.5), AlphaDivergence(0.5)) or a smaller damping"
_SENTENCES = {
    NOT_FINITE: "its log density is not finite anywhere under q: narrow the prior, scale the columns, or check that "
    "the observations lie in the likelihood's support",
    NO_TILTED: "its tilted distribution cannot be normalised at any power tried, because its cavity (q without its site) is "
    f"improper or its weights have collapsed: use {_SMALLER}, moments='laplace', or solver=NaturalGradient(), which needs no "
    "proper cavity",
    NO_STEP: f"no step towards its tilted moments left q normalisable: use {_SMALLER}",
    COLLAPSED: "the effective sample size of its weights is {ess:.0f}, so its moments were taken at {temper:.2g} of the power: "
    "pass more draws (ImportanceMoments(num_draws=...)), moments='laplace' or 'mcmc', a smaller power, or split the group",
    IMPROPER: "its cavity (q without its site) is improper at the full power for some of it, so these moments were taken at "
    f"less: where this lasts the limit is not that of the power asked for; use {_SMALLER}",
    HELD: "the moments of {held} row(s) were not finite, and these kept their sites: look for observations that are all "
    "but impossible, or use a smaller damping",
}


class PowerEPState(NamedTuple):
    """One group's memory, and what its last visit found."""

    # The step that it takes: halved while its moves turn back, doubled while they do not.
    step: Float[Array, ""]
    # The last move that was asked for: the change of q's location and of its log sds, in sds.
    last: Float[Array, "two_D"]
    # Effective sample size (NaN where nothing is sampled), and the standard error of a full step's move, in sds of q.
    ess: Float[Array, ""]
    noise: Float[Array, ""]
    # Share of the power that was used, rows that kept their sites, and what went wrong (0: nothing).
    temper: Float[Array, ""]
    held: Int[Array, ""]
    trouble: Int[Array, ""]
    # Whether quadrature asked for a finer rule than was compiled in.
    missed: Bool[Array, ""]
    # Visits running in which the weights of draws of q have collapsed, where chains may take over.
    collapses: Int[Array, ""]
    # Where the factor's chains stand; None where there are none.
    chains: Chains | None = None

    def asked(self, family: Any, moments: Any) -> Float[Array, "*M two_D"]:
        """The full move that the last visit asked for, as of ``family.moves``; empty where none is kept."""
        del family, moments
        return self.last


def trouble_of(state: Any, index: int | None = None) -> str | None:
    """What went wrong with a group's tilted moments in its last visit, and the remedy; None where nothing did.

    Args:
        state: the solver state of one group, or of all with ``index``; of any solver.
        index: which group.

    Returns:
        A sentence without the group's name.
    """
    if not hasattr(state, "trouble"):
        return None
    one = state if index is None else jax.tree.map(lambda x: x[index], state)
    if not isinstance(one, PowerEPState):
        return one.sentence()
    sentence = (_SENTENCES | CHAIN_SENTENCES).get(int(one.trouble))
    if sentence is None:
        return None
    found = {"ess": float(one.ess), "temper": float(one.temper), "held": int(one.held)}
    if one.chains is not None:
        found |= {"rhat": float(one.chains.rhat), "divergent": float(one.chains.divergent)}
    return sentence.format(**found)


@dataclasses.dataclass(frozen=True)
class PowerEP(MatchesMoments):
    """Power expectation propagation: EP at power 1, variational inference as the power tends to 0 (PVI property 6).

    With the tilted distribution ``q(theta) (p(y_m | theta) / t_m(theta))^power`` and qhat the member of the family with its
    moments of T(theta),

        eta_m <- eta_m + (damping / power) (eta_qhat - eta_q).

    Every site needs a tilted distribution that can be normalised, so the cavity ``eta_q - power eta_m`` is tested before
    moments are taken; where it is improper, or the weights of sampled moments collapse, the group takes half the power, and
    half again, for this round (``info`` says so). A group whose moves turn back halves its own step and doubles it again
    when they go on. A step that leaves q without a normaliser is halved too; a group that finds none keeps its site.

    Latents of the groups' own (inside the partitioned plate) are integrated out of the factor at every theta, by Gauss-Hermite
    rules about each unit's mode, so that ``p(y_m | theta) = prod_u int p(z_u | theta) p(y_u | theta, z_u) dz_u`` above; each unit
    keeps the Gaussian of z given theta that has the moments of ``q(theta) p(z | theta, y)``, which never enters a site.

    Neither the ELBO nor the evidence need rise from round to round, so rounds are accepted when q is valid. ``update``'s
    loss is still the negative ELBO of q after the round; :meth:`numpyro_pvi.PVI.log_evidence` gives EP's own estimate.

    Under :class:`numpyro_pvi.AutoExponentialFamily` T are the statistics of the latents' own families, and moments are of all
    latents that a factor sees together: in closed form where the factor is affine in T jointly (one round is then exact at every
    power), by quadrature where it sees at most two numbers of scalar or normal latents (or a Dirichlet's three shares) and a few
    values of discrete ones, else by weighted draws of q, and by chains where these keep collapsing; of every row in the same way
    (but for chains) under ``factors="row"``. Latents inside the partitioned plate are refused.

    Args:
        power: alpha in (0, 1]: 1 is EP, which covers the tilted distribution's mass; small powers approach variational
            inference, which seeks a mode.
        moments: how the tilted moments are taken. "auto", with a Gaussian guide: closed form for factors quadratic in the
            latents; quadrature for one factor per row, and over theta with one or two latents; else "importance", weighted
            draws of q, and, for a group whose weights have collapsed in three visits running, "mcmc", NumPyro's chains;
            under AutoExponentialFamily see above. "exact", "quadrature",
            "importance", "laplace" (weighted draws of a Laplace approximation) and "mcmc" insist on one;
            ``ImportanceMoments(num_draws=4096)``, ``LaplaceMoments(...)`` and ``MCMCMoments(...)`` set its size.
        factors: "group" (one site, one tilted distribution per group) or "row" (one per row: with a Gaussian guide every
            row needs at most two affine predictors; the group's site is the sum of its rows', updated in parallel within a
            visit; under AutoExponentialFamily every row keeps as many numbers as a site has, twice). The two have
            different fixed points; a row's factor is nearer to Gaussian, and with a Gaussian guide its moments are quadrature.
        damping: largest step in (0, 1]; 1 is the full step, as in earlier PVI code.

    Raises:
        PVIError: on construction, for values outside these ranges.

    References:
        Minka, Power EP, 2004. Ashman et al., Partitioned Variational Inference, section 4.4 and algorithm 2 (their update
        3 divides by alpha, as here). Rasmussen and Williams, Gaussian Processes for Machine Learning, section 3.6.
    """

    power: float = 1.0
    moments: Moments = "auto"
    factors: str = "group"
    damping: float = 1.0

    integrates = True
    # Moments are taken once a visit, of the q that the visit starts from.
    looks_once = True

    def __post_init__(self):
        check_share("PowerEP", "power", self.power, "1 is EP; for the limit 0 use NaturalGradient()")
        check_share("PowerEP", "damping", self.damping, "1 is the full step")
        if self.factors not in ("group", "row"):
            raise PVIError(f"PowerEP(factors={self.factors!r}): expected 'group' or 'row'.")
        check_moments("PowerEP", self.moments, chains=True)

    @property
    def exact_sites(self) -> bool:
        """Whether moments of quadratic factors are in closed form: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        return self.moments in ("auto", "exact", "quadrature")

    def init(self, family: GaussianFamily, dtype: Any) -> PowerEPState:
        """Start every group at the largest step."""
        zero = jnp.zeros((), dtype)
        full, none, last = jnp.asarray(self.damping, dtype), jnp.int32(0), jnp.zeros((2 * family.dim,), dtype)
        chains = first_chains(self.moments, family, dtype)
        return PowerEPState(full, last, zero + jnp.nan, zero, zero + 1.0, none, none, jnp.array(False), none, chains)

    def check(self, structure: str, full: bool, where: str) -> None:
        """Raise when the factors' granularity or forced moments do not fit what was found.

        Args:
            structure: "quadratic", "affine", "draws", "reparameterised" or "local".
            full: whether q has full covariance.
            where: the factor's name, for the message.

        Raises:
            PVIError: naming the factor and the choices that work.
        """
        super().check(structure, full, where)
        of_rows = self.factors == "row" and not where.startswith("prior of")
        if of_rows and isinstance(with_settings(self.moments), SAMPLED):
            raise PVIError(
                f"PowerEP(factors='row', moments={self.moments!r}): with a Gaussian guide one factor per row takes its moments by "
                "quadrature; leave moments='auto', or use factors='group'."
            )
        if of_rows and not (structure == "affine" or (structure == "quadratic" and full)):
            reason = (
                "is quadratic with a mean-field guide, whose rows are coupled"
                if structure == "quadratic"
                else f"was found to be {structure!r}: its rows do not depend on the latents through one or two affine predictors"
            )
            raise PVIError(
                f"PowerEP(factors='row') needs rows with affine predictors, but the {where} {reason}. Use factors='group', or "
                "look at Partition.plan(*args)."
            )

    def solve(
        self,
        factor: TiltedFactor,
        cavity: Any,
        site: Any,
        state: PowerEPState,
        key: Any,
        start: Expected | None = None,
        guarded: bool = False,
    ) -> LocalResult:
        """One visit: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        del start, guarded
        family, q = factor.family, cavity + site
        known = () if state.chains is None else (state.chains,)
        found = factor.tilted(q, site, self.power, key, *known)
        change = family.symmetrise(found.change)
        usable = found.valid & all_finite(change)
        change = select(usable, change, family.zeros((), q.precision_mean.dtype))
        step, move = own_step(family, q, change, state.step, state.last, usable, float(self.damping))

        def unfinished(carry):
            step, tries = carry
            return ~family.in_domain(q + change * step) & (tries < _MAX_TRIES)

        taken, tries = jax.lax.while_loop(unfinished, lambda c: (0.5 * c[0], c[1] + 1), (step, jnp.int32(0)))
        good = usable & family.in_domain(q + change * taken)
        sampled = ~jnp.isnan(found.ess)
        collapses, chains, said = after_visit(self.moments, family, found, state)
        reasons = [
            (~found.finite, NOT_FINITE),
            (~found.valid, NO_TILTED),
            (usable & ~good, NO_STEP),
            *said,
            ((found.temper < 1) & sampled & ~(False if chains is None else chains.used), COLLAPSED),
            (found.temper < 1, IMPROPER),
            (found.held > 0, HELD),
        ]
        trouble = jnp.select([flag for flag, _ in reasons], [jnp.int32(code) for _, code in reasons], FINE)
        halvings = jnp.round(-jnp.log2(jnp.maximum(found.temper, 1e-6))).astype(jnp.int32)
        new = PowerEPState(
            jnp.where(good, step, state.step),
            jnp.where(good, move, state.last),
            found.ess,
            found.noise,
            found.temper,
            found.held,
            trouble.astype(jnp.int32),
            found.missed,
            collapses,
            chains,
        )
        site = select(good, site + change * taken, site)
        return LocalResult(site, new, tries + jnp.where(sampled, halvings, 0), good, jnp.where(good, taken, 0.0))


# ---------------------------------------------------------------------------------------------- one site for all groups
# Stochastic expectation propagation: one site that all groups share.


@dataclasses.dataclass(frozen=True)
class StochasticEP(MatchesMoments):
    """Stochastic (power) EP: ``q = prior * t^M`` with one tied site t, whatever the number M of groups.

    A visit to group m takes one t out and meets that cavity with the group's exact factor: with qhat the member of the family
    that has the moments of ``q(theta) (p(y_m | theta) / t(theta))^power``,

        eta_t <- eta_t + damping / (power M) (eta_qhat - eta_q),    eta_q = eta_0 + M eta_t,

    so that t averages what the groups ask for. Under ``Synchronous()`` all groups are met with the
    same q and t moves to the mean of what they ask for: one round is exact where factors are quadratic and q has full
    covariance. Under ``Sequential()`` groups are mini-batches, and q follows the last ones: where M > 1 the step of sweep k
    (from 0) is ``10 / (10 + k)`` times the above, so that sweeps converge to the same limit. For M = 1 this is PowerEP.

    The limit is not EP's for M > 1: t stands for the average group, and all groups count alike, whatever their numbers of
    rows. As the power tends to 0 it is mini-batch natural-gradient variational inference (PVI property 7), whose limit
    is the variational one. The state holds one site (as its product ``t^M``) and a few numbers per group. What one group
    said cannot be told from what the others did: ``pvi.site(state, label)`` is t for every label, and ``add_group``, ``revisit``
    and ``forget_group`` are refused. A prior outside the family has a PRIOR site of its own, refined as PowerEP does.

    Under :class:`numpyro_pvi.AutoExponentialFamily` one round of ``Synchronous()`` is exact where factors are affine in the
    statistics of all latents jointly, and moments are those of :class:`PowerEP`.

    ``log_evidence`` is PowerEP's with t for every site. Where factors are quadratic it is exact for M = 1 and as the power
    tends to 0; else it is larger by how much the groups differ.

    Args:
        power: alpha in (0, 1]: 1 is stochastic EP; small powers approach variational inference.
        moments: how the tilted moments of a group are taken, as of :class:`PowerEP`. Of a group of a single row with one or
            two affine predictors they are quadrature over these.
        damping: largest step in (0, 1]; 1 is the full step, as in earlier PVI code.

    Raises:
        PVIError: on construction, for values outside these ranges; by ``PVI`` for schedules other than ``Sequential`` and
            ``Synchronous``.

    References:
        Li, Hernandez-Lobato and Turner, Stochastic Expectation Propagation, 2015. Ashman et al., Partitioned Variational
        Inference, section 4.6, algorithm 4 (whose rho is damping / M) and property 7.
    """

    power: float = 1.0
    moments: Moments = "auto"
    damping: float = 1.0

    # One site for all groups; see numpyro_pvi.sites.
    tied = True
    # A group's site is any member of the family, not a sum over its rows.
    whole_sites = True

    def __post_init__(self):
        limit = "1 is stochastic EP; for the limit 0 use StochasticNaturalGradient() or NaturalGradient()"
        check_share("StochasticEP", "power", self.power, limit)
        check_share("StochasticEP", "damping", self.damping, "1 is the full step")
        check_moments("StochasticEP", self.moments)

    @property
    def for_prior(self) -> PowerEP:
        """Who refines the PRIOR site, which is not tied; and a visit's arithmetic."""
        return PowerEP(self.power, self.moments, damping=self.damping)

    def init(self, family: GaussianFamily, dtype: Any) -> PowerEPState:
        """The state of a group that has no other beside it."""
        return self.for_prior.init(family, dtype)

    def init_among(self, family: GaussianFamily, dtype: Any, count: int) -> PowerEPState:
        """The state of each of ``count`` groups: a few numbers.

        PowerEP compares a group's move with its last one and halves steps that turn back. Here the site's last move was
        another group's, which says nothing where there are several, and is not kept.
        """
        state = self.init(family, dtype)
        return state if count == 1 else state._replace(last=jnp.zeros((0,), dtype))

    def init_families(self, zeros: Any, dtype: Any, chains: Any, count: int) -> MatchState:
        """As :meth:`init_among`, where q is a product of families."""
        state = super().init_families(zeros, dtype, chains, count)
        return state if count == 1 else state._replace(last=None)

    def solve(
        self,
        factor: TiltedFactor,
        cavity: Any,
        site: Any,
        state: PowerEPState,
        key: Any,
        start: Expected | None = None,
        guarded: bool = False,
    ) -> LocalResult:
        """One visit: the site that this group alone asks for; the schedule moves the tied site by 1/M of the way.

        See :class:`numpyro_pvi.solvers.LocalSolver`. ``cavity`` is q without one t, ``site`` is t. A full change of one
        group's share moves q as much as a full change of its own site would, so that validity is tested alike.
        """
        last = state.last
        if last.shape[-1] == 0:
            state = state._replace(last=jnp.zeros((2 * factor.family.dim,), last.dtype))
        result = self.for_prior.solve(factor, cavity, site, state, key, start, guarded)
        if last.shape[-1] == 0:
            result = result._replace(state=result.state._replace(last=last))
        return result
