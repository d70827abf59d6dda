"""Factors as solvers that match moments see them: which moments fit, and how they are taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._derivatives import hessian_of, value_and_grad
from ..errors import PVIError
from ..expectations import (
    GRID_DIM,
    SAMPLED,
    AffineProgram,
    Expected,
    LaplaceMoments,
    MCMCMoments,
    Proposal,
    SharedAffineProgram,
    Tilted,
    exact_tilted,
    from_points,
    grid_cloud,
    log_densities_at,
    log_density_at,
    normal_cloud,
    tilted_rows,
    with_settings,
)
from ..families import GaussianFamily, GaussianNatural
from ..schedules import Rule
from ..sites import RowSites, take
from ._chains import chained_moments, group_total
from ._factors import Factors
from ._laplace import laplace_proposal
from ._rules import cheaper_rule, escalated, relative_error

# A latent's own value, as the predictor of a term.
_OWN = "value"


@dataclasses.dataclass(frozen=True)
class MomentFactor:
    """One factor as a solver that matches moments sees it."""

    family: GaussianFamily
    take_moments: Callable[..., Tilted]

    def tilted(self, q: Any, site: Any, power: float | Float[Array, ""], key: Any, memory: Any = None) -> Tilted:
        """See :meth:`numpyro_pvi.solvers.TiltedFactor.tilted`."""
        return self.take_moments(q, site, power, key, memory)


def method_of(problem: Any, prior: bool) -> Any:
    """How a factor's tilted moments are taken.

    Args:
        problem: the factors.
        prior: whether of the prior factor, else of the likelihood.

    Returns:
        "exact", "rows" (each with its own site), "row" (one a group, under any site), "grid", or settings of sampled moments.

    Raises:
        PVIError: when forced moments do not fit.
    """
    wanted = with_settings(problem.solver.moments)
    program, dim = problem.prior_program if prior else problem.program, problem.family.dim
    if not isinstance(wanted, str):
        if wanted.num_draws < 4 * dim:
            name = "num_samples" if isinstance(wanted, MCMCMoments) else "num_draws"
            raise PVIError(
                f"{wanted!r} is too few draws for {dim} latents: the moments of q need at least {4 * dim}. Pass "
                f"{type(wanted).__name__}({name}={max(1024, 8 * dim)})."
            )
        if prior and isinstance(wanted, MCMCMoments) and _own_values(program):
            # No rows, and one-dimensional integrals: quadrature is cheaper than a chain, and exact.
            return "rows"
        return wanted
    if not prior and problem.quadratic and wanted in ("auto", "exact", "quadrature"):
        return "exact"
    if prior and _own_values(program):
        return "rows"
    if not prior and _single_rows(problem):
        return "row" if problem.solver.whole_sites else "rows"
    if dim <= GRID_DIM:
        return "grid"
    if wanted == "quadrature" and not prior:
        raise PVIError(
            f"{type(problem.solver).__name__}(moments='quadrature') takes a group's moments over at most {GRID_DIM} latents, here "
            f"are {dim}: use PowerEP(factors='row') where rows have affine predictors, or moments='importance'."
        )
    return with_settings("importance")


@runtime_checkable
class Matching(Protocol):
    """What moments are taken by, of any solver that matches them."""

    @property
    def power(self) -> float:
        """Alpha."""
        ...

    @property
    def factors(self) -> str:
        """Granularity: "group" or "row"."""
        ...


def settings_of(problem: Factors) -> Matching:
    """The solver's settings, of whatever class it is."""
    return cast(Any, problem.solver)


def keeps_rows(problem: Factors) -> bool:
    """Whether sites of single rows are kept beside the groups' sites."""
    return problem.solver.matches_moments and method_of(problem, False) == "rows"


def refuse_rows(schedule: Any) -> None:
    """Raise where a schedule does not carry the sites of single rows from visit to visit.

    Raises:
        PVIError: naming the schedules that do.
    """
    if not schedule.carries_rows:
        raise PVIError(
            f"{type(schedule).__name__} does not carry the sites of single rows (PowerEP(factors='row'), or groups of one row): "
            "use Sequential() or Synchronous(), or factors='group' with moments='importance'."
        )


def refuse_arrivals(problem: Factors) -> None:
    """Raise where rows that come to a state would have sites of their own: a group's site does not say what its rows' are.

    Raises:
        PVIError: naming what to use.
    """
    if keeps_rows(problem):
        raise PVIError(
            "add_group and revisit are not possible where single rows have sites (PowerEP(factors='row'), or groups of one row): a "
            "state keeps the sum of an absent group's row sites only. Use factors='group' with moments='importance', or fit all "
            "rows afresh."
        )


def is_sampled(problem: Factors) -> bool:
    """Whether any factor's moments are by draws."""
    methods = [method_of(problem, prior) for prior in (False, True) if not prior or problem.has_prior_factor]
    return any(isinstance(m, SAMPLED) for m in methods)


def _single_rows(problem: Factors) -> bool:
    if not isinstance(problem.program, AffineProgram | SharedAffineProgram):
        return False
    # Rows know q alone: where the tilted distribution is anchored elsewhere, it is taken over theta.
    if problem.solver.anchored:
        return False
    if settings_of(problem).factors == "row":
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


def with_arrays(program: Any, chunk: Any) -> tuple[AffineProgram, Any]:
    """The program of one chunk and its arrays, masked where all chunks share them."""
    if isinstance(program, SharedAffineProgram):
        return program.program, program.program.mask(program.data, program.masks(chunk))
    return program, chunk


def of_rows(found: Expected, rule: Rule) -> Tilted:
    """What a visit to all rows of a group says of the group: the sum of its rows' changes, and what befell any of them.

    Args:
        found: the rows' reports and values, summed over the group.
        rule: says which quadrature error counts as missed.

    Returns:
        The group's tilted moments as a change of its site in natural space; evidence and noise are those of no group as a
        whole, and are zero, or NaN for the effective sample size.
    """
    report, one = found.target, jnp.ones_like(found.value)
    temper, held = jnp.where(report.tempered > 0, 0.5 * one, one), report.held.astype(jnp.int32)
    some = (held == 0) | jnp.any(report.change.precision != 0) | jnp.any(report.change.precision_mean != 0)
    missed = relative_error(found) > rule.tolerance
    return Tilted(report.change, found.value, 0 * one, one * jnp.nan, 0 * one, temper, held, missed, some, some)


def group_factor(problem: Factors, index: Int[Array, ""], looked: Callable | None = None) -> MomentFactor:
    """One group's factor, its moments over theta as a whole; ``looked`` takes them where it has been evaluated already."""
    method, data = method_of(problem, False), problem.data
    if method == "exact":
        chunk = take(data.chunks, index)
        return _exact_factor(problem.family, chunk)

    total = group_total(problem, index)
    if isinstance(method, MCMCMoments):
        return MomentFactor(problem.family, chained_moments(problem, total, None, index))
    factor = _pointed_factor(problem, method, total) if looked is None else MomentFactor(problem.family, looked)
    if problem.chained and method == with_settings("importance"):
        return MomentFactor(problem.family, chained_moments(problem, total, factor.take_moments))
    return factor


def prior_factor(problem: Factors, rule: Rule) -> MomentFactor:
    """The prior factor."""
    method = method_of(problem, True)
    program, chunk = problem.prior_program, problem.data.prior
    if isinstance(method, MCMCMoments):
        return MomentFactor(problem.family, chained_moments(problem, lambda look: look(program, chunk), None))
    if method != "rows":
        return _pointed_factor(problem, method, lambda look: look(program, chunk))

    def moments_of(q, site, power, key, memory=None):
        del key, memory
        rows = coordinate_sites(program, chunk, site)
        moments = problem.family.moments(q)
        found = escalated(
            lambda level: tilted_rows(program, chunk, rows, moments, power, level, problem.num_rules),
            cheaper_rule(rule),
            problem.num_rules,
        )
        return of_rows(found, rule)

    return MomentFactor(problem.family, moments_of)


def coordinate_sites(program: AffineProgram, chunk: Any, site: Any) -> RowSites:
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


def own_coordinates(problem: Factors, site: GaussianNatural) -> GaussianNatural:
    """The part of the prior factor's site that is a product over the coordinates that it has terms of."""
    family, covered = problem.family, jnp.zeros((problem.family.dim,), bool)
    for data, _ in problem.data.prior:
        covered |= jnp.any(jnp.atleast_2d(data.design[0]) != 0, axis=0)
    diagonal = jnp.where(covered, family.precision_diagonal(site), 0.0)
    return family.natural(jnp.where(covered, site.precision_mean, 0.0), jnp.diag(diagonal) if family.full else diagonal)


def _exact_factor(family: GaussianFamily, chunk: Expected) -> MomentFactor:
    return MomentFactor(
        family,
        lambda q, site, power, key, memory=None: exact_tilted(family, chunk.target, chunk.value, q, site, power),
    )


def _pointed_factor(problem: Factors, method: Any, total: Callable) -> MomentFactor:
    family = problem.family

    def moments_of(q, site, power, key, memory=None):
        del memory
        dtype = q.precision_mean.dtype
        if method == "grid":
            proposal, cloud = Proposal(q, family.moments(q)), grid_cloud(family.dim, dtype)
        else:
            cloud = normal_cloud(key, family.dim, method.num_draws, dtype)
            proposal = Proposal(q, family.moments(q))
            if isinstance(method, LaplaceMoments):

                def look(point):
                    def of(program, chunk):
                        value, slope = value_and_grad(log_density_at, argnums=2)(program, chunk, point)
                        return value, slope, hessian_of(log_density_at, argnums=2)(program, chunk, point)

                    return total(of)

                proposal = laplace_proposal(family, look, q, site, power, method.num_steps)
        points = family.draw(proposal.moments, cloud.eps)
        factor = total(lambda program, chunk: log_densities_at(program, chunk, points))
        return from_points(family, cloud, factor, q, site, proposal, power)

    return MomentFactor(family, moments_of)
