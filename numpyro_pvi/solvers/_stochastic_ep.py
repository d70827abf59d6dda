"""Stochastic expectation propagation: one site that all groups share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..expectations import Expected, Moments
from ..families import GaussianFamily
from ._base import LocalResult, TiltedFactor
from ._matching import MatchesMoments, check_moments, check_share
from ._power_ep import PowerEP, PowerEPState
from ._product_visits import MatchState


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

    # One site for all groups; see numpyro_pvi.sites._tied.
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
