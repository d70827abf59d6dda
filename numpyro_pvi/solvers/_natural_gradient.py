"""Conjugate-computation variational inference: exact sites, and natural-gradient steps by all rows or by mini-batches."""

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
from ._minibatch import (
    BatchSolver,
    check_steps,
    late_from,
    late_weight,
    move_precision,
    next_draws,
    plan_batches,
    share_of_steps,
    stein_moment,
    stein_precision,
)

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
            draws agree with them, then, of few latents and rows, a product of Gauss-Hermite rules while a coarser one agrees
            with it, else random points with gradients; where rows have latents of their own a product rule or other fixed points
            while draws and such another rule agree with it, else antithetic draws; for a mean-field q in many dimensions
            reparameterised draws), or one to insist on: "exact", "quadrature", "sigma_points", "monte_carlo" (everything by
            draws: random points with gradients, right where these jump; of each latent under ``AutoExponentialFamily``),
            "reparameterised" (pairs without anything D x D, for a mean-field q).
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
        words = ("auto", "exact", "quadrature", "sigma_points", "monte_carlo", "reparameterised")
        if self.expectation not in words:
            gone = " Draws are 'monte_carlo' now." if self.expectation in ("stein", "hessian") else ""
            raise PVIError(
                f"NaturalGradient(expectation={self.expectation!r}): expected one of {', '.join(words)}.{gone}"
            )
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
        insists = self.expectation not in ("auto", "monte_carlo")
        if structure == "local" and (self.num_steps > 1 or self.backtracking is True or insists):
            raise PVIError(
                f"{self!r} does not fit the {where}, which has local latents: groups with local latents take one "
                "natural-gradient step a visit, at fixed points or by antithetic draws. Leave num_steps=1 and backtracking as they "
                "are, and expectation at 'auto' or 'monte_carlo' (draws alone)."
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


# ---------------------------------------------------------------------------------------------------------- exact sites
# Exact sites for factors that lie in the span of the family's sufficient statistics.


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
            if structure == "local":
                # NaturalGradient's full step is then the same one, but nobody has shown that it is.
                reason = f"whether the {where} is quadratic in the shared latents and its rows' own together is not looked for"
            raise PVIError(
                f"Conjugate() needs log-likelihoods that are quadratic in the latents and a guide with full covariance, but "
                f"{reason}. Use solver=NaturalGradient(), which treats conjugate parts exactly and the rest by quadrature."
            )

    def check_families(self) -> None:
        """Goes with every family: messages are exact where a factor is affine in a latent's statistics."""

    def check_groups(self, sizes: dict[Hashable, int], mechanism: str) -> None:
        """Groups of any size will do."""

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
        start = factor.expected(factor.family.moments(cavity + site)) if start is None else start
        good = all_finite(start.target) & factor.family.in_domain(cavity + start.target)
        return LocalResult(select(good, start.target, site), state, jnp.int32(0), good)


# ------------------------------------------------------------------------------------------------ steps by mini-batches
# Natural-gradient steps on one site by mini-batches of its group's rows.


class _Walk(NamedTuple):
    """The way through one visit: the site, the average of late ones, and the last draws where a step takes rows at points."""

    site: Any
    average: Any
    noise: Float[Array, "..."]
    backoffs: Int[Array, ""]
    # Whether any step was taken.
    moved: Bool[Array, ""]


# Latents up to which the curvature of a batch comes from Hessians.
_SMALL = 64


@dataclasses.dataclass(frozen=True)
class StochasticNaturalGradient(BatchSolver):
    """Natural-gradient steps on one site from mini-batches of its group's rows (PVI section 3.4.1, eq. 13).

    At every step, with q = cavity * t_m, B rows weighted by ``N_m / B`` and draws ``theta = loc + S eps`` of q,

        Lambda_m <- Lambda_m + step_size * (C - Lambda_m),        C an estimate of -E[hess f_m]
        h_m <- h_m + step_size * (g + Lambda_m loc - h_m) + (change of Lambda_m) loc,    g an estimate of E[grad f_m]

    which is ``eta_m <- (1 - step_size) eta_m + step_size * grad_mu E_q[f_m]`` wherever q stays normalisable; a precision of
    the local q falls by at most nine tenths in a step. Latents of the rows' own move as under :class:`LocalELBO`.

    Under ``AutoExponentialFamily`` a batch's message, a gradient in mean parameters, is ``N_m / B`` times that of its rows, and
    every step takes the latents in turn, each from the q that the last one left, ``eta_m <- eta_m + step_size * (message -
    eta_m)`` for those that move. Under ``Synchronous`` and ``StochasticSubset`` all groups that take part step together: with one
    group, B rows and damping 1 that is stochastic variational inference. Latents of the rows' own then move first, those of the
    batch alone and all the way; no round is tested by the ELBO, which would take all rows; losses are computed where
    ``run(loss_every=...)`` asks for them; and under damping "auto" steps are 10 / (10 + k) of ``step_size`` after k rounds in
    which q turned back, so that noise averages out, while a number is the share of ``step_size`` that all steps take. Under every
    other schedule a group makes the steps of its visit alone, beside its cavity, as with a Gaussian guide; rows have no latents of
    their own there.

    Args:
        step_size: the step in (0, 1], in natural space; 1 is the full step. Small steps average the noise of batches.
        num_steps: steps per visit; or give ``epochs``.
        epochs: passes over the group's rows per visit; 1 by default.
        batch_size: rows per step, without replacement within an epoch; a batch goes around a group that has fewer, which leaves
            its sum unbiased. None takes all rows at every step.
        num_particles: draws per step: 1 (its sign is turned over at the next step), or an even number (pairs of both
            signs). Independent draws of each latent that is drawn under ``AutoExponentialFamily``.
        average: share of the visit's steps, counted from the end, whose naturals are averaged, in [0, 1); 0 keeps the last.
        curvature: "hessian" (second derivatives of the batch), "stein" (from gradients alone), or "auto": Hessians up to
            64 latents.

    Raises:
        PVIError: on construction, for values outside these ranges, or both ``num_steps`` and ``epochs``.

    References:
        Ashman et al., Partitioned Variational Inference, eq. 13 and appendix E.6. Hoffman et al., Stochastic Variational
        Inference, figure 4. Kesten, Accelerated Stochastic Approximation (a step that falls with the changes of sign).
    """

    step_size: float = 0.1
    num_steps: int | None = None
    epochs: int | float | None = None
    batch_size: int | None = None
    num_particles: int = 2
    average: float = 0.5
    curvature: str = "auto"

    stochastic = True
    fused_families = True
    num_draws = 8

    def __post_init__(self):
        name = "StochasticNaturalGradient"
        check_steps(name, self.batch_size, self.num_steps, self.epochs, self.num_particles)
        if not (isinstance(self.step_size, (int, float)) and 0.0 < self.step_size <= 1.0):
            raise PVIError(f"{name}(step_size={self.step_size!r}): expected a number in (0, 1]; 1 is the full step.")
        if not (isinstance(self.average, (int, float)) and 0.0 <= self.average < 1.0):
            raise PVIError(f"{name}(average={self.average!r}): expected a share of the steps in [0, 1).")
        if self.curvature not in ("auto", "hessian", "stein"):
            raise PVIError(f"{name}(curvature={self.curvature!r}): expected 'auto', 'hessian' or 'stein'.")

    def init(self, family: Any, dtype: Any) -> tuple:
        """No state."""
        return ()

    def check_families(self) -> None:
        """Refuse a forced source of second derivatives.

        Raises:
            PVIError: naming the argument and what to write.
        """
        if self.curvature != "auto":
            raise PVIError(
                f"StochasticNaturalGradient(curvature={self.curvature!r}) is for Gaussian guides; under AutoExponentialFamily "
                "messages are natural gradients in the latents' own families. Leave it out."
            )

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
        family = factor.family
        rows_key, noise_key = jax.random.split(key)
        batches = plan_batches(factor, rows_key, self.batch_size, self.num_steps, self.epochs)
        first = late_from(batches.num_steps, self.average)

        def step(k, walk: _Walk) -> _Walk:
            noise, rows = walk.noise, None if batches.rows is None else batches.rows(k)
            own = jax.random.fold_in(noise_key, k)
            if factor.pointwise:
                noise = next_draws(noise_key, k, noise)
                now, halved = self._step(factor, cavity, walk.site, rows, batches.weight, noise, own)
                moved = jnp.array(True)
            else:
                now, halved, moved = factor.step(cavity, walk.site, self.step_size, own, rows)
            average = walk.average + (now - walk.average) * late_weight(k, first)
            return _Walk(now, average, noise, walk.backoffs + halved, walk.moved | moved)

        dtype = jax.tree.leaves(site)[0].dtype
        noise = jnp.zeros((self.num_particles, family.dim) if factor.pointwise else (), dtype)
        begin = _Walk(site, site, noise, jnp.int32(0), jnp.array(False))
        walk = jax.lax.fori_loop(0, batches.num_steps, step, begin)
        new = family.symmetrise(walk.average)
        good = walk.moved & all_finite(new) & family.in_domain(cavity + new)
        share = share_of_steps(self.step_size, batches.num_steps, self.average)
        share = jnp.where(good, jnp.asarray(share, dtype), 0.0)
        return LocalResult(select(good, new, site), state, walk.backoffs, good, share)

    def _step(
        self, factor: LocalFactor, cavity: Any, site: Any, rows: Any, weight: Any, noise: Any, key: Any
    ) -> tuple[Any, Any]:
        family, q = factor.family, cavity + site
        moments = family.moments(q)
        hessian = self.curvature == "hessian" or (self.curvature == "auto" and family.dim <= _SMALL)
        found = factor.derivatives(family.draw(moments, noise), rows, hessian, key)
        gradient = weight * found.gradient
        if found.hessian is not None:
            dense = -weight * jnp.mean(found.hessian, axis=0)
            wanted = 0.5 * (dense + dense.T) if family.full else jnp.diagonal(dense)
        else:
            wanted = stein_precision(family, q, moments, stein_moment(family, noise, gradient))
        change, halvings = move_precision(family, site, q, wanted, self.step_size)
        own = family.precision_product(site, moments.loc)
        force = self.step_size * (jnp.mean(gradient, axis=0) + own - site.precision_mean)
        turned = family.precision_product(family.natural(force, change), moments.loc)
        return family.natural(site.precision_mean + force + turned, site.precision + change), halvings
