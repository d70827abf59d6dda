"""Conjugate-computation variational inference: natural-gradient steps on one site."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite
from ..errors import PVIError
from ..expectations import Expected
from ..sites import damp, select
from ._base import LocalFactor, LocalResult, SolverDefaults, local_free_energy

# Halvings after which a step is 1e-6 of a full one.
_MAX_TRIES = 20


class NaturalGradientState(NamedTuple):
    """One group's memory: the step that was accepted last, doubled back towards the full one when it is accepted again."""

    step: Float[Array, ""]


class _Search(NamedTuple):
    site: Any
    expected: Expected
    energy: Float[Array, ""]
    step: Float[Array, ""]
    accepted: Int[Array, ""]
    tries: Int[Array, ""]
    backoffs: Int[Array, ""]


# Ways to take expectations that are there under AutoExponentialFamily.
_UNDER_FAMILIES = ("auto", "exact", "quadrature", "monte_carlo")


@dataclasses.dataclass(frozen=True)
class NaturalGradient(SolverDefaults):
    """Natural-gradient variational inference on one site (CVI; PVI eq. 10).

    A step is ``eta_m <- (1 - step) eta_m + step * grad_mu E_q[log p(y_m | theta)]`` at the current local q,
    ``num_steps`` times.
    For a Gaussian q with ``f = log p(y_m | theta)``, ``H = E[hess f]`` and ``g = E[grad f]``, the target has precision
    ``-H`` and precision-mean ``g - H loc`` (their diagonals for a mean-field q).

    Args:
        num_steps: inner steps per visit, each a pass over the group's rows; 1 makes parallel rounds independent of the
            partition (PVI property 5).
        step_size: largest step in (0, 1], in natural space; 1 is the full step, as for ``damping`` in earlier PVI code.
        expectation: "auto" (closed form or quadrature where the structure allows, else sigma points while a few random
            draws agree with them, else random points with gradients; for a mean-field q in many dimensions reparameterised
            draws), or one to insist on: "exact", "quadrature", "sigma_points", "stein" (random points, gradients only),
            "hessian" (antithetic draws with second derivatives, wrong where the gradient jumps), "monte_carlo" (whichever
            of the last two a comparison on common draws allows), "reparameterised" (draws without Hessians, for a
            mean-field q).
        backtracking: halve a step that lowers the local free energy or leaves q improper, and double it back when it is
            accepted. "auto" does so wherever the schedule does not test the joint step itself and the factor is not
            quadratic.
        num_draws: antithetic pairs per round when expectations are by draws; random points come in whole rotations, at
            least as many pairs as there are latents, and few local latents take up to 64 pairs. Draws, not pairs, of each
            latent that is drawn under ``AutoExponentialFamily``.
        sites: how sites are held. "dense": D x D numbers a group. "rows": two numbers per row, where every row sees a Gaussian
            prior through one affine predictor (q has full covariance); then nothing of size D x D is made for N rows and D
            latents, and a round takes O(N^3 + N^2 D). The state holds what rows see of the latents, as data would. "auto": by
            rows from 64 latents on, where there are fewer rows than latents, or one predictor per latent.
        blocks: under ``AutoExponentialFamily``, what moves from one q: "auto" one latent after another in the model's order
            (with all sites in parallel that is coordinate ascent), "parallel" all of them at once, or a tuple of latents:
            these first, in this order, then the others.

    Raises:
        PVIError: on construction, for values outside these ranges.

    References:
        Ashman et al., Partitioned Variational Inference, eq. 10. Khan and Lin, Conjugate-Computation Variational
        Inference, algorithm 1.
    """

    num_steps: int = 1
    step_size: float = 1.0
    expectation: str = "auto"
    backtracking: bool | str = "auto"
    num_draws: int = 16
    sites: str = "auto"
    blocks: str | tuple[str, ...] = "auto"

    exact_sites = True
    fused_families = True

    def __post_init__(self):
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise PVIError(f"NaturalGradient(num_steps={self.num_steps!r}): expected a positive int.")
        if not 0.0 < float(self.step_size) <= 1.0:
            raise PVIError(
                f"NaturalGradient(step_size={self.step_size!r}): expected a number in (0, 1]; 1 is the full step."
            )
        words = ("auto", "exact", "quadrature", "sigma_points", "monte_carlo", "stein", "hessian", "reparameterised")
        if self.expectation not in words:
            raise PVIError(f"NaturalGradient(expectation={self.expectation!r}): expected one of {', '.join(words)}.")
        if self.backtracking not in (True, False, "auto"):
            raise PVIError(f"NaturalGradient(backtracking={self.backtracking!r}): expected True, False or 'auto'.")
        if self.sites not in ("auto", "rows", "dense"):
            raise PVIError(f"NaturalGradient(sites={self.sites!r}): expected 'auto', 'rows' or 'dense'.")
        if not isinstance(self.num_draws, int) or self.num_draws < 1:
            raise PVIError(f"NaturalGradient(num_draws={self.num_draws!r}): expected a positive int.")
        if isinstance(self.blocks, list):
            object.__setattr__(self, "blocks", tuple(self.blocks))
        if self.blocks not in ("auto", "parallel") and not isinstance(self.blocks, tuple):
            raise PVIError(
                f"NaturalGradient(blocks={self.blocks!r}): expected 'auto', 'parallel' or a tuple of latents' names."
            )

    @property
    def rereads(self) -> bool:
        """Whether a visit passes over the rows again: for further steps, or to see whether one was too long."""
        return self.num_steps > 1 or self.backtracking is True

    @property
    def immediate(self) -> bool:
        """Whether one look is all a visit takes: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        return not self.rereads

    def init(self, family: Any, dtype: Any) -> NaturalGradientState:
        """Start every group at the largest step."""
        del family
        return NaturalGradientState(jnp.asarray(self.step_size, dtype))

    def check(self, structure: str, full: bool, where: str) -> None:
        """Raise when a forced expectation does not fit what was found.

        Args:
            structure: "quadratic", "affine", "draws" or "reparameterised".
            full: whether q has full covariance.
            where: the factor's name, for the message.

        Raises:
            PVIError: naming the factor and the choices that work.
        """
        if self.blocks != "auto":
            raise PVIError(
                f"NaturalGradient(blocks={self.blocks!r}) is for the guide AutoExponentialFamily, whose latents can move one after "
                "another; a Gaussian guide moves all of them together. Leave blocks out."
            )
        if structure == "local" and (self.num_steps > 1 or self.backtracking is True or self.expectation != "auto"):
            raise PVIError(
                f"{self!r} does not fit the {where}, which has local latents: groups with local latents take one "
                "natural-gradient step a visit, by antithetic draws. Leave num_steps=1, backtracking and expectation as they are."
            )
        if self.expectation == "reparameterised" and full:
            raise PVIError(
                "NaturalGradient(expectation='reparameterised') estimates the diagonal of the curvature only, which is what a "
                "mean-field guide needs: pass AutoDiagonalNormal or AutoNormal, or leave expectation='auto'."
            )
        wanted = {"exact": ("quadratic",), "quadrature": ("quadratic", "affine")}.get(self.expectation)
        if wanted is not None and structure not in wanted:
            raise PVIError(
                f"NaturalGradient(expectation={self.expectation!r}) needs a {' or '.join(wanted)} structure, but the {where} "
                f"was found to be {structure!r}; leave expectation='auto', or look at Partition.plan(*args)."
            )

    def check_families(self) -> None:
        """Refuse settings that say something about one Gaussian block.

        Raises:
            PVIError: naming the argument and what to write.
        """
        if self.expectation not in _UNDER_FAMILIES:
            raise PVIError(
                f"NaturalGradient(expectation={self.expectation!r}) is for Gaussian guides; under AutoExponentialFamily it is "
                f"one of {', '.join(map(repr, _UNDER_FAMILIES))}."
            )
        if self.sites == "rows":
            raise PVIError(
                "NaturalGradient(sites='rows') is for Gaussian guides; under AutoExponentialFamily sites are terms of the latents' "
                "families. Leave it out."
            )
        if self.backtracking is True:
            raise PVIError(
                "NaturalGradient(backtracking=True) is for Gaussian guides; under AutoExponentialFamily every round is tested by "
                "the global ELBO. Leave it out."
            )

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """Groups of any size will do."""
        del sizes, mechanism

    def solve(
        self,
        factor: LocalFactor,
        cavity: Any,
        site: Any,
        state: NaturalGradientState,
        key: Any,
        start: Expected | None = None,
        guarded: bool = False,
    ) -> LocalResult:
        """One visit: see :class:`numpyro_pvi.solvers.LocalSolver`."""
        del key
        family = factor.family
        backtrack = self.backtracking is True or (self.backtracking == "auto" and not guarded and not factor.quadratic)
        start = factor.expected(family.moments(cavity + site)) if start is None else start
        if guarded and self.num_steps == 1 and not backtrack:
            return self._full_step(site, start, state)
        if factor.quadratic and self.step_size == 1.0:
            result = self._full_step(site, start, state)
            valid = family.in_domain(cavity + result.site)
            return LocalResult(select(valid, result.site, site), state, jnp.int32(0), result.moved & valid)
        return self._search(factor, cavity, site, state, start, backtrack)

    def _full_step(self, site: Any, start: Expected, state: NaturalGradientState) -> LocalResult:
        proposal = start.target if self.step_size == 1.0 else damp(site, start.target, self.step_size)
        good = all_finite(proposal) & jnp.isfinite(start.value)
        return LocalResult(select(good, proposal, site), state, jnp.int32(0), good)

    def _search(self, factor, cavity, site, state, start: Expected, backtrack: bool) -> LocalResult:
        family = factor.family
        q = cavity + site
        energy, size = local_free_energy(family, start, site, q, family.moments(q))
        tolerance = 20 * jnp.finfo(size.dtype).eps * size

        def unfinished(s: _Search) -> Bool[Array, ""]:
            return (s.accepted < self.num_steps) & (s.tries < _MAX_TRIES + self.num_steps)

        def attempt(s: _Search) -> _Search:
            candidate = family.symmetrise(damp(s.site, s.expected.target, s.step))
            q = cavity + candidate
            moments = family.moments(q)
            expected = factor.expected(moments)
            energy, _ = local_free_energy(family, expected, candidate, q, moments)
            good = moments.valid & all_finite(candidate) & jnp.isfinite(expected.value)
            if backtrack:
                good = good & ((energy >= s.energy - tolerance) | ~jnp.isfinite(s.energy))
            step = jnp.where(good, jnp.minimum(2 * s.step, self.step_size), 0.5 * s.step)
            keep = jax.tree.map(lambda new, old: jnp.where(good, new, old), (candidate, expected, energy), s[:3])
            return _Search(*keep, step, s.accepted + good, s.tries + 1, s.backoffs + ~good)

        first = _Search(site, start, energy, state.step, jnp.int32(0), jnp.int32(0), jnp.int32(0))
        last = jax.lax.while_loop(unfinished, attempt, first)
        step = jnp.where(last.accepted > 0, last.step, jnp.asarray(self.step_size, last.step.dtype))
        return LocalResult(last.site, NaturalGradientState(step), last.backoffs, last.accepted > 0)
