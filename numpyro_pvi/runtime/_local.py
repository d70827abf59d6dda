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

from .._numerics import all_finite, clip_to_psd, in_batches
from ..expectations import (
    FIXED_RULES,
    Expected,
    LocalLatentProgram,
    MaskedIntegratedProgram,
    MaskedLocalProgram,
    PointsProgram,
    own_normals,
)
from ..families import (
    ConditionalNatural,
    GaussianFamily,
    GaussianMoments,
    GaussianNatural,
    NormalFamily,
    RowFamily,
    RowMoments,
    conditional_moments,
    conditional_products,
)
from ..schedules import Evaluation, ProblemDefaults, RoundCarry, Rule, move_in_nats
from ..sites import (
    LocalSites,
    OwnConditionals,
    RowSites,
    SiteStack,
    cavity,
    damp,
    keep_groups,
    marginal_sites,
    posterior,
    select,
    take,
    tie,
)
from ..solvers import LocalResult
from ._factors import Draws, Factors, GroupFactor
from ._local_latents import (
    beside_conditionals,
    chunks_with,
    conditionals_after,
    conditionals_proposal,
    own_move,
    visit_with_locals,
)
from ._moments import solver_of_prior, visit_all_moments, visit_group_moments, visit_prior_moments
from ._refinement import (
    cheaper_rule,
    escalate,
    escalated,
    expect_wide,
    joined,
    next_rule,
    refine,
    relative_error,
    rule_at_start,
)
from ._tilted import is_sampled

# --------------------------------------------------------------------------------------------------------- values alone
# Values of the factors alone, for solvers that take gradients of their own.


def values_at(problem: Any, q: Any, rule: Rule, noise: Any) -> Evaluation:
    """The ELBO at a Gaussian and nothing that only a natural gradient would read. Returns the evaluation, without targets."""
    moments = problem.family.moments(q)
    if not problem.program.noisy:
        found = problem.evaluate_at(q, moments, rule, noise)
        return found._replace(groups=_values_only(found.groups), prior=_values_only(found.prior))
    values = problem.rows.values(problem.family.draw(moments, noise.pairs))
    zero = jnp.zeros_like(values)
    groups = Expected(values, None, None, zero, zero, zero)
    draws = problem.draws_of(problem.prior_program, noise, rule)

    def prior_at(level):
        prior = problem.prior_expected(moments, None, level, draws, False)
        return prior, relative_error(prior)

    prior, error = None, jnp.zeros((), values.dtype)
    if problem.has_prior_factor:
        prior, used, error = escalate(prior_at, rule, problem.num_rules)
        rule = next_rule(rule, used, prior.spread)
    rest = problem.rest(moments)
    own = jnp.zeros((), values.dtype) if prior is None else prior.value
    elbo, size = jnp.sum(values) + rest + own, jnp.sum(jnp.abs(values)) + jnp.abs(rest) + jnp.abs(own)
    return Evaluation(q, moments, groups, _values_only(prior), rest, elbo, size, rule, error > rule.tolerance)


def unlooked(evaluation: Evaluation) -> Evaluation:
    """An evaluation of a q without a pass over any row, as such: its ELBO is no number."""
    return evaluation._replace(elbo=jnp.full_like(evaluation.elbo, jnp.nan))


def _values_only(expected: Expected | None) -> Expected | None:
    return None if expected is None else dataclasses.replace(expected, target=None, product=None)


# ------------------------------------------------------------------------------------- draws that contradict themselves
# Expectations by draws with second derivatives: how many draws, and how far to believe their ELBO.

# Local latents of few units are so cheap that a round takes more than the solver's pairs: up to so many, or so many tangents.
_MOST_PAIRS, _FEW_TANGENTS = 64, 1 << 14
# Falls of the ELBO on common draws, as a share of the gain a step promises, that are their own contradiction (up to 1.9
# were seen with 16 pairs at an optimum).
_NOISE_SHARE = 2.0
# Nats per coordinate that noise may promise at most: a jitter of one sd. At the optima of hierarchies of 10 to 90 coordinates
# it promised 0.1 to 2 nats in all; steps that throw a scale to the far side of its posterior promise hundreds.
_FARTHEST = 0.5
# Posterior sds that where sigma points' messages lead to and the largest mean value of theirs may lie apart (.01 in a Student's t
# regression of unknown degrees of freedom): with more left to move, rounds that stand still give them up.
BARRED_LEFT = 0.02


def affordable_pairs(units: int, width: int, dim: int) -> int:
    """Antithetic pairs that cost little where local latents are few: tangents of a draw, one per coordinate and unit.

    ``units``: how many units have local latents. Returns the pairs; 0 where even one has more tangents than is little.
    """
    tangents = 2 * units * width * (dim + width)
    return min(_MOST_PAIRS, _FEW_TANGENTS // max(tangents, 1))


def fall_explained(
    family: GaussianFamily | RowFamily,
    noisy: list[Any],
    new: tuple[SiteStack, Evaluation],
    old: tuple[SiteStack, Evaluation],
    step: Float[Array, ""],
    units: tuple[int, int] | None = None,
    own: Any = 0.0,
    sigma: Any = False,
    drawn: Any = True,
) -> Any:
    """Twice what a joint step promises, its squared length over its share, where draws contradict themselves; else 0.

    Curvature from second derivatives is not the derivative of the draws' mean value, so that near the optimum their ELBO falls
    along most targets, in proportion to the step: no halving would mend it, and q would stand still where the noise of its last
    draws left it. The fall is of the size of the gain that a natural-gradient step promises to first order. A step that
    overshoots by far loses more, and is still halved; and what promises more than a jitter of one sd in every coordinate, half
    their number, is no noise but a step that far, and must keep its word. Random points with gradients do not contradict
    themselves: their curvature is the derivative of their mean value. Of factors that jump it is not, and a move of d sds takes
    some d of P pairs over a jump, by chance more or fewer: the mean value falls by the root of d / P nats and more. What sigma
    points' messages lead to is not where their mean value is largest either, and a move of d sds towards it from an optimum
    :data:`BARRED_LEFT` sds behind loses that times d, and half of d squared. ``noisy``: programs of the factors whose
    expectations are by draws; ``new``: sites and evaluation after the step; ``old``: before it, on the same draws; ``step``:
    share of the way to the targets, in (0, 1]; ``units``: how many units have how many local latents each; None without any;
    ``own``: the local latents' part of the step's squared length, where clients keep them;
    ``sigma``: whether some expectation is by sigma points; False where none ever is; ``drawn``: whether those of ``noisy`` that may
    be by fixed points are by draws. Returns nats, or the number 0.
    """
    jumping = [p.num_pairs for p in noisy if isinstance(p, PointsProgram) and p.mode == "values"]
    by_draws = bool(jumping) or not all(isinstance(p, PointsProgram) for p in noisy)
    if not by_draws and sigma is False:
        return 0.0
    (sites, after), (before, was) = new, old
    rows = None if sites.local is None else (sites.local.rows, before.local.rows)
    length = move_in_nats(family, after.q, was.q, after.moments, was.moments, rows) + own
    promised = length / jnp.maximum(step, jnp.finfo(length.dtype).tiny)
    coordinates = family.dim + (0 if units is None else units[0] * units[1])
    excused = explained(promised, coordinates, min(jumping) if jumping else 0) if by_draws else 0.0
    excused = excused if drawn is True else jnp.where(drawn, excused, 0.0)
    behind = BARRED_LEFT * jnp.sqrt(promised) + 0.5 * promised
    return jnp.where(sigma & (promised <= BARRED_LEFT**2), jnp.maximum(behind, excused), excused)


def explained(promised: Float[Array, ""], coordinates: int, draws: int = 0) -> Float[Array, ""]:
    """How far the mean of draws may fall that contradict themselves, in nats.

    ``promised``: what the step promises, in squared sds; ``coordinates``: of q; ``draws``: of a factor that jumps; 0 where none
    does.
    """
    chance = jnp.sqrt(jnp.sqrt(promised) / draws) if draws else 0.0
    return jnp.where(promised <= _FARTHEST * coordinates, _NOISE_SHARE * promised + chance, 0.0)


# ---------------------------------------------------------------------------------------------------------------- local

# Antithetic pairs that sigma points are compared with, and of them those that a pass over the rows takes at once.
COMPARED_PAIRS, _PAIRS_AT_ONCE = 16, 4


# Latents up to which a stochastic solver's losses take as many draws as its curvatures.
_FEW_LATENTS = 64
# Vectors of length D that one stochastic visit holds, and the bytes up to which visits run side by side.
_VISIT_VECTORS = 12
_SIDE_BY_SIDE = 1 << 21


@dataclasses.dataclass(frozen=True)
class LocalProblem(Factors, ProblemDefaults):
    """The factors of one model with the way to run them: implements :class:`numpyro_pvi.schedules.Problem`."""

    @property
    def noisy(self) -> bool:
        """Whether any expectation, or any moment of a tilted distribution, is by draws."""
        return self.redraws or (self.matches_moments and is_sampled(self))

    def sampled(self, rule: Rule) -> Bool[Array, ""]:
        """Whether any expectation is by draws under this rule."""
        if self.matches_moments and is_sampled(self):
            return jnp.array(True)
        programs = (self.program, self.prior_program)
        flags = [
            rule.points.sampled[i] if p.mode == "auto" else jnp.array(p.noisy)
            for i, p in enumerate(programs)
            if p is not None
        ]
        return jnp.any(jnp.stack(flags))

    def by_sigma_points(self, rule: Rule) -> Bool[Array, ""] | bool:
        """Whether any expectation is by few fixed points under this rule, which contradict themselves; False where none ever is.

        With own latents a product rule is what is begun with: its messages lead where its values are largest.
        """
        programs = {
            i: p
            for i, p in enumerate((self.program, self.prior_program))
            if isinstance(p, PointsProgram) or (isinstance(p, LocalLatentProgram) and not p.refinable)
        }
        able = {i: p.mode for i, p in programs.items() if p.mode in ("auto", "sigma_points")}
        flags = [~rule.points.sampled[i] if mode == "auto" else jnp.array(True) for i, mode in able.items()]
        return jnp.any(jnp.stack(flags)) if flags else False

    def points_of(self, rule: Rule) -> dict[str, Any]:
        """Whether expectations are by fixed points, and by draws that contradict themselves: see :func:`fall_explained`."""
        own = isinstance(self.program, LocalLatentProgram) and self.program.mode == "auto"
        others = (
            self.has_prior_factor and not isinstance(self.prior_program, PointsProgram) and self.prior_program.noisy
        )
        drawn = rule.points.sampled[0] if own and not others else True
        return {"sigma": self.by_sigma_points(rule), "drawn": drawn}

    def allowance(
        self, new_sites: SiteStack, new: Evaluation, old_sites: SiteStack, old: Evaluation, step: Float[Array, ""]
    ) -> Any:
        """What draws that contradict themselves may lose: see :func:`fall_explained`."""
        own = [p for p in (self.program, self.prior_program) if p is not None and p.noisy]
        pairs, points = ((new_sites, new), (old_sites, old)), self.points_of(old.rule)
        return fall_explained(self.family, own, *pairs, step, self.units, **points)

    def noise(self, key: Any, num_particles: int = 1) -> Draws | None:
        """The draws of one round, shared by all groups, or None.

        Sharing them keeps a round's result independent of the partition, and lets ELBOs of one round be compared.
        """
        if not self.redraws:
            return None
        keys = jax.random.split(key, 5)
        count = max(self.solver.num_draws, -(-num_particles // 2))
        if self.stochastic and self.units is None:
            # A pass of values costs little beside one of curvatures, which few latents allow at every visit.
            count = num_particles if self.family.dim > _FEW_LATENTS else max(num_particles, self.solver.num_draws)
        elif self.units is not None:
            count = max(count, affordable_pairs(*self.units, self.family.dim))
        units, width = (0, 0) if self.units is None else self.units
        pairs, local = own_normals(keys[0], self.family.dim, width, count, units, self.dtype)[:2]
        compared = jax.random.normal(keys[1], (COMPARED_PAIRS, self.family.dim), self.dtype)
        points = [
            p.draw(k, self.dtype) if isinstance(p, PointsProgram) else None
            for k, p in zip(keys[2:4], (self.program, self.prior_program), strict=True)
        ]
        return Draws(pairs, compared, *points, None if self.units is None else local)

    def evaluate(
        self,
        sites: SiteStack,
        rule: Rule,
        noise: Any,
        probe: Any = None,
        again: bool | Bool[Array, ""] = False,
        trial: bool = False,
        hopeless: Any = None,
    ) -> Evaluation:
        """One pass over all groups: see :class:`numpyro_pvi.schedules.Problem`."""
        if self.blind:
            return unlooked(self.unread(sites, rule))
        q = posterior(self.prior_natural, sites)
        rule = rule_at_start(rule, again)
        if self.stochastic and self.units is None:
            return values_at(self, q, rule, noise)
        local = None if isinstance(sites.local, RowSites) else sites.local
        found = self.evaluate_at(
            q, self.family.moments(q), rule, noise, probe, trial=trial, local=local, hopeless=hopeless
        )
        if not self.tied:
            return found
        # What rounds keep of an evaluation has no more sites in it than they have.
        return found._replace(groups=dataclasses.replace(found.groups, target=tie(found.groups.target)))

    def shaped(self, sites: SiteStack, rule: Rule) -> Evaluation | None:
        """See :class:`numpyro_pvi.schedules.ProblemDefaults`: of targets, whose shapes are those of sites, and values of groups.

        None where values are all there is, or there is more: rows set apart, rows' own latents that are integrated out.
        """
        # Sites of rows stand beside those of groups as well, and no evaluation has any.
        local = sites.local if isinstance(sites.local, LocalSites) else None
        found, known = (
            self.unread(sites, rule),
            self.units is None or (local is not None and not self.keeps_conditionals),
        )
        if self.flat or self.blind or self.stochastic or self.wide is not None or not known:
            return None

        def looked(value: Array, target: Any, local: Any = None) -> Expected:
            product = jnp.zeros((*value.shape, self.family.dim), value.dtype)
            return Expected(value, target, product, value, value, value, local)

        prior, own = looked(found.rest, sites.prior) if self.has_prior_factor else None, None
        if local is not None:
            own = local.rows.linear, local.rows.linear
        return found._replace(groups=looked(found.groups.value, sites.groups, local), prior=prior, local=own)

    def evaluate_at(
        self,
        q,
        moments: GaussianMoments | RowMoments,
        rule,
        noise,
        probe=None,
        clip=False,
        trial=False,
        local=None,
        hopeless=None,
    ) -> Evaluation:
        """One pass over all groups at a Gaussian given by its moments.

        ``q``: its natural parameters; ``moments``: its moments; ``rule``: quadrature rule to start from; ``noise``: the round's
        draws, or None; ``probe``: vector for the curvature product, or None; ``clip``: raise curvatures to positive
        semi-definite; ``trial``: whether values alone will do where they are by random points; ``local``: what groups hold of
        their local latents, or None; ``hopeless``: an ELBO below which no finer rule is tried, or None. Returns the evaluation;
        ``elbo`` is minus infinity or NaN where a factor is not finite.
        """
        draws, prior_draws = (self.draws_of(p, noise, rule, trial) for p in (self.program, self.prior_program))
        apart = None if self.wide is None else expect_wide(self, moments, rule)

        def both(level):
            groups = self.sum_groups(self.looking(moments, level, draws, clip, probe), local, apart)
            prior = self.prior_expected(moments, probe, level, prior_draws, clip)
            error, spread = relative_error(groups), jnp.max(groups.spread)
            if prior is not None:
                error, spread = jnp.maximum(error, relative_error(prior)), jnp.maximum(spread, prior.spread)
            values = jnp.sum(groups.value) + (0.0 if prior is None else prior.value)
            if hopeless is not None:
                error = jnp.where(values + rest < hopeless, 0.0, error)
            return (groups, prior, values, spread), error

        rest = self.rest(moments)
        (groups, prior, values, spread), used, error = escalate(both, rule, self.num_rules)
        if apart is not None:
            groups, values, error = joined(groups, values, error, apart)
        size = jnp.sum(jnp.abs(groups.value)) + jnp.abs(rest) + (0.0 if prior is None else jnp.abs(prior.value))
        own = None
        if local is not None:
            own, good = self.own_latents(local, moments, groups)
            moments = moments._replace(valid=moments.valid & good)
        missed = error > rule.tolerance
        rule = self.always_drawn(next_rule(rule, used, spread))
        slots = None if apart is None else apart.slots
        return Evaluation(q, moments, groups, prior, rest, values + rest, size, rule, missed, own, slots)

    def always_drawn(self, rule: Rule) -> Rule:
        """A rule that says so of groups with latents of their own, where there are no fixed points for them."""
        if not isinstance(self.program, LocalLatentProgram) or self.program.rules is not None:
            return rule
        return rule._replace(points=rule.points._replace(sampled=rule.points.sampled.at[0].set(True)))

    def own_latents(self, local: Any, moments: GaussianMoments, groups: Expected) -> tuple[Any, Bool[Array, ""]]:
        """What an evaluation keeps of the groups' own latents, and whether their conditionals are normalisable.

        ``local``: what groups hold of them; ``moments``: q; ``groups``: what a look at them has found.
        """
        found = conditional_moments(local.rows)
        return (found.mean(moments.loc), found.marginal_sd(moments)), jnp.all(found.valid)

    def own_move(self, new: Evaluation, old: Evaluation) -> Float[Array, ""]:
        """Largest change of a mean or log sd of the own latents: see :class:`numpyro_pvi.schedules.Problem`."""
        return own_move(new.local, old.local)

    def rows_elbo_at(self, moments: GaussianMoments, noise: Any, rule: Rule, local: Any = None) -> Float[Array, ""]:
        """What the rows add to the global ELBO at a fixed q under a fixed quadrature rule.

        Reverse-mode differentiable in the factors' arrays, as :meth:`rest_elbo_at` is, which is the other part. ``moments``: q;
        ``noise``: the round's draws, or None; ``rule``: says which points are in use where there is no structure; ``local``:
        what groups hold of their local latents, or None. Returns nats.
        """
        draws = self.draws_of(self.program, noise, rule)
        # A static rule: loops of traced length have no reverse mode.
        level = len(FIXED_RULES) - 1
        values = jax.lax.map(
            lambda chunk: self.program.expected(chunk, moments, None, level, draws, False).value,
            chunks_with(self, local),
        )
        return self.passes.total(jnp.sum(values))

    def rest_elbo_at(self, moments: GaussianMoments, noise: Any, rule: Rule) -> Float[Array, ""]:
        """What is not of the rows: prior and entropy.

        ``moments``: q; ``noise``: the round's draws, or None; ``rule``: says which points are in use where there is no
        structure. Returns nats.
        """
        draws = self.draws_of(self.prior_program, noise, rule)
        prior = self.prior_expected(moments, None, len(FIXED_RULES) - 1, draws, False)
        return self.rest(moments) + (0.0 if prior is None else prior.value)

    def pairs(self, moments: GaussianMoments, eps: Float[Array, "K D"]) -> Expected:
        """Antithetic pairs of draws of all rows, where a likelihood is taken by points, for a comparison with these.

        ``moments``: q; ``eps``: standard normal draws. Returns as of ``PointsProgram.pair``, summed over the rows, with a
        leading axis of pairs.
        """

        def one(e: Float[Array, "D"]) -> Expected:
            found = self.sum_groups(lambda chunk: self.program.pair(chunk, moments, e))
            return jax.tree.map(lambda x: jnp.sum(x, axis=0), found)

        return in_batches(one, eps, _PAIRS_AT_ONCE)

    def zero_sites(self, dtype: Any) -> SiteStack:
        """See :class:`numpyro_pvi.schedules.ProblemDefaults`; with what groups hold of their own latents."""
        sites = super().zero_sites(dtype)
        if self.units is None or self.away or self.keeps_conditionals or self.runtime.alone is not self.runtime:
            return sites
        width, full = self.units[1], self.family.full
        none = jnp.zeros((*self.data.chunks[1].shape, width), dtype)
        precision = jnp.zeros((*none.shape, width), dtype) if full else none
        rows = ConditionalNatural(none, precision, jnp.zeros((*none.shape, self.family.dim if full else 0), dtype))
        return dataclasses.replace(sites, local=LocalSites(sites.groups, rows))

    def own_products(self, evaluation: Evaluation, local: LocalSites, change: LocalSites) -> Float[Array, "W W"]:
        """See :class:`numpyro_pvi.schedules.ProblemDefaults`."""
        if self.family.full:
            return conditional_products(local.rows, evaluation.moments, change.rows)
        loc, sd = (x.ravel() for x in evaluation.local)
        linear, precision = (x.reshape(x.shape[0], -1) for x in (change.rows.linear, change.rows.precision))
        moments = GaussianMoments(loc, sd, jnp.zeros_like(loc[0]), jnp.array(True))
        return NormalFamily(loc.shape[0]).inner_products(moments, GaussianNatural(linear, precision))

    def compared(
        self,
        sites: SiteStack,
        evaluation: Evaluation,
        noise: Draws,
        stale: Bool[Array, ""],
        ask: Bool[Array, ""],
        again: Any,
    ) -> tuple[Evaluation, Bool[Array, ""]]:
        """An evaluation with groups' own latents at fixed points, and whether these are contradicted.

        One place for all passes over the rows, which are most of what is compiled. ``evaluation``: at these sites, or of the right
        shapes where ``stale``; ``noise``: the round's draws; ``stale``: whether it must be made; ``ask``: whether fixed points are
        compared with others; ``again``: as of :meth:`evaluate`. See ``LocalLatentProgram.contradicted``.
        """
        program, rule, local = self.program, evaluation.rule, sites.local
        rows = local.rows if isinstance(local, LocalSites | OwnConditionals) else None
        looks, dim = program.looks_apart(noise.pairs.shape[0]), self.family.dim
        if rows is not None and self.units is not None:
            # Not what fills up chunks, nor other groups' slots.
            dim += math.prod(self.units)

        def apart(found: Evaluation, evaluation: Evaluation) -> tuple[Array, Array, Array]:
            return program.apart(found.groups, evaluation.groups, evaluation.moments, rows)

        def look(k: Int[Array, ""], carry: tuple) -> tuple:
            evaluation, table = carry
            found = self.evaluate(sites, rule, noise._replace(batch=k), again=again)
            off, made = apart(found, evaluation), k < 0
            table = jax.tree.map(lambda all_, x: all_.at[jnp.where(made, looks, k)].set(x, mode="drop"), table, off)
            return select(made, found, evaluation), table

        shapes = jax.eval_shape(lambda: apart(evaluation, evaluation))
        table = jax.tree.map(lambda s: jnp.zeros((looks, *s.shape), s.dtype), shapes)
        first, last = jnp.where(stale, -1, 0), jnp.where(ask, looks, 0)
        evaluation, table = jax.lax.fori_loop(first, last, look, (evaluation, table))
        return evaluation, ask & program.contradicted(*table, dim)

    def empty_sites(self, prior_site: Any) -> SiteStack:
        """Unit sites for all groups, and the given site (or None) for the prior factor."""
        return SiteStack(self.merge(self.family.zeros((self.num_groups,), self.dtype)), prior_site)

    def tidy(self, sites: SiteStack) -> SiteStack:
        """Symmetrise; see :class:`numpyro_pvi.schedules.Problem`."""
        groups, local = self.family.symmetrise(sites.groups), sites.local
        if isinstance(local, LocalSites):
            local = LocalSites(self.family.symmetrise(local.shared), local.rows)
            groups = marginal_sites(local, self.data.chunk_group)
        return SiteStack(groups, None if sites.prior is None else self.family.symmetrise(sites.prior), local)

    def local_proposal(self, carry: RoundCarry, moved: Bool[Array, "M"]) -> Any:
        """Natural-gradient targets over shared and local latents, of groups that moved and were finite.

        Where own latents are integrated out, their conditionals at q; beside steps by batches of rows, these latents' own targets.
        """
        if self.matches_moments:
            return conditionals_proposal(self, carry, moved)
        wanted, group = carry.evaluation.groups.local, self.data.chunk_group
        if wanted is None:
            return None
        finite = jnp.stack(
            [jnp.all(jnp.isfinite(x).reshape(x.shape[0], -1), axis=-1) for x in jax.tree.leaves(wanted.rows)]
        )
        broken = jax.ops.segment_sum((~jnp.all(finite, axis=0)).astype(jnp.int32), group, self.num_groups)
        good = moved & (broken == 0) & jnp.isfinite(carry.evaluation.groups.value)
        if self.keeps_conditionals:
            return keep_groups(good, OwnConditionals(wanted.rows), carry.sites.local, group)
        new = carry.sites.local + (wanted - carry.sites.local) * self.solver.step_size
        return keep_groups(good, new, carry.sites.local, group)

    def between(self, old: SiteStack, aim: SiteStack, step: Any) -> SiteStack:
        """Sites at a share of the way; see :meth:`own_share` for conditionals beside them."""
        sites = super().between(old, aim, step)
        if not (self.stochastic and isinstance(old.local, OwnConditionals)):
            return sites
        return dataclasses.replace(sites, local=damp(old.local, aim.local, self.own_share(step)))

    def own_share(self, step: Any) -> Any:
        """The share that conditionals beside a stochastic solver's sites take of their way, where sites take ``step``.

        Sites that were each moved as if alone take an M-th together (``power / M``); a group's own latents are moved by no other.
        """
        return jnp.minimum(1.0, step * (self.num_groups / max(1.0, float(self.solver.power))))

    def visit_all(self, carry: RoundCarry, key: Any, noise: Any, only: Int[Array, "k"] | None = None) -> LocalResult:
        """Every group's local solve from the same q, or those of some groups, in parallel."""
        if self.matches_moments:
            return visit_all_moments(self, carry, key, only)
        evaluation = carry.evaluation
        keys = jax.random.split(key, self.num_groups)
        noise = self._visit_noise(key, noise)

        def solve(problem, index, site, state, key, start):
            factor = problem._factor(index, evaluation.rule, noise)
            rest = cavity(evaluation.q, site)
            return self.solver.solve(factor, rest, site, state, key, start=start, guarded=True)

        start = dataclasses.replace(evaluation.groups, target=self.split(evaluation.groups.target), local=None)
        operands = (jnp.arange(self.num_groups), self.split(carry.sites.groups), carry.solver, keys, start)
        own = beside_conditionals(self, carry.sites.local)
        if only is not None:
            operands = jax.tree.map(lambda x: x[only], operands)
        reads = self.rows is not None or self.solver.rereads
        results = own.map_groups(solve, operands, reads_rows=reads, side_by_side=self._side_by_side)
        return results._replace(site=self.merge(results.site))

    def refined(self, evaluation: Evaluation, results: LocalResult) -> LocalResult:
        """What all groups propose together, gone on with by the rows set apart: see :func:`refine`."""
        return results if self.wide is None else refine(self, evaluation, results)

    def visit_group(
        self,
        index: Any,
        q: Any,
        site: Any,
        state: Any,
        key: Any,
        rule: Rule,
        noise: Any,
        local: Any = None,
        alone: bool = False,
    ) -> tuple[LocalResult, Any]:
        """One group's local solve from the current q."""
        if self.matches_moments:
            return visit_group_moments(self, index, q, site, state, key, rule, local)
        if local is not None and not self.keeps_conditionals:
            return visit_with_locals(self, index, q, site, state, noise, rule, local, alone)
        own, rest = beside_conditionals(self, local), cavity(q, site)
        factor = own._factor(index, cheaper_rule(rule), self._visit_noise(key, noise))
        result = self.solver.solve(factor, rest, site, state, key, start=None, guarded=False)
        if local is None:
            return result, None
        draws = self.draws_of(self.program, noise, rule)
        return result, conditionals_after(self, index, rest + result.site, local, draws)

    def visit_prior(self, q: Any, site: Any, state: Any, key: Any, rule: Rule, noise: Any, start: Any) -> LocalResult:
        """The prior factor's local solve; it has no rows, so under a stochastic solver it takes natural-gradient steps."""
        if self.matches_moments:
            return visit_prior_moments(self, q, site, state, key, rule)
        draws = self.draws_of(self.prior_program, self._visit_noise(key, noise), rule)
        expect = partial(self.prior_expected, probe=None, noise=draws, clip=False)
        start_rule = cheaper_rule(rule)
        factor = GroupFactor(
            self.family,
            False,
            self.prior_program.noisy,
            lambda moments: escalated(lambda lv: expect(moments, level=lv), start_rule, self.num_rules),
        )
        guarded = start is not None
        if self.stochastic:
            start = None
        solver = solver_of_prior(self.solver)
        return solver.solve(factor, cavity(q, site), site, state, key, start=start, guarded=guarded)

    def _visit_noise(self, key: Any, noise: Any) -> Any:
        """Draws for expectations within a visit: the round's, or a stochastic solver's own."""
        if noise is None or not self.stochastic or self.units is not None:
            return noise
        shape = (self.solver.num_draws, self.family.dim)
        return noise._replace(pairs=jax.random.normal(jax.random.fold_in(key, 1), shape, self.dtype))

    @property
    def _side_by_side(self) -> bool:
        """Whether visits that read single rows run side by side: while the working set of all stays small, and equally long."""
        size = _VISIT_VECTORS * self.num_groups * self.family.dim * self.dtype.itemsize
        return self.rows is not None and size <= _SIDE_BY_SIDE and self.rows.equal

    def sum_groups(self, expect: Callable[[Any], Expected], local: Any = None, apart: Any = None) -> Expected:
        """A pass over all chunks but rows set apart, summed by group; with local latents, integrated out of the targets."""
        data, chunks = self.data, chunks_with(self, local)
        if apart is not None:
            chunks = self.wide.without(chunks, apart.slots)
        if isinstance(self.program, MaskedLocalProgram | MaskedIntegratedProgram):
            found = expect(chunks)
        else:
            working = self.program.working_bytes(chunks)
            # Runtimes may ask for its shapes first: one trace serves both.
            expect = jax.jit(expect, inline=True)
            found = self.passes.sum_chunks(expect, chunks, data.chunk_group, data.offsets, working)
        if found.local is None:
            return found
        joint = LocalSites(found.target, found.local)
        return dataclasses.replace(found, target=marginal_sites(joint, data.chunk_group), local=joint)

    def sum_group(self, expect: Callable[[Any], Expected], index: Int[Array, ""]) -> Expected:
        """The same of one group's chunks."""
        if self.quadratic:
            return expect(take(self.data.chunks, index))
        return self.runtime.sum_group(expect, self.data.chunks, self.data.offsets, index)

    def finite_sites(self, natural: GaussianNatural) -> GaussianNatural:
        """Sites as they may start: unit ones for groups of which some number is not finite, and quadratic factors' proper."""
        if self.quadratic and self.family.full:
            natural = GaussianNatural(natural.precision_mean, clip_to_psd(natural.precision))
        sites = self.split(self.family.symmetrise(natural))
        zero = jax.tree.map(jnp.zeros_like, sites)
        return self.merge(select(jax.vmap(all_finite)(sites), sites, zero))

    def looking(self, moments: Any, level: Any, noise: Any, clip: Any = False, probe: Any = None) -> partial:
        """:meth:`expect` of a chunk at a q, under a rule: what :meth:`sum_groups` and :meth:`sum_group` take."""
        return partial(self.expect, moments=moments, probe=probe, level=level, noise=noise, clip=clip)

    def expect(self, chunk, *, moments, probe, level, noise, clip) -> Any:
        """One chunk's expectations, or (masked local latents) those of all groups."""
        if isinstance(self.program, MaskedLocalProgram | MaskedIntegratedProgram):
            return self.program.expected_all(chunk, moments, probe, noise)
        return self.program.expected(chunk, moments, probe, level, noise, clip)

    def prior_expected(self, moments, probe, level, noise, clip) -> Expected | None:
        """Expectations of the prior factor, or None without one."""
        if self.prior_program is None:
            return None
        return self.prior_program.expected(self.data.prior, moments, probe, level, noise, clip)

    def _factor(self, index, rule, noise) -> GroupFactor:
        draws = self.draws_of(self.program, noise, rule)

        def expected(moments):
            if self.units is not None:
                return self.sum_group(lambda chunk: self.program.given(chunk, moments, draws), index)
            return escalated(lambda lv: self.sum_group(self.looking(moments, lv, draws), index), rule, self.num_rules)

        quadratic = self.quadratic and self.family.full
        return GroupFactor(self.family, quadratic, self.program.noisy, expected, self.rows, index)

    def rest(self, moments: GaussianMoments | RowMoments) -> Float[Array, ""]:
        """``E_q[log p(theta)]`` over the exact coordinates plus the entropy of q, in nats.

        With absent groups also ``E_q[log t]`` of their sites, which stand in for their factors (without a constant).
        """
        expected_prior = self.family.expect_quadratic(self.data.prior_natural, moments) - self.data.prior_partition
        entropy = 0.5 * self.family.dim * (1 + math.log(2 * math.pi)) - 0.5 * moments.log_det_precision
        rest = jnp.where(jnp.any(self.data.exact), expected_prior, 0.0) + entropy
        if self.data.others is None:
            return rest
        return rest + self.family.expect_quadratic(self.data.others, moments)
