"""Visits of solvers that match moments, where the sites of single rows start, and the evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..expectations import TOLERANCE, Expected, row_sites_zero, row_targets, tilted_rows
from ..schedules import RoundCarry, RoundReport, Rule
from ..sites import RowSites, SiteStack, cavity, posterior, take, tied_site
from ..solvers import LocalResult, LocalSolver, NaturalGradient, matched
from ._factors import Factors
from ._local_latents import at_conditionals, conditionals_after, look_together, shares_points
from ._refinement import cheaper_rule, escalated, first_rule, relative_error
from ._tilted import (
    MomentFactor,
    factor_of,
    method_of,
    of_rows,
    own_coordinates,
    prior_factor,
    side_by_side,
    whole_factor,
    with_arrays,
)

# Steps from which on late rounds count as averaged: with steps c / (c + k) and c = 10 the variance of q's noise is then
# c / (2 c - 1) * step, about an eighth of one round's (see numpyro_pvi.sites.late_share).
_LATE_STEP = 0.25


def solver_of_prior(solver: LocalSolver) -> LocalSolver:
    """Who refines the prior factor's site: it has no rows for a stochastic solver to take, and is tied to no other."""
    return NaturalGradient() if solver.stochastic else solver.for_prior


def moments_missed(carry: RoundCarry) -> Bool[Array, ""]:
    """Whether some row's moments asked for a finer quadrature rule than was compiled in."""
    found = matched(carry.solver), matched(carry.prior_solver)
    flags = [jnp.any(memory.missed) for memory in found if memory is not None]
    return jnp.any(jnp.stack(flags)) if flags else jnp.array(False)


def noise_floor(states: Any, report: RoundReport) -> Float[Array, ""]:
    """The move, in posterior sds, that the noise of sampled moments alone explains once late rounds are being averaged.

    A tolerance below it would chase noise: what further rounds gain shrinks as the root of their number only. ``states``: the
    groups' solver states; ``report``: the round's report. Returns ``step * sqrt(sum_m noise_m^2)`` where the joint step has
    fallen to a quarter; 0 before, and where nothing is sampled.
    """
    found = matched(states)
    if found is None:
        return jnp.zeros((), report.total_move.dtype)
    step = jnp.max(report.step)
    return jnp.where(step <= _LATE_STEP, step * jnp.sqrt(jnp.sum(found.noise**2)), 0.0)


# ---------------------------------------------------------------------------------------------------------- visits


class MatchedFactors:
    """The factors of a round as solvers that match moments see them, whatever the family of q and however moments are taken.

    One of them is named by a group's position; None is the prior factor. Who derives from it has the factors' ``problem`` and the
    ``solver`` whose visits they are.
    """

    problem: Any
    solver: Any

    def factor(self, index: Int[Array, ""] | None) -> MomentFactor:
        """One factor."""
        raise NotImplementedError

    def over_groups(self, visit: Callable[..., Any], operands: tuple) -> Any:
        """``visit(these factors, *operands)`` of many groups, whose positions are the first of the operands."""
        raise NotImplementedError

    def visit(
        self, index: Int[Array, ""] | None, rest: Any, site: Any, state: Any, key: Any, guarded: bool = False
    ) -> LocalResult:
        """One factor's moments matched; ``rest``: q without its site."""
        solver = solver_of_prior(self.solver) if index is None else self.solver
        return solver.solve(self.factor(index), rest, site, state, key, start=None, guarded=guarded)

    def visit_all(self, q: Any, sites: Any, states: Any, keys: Any, only: Int[Array, "k"] | None = None) -> LocalResult:
        """Every group's moments matched from the same q.

        Where all share one tied site they ask one after another, so that there are never as many sites as groups, and the site
        moves to the mean of what they ask for. ``sites``: all groups' stacked, or the product of all as a stack of one; ``only``:
        which groups; None for all. Returns results with a leading group axis, and the product after them where it is tied.
        """

        def visit(own: MatchedFactors, index: Any, site: Any, state: Any, key: Any) -> LocalResult:
            return own.visit(index, cavity(q, site), site, state, key, guarded=True)

        operands = jnp.arange(self.problem.num_groups), sites, states, keys
        if not self.solver.tied:
            return self.over_groups(visit, operands if only is None else take(operands, only))
        site = tied_site(sites, self.problem.num_groups)

        def one(total: Any, own: tuple) -> tuple[Any, LocalResult]:
            index, *known = own
            result = visit(self, index, site, *known)
            return total + (result.site - site), result._replace(site=None, step=None)

        # Of the mean of what groups ask for M copies make the sum.
        zero = jax.tree.map(jnp.zeros_like, site)
        change, results = jax.lax.scan(one, zero, (operands[0], states, keys))
        return results._replace(site=sites + change)

    def share(self, index: Int[Array, ""] | None, q: Any, site: Any, state: Any, key: Any) -> Shares:
        """One factor's share of the evidence; ``state``: its solver's, whose chains go on from where they stood."""
        at, power = (solver_of_prior(self.solver) if index is None else self.solver).vantage(state, q)
        memory = matched(state)
        found = self.factor(index).tilted(at, site, power, key, None if memory is None else memory.chains)
        return Shares(found.value, found.variance, found.missed)

    def shares(self, q: Any, sites: Any, states: Any, keys: Any) -> Shares:
        """Every group's, with a leading group axis; a tied site is every group's t_m."""

        def look(own: MatchedFactors, index: Any, state: Any, key: Any) -> Shares:
            site = tied_site(sites, self.problem.num_groups) if self.solver.tied else take(sites, index)
            return own.share(index, q, site, state, key)

        return self.over_groups(look, (jnp.arange(self.problem.num_groups), states, keys))


class Shares(NamedTuple):
    """Factors' ``(1/alpha) log E[(p / t)^alpha]`` in nats, Monte Carlo variances, and whether quadrature asks for finer rules."""

    value: Float[Array, "*M"]
    variance: Float[Array, "*M"]
    missed: Bool[Array, "*M"]


def summed_evidence(family: Any, q: Any, base: Any, groups: Shares, prior: Shares | None) -> tuple[Array, Array, Array]:
    """Power EP's estimate of log p(y) and its Monte Carlo standard error, in nats, and whether a finer rule is needed.

    ``A(eta_q) - A(eta_0) + sum_m (1/alpha) log E_q[(p(y_m | theta) / t_m)^alpha]``, which is DESIGN's formula with the cavity's
    normaliser taken into the expectation, so that a cavity need not be proper. Of a solver with anchors theta' the expectations
    are under these instead of q, which gives the solver's objective less ``A(eta_0)``. ``base``: A(eta_0), of what is held exactly
    of the prior; ``groups``: shares of all groups; ``prior``: the prior factor's, or None.
    """
    value, variance, missed = jnp.sum(groups.value), jnp.sum(groups.variance), jnp.any(groups.missed)
    if prior is not None:
        value, variance, missed = value + prior.value, variance + prior.variance, missed | prior.missed
    return family.log_partition(q) - base + value, jnp.sqrt(variance), missed


# ------------------------------------------------------------------------------------------------------ Gaussian guides


@dataclasses.dataclass(frozen=True)
class GaussianMatched(MatchedFactors):
    """The same of Gaussian guides.

    ``rule``: quadrature rule to start from, and the error aimed at; ``together``: a group's position to how moments are taken
    from points at which all factors have been evaluated already; or None.
    """

    problem: Factors
    rule: Rule
    together: Callable | None = None

    @property
    def solver(self) -> Any:
        """The problem's own."""
        return self.problem.solver

    def factor(self, index: Int[Array, ""] | None) -> Any:
        """See :func:`numpyro_pvi.runtime._tilted.whole_factor` and :func:`numpyro_pvi.runtime._tilted.prior_factor`."""
        if index is None:
            return prior_factor(self.problem, self.rule)
        return whole_factor(self.problem, index, self.rule, None if self.together is None else self.together(index))

    def over_groups(self, visit: Callable[..., Any], operands: tuple) -> Any:
        """Each where its rows are; side by side where nothing but moments of q is looked at, or chains fill the lanes."""
        problem = self.problem

        def one(own: Factors, *rest: Any) -> Any:
            return visit(dataclasses.replace(self, problem=own), *rest)

        return problem.map_groups(one, operands, not problem.quadratic, side_by_side(problem))


def visit_all_moments(
    problem: Factors, carry: RoundCarry, key: Any, only: Int[Array, "k"] | None = None
) -> LocalResult:
    """Every group's moments matched from the same q.

    ``only``: which groups; None for all. Where rows have sites, all. Returns results with a leading group axis; ``local`` the
    rows' sites after them, where rows have sites.
    """
    problem = at_conditionals(problem, carry.sites.local)
    q, rule = carry.evaluation.q, carry.evaluation.rule
    keys = jax.random.split(key, problem.num_groups)
    if method_of(problem, False) == "rows":
        found = all_rows(problem, q, carry.sites.local, rule)
        solve = partial(_solve_found, problem, q, rule)
        old = problem.family.symmetrise(found.target.old)
        result = jax.vmap(solve)(dataclasses.replace(found, local=None), old, carry.solver, keys)
        step = result.step[problem.data.chunk_group]
        return result._replace(local=carry.sites.local + found.local * step)

    together = None
    if shares_points(problem, method_of(problem, False)):
        together = look_together(problem, method_of(problem, False), q, jax.random.fold_in(key, 1))
    return GaussianMatched(problem, rule, together).visit_all(q, carry.sites.groups, carry.solver, keys, only)


def visit_group_moments(
    problem: Factors, index: Int[Array, ""], q: Any, site: Any, state: Any, key: Any, rule: Rule, local: Any
) -> tuple[LocalResult, Any]:
    """One group's moments matched from the current q: see :class:`numpyro_pvi.schedules.Problem`."""
    if method_of(problem, False) != "rows":
        matched = GaussianMatched(at_conditionals(problem, local), rule)
        result = matched.visit(index, cavity(q, site), site, state, key)
        if not problem.tied:
            local = conditionals_after(problem, index, cavity(q, site) + result.site, local)
        return result._replace(step=None), local
    moments, mine = problem.family.moments(q), problem.runtime.mine(local, problem.held)

    def at(level):
        def add(c, carry):
            total, rows = carry
            new = _rows_of(problem, take(problem.data.chunks, c), take(mine, c), moments, level)
            rows = jax.tree.map(lambda x, y: x.at[c].set(y), rows, new.local)
            new = dataclasses.replace(new, local=None)
            spread = jnp.maximum(total.spread, new.spread)
            return dataclasses.replace(jax.tree.map(jnp.add, total, new), spread=spread), rows

        start = jax.eval_shape(lambda: _rows_of(problem, *take((problem.data.chunks, local), 0), moments, level))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), dataclasses.replace(start, local=None))
        total, rows = jax.lax.fori_loop(*problem.span(index), add, (zero, mine * 0.0))
        return dataclasses.replace(problem.runtime.total_expected(total), local=problem.runtime.gathered(rows))

    found = escalated(at, cheaper_rule(rule), problem.num_rules)
    old = problem.family.symmetrise(found.target.old)
    # q as the groups' own sums have it: the site is what is replaced.
    result = _solve_found(problem, q, rule, dataclasses.replace(found, local=None), old, state, key)
    return result._replace(step=None), local + found.local * result.step


def visit_prior_moments(problem: Factors, q: Any, site: Any, state: Any, key: Any, rule: Rule) -> LocalResult:
    """The prior factor's moments matched from the current q."""
    rest = cavity(q, site)
    if method_of(problem, True) == "rows":
        # A product over coordinates has no part beyond them; what the user's starting values put there goes.
        site = own_coordinates(problem, site)
    return GaussianMatched(problem, rule).visit(None, rest, site, state, key)._replace(step=None)


def _rows_of(problem: Factors, chunk: Any, rows: RowSites, moments: Any, level: Any) -> Expected:
    """What moment matching asks of one chunk's rows."""
    program, arrays = with_arrays(problem.program, chunk)
    return tilted_rows(program, arrays, rows, moments, problem.solver.power, level, problem.num_rules)


def all_rows(problem: Factors, q: Any, local: RowSites, rule: Rule) -> Expected:
    """One pass over all rows: what moment matching asks of each, and its sums by group."""
    moments = problem.family.moments(q)

    def expect(operand, level):
        return _rows_of(problem, *operand, moments, level)

    data = problem.data
    working = problem.program.working_bytes(data.chunks)

    def at(level):
        chunks = (data.chunks, problem.runtime.mine(local, problem.held))
        return problem.runtime.sum_chunks(partial(expect, level=level), chunks, data.chunk_group, data.offsets, working)

    return escalated(at, cheaper_rule(rule), problem.num_rules)


def _solve_found(problem: Factors, q: Any, rule: Rule, found: Expected, site: Any, state: Any, key: Any) -> LocalResult:
    """The solver's answer to moments that a pass over rows has found."""
    factor = factor_of(problem, lambda *_: of_rows(found, rule))
    return problem.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=True)


# ------------------------------------------------------------------------------------------------ start and evidence


def first_row_sites(problem: Factors, at_prior: Any, loc: Float[Array, "D"], mode: str) -> tuple[SiteStack, Rule]:
    """Where the sites of single rows start.

    ``at_prior``: the prior as moments; ``mode``: "prior" (unit sites), or "curvature" and "auto": each row's clipped curvature
    and gradient at ``loc``. Returns sites, and the quadrature rule to begin with. A row that is not finite there gets the unit
    site.
    """
    data = problem.data
    point = at_prior._replace(loc=loc, scale=0.0 * at_prior.scale)

    def read(chunk):
        program, arrays = with_arrays(problem.program, chunk)
        if mode == "prior":
            return row_sites_zero(program, arrays, problem.dtype), problem.family.zeros((), problem.dtype)
        found = row_targets(program, arrays, point, 0)
        return found.local, found.target.old

    rows, sums = jax.lax.map(read, data.chunks)
    groups = jax.tree.map(
        lambda x: jax.ops.segment_sum(x, data.chunk_group, problem.num_groups, indices_are_sorted=True), sums
    )
    return SiteStack(problem.family.symmetrise(groups), None, rows), first_rule(problem.dtype)


def evidence(
    problem: Factors,
    sites: SiteStack,
    rule: Rule,
    key: Any,
    solver: tuple[Any, Any],
    ask: Callable[..., Shares] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Power EP's estimate of log p(y) and its Monte Carlo standard error, in nats: see :func:`summed_evidence`.

    ``solver``: solver states of the groups and of the prior factor, whose chains go on from where they stood; ``ask``: who
    answers for the groups, ``(q, sites, solver states, keys, rule)`` to what :meth:`MatchedFactors.shares` gives; None
    where their rows are here. Returns ``(value, standard error, missed)``; ``missed`` says that a finer quadrature rule is
    needed than was compiled in.
    """
    q, prior = posterior(problem.prior_natural, sites), None
    problem = at_conditionals(problem, sites.local)
    group_key, prior_key = jax.random.split(key)
    dtype = rule.tolerance.dtype
    tight = rule._replace(tolerance=jnp.asarray(TOLERANCE[dtype.name], dtype))
    matched = GaussianMatched(problem, tight)
    if method_of(problem, False) == "rows":
        found = all_rows(problem, q, sites.local, tight)
        groups = Shares(found.value, jnp.zeros_like(found.value), relative_error(found) > tight.tolerance)
    else:
        keys = jax.random.split(group_key, problem.num_groups)
        given = q, sites.groups, solver[0], keys
        groups = matched.shares(*given) if ask is None else ask(*given, tight)
    if problem.has_prior_factor:
        prior = matched.share(None, q, sites.prior, solver[1], prior_key)
    base = jnp.where(jnp.any(problem.data.exact), problem.data.prior_partition, 0.0)
    return summed_evidence(problem.family, q, base, groups, prior)
