"""Visits of solvers that match moments, where the sites of single rows start, and the evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..expectations import TOLERANCE, Expected, row_sites_zero, row_targets, tilted_rows
from ..schedules import RoundCarry, RoundReport, Rule
from ..sites import RowSites, SiteStack, cavity, posterior, take, tied_site
from ..solvers import LocalResult, LocalSolver, NaturalGradient
from ._factors import Factors
from ._local_latents import at_conditionals, conditionals_after, look_together, shares_points
from ._refinement import cheaper_rule, escalated, first_rule, relative_error
from ._tilted import (
    factor_of,
    method_of,
    of_rows,
    own_coordinates,
    prior_factor,
    settings_of,
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
    flags = [jnp.any(s.missed) for s in (carry.solver, carry.prior_solver) if hasattr(s, "missed")]
    return jnp.any(jnp.stack(flags)) if flags else jnp.array(False)


def noise_floor(states: Any, report: RoundReport) -> Float[Array, ""]:
    """The move, in posterior sds, that the noise of sampled moments alone explains once late rounds are being averaged.

    A tolerance below it would chase noise: what further rounds gain shrinks as the root of their number only. ``states``: the
    groups' solver states; ``report``: the round's report. Returns ``step * sqrt(sum_m noise_m^2)`` where the joint step has
    fallen to a quarter; 0 before, and where nothing is sampled.
    """
    if not hasattr(states, "noise"):
        return jnp.zeros((), report.total_move.dtype)
    step = jnp.max(report.step)
    return jnp.where(step <= _LATE_STEP, step * jnp.sqrt(jnp.sum(states.noise**2)), 0.0)


# ---------------------------------------------------------------------------------------------------------- visits


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

    def solve_group(problem, index, site, state, key):
        factor = whole_factor(problem, index, rule, None if together is None else together(index))
        return problem.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=True)

    if problem.tied:
        numbers = jnp.arange(problem.num_groups)
        return visit_tied(carry.sites.groups, partial(solve_group, problem), numbers, carry.solver, keys)
    operands = (jnp.arange(problem.num_groups), carry.sites.groups, carry.solver, keys)
    if only is not None:
        operands = jax.tree.map(lambda x: x[only], operands)
    return problem.map_groups(solve_group, operands, not problem.quadratic, side_by_side(problem))


def visit_tied(whole: Any, visit: Callable[..., LocalResult], groups: Int[Array, "M"], *operands: Any) -> LocalResult:
    """Every group asks for its own tied site from the same q; the site moves to the mean of what they ask for.

    One group after another, so that there are never as many sites as groups. ``whole``: the product of all groups' sites, as a
    stack of one; ``visit``: a group's visit, of its position, the site and its operands. Returns results with a leading group
    axis, and the product after them.
    """
    site = tied_site(whole, groups.shape[0])

    def one(total, operands):
        index, *own = operands
        result = visit(index, site, *own)
        return total + (result.site - site), result._replace(site=None, step=None)

    # Of the mean of what groups ask for M copies make the sum.
    zero = jax.tree.map(jnp.zeros_like, site)
    change, results = jax.lax.scan(one, zero, (groups, *operands))
    return results._replace(site=whole + change)


def visit_group_moments(
    problem: Factors, index: Int[Array, ""], q: Any, site: Any, state: Any, key: Any, rule: Rule, local: Any
) -> tuple[LocalResult, Any]:
    """One group's moments matched from the current q: see :class:`numpyro_pvi.schedules.Problem`."""
    if method_of(problem, False) != "rows":
        factor = whole_factor(at_conditionals(problem, local), index, rule)
        result = problem.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=False)
        return result._replace(step=None), conditionals_after(problem, index, cavity(q, site) + result.site, local)
    moments, mine = problem.family.moments(q), problem.runtime.mine(local, problem.held)

    def at(level):
        def add(c, carry):
            total, rows = carry
            program, chunk = with_arrays(problem.program, take(problem.data.chunks, c))
            new = tilted_rows(
                program, chunk, take(mine, c), moments, settings_of(problem).power, level, problem.num_rules
            )
            rows = jax.tree.map(lambda x, y: x.at[c].set(y), rows, new.local)
            new = dataclasses.replace(new, local=None)
            spread = jnp.maximum(total.spread, new.spread)
            return dataclasses.replace(jax.tree.map(jnp.add, total, new), spread=spread), rows

        start = jax.eval_shape(lambda: _one_chunk(problem, local, moments, level))
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
    factor, rest = prior_factor(problem, rule), cavity(q, site)
    if method_of(problem, True) == "rows":
        # A product over coordinates has no part beyond them; what the user's starting values put there goes.
        site = own_coordinates(problem, site)
    solver = solver_of_prior(problem.solver)
    return solver.solve(factor, rest, site, state, key, start=None, guarded=False)._replace(step=None)


def _one_chunk(problem: Factors, local: RowSites, moments, level) -> Expected:
    program, chunk = with_arrays(problem.program, take(problem.data.chunks, 0))
    return tilted_rows(program, chunk, take(local, 0), moments, settings_of(problem).power, level, problem.num_rules)


def all_rows(problem: Factors, q: Any, local: RowSites, rule: Rule) -> Expected:
    """One pass over all rows: what moment matching asks of each, and its sums by group."""
    moments = problem.family.moments(q)

    def expect(operand, level):
        chunk, rows = operand
        program, arrays = with_arrays(problem.program, chunk)
        return tilted_rows(program, arrays, rows, moments, settings_of(problem).power, level, problem.num_rules)

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


def group_evidence(
    problem: Factors, index: Int[Array, ""], q: Any, site: Any, state: Any, key: Any, rule: Rule
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """One group's part of :func:`evidence`: ``(1/alpha) log E[(p(y_m | theta) / t_m)^alpha]``.

    ``rule``: quadrature rule to start from, and the error aimed at. Returns nats, their Monte Carlo variance, and whether a
    finer rule is needed than was compiled in.
    """
    at, power = problem.solver.vantage(state, q)
    one = whole_factor(problem, index, rule).tilted(at, site, power, key, getattr(state, "chains", None))
    return one.value, one.variance, one.missed


def evidence(
    problem: Factors,
    sites: SiteStack,
    rule: Rule,
    key: Any,
    solver: tuple[Any, Any],
    ask: Callable[..., tuple[Float[Array, "M"], Float[Array, "M"], Bool[Array, "M"]]] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Power EP's estimate of log p(y) and its Monte Carlo standard error, in nats.

    ``A(eta_q) - A(eta_0) + sum_m (1/alpha) log E_q[(p(y_m | theta) / t_m)^alpha]``, which is DESIGN's formula with the cavity's
    normaliser taken into the expectation, so that a cavity need not be proper. A tied site is every group's t_m. Of a solver
    with anchors theta' the expectations are under these instead of q, which gives the solver's objective less ``A(eta_0)``.
    ``solver``: solver states of the groups and of the prior factor, whose chains go on from where they stood; ``ask``: who
    answers for the groups, ``(q, sites, solver states, keys, rule)`` to what :func:`group_evidence` gives of each; None where
    their rows are here. Returns ``(value, standard error, missed)``; ``missed`` says that a finer quadrature rule is needed
    than was compiled in.
    """
    q = posterior(problem.prior_natural, sites)
    problem = at_conditionals(problem, sites.local)

    def vantage(state):
        return problem.solver.vantage(state, q)

    group_key, prior_key = jax.random.split(key)
    dtype = rule.tolerance.dtype
    tight = rule._replace(tolerance=jnp.asarray(TOLERANCE[dtype.name], dtype))
    missed = jnp.array(False)
    if method_of(problem, False) == "rows":
        found = all_rows(problem, q, sites.local, tight)
        value, variance = jnp.sum(found.value), jnp.zeros((), dtype)
        missed = relative_error(found) > tight.tolerance
    else:
        count = problem.num_groups
        keys = jax.random.split(group_key, count)

        def look(problem, index, state, key):
            site = tied_site(sites.groups, count) if problem.tied else take(sites.groups, index)
            return group_evidence(problem, index, q, site, state, key, tight)

        if ask is not None:
            found = ask(q, sites.groups, solver[0], keys, tight)
        else:
            operands = (jnp.arange(count), solver[0], keys)
            found = problem.map_groups(look, operands, not problem.quadratic, side_by_side(problem))
        value, variance, missed = jnp.sum(found[0]), jnp.sum(found[1]), jnp.any(found[2])
    if problem.has_prior_factor:
        at, power = vantage(solver[1])
        memory = getattr(solver[1], "chains", None)
        own = prior_factor(problem, tight).tilted(at, sites.prior, power, prior_key, memory)
        value, variance, missed = value + own.value, variance + own.variance, missed | own.missed
    base = jnp.where(jnp.any(problem.data.exact), problem.data.prior_partition, 0.0)
    return problem.family.log_partition(q) - base + value, jnp.sqrt(variance), missed
