"""Ways to take the moments of a tilted distribution, with their settings, and which one fits a factor."""

from __future__ import annotations

import dataclasses

from ..errors import PVIError


@dataclasses.dataclass(frozen=True)
class ImportanceMoments:
    """Moments from weighted draws of q, with the draws' own moments as control variates.

    Args:
        num_draws: draws per factor and round, at least 16; quasi-random up to 32 latents.

    Raises:
        PVIError: on construction, for fewer draws.
    """

    num_draws: int = 1024

    def __post_init__(self):
        _check_count(type(self).__name__, self.num_draws)


@dataclasses.dataclass(frozen=True)
class LaplaceMoments:
    """Moments from weighted draws of a Laplace approximation of the tilted distribution.

    A damped Newton search from q's location finds the tilted distribution's mode; its curvature there gives the Gaussian
    that is drawn from. For groups that say much more than q knows yet, whose draws from q would hardly ever hit.

    Args:
        num_draws: draws per factor and round, at least 16; quasi-random up to 32 latents.
        num_steps: most Newton steps.

    Raises:
        PVIError: on construction, for values outside these ranges.
    """

    num_draws: int = 1024
    num_steps: int = 20

    def __post_init__(self):
        _check_count(type(self).__name__, self.num_draws)
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise PVIError(f"LaplaceMoments(num_steps={self.num_steps!r}): expected a positive int.")


# Words for ``moments=``: one of these, or an instance with settings.
MOMENTS = ("auto", "exact", "quadrature", "importance", "laplace")

Moments = ImportanceMoments | LaplaceMoments | str


def with_settings(moments: Moments) -> Moments:
    """The default settings behind a word that has some."""
    words = {"importance": ImportanceMoments(), "laplace": LaplaceMoments()}
    return words.get(moments, moments) if isinstance(moments, str) else moments


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int) or count < 16:
        raise PVIError(f"{name}(num_draws={count!r}): expected an int of 16 or more.")
