"""Power expectation propagation: match the moments of the tilted distribution; stochastic EP, one site for all groups."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import PVIError
from ..expectations import SAMPLED, Moments, with_settings
from ._matching import MatchesMoments, MatchState, check_moments, check_share


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
    (but for chains) under ``factors="row"``. Latents inside the partitioned plate are integrated out: finitely many values are
    summed over, in closed form goes one continuous latent in whose statistics the rows are affine given the others, and others by
    sums over a grid, of at most two numbers a row. A row's member has the mean statistics of ``q(theta) p(z | theta, y)``, and
    ``numpyro.param`` sites climb the marginal model's ELBO.

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

    Latents of the groups' own are integrated out as by :class:`PowerEP`: t stands for the average of the groups' marginal factors,
    and each unit keeps a Gaussian of its own, matched to the q that a round of ``Synchronous()`` begins, or a sweep ends at.

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

    # One site for all groups; see numpyro_pvi.sites. A visit gives the site that its group alone asks for (a full change of one
    # group's share moves q as much as one of its own site would); schedules move the tied site by 1/M of the way.
    tied = True
    # A group's site is any member of the family, not a sum over its rows.
    whole_sites = True
    # Moments are taken once a visit, of the q that the visit starts from.
    looks_once = True

    def __post_init__(self):
        limit = "1 is stochastic EP; for the limit 0 use StochasticNaturalGradient() or NaturalGradient()"
        check_share("StochasticEP", "power", self.power, limit)
        check_share("StochasticEP", "damping", self.damping, "1 is the full step")
        check_moments("StochasticEP", self.moments)

    @property
    def for_prior(self) -> PowerEP:
        """Who refines the PRIOR site, which is not tied; and a visit's arithmetic."""
        return PowerEP(self.power, self.moments, damping=self.damping)

    def init_among(self, family: Any, dtype: Any, count: int) -> MatchState:
        """The state of each of ``count`` groups: a few numbers.

        PowerEP compares a group's move with its last one and halves steps that turn back. Here the site's last move was
        another group's, which says nothing where there are several, and is not kept.
        """
        state = self.init(family, dtype)
        return state if count == 1 else state._replace(last=None)
