"""Visits of solvers that match moments: which moments fit a factor, where they are taken, and the evidence they give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..errors import PVIError
from ..expectations import (
    GRID_DIM,
    AffineProgram,
    Expected,
    ImportanceMoments,
    LaplaceMoments,
    Proposal,
    SharedAffineProgram,
    Tilted,
    exact_tilted,
    from_points,
    grid_cloud,
    log_densities_at,
    log_density_at,
    normal_cloud,
    row_sites_zero,
    row_targets,
    tilted_rows,
    with_settings,
)
from ..families import GaussianFamily
from ..schedules import RoundCarry, Rule
from ..sites import RowSites, SiteStack, cavity, posterior, take
from ..solvers import LocalResult
from ._laplace import laplace_proposal
from ._rules import TOLERANCE, cheaper_rule, escalated, first_rule, relative_error

if TYPE_CHECKING:
    from ._local import LocalProblem

# A latent's own value, as the predictor of a term.
_OWN = "value"


@dataclasses.dataclass(frozen=True)
class MomentFactor:
    """One factor as a solver that matches moments sees it."""

    family: GaussianFamily
    take_moments: Callable[[Any, Any, float, Any], Tilted]

    def tilted(self, q: Any, site: Any, power: float, key: Any) -> Tilted:
        """See :meth:`numpyro_pvi.solvers.TiltedFactor.tilted`."""
        return self.take_moments(q, site, power, key)


def method_of(problem: LocalProblem, prior: bool) -> Any:
    """How a factor's tilted moments are taken.

    Args:
        problem: the factors.
        prior: whether of the prior factor, else of the likelihood.

    Returns:
        "exact", "rows", "grid", or settings of sampled moments.

    Raises:
        PVIError: when forced moments do not fit.
    """
    wanted = with_settings(getattr(problem.solver, "moments", "auto"))
    program, dim = problem.prior_program if prior else problem.program, problem.family.dim
    if not isinstance(wanted, str):
        if wanted.num_draws < 4 * dim:
            raise PVIError(
                f"{wanted!r} is too few draws for {dim} latents: the moments of q need at least {4 * dim}. Pass "
                f"{type(wanted).__name__}(num_draws={max(1024, 8 * dim)})."
            )
        return wanted
    if not prior and problem.quadratic and wanted in ("auto", "exact"):
        return "exact"
    if _own_values(program) if prior else _single_rows(problem):
        return "rows"
    if dim <= GRID_DIM:
        return "grid"
    if wanted == "quadrature" and not prior:
        raise PVIError(
            f"PowerEP(moments='quadrature') takes a group's moments over at most {GRID_DIM} latents, here are {dim}: use "
            "factors='row' where rows have affine predictors, or moments='importance'."
        )
    return with_settings("importance")


def keeps_rows(problem: LocalProblem) -> bool:
    """Whether sites of single rows are kept beside the groups' sites."""
    return getattr(problem.solver, "matches_moments", False) and method_of(problem, False) == "rows"


def is_sampled(problem: LocalProblem) -> bool:
    """Whether any factor's moments are by draws."""
    methods = [method_of(problem, prior) for prior in (False, True) if not prior or problem.has_prior_factor]
    return any(isinstance(m, ImportanceMoments | LaplaceMoments) for m in methods)


def _single_rows(problem: LocalProblem) -> bool:
    if not isinstance(problem.program, AffineProgram | SharedAffineProgram):
        return False
    if problem.solver.factors == "row":
        return True
    # One element a group: its tilted distribution differs from the cavity in one predictor only.
    if not isinstance(problem.program, AffineProgram) or len(problem.program.terms) != 1:
        return False
    mask = problem.data.chunks[0][1]
    return mask.shape == (problem.num_groups, 1)


def _own_values(program: Any) -> bool:
    """Whether a prior factor is a product over single coordinates."""
    if not isinstance(program, AffineProgram):
        return False
    return all(len(t.predictors) == 1 and t.predictors[0].path == _OWN for t in program.terms)


def _with_arrays(program: Any, chunk: Any) -> tuple[AffineProgram, Any]:
    if isinstance(program, SharedAffineProgram):
        return program.program, program.program.mask(program.data, program.masks(chunk))
    return program, chunk


def moments_missed(carry: RoundCarry) -> Bool[Array, ""]:
    """Whether some row's moments asked for a finer quadrature rule than was compiled in."""
    flags = [jnp.any(s.missed) for s in (carry.solver, carry.prior_solver) if hasattr(s, "missed")]
    return jnp.any(jnp.stack(flags)) if flags else jnp.array(False)


# ---------------------------------------------------------------------------------------------------------- visits


def visit_all_moments(problem: LocalProblem, carry: RoundCarry, key: Any) -> LocalResult:
    """Every group's moments matched from the same q.

    Args:
        problem: the factors.
        carry: where things stand.
        key: random key.

    Returns:
        Results with a leading group axis; ``local`` the rows' sites after them, where rows have sites.
    """
    q, rule = carry.evaluation.q, carry.evaluation.rule
    keys = jax.random.split(key, problem.num_groups)
    if method_of(problem, False) == "rows":
        found = all_rows(problem, q, carry.sites.local, rule)
        solve = partial(_solve_found, problem, q, rule)
        old = problem.family.symmetrise(found.target.old)
        result = jax.vmap(solve)(dataclasses.replace(found, local=None), old, carry.solver, keys)
        step = result.step[problem.data.chunk_group]
        return result._replace(local=carry.sites.local + found.local * step)

    def solve_group(index, site, state, key):
        factor = group_factor(problem, index)
        return problem.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=True)

    operands = (jnp.arange(problem.num_groups), carry.sites.groups, carry.solver, keys)
    return problem.runtime.map_groups(solve_group, operands, reads_rows=not problem.quadratic)


def visit_group_moments(
    problem: LocalProblem, index: Int[Array, ""], q: Any, site: Any, state: Any, key: Any, rule: Rule, local: Any
) -> tuple[LocalResult, Any]:
    """One group's moments matched from the current q: see :class:`numpyro_pvi.schedules.Problem`."""
    if method_of(problem, False) != "rows":
        factor = group_factor(problem, index)
        result = problem.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=False)
        return result._replace(step=None), local
    moments = problem.family.moments(q)

    def at(level):
        def add(c, carry):
            total, rows = carry
            program, chunk = _with_arrays(problem.program, take(problem.data.chunks, c))
            new = tilted_rows(program, chunk, take(local, c), moments, problem.solver.power, level, problem.num_rules)
            rows = jax.tree.map(lambda x, y: x.at[c].set(y), rows, new.local)
            new = dataclasses.replace(new, local=None)
            spread = jnp.maximum(total.spread, new.spread)
            return dataclasses.replace(jax.tree.map(jnp.add, total, new), spread=spread), rows

        start = jax.eval_shape(lambda: _one_chunk(problem, local, moments, level))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), dataclasses.replace(start, local=None))
        span = problem.data.offsets[index], problem.data.offsets[index + 1]
        total, rows = jax.lax.fori_loop(*span, add, (zero, local * 0.0))
        return dataclasses.replace(total, local=rows)

    found = escalated(at, cheaper_rule(rule), problem.num_rules)
    old = problem.family.symmetrise(found.target.old)
    # q as the groups' own sums have it: the site is what is replaced.
    result = _solve_found(problem, q, rule, dataclasses.replace(found, local=None), old, state, key)
    return result._replace(step=None), local + found.local * result.step


def visit_prior_moments(problem: LocalProblem, q: Any, site: Any, state: Any, key: Any, rule: Rule) -> LocalResult:
    """The prior factor's moments matched from the current q."""
    factor = prior_factor(problem, rule)
    result = problem.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=False)
    return result._replace(step=None)


def _one_chunk(problem: LocalProblem, local: RowSites, moments, level) -> Expected:
    program, chunk = _with_arrays(problem.program, take(problem.data.chunks, 0))
    return tilted_rows(program, chunk, take(local, 0), moments, problem.solver.power, level, problem.num_rules)


def all_rows(problem: LocalProblem, q: Any, local: RowSites, rule: Rule) -> Expected:
    """One pass over all rows: what moment matching asks of each, and its sums by group."""
    moments = problem.family.moments(q)

    def expect(operand, level):
        chunk, rows = operand
        program, arrays = _with_arrays(problem.program, chunk)
        return tilted_rows(program, arrays, rows, moments, problem.solver.power, level, problem.num_rules)

    data = problem.data
    working = problem.program.working_bytes(data.chunks)

    def at(level):
        chunks = (data.chunks, local)
        return problem.runtime.sum_chunks(partial(expect, level=level), chunks, data.chunk_group, data.offsets, working)

    return escalated(at, cheaper_rule(rule), problem.num_rules)


def _solve_found(
    problem: LocalProblem, q: Any, rule: Rule, found: Expected, site: Any, state: Any, key: Any
) -> LocalResult:
    """The solver's answer to moments that a pass over rows has found."""
    factor = MomentFactor(problem.family, lambda *_: _of_rows(found, rule))
    return problem.solver.solve(factor, cavity(q, site), site, state, key, start=None, guarded=True)


def _of_rows(found: Expected, rule: Rule) -> Tilted:
    report, one = found.target, jnp.ones_like(found.value)
    temper, held = jnp.where(report.tempered > 0, 0.5 * one, one), report.held.astype(jnp.int32)
    some = (held == 0) | jnp.any(report.change.precision != 0) | jnp.any(report.change.precision_mean != 0)
    missed = relative_error(found) > rule.tolerance
    return Tilted(report.change, found.value, 0 * one, one * jnp.nan, 0 * one, temper, held, missed, some, some)


# --------------------------------------------------------------------------------------------------------- factors


def group_factor(problem: LocalProblem, index: Int[Array, ""]) -> MomentFactor:
    """One group's factor, its moments over theta as a whole."""
    method, data = method_of(problem, False), problem.data
    if method == "exact":
        chunk = take(data.chunks, index)
        return _exact_factor(problem.family, chunk)

    def total(look: Callable[[Any, Any], Any]) -> Any:
        """A function of the program and a chunk, summed over the group's chunks."""
        if problem.quadratic or data.chunk_group.shape[0] == problem.num_groups:
            return look(problem.program, take(data.chunks, index))
        shapes = jax.eval_shape(lambda: look(problem.program, take(data.chunks, 0)))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(c, sums):
            return jax.tree.map(jnp.add, sums, look(problem.program, take(data.chunks, c)))

        return jax.lax.fori_loop(data.offsets[index], data.offsets[index + 1], add, zero)

    return _pointed_factor(problem, method, total)


def prior_factor(problem: LocalProblem, rule: Rule) -> MomentFactor:
    """The prior factor."""
    method = method_of(problem, True)
    if method != "rows":
        return _pointed_factor(problem, method, lambda look: look(problem.prior_program, problem.data.prior))
    program, chunk = problem.prior_program, problem.data.prior

    def moments_of(q, site, power, key):
        del key
        rows = _coordinate_sites(program, chunk, site)
        moments = problem.family.moments(q)
        found = escalated(
            lambda level: tilted_rows(program, chunk, rows, moments, power, level, problem.num_rules),
            cheaper_rule(rule),
            problem.num_rules,
        )
        return _of_rows(found, rule)

    return MomentFactor(problem.family, moments_of)


def _coordinate_sites(program: AffineProgram, chunk: Any, site: Any) -> RowSites:
    """The prior factor's site by coordinates: a product over them stays one."""
    terms = []
    for (data, mask), _ in zip(chunk, program.terms, strict=True):
        design = jnp.broadcast_to(data.design[0], (mask.shape[-1], program.family.dim))
        if program.family.full:
            square = jnp.einsum("ed,df,ef->e", design, site.precision, design)
            terms.append(((design @ site.precision_mean)[:, None], square[:, None, None]))
        else:
            terms.append((design * site.precision_mean, design**2 * site.precision))
    return RowSites(tuple(terms))


def _exact_factor(family: GaussianFamily, chunk: Expected) -> MomentFactor:
    return MomentFactor(
        family,
        lambda q, site, power, key: exact_tilted(family, chunk.target, chunk.value, q, site, power),
    )


def _pointed_factor(problem: LocalProblem, method: Any, total: Callable) -> MomentFactor:
    family = problem.family

    def moments_of(q, site, power, key):
        dtype = q.precision_mean.dtype
        if method == "grid":
            proposal, cloud = Proposal(q, family.moments(q)), grid_cloud(family.dim, dtype)
        else:
            cloud = normal_cloud(key, family.dim, method.num_draws, dtype)
            proposal = Proposal(q, family.moments(q))
            if isinstance(method, LaplaceMoments):

                def look(point):
                    def of(program, chunk):
                        value, slope = jax.value_and_grad(log_density_at, argnums=2)(program, chunk, point)
                        return value, slope, jax.hessian(log_density_at, argnums=2)(program, chunk, point)

                    return total(of)

                proposal = laplace_proposal(family, look, q, site, power, method.num_steps)
        points = family.draw(proposal.moments, cloud.eps)
        factor = total(lambda program, chunk: log_densities_at(program, chunk, points))
        return from_points(family, cloud, factor, q, site, proposal, power)

    return MomentFactor(family, moments_of)


# ------------------------------------------------------------------------------------------------ start and evidence


def first_row_sites(problem: LocalProblem, at_prior: Any, loc: Float[Array, "D"], mode: str) -> tuple[SiteStack, Rule]:
    """Where the sites of single rows start.

    Args:
        problem: the factors.
        at_prior: the prior as moments.
        loc: its location.
        mode: "prior" (unit sites), or "curvature" and "auto": each row's clipped curvature and gradient at ``loc``.

    Returns:
        Sites, and the quadrature rule to begin with. A row that is not finite there gets the unit site.
    """
    data = problem.data
    point = at_prior._replace(loc=loc, scale=0.0 * at_prior.scale)

    def read(chunk):
        program, arrays = _with_arrays(problem.program, chunk)
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
    problem: LocalProblem, sites: SiteStack, rule: Rule, key: Any
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Power EP's estimate of log p(y) and its Monte Carlo standard error, in nats.

    ``A(eta_q) - A(eta_0) + sum_m (1/alpha) log E_q[(p(y_m | theta) / t_m)^alpha]``, which is DESIGN's formula with the
    cavity's normaliser taken into the expectation, so that a cavity need not be proper.

    Args:
        problem: the factors.
        sites: all sites.
        rule: quadrature rule to start from.
        key: random key.

    Returns:
        ``(value, standard error, missed)``; ``missed`` says that a finer quadrature rule is needed than was compiled in.
    """
    q, power = posterior(problem.prior_natural, sites), problem.solver.power
    group_key, prior_key = jax.random.split(key)
    dtype = rule.tolerance.dtype
    tight = rule._replace(tolerance=jnp.asarray(TOLERANCE[dtype.name], dtype))
    missed = jnp.array(False)
    if method_of(problem, False) == "rows":
        found = all_rows(problem, q, sites.local, tight)
        value, variance = jnp.sum(found.value), jnp.zeros((), dtype)
        missed = relative_error(found) > tight.tolerance
    else:

        def look(index, site, key):
            one = group_factor(problem, index).tilted(q, site, power, key)
            return one.value, one.variance

        keys = jax.random.split(group_key, problem.num_groups)
        operands = (jnp.arange(problem.num_groups), sites.groups, keys)
        values, variances = problem.runtime.map_groups(look, operands, reads_rows=not problem.quadratic)
        value, variance = jnp.sum(values), jnp.sum(variances)
    if problem.has_prior_factor:
        own = prior_factor(problem, tight).tilted(q, sites.prior, power, prior_key)
        value, variance, missed = value + own.value, variance + own.variance, missed | own.missed
    base = jnp.where(jnp.any(problem.data.exact), problem.data.prior_partition, 0.0)
    return problem.family.log_partition(q) - base + value, jnp.sqrt(variance), missed
