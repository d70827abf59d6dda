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
    that is drawn from. For groups that say much more than q knows yet, whose draws from q would hardly ever hit. Under
    :class:`numpyro_pvi.AutoExponentialFamily` the search is in unconstrained coordinates, and draws are of the Student's t of 5
    degrees of freedom there, because logarithms of gammas have longer tails than a Gaussian's.

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


@dataclasses.dataclass(frozen=True)
class MCMCMoments:
    """Moments from Hamiltonian chains, or NumPyro's NUTS, on the tilted distribution, with the score as control variate.

    Chains run in coordinates whitened by q, those of all groups (of about equal size) in one vectorised program. A first
    visit starts from draws of q and warms up; later ones go on from where the chains stood, with the step sizes they had,
    after a few transitions that are thrown away. The gradient of the log density has mean zero under the tilted
    distribution and makes its mean and covariance exact where it is Gaussian, so that their noise is far below that of plain
    draws. The evidence needs a normaliser, which chains do not have: it is a bridge from the Gaussian with these moments,
    with a Monte Carlo error.

    Under :class:`numpyro_pvi.AutoExponentialFamily` chains move in unconstrained coordinates. Their draws are matched as a
    family of their own, with one over the weights that draws of q would have: exact, with the evidence, where the factor is
    conjugate.

    For factors whose weights collapse however many draws of q are weighted. Unlike weighted draws, chains need gradients.

    Args:
        num_warmup: transitions of a first visit that adapt the step size and are thrown away.
        num_samples: transitions kept in every visit, per chain.
        num_chains: chains per factor.
        kernel: NumPyro's "nuts" or "hmc" (a quarter period of q), or "lockstep": Hamiltonian chains of that length, all of a
            group in the same number of leapfrog steps, a handful, and so several times faster side by side, where every
            lane of NUTS waits for the deepest tree. NUTS is surer where a tilted distribution is far from q's shape.
            "langevin" is for large groups: underdamped Langevin dynamics without an accept step, on mini-batches.
        batch_size: "langevin" only: rows of a group that one step reads, an even number, taken with replacement; None for all
            of them. Gradients are differences from the whole gradient at q's location, so that their noise vanishes with
            q's width. A visit also takes 15 passes over the group's rows, for that gradient, the step size, and the evidence.
        num_refresh: transitions of later visits that are thrown away.
        target_accept: mean acceptance that step sizes aim at, in (0, 1).
        max_tree_depth: NUTS doubles a trajectory at most so often; "lockstep" takes at most ``2^max_tree_depth - 1`` steps.

    Raises:
        PVIError: on construction, for values outside these ranges.
    """

    num_warmup: int = 200
    num_samples: int = 256
    num_chains: int = 4
    kernel: str = "nuts"
    num_refresh: int = 8
    target_accept: float = 0.8
    max_tree_depth: int = 6
    batch_size: int | None = None

    def __post_init__(self):
        least = {"num_warmup": 10, "num_samples": 16, "num_chains": 2, "num_refresh": 0, "max_tree_depth": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise PVIError(f"MCMCMoments({name}={value!r}): expected an int of {low} or more.")
        if self.kernel not in ("nuts", "hmc", "lockstep", "langevin"):
            raise PVIError(f"MCMCMoments(kernel={self.kernel!r}): expected 'nuts', 'hmc', 'lockstep' or 'langevin'.")
        self._check_batch()
        if not isinstance(self.target_accept, float) or not 0.0 < self.target_accept < 1.0:
            raise PVIError(f"MCMCMoments(target_accept={self.target_accept!r}): expected a number between 0 and 1.")

    def _check_batch(self) -> None:
        size = self.batch_size
        if size is None:
            return
        if isinstance(size, bool) or not isinstance(size, int) or size < 2 or size % 2:
            raise PVIError(
                f"MCMCMoments(batch_size={size!r}): expected an even int of 2 or more (the noise of a batch is told by the "
                "difference of its halves), or None for all rows."
            )
        if self.kernel != "langevin":
            raise PVIError(
                f"MCMCMoments(kernel={self.kernel!r}, batch_size={size}): a step that is accepted or refused needs all rows. "
                "Mini-batches are of kernel='langevin'."
            )

    @property
    def num_draws(self) -> int:
        """Draws per visit, of all chains."""
        return self.num_samples * self.num_chains


# Words for ``moments=``: one of these, or an instance with settings.
MOMENTS = ("auto", "exact", "quadrature", "importance", "laplace", "mcmc")
# Classes of settings; the moments that they stand for are sampled.
SAMPLED = (ImportanceMoments, LaplaceMoments, MCMCMoments)

Moments = ImportanceMoments | LaplaceMoments | MCMCMoments | str


def with_settings(moments: Moments) -> Moments:
    """The default settings behind a word that has some."""
    words = {"importance": ImportanceMoments(), "laplace": LaplaceMoments(), "mcmc": MCMCMoments()}
    return words.get(moments, moments) if isinstance(moments, str) else moments


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int) or count < 16:
        raise PVIError(f"{name}(num_draws={count!r}): expected an int of 16 or more.")
