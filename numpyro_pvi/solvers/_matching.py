"""What solvers that match moments share: their common settings, and the checks of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..errors import PVIError
from ..expectations import MOMENTS, SAMPLED, Moments


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


class MatchesMoments:
    """What solvers that match the moments of tilted distributions have in common: a base class of their settings."""

    stochastic = False
    # Rounds are accepted when q is valid; see numpyro_pvi.schedules.
    matches_moments = True
    factors = "group"
    # Whether latents of the groups' own are integrated out of their factors.
    integrates = False
    expectation = "auto"
    num_draws = 16
    moments: Moments

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
        if self.moments == "exact" and structure != "quadratic":
            raise PVIError(
                f"{owner}(moments='exact') needs a factor that is quadratic in the latents, but the {where} was found to be "
                f"{structure!r}; leave moments='auto'."
            )

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """Groups of any size will do."""
        del sizes, mechanism
