"""The factors of one model on one device, as a schedule sees them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, clip_to_psd
from ..expectations import FIXED_RULES, Expected, PointSet, PointsProgram, rule_index
from ..families import GaussianFamily, GaussianMoments, GaussianNatural
from ..schedules import Evaluation, Points, RoundCarry, Rule
from ..sites import SiteStack, cavity, posterior, select
from ..solvers import LocalResult, LocalSolver
from ._base import Runtime
from ._mapping import sum_one_group

# Relative quadrature error that does no harm while q still moves by more than a posterior sd in a round.
LOOSE_TOLERANCE = 2e-2
LOOSE_MOVE = 1.0
# The first step from the prior may be cruder still: at worst a step is halved.
START_TOLERANCE = 0.3
# Antithetic pairs that sigma points are compared with; of the likelihood, whose passes cost rows, only the first few.
COMPARED_PAIRS = 16
# Scale of the q, in prior sds, under which a factor's curvature at a point is read from gradients.
POINT_SCALE = 0.01
# Relative quadrature error aimed at otherwise, by dtype.
TOLERANCE = {"float32": 1e-5, "float64": 1e-8}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactorData:
    """Arrays of all factors, prepared once per run from the model's arguments."""

    # Leading chunk axis C; a quadratic likelihood has one "chunk" per group.
    chunks: Any
    chunk_group: Int[Array, "C"]
    offsets: Int[Array, "ends"]
    prior: Any
    prior_natural: GaussianNatural
    # Which flat coordinates the exactly held prior covers, and its log partition function over them, nats.
    exact: Bool[Array, "D"]
    prior_partition: Float[Array, ""]


class Draws(NamedTuple):
    """A round's standard normal draws; one row of zeros among ``pairs`` evaluates at the location."""

    pairs: Float[Array, "S D"]
    # For the comparison with sigma points.
    compared: Float[Array, "K D"]
    # Random point sets of the likelihood and of the prior factor, where they have no structure.
    points: PointSet | None
    prior_points: PointSet | None


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
    def can_switch(self) -> bool:
        """Whether any factor goes from sigma points to draws when these contradict them."""
        return "auto" in (getattr(p, "mode", "") for p in (self.program, self.prior_program))

    def sampled(self, rule: Rule) -> Bool[Array, ""]:
        """Whether any expectation is by draws under this rule."""
        programs = (self.program, self.prior_program)
        flags = [
            rule.points.sampled[i] if getattr(p, "mode", "") == "auto" else jnp.array(p.noisy)
            for i, p in enumerate(programs)
            if p is not None
        ]
        return jnp.any(jnp.stack(flags))

    def noise(self, key: Any, num_particles: int = 1) -> Draws | None:
        """The draws of one round, shared by all groups, or None.

        Sharing them keeps a round's result independent of the partition, and lets ELBOs of one round be compared.
        """
        if not self.noisy:
            return None
        keys = jax.random.split(key, 4)
        count = max(self.solver.num_draws, -(-num_particles // 2))
        pairs, compared = (
            jax.random.normal(k, (n, self.family.dim), self._dtype)
            for k, n in zip(keys[:2], (count, COMPARED_PAIRS), strict=True)
        )
        points = [
            p.draw(k, self._dtype) if isinstance(p, PointsProgram) else None
            for k, p in zip(keys[2:], (self.program, self.prior_program), strict=True)
        ]
        return Draws(pairs, compared, *points)

    def draws_of(self, program: Any, noise: Draws | None, rule: Rule | None, trial: bool = False) -> Any:
        """What one program takes of a round's draws: sigma points or random ones, pairs, or None."""
        if not isinstance(program, PointsProgram):
            return None if noise is None else noise.pairs
        prior = program is self.prior_program
        random = None if noise is None else noise.prior_points if prior else noise.points
        sampled = False if rule is None else rule.points.sampled[int(prior)]
        return program.choose(random, sampled, self._dtype, trial)

    def evaluate(
        self, sites: SiteStack, rule: Rule, noise: Any, probe: Any = None, again: bool = False, trial: bool = False
    ) -> Evaluation:
        """One pass over all groups: see :class:`numpyro_pvi.schedules.Problem`."""
        q = posterior(self.prior_natural, sites)
        rule = rule if again else cheaper_rule(rule)
        return self.evaluate_at(q, self.family.moments(q), rule, noise, probe, trial=trial)

    def evaluate_at(
        self, q, moments: GaussianMoments, rule: Rule, noise, probe=None, clip: bool = False, trial=False
    ) -> Evaluation:
        """One pass over all groups at a Gaussian given by its moments.

        Args:
            q: its natural parameters.
            moments: its moments.
            rule: quadrature rule to start from.
            noise: the round's draws, or None.
            probe: vector for the curvature product, or None.
            clip: raise curvatures to positive semi-definite.
            trial: whether values alone will do where they are by random points.

        Returns:
            The evaluation; ``elbo`` is minus infinity or NaN where a factor is not finite.
        """
        draws, prior_draws = (self.draws_of(p, noise, rule, trial) for p in (self.program, self.prior_program))

        def both(level):
            expect = partial(
                self._expect, self.program, moments=moments, probe=probe, level=level, noise=draws, clip=clip
            )
            groups = self.sum_groups(expect)
            prior = self._prior_expected(moments, probe, level, prior_draws, clip)
            error, spread = relative_error(groups), jnp.max(groups.spread)
            if prior is not None:
                error, spread = jnp.maximum(error, relative_error(prior)), jnp.maximum(spread, prior.spread)
            return (groups, prior, spread), error

        (groups, prior, spread), used, error = escalate(both, rule, self.num_rules)
        rest = self._rest(moments)
        values = jnp.sum(groups.value) + (0.0 if prior is None else prior.value)
        size = jnp.sum(jnp.abs(groups.value)) + jnp.abs(rest) + (0.0 if prior is None else jnp.abs(prior.value))
        return Evaluation(
            q, moments, groups, prior, rest, values + rest, size, next_rule(rule, used, spread), error > rule.tolerance
        )

    def elbo_at(self, moments: GaussianMoments, noise: Any, rule: Rule) -> Float[Array, ""]:
        """The global ELBO at a fixed q under a fixed quadrature rule: reverse-mode differentiable in the factors' arrays.

        Args:
            moments: q.
            noise: the round's draws, or None.
            rule: says which points are in use where there is no structure.

        Returns:
            The ELBO in nats.
        """
        draws, prior_draws = (self.draws_of(p, noise, rule) for p in (self.program, self.prior_program))
        # A static rule: loops of traced length have no reverse mode.
        level = len(FIXED_RULES) - 1
        values = jax.lax.map(
            lambda chunk: self.program.expected(chunk, moments, None, level, draws, False).value, self.data.chunks
        )
        prior = self._prior_expected(moments, None, level, prior_draws, False)
        return jnp.sum(values) + self._rest(moments) + (0.0 if prior is None else prior.value)

    def empty_sites(self, prior_site: Any) -> SiteStack:
        """Unit sites for all groups, and the given site (or None) for the prior factor."""
        return SiteStack(self.family.zeros((self.num_groups,), self._dtype), prior_site)

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any) -> LocalResult:
        """Every group's local solve from the same q, in parallel."""
        evaluation = carry.evaluation
        keys = jax.random.split(key, self.num_groups)

        def solve(index, site, state, key, start):
            factor = self._factor(index, evaluation.rule, noise)
            rest = cavity(evaluation.q, site)
            return self.solver.solve(factor, rest, site, state, key, start=start, guarded=True)

        operands = (jnp.arange(self.num_groups), carry.sites.groups, carry.solver, keys, evaluation.groups)
        return self.runtime.map_groups(solve, operands, reads_rows=self._solver_reads_rows)

    def visit_group(self, index: Any, q: Any, site: Any, state: Any, key: Any, rule: Rule, noise: Any) -> LocalResult:
        """One group's local solve from the current q."""
        factor = self._factor(index, cheaper_rule(rule), noise)
        return self.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=False)

    def visit_prior(self, q: Any, site: Any, state: Any, key: Any, rule: Rule, noise: Any, start: Any) -> LocalResult:
        """The prior factor's local solve."""
        draws = self.draws_of(self.prior_program, noise, rule)
        expect = partial(self._prior_expected, probe=None, noise=draws, clip=False)
        start_rule = cheaper_rule(rule)
        factor = _Factor(
            self.family,
            False,
            lambda moments: _escalated(lambda lv: expect(moments, level=lv), start_rule, self.num_rules),
        )
        return self.solver.solve(factor, cavity(q, site), site, state, key, start=start, guarded=start is not None)

    def first_sites(self, at_prior: GaussianMoments, loc: Float[Array, "D"], mode: str) -> tuple[SiteStack, Rule]:
        """Where the groups' sites start.

        Args:
            at_prior: the prior as moments.
            loc: its location.
            mode: "prior" (unit sites), "curvature" (each factor's positive semi-definite curvature and gradient at
                ``loc``, the cure for wide priors), or "auto": curvature, or one natural-gradient step of all groups
                from the prior where a fixed quadrature rule resolves every factor there and the global ELBO is higher
                after it.

        Returns:
            Sites (the prior factor's is None), and the quadrature rule to begin with. A factor that is not finite where
            it is read gets the unit site.
        """
        if mode == "prior":
            return self.empty_sites(None), first_rule(self._dtype)
        points = isinstance(self.program, PointsProgram)
        # One row of zeros evaluates at the location; points at a distance read the curvature there from gradients.
        zero = jnp.zeros((1, self.family.dim), self._dtype)
        draws = self.draws_of(self.program, None, None) if points else zero

        def look(xs):
            moments, clip = xs
            expect = partial(
                self._expect,
                self.program,
                moments=moments,
                probe=None,
                level=len(FIXED_RULES) - 1,
                noise=draws,
                clip=clip,
            )
            return self.sum_groups(expect)

        def stage(moments, _):
            found = jax.lax.map(look, (moments, jnp.array([False, True])))
            sites = jax.vmap(self._finite_sites)(found.target)
            after = jax.vmap(
                lambda groups: self.family.moments(posterior(self.prior_natural, SiteStack(groups, None)))
            )(sites)
            return after, (found, sites, after.valid, jnp.sum(found.value, axis=-1) + jax.vmap(self._rest)(moments))

        point = at_prior._replace(loc=loc, scale=(POINT_SCALE if points else 0.0) * at_prior.scale)
        both = jax.tree.map(lambda *xs: jnp.stack(xs), at_prior, point)
        quick = mode == "curvature" or self.noisy or points
        # First at the prior and at its location, then at the two q that come of it: one program for all four looks.
        _, (found, sites, valid, elbo) = jax.lax.scan(stage, both, length=1 if quick else 2)
        first = [jax.tree.map(lambda x, i=i: x[0, i], sites) for i in (0, 1)]
        if quick:
            return SiteStack(first[1], None), first_rule(self._dtype)
        prior_look = jax.tree.map(lambda x: x[0, 0], found)
        usable = (
            jnp.all(self.data.exact)
            & all_finite(prior_look)
            & (relative_error(prior_look) <= START_TOLERANCE)
            & valid[0, 0]
        )
        better = usable & ((elbo[1, 0] > elbo[1, 1]) | ~valid[0, 1])
        rules = [first_rule(self._dtype, jnp.max(found.spread[1, i])) for i in (0, 1)]
        return SiteStack(select(better, *first), None), select(better, *rules)

    def _finite_sites(self, natural: GaussianNatural) -> GaussianNatural:
        precision = natural.precision
        if self.quadratic and self.family.full:
            precision = clip_to_psd(precision)
        finite = jnp.isfinite(natural.precision_mean).all(-1)
        finite &= jnp.isfinite(precision).all((-2, -1) if self.family.full else -1)
        zero = self.family.zeros((self.num_groups,), self._dtype)
        return select(finite, self.family.natural(natural.precision_mean, precision), zero)

    @property
    def _dtype(self):
        return self.data.prior_natural.precision_mean.dtype

    @property
    def _solver_reads_rows(self) -> bool:
        steps = getattr(self.solver, "num_steps", 1)
        return steps > 1 or getattr(self.solver, "backtracking", False) is True

    def sum_groups(self, expect: Callable[[Any], Expected]) -> Expected:
        """A pass over all chunks, summed by group."""
        data = self.data
        working = self.program.working_bytes(data.chunks)
        return self.runtime.sum_chunks(expect, data.chunks, data.chunk_group, data.offsets, working)

    def _expect(self, program, chunk, *, moments, probe, level, noise, clip) -> Expected:
        return program.expected(chunk, moments, probe, level, noise, clip)

    def _prior_expected(self, moments, probe, level, noise, clip) -> Expected | None:
        if self.prior_program is None:
            return None
        return self.prior_program.expected(self.data.prior, moments, probe, level, noise, clip)

    def _factor(self, index, rule, noise) -> _Factor:
        draws = self.draws_of(self.program, noise, rule)

        def expected(moments):
            def at(lv):
                expect = partial(
                    self._expect, self.program, moments=moments, probe=None, level=lv, noise=draws, clip=False
                )
                if self.quadratic:
                    return expect(jax.tree.map(lambda x: x[index], self.data.chunks))
                return sum_one_group(expect, self.data.chunks, self.data.offsets, index)

            return _escalated(at, rule, self.num_rules)

        return _Factor(self.family, self.quadratic and self.family.full, expected)

    def _rest(self, moments: GaussianMoments) -> Float[Array, ""]:
        """``E_q[log p(theta)]`` over the exact coordinates plus the entropy of q, in nats."""
        expected_prior = self.family.expect_quadratic(self.prior_natural, moments) - self.data.prior_partition
        entropy = 0.5 * self.family.dim * (1 + math.log(2 * math.pi)) - 0.5 * moments.log_det_precision
        return jnp.where(jnp.any(self.data.exact), expected_prior, 0.0) + entropy


@dataclasses.dataclass(frozen=True)
class _Factor:
    family: GaussianFamily
    quadratic: bool
    expected: Callable[[GaussianMoments], Expected]


def exact_log_partition(family: GaussianFamily, natural: GaussianNatural, exact: Bool[Array, "D"]) -> Float[Array, ""]:
    """Log partition function of the exactly held prior over the coordinates that it covers, in nats.

    Args:
        family: the family of q.
        natural: the prior's natural parameters, zero on every other coordinate.
        exact: the coordinates it covers.

    Returns:
        ``A(eta_0)``, flat coordinates left out; NaN where the prior is not normalisable on the others.
    """
    diagonal = family.precision_diagonal(natural)
    # A flat (improper) prior has log density 0 and nothing to normalise.
    flat = (diagonal == 0) & (natural.precision_mean == 0)
    outside = (~exact | flat).astype(natural.precision.dtype)
    padding = jnp.diag(outside) if family.full else outside
    padded = GaussianNatural(natural.precision_mean, natural.precision + padding)
    return family.log_partition(padded) - 0.5 * jnp.sum(outside) * math.log(2 * math.pi)


def first_rule(dtype, spread: Float[Array, ""] | None = None) -> Rule:
    """The rule of a fresh state: the cheapest, or the finest fixed one where predictors are known to be wide."""
    zero = jnp.zeros((), dtype)
    loose = zero + LOOSE_TOLERANCE
    # Nothing compared yet: as if q had come from far away.
    points = Points(jnp.zeros((2,), bool), jnp.full((2,), jnp.inf, dtype), zero + jnp.inf)
    if spread is None:
        return Rule(jnp.int32(0), zero, zero, loose, points)
    level = jnp.minimum(rule_index(spread), len(FIXED_RULES) - 1).astype(jnp.int32)
    return Rule(level, spread, spread, loose, points)


def cheaper_rule(rule: Rule) -> Rule:
    """Where the next evaluation starts: a cheaper rule is tried again whenever the predictor sd has halved."""
    lower = (rule.level > 0) & (rule.spread < 0.5 * rule.anchor)
    level = jnp.minimum(rule.level - 1, rule_index(rule.spread))
    return rule._replace(
        level=jnp.where(lower, level, rule.level).astype(jnp.int32), anchor=jnp.where(lower, rule.spread, rule.anchor)
    )


def next_rule(rule: Rule, used: Int[Array, ""], spread: Float[Array, ""]) -> Rule:
    """What an evaluation leaves behind: the rule it ended with, and the sd at which it had to refine."""
    return rule._replace(level=used, spread=spread, anchor=jnp.where(used > rule.level, spread, rule.anchor))


def relative_error(expected: Expected) -> Float[Array, ""]:
    """Estimated quadrature error of all rows, relative to the precision of q.

    Errors and sizes are weighted by the predictors' variances, so both are traces of (a precision times the covariance
    of q), and the trace of q's own precision times its covariance is D: curvature much smaller than that needs no
    relative accuracy.

    Args:
        expected: expectations of one or more groups.

    Returns:
        The ratio; infinity where the error is unknown.
    """
    total = jnp.maximum(jnp.sum(expected.weight), expected.product.shape[-1])
    ratio = jnp.sum(expected.error) / total
    return jnp.where(jnp.isnan(ratio), jnp.inf, ratio)


def escalate(
    evaluate: Callable[[Any], tuple[Any, Float[Array, ""]]], rule: Rule, num_rules: int
) -> tuple[Any, Int[Array, ""], Float[Array, ""]]:
    """Evaluate with a quadrature rule, and again with finer ones while the error is above the rule's tolerance.

    Args:
        evaluate: the index of a quadrature rule to ``(result, relative error)``.
        rule: where to start, and the tolerance.
        num_rules: how many rules there are.

    Returns:
        ``(result, rule used, relative error)``; the error is above the tolerance only where the finest rule missed it.
    """
    result, error = jax.eval_shape(evaluate, jnp.int32(0))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), result)
    first = jnp.minimum(jnp.asarray(rule.level, jnp.int32), num_rules - 1)

    def unfinished(state):
        _, used, error = state
        return (used < first) | ((error > rule.tolerance) & (used < num_rules - 1))

    def attempt(state):
        _, used, _ = state
        result, error = evaluate(used + 1)
        return result, used + 1, error

    return jax.lax.while_loop(unfinished, attempt, (zero, first - 1, jnp.asarray(jnp.inf, error.dtype)))


def _escalated(evaluate: Callable[[Any], Expected], rule: Rule, num_rules: int) -> Expected:
    def split(level):
        result = evaluate(level)
        return result, relative_error(result)

    return escalate(split, rule, num_rules)[0]
