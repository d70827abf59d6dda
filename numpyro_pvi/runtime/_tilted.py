"""Factors as solvers that match moments see them: which moments fit, and how they are taken, by weights or chains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._numerics import all_finite, hessian_of, value_and_grad
from ..errors import PVIError
from ..expectations import (
    GRID_DIM,
    SAMPLED,
    AffineProgram,
    Chains,
    Expected,
    LaplaceMoments,
    MCMCMoments,
    PointCloud,
    Proposal,
    SharedAffineProgram,
    Tilted,
    chain_settings,
    exact_tilted,
    from_chains,
    from_points,
    grid_cloud,
    log_densities_at,
    log_density_at,
    no_chains,
    normal_cloud,
    row_sites_zero,
    tilted_rows,
    with_settings,
)
from ..factors import Packing
from ..families import GaussianFamily, GaussianNatural
from ..schedules import Rule
from ..sites import RowSites, cavity, select, take
from ..solvers import LocalSolver, MatchRules, match_rules, matched
from ._base import sum_span
from ._factors import Factors, GroupRows
from ._refinement import cheaper_rule, escalated, relative_error

# --------------------------------------------------------------------------------------------- the Gaussian at the mode
# The Gaussian at a tilted distribution's mode.

# Step of Newton's search, in sds of q, below which it has arrived; halvings of a step.
_ARRIVED = 1e-3
_HALVINGS = 12


def laplace_proposal(
    family: GaussianFamily,
    look: Callable[[Float[Array, "D"]], tuple],
    q: Any,
    site: Any,
    power: float | Float[Array, ""],
    num_steps: int,
) -> Proposal:
    """Search the mode of ``q (p / t)^power`` by Newton's method, and take the curvature there.

    ``look``: a point to value, gradient and Hessian of the factor's log density; ``power``: alpha. Returns the Gaussian of the
    last point's curvature (q's own precision where that is not positive definite); q itself where the factor is not finite.
    """
    rest, own = cavity(q, site, power), family.moments(q)
    sd = family.sds(own)

    def at(point):
        value, slope, bend = look(point)
        curvature = -bend if family.full else -jnp.diagonal(bend)
        image = family.precision_product(rest, point)
        total = power * value + point @ (rest.precision_mean - 0.5 * image)
        slope = power * slope + rest.precision_mean - image
        precision = rest.precision + power * 0.5 * (curvature + curvature.T)
        proper = family.in_domain(family.natural(slope, precision))
        precision = select(proper, precision, q.precision)
        gaussian = family.natural(family.precision_product(family.natural(slope, precision), point) + slope, precision)
        return total, family.moments(gaussian).loc, precision

    def unfinished(carry):
        _, count, (_, aim, _), gain = carry
        return (count < num_steps) & (gain > _ARRIVED) & all_finite(aim)

    def step(carry):
        point, count, (total, aim, precision), _ = carry

        def worse(state):
            share, (now, *_), tries = state
            return ~(now >= total - 1e-6 * jnp.abs(total)) & (tries < _HALVINGS)

        def shorten(state):
            share, _, tries = state
            return 0.5 * share, at(point + 0.5 * share * (aim - point)), tries + 1

        first = jnp.ones((), point.dtype), at(aim), jnp.int32(0)
        share, found, tries = jax.lax.while_loop(worse, shorten, first)
        moved = share * (aim - point)
        good = tries < _HALVINGS
        kept = jax.tree.map(
            lambda a, b: jnp.where(good, a, b), (point + moved, found), (point, (total, aim, precision))
        )
        gain = jnp.where(good, jnp.max(jnp.abs(moved) / sd), 0.0)
        return kept[0], count + 1, kept[1], gain

    start = own.loc, jnp.int32(0), at(own.loc), jnp.asarray(jnp.inf, own.loc.dtype)
    point, _, (_, _, precision), _ = jax.lax.while_loop(unfinished, step, start)
    vector = family.precision_product(family.natural(point, precision), point)
    natural = family.natural(vector, precision)
    natural = select(family.in_domain(natural), natural, q)
    return Proposal(natural, family.moments(natural))


# --------------------------------------------------------------------------------------------------------------- chains
# Factors whose tilted moments are taken by Markov chains: which groups run side by side, and when weights give way to
# chains.

# Rows of a group up to which lanes pay on a CPU: beyond, arithmetic fills it, and lanes that wait for one another waste it
# (draws a second side by side over in turn: 2.7 times at 50 rows, 0.9 at 500, 0.8 at 3,000).
_LANE_ROWS = 256
# Groups run side by side while filling each up to the largest costs at most half of the rows.
_LARGEST_FILL = 1.5


def by_chains(solver: LocalSolver) -> bool:
    """Whether a solver's moments are taken by chains from the start."""
    return solver.matches_moments and isinstance(with_settings(solver.moments), MCMCMoments)


def chains_wanted(solver: LocalSolver, state: Any) -> Bool[Array, ""] | bool:
    """Whether some group's weights have collapsed so often that chains should be compiled in.

    ``solver``: the groups' solver; ``state``: the groups' solver states. Returns False where there are chains already, or none
    were allowed.
    """
    found = matched(state)
    return False if solver.moments != "auto" or found is None else found.wants_chains


def with_chains(solver: LocalSolver, state: Any, dim: int, dtype: Any, used: bool = False) -> Any:
    """Solver states with room for chains that have not started.

    ``solver``: the groups' solver; ``state``: solver states, one or stacked; ``dim``: D; ``dtype``: floating dtype; ``used``:
    whether moments are taken by them. Returns the states; as they are where they have chains or can have none.
    """
    settings, found = chain_settings(solver.moments), matched(state)
    if settings is None or found is None or not found.takes_chains:
        return state
    fresh = no_chains(settings, dim, dtype, used)
    batch = state.collapses.shape
    return state._replace(chains=jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), fresh))


def most_chunks(sizes: tuple[int, ...], packing: Any) -> int:
    """Chunks of the largest group, or 0 where sizes are not known beforehand."""
    if not isinstance(packing, Packing) or not any(sizes):
        return 0
    return max(-(-size // packing.rows.shape[1]) for size in sizes)


def lanes_pay(rows: int) -> bool:
    """Whether chains of groups of up to so many rows are faster side by side than in turn, on the default device."""
    return rows <= _LANE_ROWS or jax.default_backend() != "cpu"


def side_by_side(problem: Factors) -> bool:
    """Whether chains of all groups run in one vectorised program, each group filled up to the largest."""
    count, chunks = problem.num_groups, problem.data.chunk_group.shape[0]
    if not by_chains(problem.solver) or not lanes_pay(problem.longest):
        return False
    return count == chunks or 0 < count * problem.most_chunks <= _LARGEST_FILL * chunks


def group_total(problem: Factors, index: Int[Array, ""]) -> Callable[[Callable], Any]:
    """How to sum a function of the program and a chunk over one group's chunks.

    Returns ``total(look)``; the chunks are picked once, outside of whatever loop calls it, where groups run side by side.
    """
    data, program = problem.data, problem.program
    chunks = data.chunk_group.shape[0]
    first, last = problem.span(index)
    if problem.quadratic or chunks == problem.num_groups:
        own, here = take(data.chunks, first), problem.passes.holds(data.offsets, index, problem.held)
        return lambda look: problem.passes.total(look(program, own), here)
    if side_by_side(problem):
        places = first + jnp.arange(problem.most_chunks)
        mine = places < last
        # Filled up with the group's first chunk, whose numbers are finite wherever the group's are.
        picked = take(data.chunks, jnp.where(mine, places, first))

        def add_up(look: Callable) -> Any:
            found = jax.vmap(lambda chunk: look(program, chunk))(picked)
            kept = select(mine, found, jax.tree.map(jnp.zeros_like, found))
            return problem.runtime.total(jax.tree.map(lambda x: jnp.sum(x, axis=0), kept))

        return add_up

    return lambda look: problem.runtime.total(sum_span(partial(look, program), data.chunks, first, last))


def chained_moments(
    problem: Factors, total: Callable, by_weights: Callable | None, index: Int[Array, ""] | None = None
) -> Callable[[Any, Any, float, Any, Chains | None], Tilted]:
    """Moments by chains, or by weights until a factor's memory says otherwise.

    ``total``: sums a function of the program and a chunk over the factor's chunks; ``by_weights``: the way to take moments that
    chains stand in for; None where there are chains only; ``index``: the group whose rows chains may read in mini-batches; None
    for a factor without rows. Returns a function of q, site, power, key and memory.
    """
    settings, look, look_rows = chain_settings(problem.solver.moments), _derivatives_of(total, 1), None
    assert settings is not None
    if settings.batch_size is not None and index is not None and problem.rows is not None:
        look_rows = partial(_batch_gradients, problem.rows, index, settings.batch_size // 2)

    def moments_of(q, site, power, key, memory=None):
        def run():
            return from_chains(problem.family, look, q, site, power, key, settings, memory, look_rows)

        if by_weights is None:
            return run()
        return by_either(memory, run, partial(by_weights, q, site, power, key))

    return moments_of


def by_either(memory: Chains | None, run: Callable[[], Tilted], weighed: Callable[[], Tilted]) -> Tilted:
    """Moments by weights, and by chains where a factor's memory says that these have given way."""
    if memory is None:
        return weighed()
    return jax.lax.cond(memory.used, run, lambda: weighed()._replace(memory=memory))


def derivatives(density: Callable, point: Float[Array, "D"], order: int) -> tuple:
    """Value and gradient, and the Hessian for order 2."""
    found = value_and_grad(density)(point)
    return found if order == 1 else (*found, hessian_of(density)(point))


def _derivatives_of(total: Callable, order: int) -> Callable[[Float[Array, "D"]], tuple]:
    """Of a factor's log density at a point."""
    return lambda point: total(lambda *own: derivatives(partial(log_density_at, *own), point, order))


def _batch_gradients(
    rows: GroupRows, index: Int[Array, ""], half: int, point: Float[Array, "D"], other: Float[Array, "D"], key: Any
) -> Float[Array, "2 D"]:
    """The difference of a group's gradients at two points, from each of two independent halves of a mini-batch."""
    count = rows.num_rows(index)
    taken = jax.random.randint(key, (2, half), 0, count)

    def one(some):
        at = rows.derivatives(index, jnp.stack([point, other]), some, False).gradient
        return (at[0] - at[1]) * (count / half)

    return jax.vmap(one)(taken)


# --------------------------------------------------------------------------------------------------------------- tilted

# A latent's own value, as the predictor of a term.
_OWN = "value"


@dataclasses.dataclass(frozen=True)
class MomentFactor:
    """One factor as a solver that matches moments sees it: see :class:`numpyro_pvi.solvers.TiltedFactor`."""

    family: Any
    rules: MatchRules
    take_moments: Callable[..., Tilted]

    def tilted(self, q: Any, site: Any, power: float | Float[Array, ""], key: Any, memory: Any = None) -> Tilted:
        """See :meth:`numpyro_pvi.solvers.TiltedFactor.tilted`."""
        return self.take_moments(q, site, power, key, memory)


def factor_of(problem: Any, take_moments: Callable[..., Tilted]) -> MomentFactor:
    """A factor whose moments are taken in this way, of a function of q, site, power, key and memory."""
    solver, family = problem.solver, problem.family
    return MomentFactor(family, match_rules(solver, family.dim, solver.moments == "auto"), take_moments)


def method_of(problem: Any, prior: bool) -> Any:
    """How a factor's tilted moments are taken.

    ``prior``: whether of the prior factor, else of the likelihood. Returns "exact", "rows" (each with its own site), "row" (one
    a group, under any site), "grid", or settings of sampled moments. Raises PVIError when forced moments do not fit.
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


def keeps_rows(problem: Factors) -> bool:
    """Whether sites of single rows are kept beside the groups' sites."""
    return problem.solver.matches_moments and method_of(problem, False) == "rows"


def refuse_rows(schedule: Any) -> None:
    """Raise where a schedule does not carry the sites of single rows from visit to visit.

    Raises PVIError naming the schedules that do.
    """
    if not schedule.carries_rows:
        raise PVIError(
            f"{type(schedule).__name__} does not carry the sites of single rows (PowerEP(factors='row'), or groups of one row): "
            "use Sequential() or Synchronous(), or factors='group' with moments='importance'."
        )


def refuse_arrivals(problem: Factors) -> None:
    """Raise where rows that come to a state would have sites of their own: a group's site does not say what its rows' are.

    Raises PVIError naming what to use.
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
    if problem.solver.factors == "row":
        return True
    # One element a group: its tilted distribution differs from the cavity in one predictor only.
    if not isinstance(problem.program, AffineProgram) or len(problem.program.terms) != 1:
        return False
    return problem.one_chunk_each and problem.data.chunks[0][1].shape[1:] == (1,)


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

    ``found``: the rows' reports and values, summed over the group; ``rule``: says which quadrature error counts as missed.
    Returns the group's tilted moments as a change of its site in natural space; evidence and noise are those of no group as a
    whole, and are zero, or NaN for the effective sample size.
    """
    report, one = found.target, jnp.ones_like(found.value)
    temper, held = jnp.where(report.tempered > 0, 0.5 * one, one), report.held.astype(jnp.int32)
    some = (held == 0) | jnp.any(report.change.precision != 0) | jnp.any(report.change.precision_mean != 0)
    missed = relative_error(found) > rule.tolerance
    return Tilted(report.change, found.value, 0 * one, one * jnp.nan, 0 * one, temper, held, missed, some, some)


def _by_rows(
    problem: Factors, program: AffineProgram, chunk: Any, rows: RowSites, q: Any, power: Any, rule: Rule
) -> Tilted:
    """What a visit to all rows of a chunk says of a factor that has no others; ``q``: moments."""
    found = escalated(
        lambda level: tilted_rows(program, chunk, rows, q, power, level, problem.num_rules),
        cheaper_rule(rule),
        problem.num_rules,
    )
    return of_rows(found, rule)


def group_factor(problem: Factors, index: Int[Array, ""], looked: Callable | None = None) -> MomentFactor:
    """One group's factor, its moments over theta as a whole; ``looked`` takes them where it has been evaluated already."""
    method, data = method_of(problem, False), problem.data
    if method == "exact":
        own, family = take(data.chunks, index), problem.family
        fixed = family, own.target, own.constant
        return factor_of(problem, lambda q, site, power, *_: exact_tilted(*fixed, q, site, power))

    total = group_total(problem, index)
    if isinstance(method, MCMCMoments):
        return factor_of(problem, chained_moments(problem, total, None, index))
    looked = _pointed_moments(problem, method, total) if looked is None else looked
    if problem.chained and method == with_settings("importance"):
        looked = chained_moments(problem, total, looked)
    return factor_of(problem, looked)


def prior_factor(problem: Factors, rule: Rule) -> MomentFactor:
    """The prior factor."""
    method = method_of(problem, True)
    program, chunk = problem.prior_program, problem.data.prior
    if isinstance(method, MCMCMoments):
        return factor_of(problem, chained_moments(problem, lambda look: look(program, chunk), None))
    if method != "rows":
        return factor_of(problem, _pointed_moments(problem, method, lambda look: look(program, chunk)))

    def moments_of(q, site, power, key, memory=None):
        return _by_rows(
            problem, program, chunk, coordinate_sites(program, chunk, site), problem.family.moments(q), power, rule
        )

    return factor_of(problem, moments_of)


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


def _pointed_moments(problem: Factors, method: Any, total: Callable) -> Callable[..., Tilted]:
    """Moments from points at which ``total`` sums the factor: a grid's, or weighted draws."""
    family = problem.family

    def moments_of(q, site, power, key, memory=None):
        cloud, proposal = cloud_of(family, method, key, q.precision_mean.dtype), Proposal(q, family.moments(q))
        if isinstance(method, LaplaceMoments):
            look = _derivatives_of(total, 2)
            proposal = laplace_proposal(family, look, q, site, power, method.num_steps)
        points = family.draw(proposal.moments, cloud.eps)
        factor = total(lambda program, chunk: log_densities_at(program, chunk, points))
        return from_points(family, cloud, factor, q, site, proposal, power)

    return moments_of


def cloud_of(family: GaussianFamily, method: Any, key: Any, dtype: Any) -> PointCloud:
    """Points that moments are taken from: a grid's, or as many draws as the settings say."""
    if method == "grid":
        return grid_cloud(family.dim, dtype)
    return normal_cloud(key, family.dim, method.num_draws, dtype)


# ----------------------------------------------------------------------------------------------- groups of a single row
# Factors whose site is a group's as a whole: a group of a single row by quadrature, whatever its site.


def whole_factor(problem: Factors, index: Int[Array, ""], rule: Rule, looked: Callable | None = None) -> MomentFactor:
    """One group's factor, for a site that is any member of the family.

    Of a single row with affine predictors moments are integrals over these. The cavity takes the place of q, and a unit site
    that of the row's: ``q (p / t)^alpha = cavity p^alpha``. ``rule``: quadrature rule to start from, and the error aimed at;
    ``looked``: how moments are taken from points at which the factor has been evaluated already, or None. Returns the factor;
    its tilted distribution counts as invalid where the cavity is not normalisable.
    """
    if method_of(problem, False) != "row":
        return group_factor(problem, index, looked)
    family = problem.family
    here = problem.runtime.holds(problem.data.offsets, index, problem.held)
    program, chunk = with_arrays(problem.program, take(problem.data.chunks, problem.span(index)[0]))

    def moments_of(q, site, power, key, memory):
        rest = cavity(q, site, power)
        moments, unit = family.moments(rest), row_sites_zero(program, chunk, q.precision_mean.dtype)
        tilted = problem.runtime.total(_by_rows(problem, program, chunk, unit, moments, power, rule), here)
        shift = (family.log_partition(rest) - family.log_partition(q)) / power
        usable = tilted.valid & moments.valid
        return tilted._replace(change=tilted.change - site, value=tilted.value + shift, valid=usable)

    return factor_of(problem, moments_of)
