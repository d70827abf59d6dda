"""What solvers that match moments share: their common settings, and the checks of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..errors import PVIError
from ..expectations import MOMENTS, SAMPLED, MCMCMoments, Moments
from ._base import FamilyFactor, LocalResult, SolverDefaults
from ._minibatch import check_batch_size
from ._product_visits import MatchState, first_match_state, match_visit


def check_share(owner: str, name: str, value: Any, remedy: str) -> None:
    """Refuse what is no number in (0, 1].

    Args:
        owner: the solver's name.
        name: the option's.
        value: its value.
        remedy: what to write instead.

    Raises:
        PVIError: naming all of them.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise PVIError(f"{owner}({name}={value!r}): expected a number in (0, 1]; {remedy}.")


def check_moments(owner: str, moments: Any, chains: bool = False) -> None:
    """Refuse ways to take moments that are none.

    Args:
        owner: the solver's name.
        moments: a word, or an instance with settings.
        chains: whether the solver takes draws of Markov chains.

    Raises:
        PVIError: listing the ways.
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
    # Whether latents of the groups' own are integrated out of their factors.
    integrates = False
    # Under families the server's own rounds are PowerEP's; other visits are taken one by one by a schedule's round.
    fused_families = False
    moments: Moments
    damping: float

    def check(self, structure: str, full: bool, where: str) -> None:
        """Raise when forced moments do not fit what was found.

        Args:
            structure: "quadratic", "affine", "draws", "reparameterised" or "local".
            full: whether q has full covariance.
            where: the factor's name, for the message.

        Raises:
            PVIError: naming the factor and the choices that work.
        """
        del full
        owner = type(self).__name__
        if structure == "local" and not self.integrates:
            raise PVIError(
                f"{owner} does not integrate out local latents, and the {where} has some: use PowerEP() or NaturalGradient(), or "
                "keep the latents shared by leaving them outside the partitioned plate."
            )
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

    def check_families(self) -> None:
        """Goes with every family whose tilted moments can be taken; which can is found at ``init``."""

    def init_families(self, zeros: Any, dtype: Any, chains: Any, count: int) -> MatchState:
        """Start every group at the largest step: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        del count
        return first_match_state(zeros, float(self.damping), dtype, chains)

    def solve_families(self, factor: FamilyFactor, q: Any, site: Any, state: MatchState, key: Any) -> LocalResult:
        """One visit: ``eta_m <- eta_m + step (eta_qhat - eta_q) / power``, by the draws that groups share."""
        del key
        found = factor.tilted(q, site, self.power, None, state.chains)
        return match_visit(factor.family, q, site, found, state, factor.rules)

    @property
    def moments_batch(self) -> int | None:
        """Rows of a mini-batch by which chains read a group, or None where they read all of it."""
        return self.moments.batch_size if isinstance(self.moments, MCMCMoments) else None

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """Raise when chains ask for mini-batches of a group that has fewer rows, or of one that is read by masks.

        Args:
            sizes: rows of each group, by label.
            mechanism: how rows are read.

        Raises:
            PVIError: naming the group.
        """
        check_batch_size("MCMCMoments", self.moments_batch, sizes, mechanism)
