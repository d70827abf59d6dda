"""Exact sites for factors that lie in the span of the family's sufficient statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp

from .._numerics import all_finite
from ..errors import PVIError
from ..expectations import Expected
from ..sites import select
from ._base import LocalFactor, LocalResult, SolverDefaults


@dataclasses.dataclass(frozen=True)
class Conjugate(SolverDefaults):
    """Set a site to the natural parameter of its factor, exactly: ``eta_m = eta(f_m)``, one pass, no optimiser.

    For a Gaussian q the log-likelihood must be quadratic in theta jointly and q must keep full covariance over it (a
    linear regression with known noise, say).

    References:
        Khan and Lin, Conjugate-Computation Variational Inference, section 3 (the conjugate part of algorithm 1).
    """

    num_draws = 1
    exact_sites = True
    fused_families = True
    immediate = True
    closed_form = True

    def init(self, family: Any, dtype: Any) -> tuple:
        """No state."""
        del family, dtype
        return ()

    def check(self, structure: str, full: bool, where: str) -> None:
        """Raise unless the factor is conjugate to q.

        Args:
            structure: "quadratic", "affine", "draws" or "reparameterised".
            full: whether q has full covariance.
            where: the factor's name, for the message.

        Raises:
            PVIError: naming the factor and the solver to use.
        """
        if structure != "quadratic" or not full:
            reason = "q is mean-field" if structure == "quadratic" else f"the {where} is not quadratic in the latents"
            raise PVIError(
                f"Conjugate() needs log-likelihoods that are quadratic in the latents and a guide with full covariance, but "
                f"{reason}. Use solver=NaturalGradient(), which treats conjugate parts exactly and the rest by quadrature."
            )

    def check_families(self) -> None:
        """Goes with every family: messages are exact where a factor is affine in a latent's statistics."""

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """Groups of any size will do."""
        del sizes, mechanism

    def solve(
        self,
        factor: LocalFactor,
        cavity: Any,
        site: Any,
        state: tuple,
        key: Any,
        start: Expected | None = None,
        guarded: bool = False,
    ) -> LocalResult:
        """One visit: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        del key, guarded
        start = factor.expected(factor.family.moments(cavity + site)) if start is None else start
        good = all_finite(start.target) & factor.family.in_domain(cavity + start.target)
        return LocalResult(select(good, start.target, site), state, jnp.int32(0), good)
