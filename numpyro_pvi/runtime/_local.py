"""The factors of one model on one device, as a schedule sees them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import clip_to_psd
from ..expectations import FIXED_RULES, Expected
from ..families import GaussianFamily, GaussianMoments, GaussianNatural
from ..schedules import Evaluation, RoundCarry, Rule
from ..sites import SiteStack, cavity, posterior
from ..solvers import LocalResult, LocalSolver
from ._base import Runtime
from ._mapping import sum_one_group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactorData:
    """Arrays of all factors, prepared once per run from the model's arguments."""

    # Leading chunk axis C; a quadratic likelihood has one "chunk" per group.
    chunks: Any
    chunk_group: Int[Array, "C"]
    offsets: Int[Array, "M+1"]
    prior: Any
    prior_natural: GaussianNatural
    # Which flat coordinates the exactly held prior covers.
    exact: Bool[Array, "D"]


@dataclasses.dataclass(frozen=True)
class LocalProblem:
    """The factors of one model with the way to run them: implements :class:`numpyro_pvi.schedules.Problem`.

    Args:
        family: the Gaussian family of q.
        solver: the local solver.
        runtime: how to map over chunks and groups.
        program: expectations of one chunk of the likelihood.
        prior_program: expectations of the prior factor, or None.
        quadratic: whether the likelihood is quadratic in the latents jointly.
        num_rules: how many quadrature rules are compiled in.
        data: the factors' arrays.
    """

    family: GaussianFamily
    solver: LocalSolver
    runtime: Runtime
    program: Any
    prior_program: Any
    quadratic: bool
    num_rules: int
    data: FactorData

    @property
    def num_groups(self) -> int:
        """M, without the prior factor."""
        return self.data.offsets.shape[0] - 1

    @property
    def prior_natural(self) -> GaussianNatural:
        """Natural parameters of the exactly held prior."""
        return self.data.prior_natural

    @property
    def has_prior_factor(self) -> bool:
        """Whether part of the prior has a site."""
        return self.prior_program is not None

    @property
    def noisy(self) -> bool:
        """Whether any expectation is by draws."""
        return self.program.noisy or (self.has_prior_factor and self.prior_program.noisy)

    @property
    def conjugate(self) -> bool:
        """Whether one full step of every site is exact."""
        return self.quadratic and self.family.full and not self.has_prior_factor

    def noise(self, key: Any, num_particles: int = 1) -> Any:
        """Standard normal draws shared by all groups in one round, or None.

        Sharing them keeps a round's result independent of the partition, and lets ELBOs of one round be compared.
        """
        if not self.noisy:
            return None
        return jax.random.normal(key, (max(self.solver.num_draws, -(-num_particles // 2)), self.family.dim), self._dtype)

    def evaluate(self, sites: SiteStack, rule: Rule, noise: Any, probe: Any = None) -> Evaluation:
        """One pass over all groups: see :class:`numpyro_pvi.schedules.Problem`."""
        q = posterior(self.prior_natural, sites)
        return self.evaluate_at(q, self.family.moments(q), rule, noise, probe)

    def evaluate_at(self, q, moments: GaussianMoments, rule: Rule, noise, probe=None, clip: bool = False) -> Evaluation:
        """One pass over all groups at a Gaussian given by its moments.

        Args:
            q: its natural parameters.
            moments: its moments.
            rule: quadrature rule to start from.
            noise: the round's draws, or None.
            probe: vector for the curvature product, or None.
            clip: raise curvatures to positive semi-definite.

        Returns:
            The evaluation; ``elbo`` is minus infinity or NaN where a factor is not finite.
        """

        def both(level):
            expect = partial(self._expect, self.program, moments=moments, probe=probe, level=level, noise=noise, clip=clip)
            groups = self.runtime.sum_chunks(expect, self.data.chunks, self.data.chunk_group, self.data.offsets)
            prior = self._prior_expected(moments, probe, level, noise, clip)
            needed, spread = jnp.max(groups.level), jnp.max(groups.spread)
            if prior is not None:
                needed, spread = jnp.maximum(needed, prior.level), jnp.maximum(spread, prior.spread)
            return (groups, prior), needed, spread

        (groups, prior), needed, spread = escalate(both, rule.level, self.num_rules)
        used = jnp.minimum(needed, self.num_rules - 1)
        rest = self._rest(moments)
        values = jnp.sum(groups.value) + (0.0 if prior is None else prior.value)
        size = jnp.sum(jnp.abs(groups.value)) + jnp.abs(rest) + (0.0 if prior is None else jnp.abs(prior.value))
        return Evaluation(
            q, moments, groups, prior, rest, values + rest, size, next_rule(rule, used, spread), needed > used
        )

    def elbo_at(self, moments: GaussianMoments, noise: Any) -> Float[Array, ""]:
        """The global ELBO at a fixed q under a fixed quadrature rule: reverse-mode differentiable in the factors' arrays.

        Args:
            moments: q.
            noise: the round's draws, or None.

        Returns:
            The ELBO in nats.
        """
        # A static rule: loops of traced length have no reverse mode.
        level = len(FIXED_RULES) - 1
        values = jax.lax.map(
            lambda chunk: self.program.expected(chunk, moments, None, level, noise, False).value, self.data.chunks
        )
        prior = self._prior_expected(moments, None, level, noise, False)
        return jnp.sum(values) + self._rest(moments) + (0.0 if prior is None else prior.value)

    def empty_sites(self, prior_site: Any) -> SiteStack:
        """Unit sites for all groups, and the given site (or None) for the prior factor."""
        return SiteStack(self.family.zeros((self.num_groups,), self._dtype), prior_site)

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any) -> LocalResult:
        """Every group's local solve from the same q, in parallel."""
        evaluation = carry.evaluation
        keys = jax.random.split(key, self.num_groups)

        def solve(index, site, state, key, start):
            factor = self._factor(index, evaluation.rule.level, noise)
            rest = cavity(evaluation.q, site)
            return self.solver.solve(factor, rest, site, state, key, start=start, guarded=True)

        operands = (jnp.arange(self.num_groups), carry.sites.groups, carry.solver, keys, evaluation.groups)
        return self.runtime.map_groups(solve, operands, reads_rows=self._solver_reads_rows)

    def visit_group(self, index: Any, q: Any, site: Any, state: Any, key: Any, rule: Rule, noise: Any) -> LocalResult:
        """One group's local solve from the current q."""
        factor = self._factor(index, rule.level, noise)
        return self.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=False)

    def visit_prior(self, q: Any, site: Any, state: Any, key: Any, rule: Rule, noise: Any, start: Any) -> LocalResult:
        """The prior factor's local solve."""
        expect = partial(self._prior_expected, probe=None, noise=noise, clip=False)
        factor = _Factor(self.family, False, lambda moments: _escalated(lambda lv: expect(moments, level=lv), rule.level, self.num_rules))
        return self.solver.solve(factor, cavity(q, site), site, state, key, start=start, guarded=start is not None)

    def curvature_sites(self, loc: Float[Array, "D"]) -> SiteStack:
        """Sites from each factor's positive semi-definite curvature and gradient at one point (the cure for wide priors).

        Args:
            loc: flat unconstrained point, the prior's location.

        Returns:
            Sites; a factor that is not finite there gets the unit site.
        """
        scale = jnp.zeros((self.family.dim,) * (2 if self.family.full else 1), self._dtype)
        moments = GaussianMoments(loc, scale, jnp.zeros((), self._dtype), jnp.array(True))
        noise = jnp.zeros((1, self.family.dim), self._dtype) if self.noisy else None
        found = self.evaluate_at(self.prior_natural, moments, first_rule(self._dtype), noise, clip=True)

        def clean(natural):
            precision = natural.precision
            if self.quadratic and self.family.full:
                precision = clip_to_psd(precision)
            finite = jnp.isfinite(natural.precision_mean).all(-1) & jnp.isfinite(precision).all(
                (-2, -1) if self.family.full else -1
            )
            shaped = finite[..., None, None] if self.family.full else finite[..., None]
            vector = jnp.where(finite[..., None], natural.precision_mean, 0.0)
            return self.family.natural(vector, jnp.where(shaped, precision, 0.0))

        return SiteStack(clean(found.groups.target), None if found.prior is None else clean(found.prior.target))

    @property
    def _dtype(self):
        return self.data.prior_natural.precision_mean.dtype

    @property
    def _solver_reads_rows(self) -> bool:
        steps = getattr(self.solver, "num_steps", 1)
        return steps > 1 or getattr(self.solver, "backtracking", False) is True

    def _expect(self, program, chunk, *, moments, probe, level, noise, clip) -> Expected:
        return program.expected(chunk, moments, probe, level, noise, clip)

    def _prior_expected(self, moments, probe, level, noise, clip) -> Expected | None:
        if self.prior_program is None:
            return None
        return self.prior_program.expected(self.data.prior, moments, probe, level, noise, clip)

    def _factor(self, index, level, noise) -> _Factor:
        def expected(moments):
            def at(lv):
                expect = partial(
                    self._expect, self.program, moments=moments, probe=None, level=lv, noise=noise, clip=False
                )
                if self.quadratic:
                    return expect(jax.tree.map(lambda x: x[index], self.data.chunks))
                return sum_one_group(expect, self.data.chunks, self.data.offsets, index)

            return _escalated(at, level, self.num_rules)

        return _Factor(self.family, self.quadratic and self.family.full, expected)

    def _rest(self, moments: GaussianMoments) -> Float[Array, ""]:
        """``E_q[log p(theta)]`` over the exact coordinates plus the entropy of q, in nats."""
        eta = self.prior_natural
        outside = (~self.data.exact).astype(self._dtype)
        padding = jnp.diag(outside) if self.family.full else outside
        padded = GaussianNatural(eta.precision_mean, eta.precision + padding)
        partition = self.family.log_partition(padded) - 0.5 * jnp.sum(outside) * math.log(2 * math.pi)
        expected_prior = self.family.expect_quadratic(eta, moments) - partition
        entropy = 0.5 * self.family.dim * (1 + math.log(2 * math.pi)) - 0.5 * moments.log_det_precision
        return jnp.where(jnp.any(self.data.exact), expected_prior, 0.0) + entropy


@dataclasses.dataclass(frozen=True)
class _Factor:
    family: GaussianFamily
    quadratic: bool
    expected: Callable[[GaussianMoments], Expected]


def first_rule(dtype) -> Rule:
    """Start from the cheapest quadrature rule."""
    return Rule(jnp.int32(0), jnp.zeros((), dtype))


def next_rule(rule: Rule, used: Int[Array, ""], spread: Float[Array, ""]) -> Rule:
    """Where the next evaluation starts: a cheaper rule is tried again whenever the predictor sd has halved.

    Args:
        rule: where this evaluation started.
        used: the rule it ended with.
        spread: largest predictor sd.

    Returns:
        The rule for the next evaluation.
    """
    anchor = jnp.where(used > rule.level, spread, rule.anchor)
    lower = (used > 0) & (spread < 0.5 * anchor)
    return Rule(jnp.where(lower, used - 1, used).astype(jnp.int32), jnp.where(lower, spread, anchor))


def escalate(
    evaluate: Callable[[Any], tuple[Any, Array, Array]], level: Any, num_rules: int
) -> tuple[Any, Array, Array]:
    """Evaluate with a quadrature rule, and again with finer ones while rows ask for them.

    Args:
        evaluate: a rule to ``(result, rule asked for, largest predictor sd)``; asking for the same rule means being content.
        level: the rule to start from.
        num_rules: how many rules there are.

    Returns:
        The last evaluation; the rule asked for is past the end of the list where even the finest one missed its target.
    """
    shapes = jax.eval_shape(evaluate, jnp.int32(0))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    level = jnp.minimum(jnp.asarray(level, jnp.int32), num_rules - 1)

    def unfinished(state):
        used, (_, needed, _) = state
        return used < jnp.minimum(needed, num_rules - 1)

    def attempt(state):
        _, (_, needed, _) = state
        return needed, evaluate(needed)

    _, last = jax.lax.while_loop(unfinished, attempt, (jnp.int32(-1), (zero[0], level, zero[2])))
    return last


def _escalated(evaluate: Callable[[Any], Expected], level: Any, num_rules: int) -> Expected:
    def split(lv):
        result = evaluate(lv)
        return result, result.level, result.spread

    return escalate(split, level, num_rules)[0]
