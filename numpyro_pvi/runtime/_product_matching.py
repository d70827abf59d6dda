"""Rounds that match moments of products of families, and the evidence that goes with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..expectations import MCMCMoments, Unconstrained, no_chains, with_settings
from ..schedules import Asked, RoundReport, asked_by_move
from ..sites import SiteStack, late_share, posterior, take, tied_site
from ..solvers import MatchState
from ._chains import lanes_pay
from ._product_moment_choice import SAMPLED_WAYS
from ._product_plan import touched
from ._product_problem import Objective, ProductProblem
from ._product_rounds import ProductMemory, Round, Settings, report_of, with_progress, with_turn
from ._product_row_factors import RowFactors, first_row_matches, rows_in_turn, rows_together, tilted_of
from ._product_sweeps import MatchStates, Outcome, in_turn, together
from ._product_tilted import ProductTilted


def first_match_states(problem: ProductProblem, solver: Any, dtype: Any) -> MatchStates:
    """The memory of factors that nobody has visited.

    Args:
        problem: of the groups; its plan says how moments are taken.
        solver: the solver.
        dtype: floating dtype.

    Returns:
        The memory.
    """
    plan = problem.plan

    def first(who: Any, factor: Any, method: str, count: int) -> MatchState:
        chains, settings = None, with_settings(solver.moments)
        if method == "mcmc":
            assert isinstance(settings, MCMCMoments)  # the plan says so
            chains = no_chains(settings, Unconstrained(touched(plan.family, factor)).dim, dtype, True)
        return who.init_families(jax.tree.map(jnp.zeros_like, problem.prior), dtype, chains, count)

    if solver.factors == "row":
        groups: Any = first_row_matches(problem, solver, dtype)
    else:
        one = first(solver, plan.likelihood, plan.tilted[0], problem.num_groups)
        groups = jax.tree.map(lambda x: jnp.broadcast_to(x, (problem.num_groups, *jnp.shape(x))), one)
    prior = plan.prior_factor
    return MatchStates(groups, None if prior is None else first(solver.for_prior, prior, plan.tilted[1], 1))


class Matched(NamedTuple):
    """The outcome of :func:`matching_round`."""

    round: Round
    states: MatchStates


def matching_round(
    problem: ProductProblem,
    sites: SiteStack,
    states: MatchStates,
    before: Objective,
    memory: ProductMemory,
    last: RoundReport,
    settings: Settings,
    solver: Any,
    key: Any,
    noise: Any,
) -> Matched:
    """Match every factor's tilted moments; what is asked for is taken as far as q stays normalisable.

    Neither the ELBO nor the evidence has to rise. Where moments are by draws, steps are c / (c + k) of full ones after k rounds in
    which q turned back, as in natural-gradient rounds.

    Args:
        problem: the factors.
        sites: before the round.
        states: what factors remember.
        before: the ELBO at the sites.
        memory: the schedule's.
        last: the last round's report.
        settings: how far, in which order.
        solver: whose ``power``, ``moments`` and ``damping`` count.
        key: for the order.
        noise: key of this round's draws.

    Returns:
        Sites after the round, and the memories.
    """
    sampled = not SAMPLED_WAYS.isdisjoint(problem.plan.tilted)
    late = late_share(memory.turns, before.elbo.dtype) if sampled else 1.0
    share = jnp.asarray(settings.damping * late, before.elbo.dtype)
    visits, swept, step = _sweep(tilted_of(problem, solver, noise), sites, states, settings, share, key)
    taken, old = swept.sites, posterior(problem.prior, sites)
    q = posterior(problem.prior, taken)
    memory = with_turn(problem.family, memory, q, q - old) if sampled else memory
    # Of draws the engine takes the ELBO again, on the next round's.
    found = before if problem.plan.noisy else problem.objective(taken, noise)
    report = report_of(problem, sites, taken, q, old, swept, step, jnp.int32(0), last)
    steps = visits.groups.step
    if visits.prior is not None:
        steps = jnp.concatenate([visits.prior.step[None], steps])
    report = report._replace(step=jnp.where(swept.skipped, 0.0, step * steps).astype(report.move.dtype))
    asked = _asked(problem, states, visits, q, report, last)
    report = with_progress(problem, report, last, q - old, q, asked, step > 0, found.elbo, late)
    new = MatchStates(visits.groups.state, None if visits.prior is None else visits.prior.state)
    return Matched(Round(taken, found, ProductMemory(memory.step, memory.turns, memory.last), report), new)


def _asked(
    problem: ProductProblem, before: MatchStates, visits: Any, q: Any, report: RoundReport, last: RoundReport
) -> Asked:
    """What the visits asked for: the change that every factor remembers, or the moves undone by the steps that were taken."""
    del before
    states = visits.groups.state
    if not isinstance(states, MatchState):
        return asked_by_move(report.move, report.total_move, report.step, jnp.all(report.step > 0), last)
    own = jax.vmap(lambda change: problem.size(q, change))(states.last)
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0), states.last)
    if visits.prior is not None:
        own = jnp.concatenate([problem.size(q, visits.prior.state.last)[None], own])
        total = total + visits.prior.state.last
    return Asked(own, problem.size(q, total))


def _sweep(
    tilted: ProductTilted, sites: SiteStack, states: MatchStates, settings: Settings, share: Any, key: Any
) -> Outcome:
    if isinstance(tilted.problem, RowFactors):
        if settings.sequential:
            return rows_in_turn(tilted, sites, states, settings, share, key)
        return rows_together(tilted, sites, states, share)
    if settings.sequential:
        return in_turn(tilted, sites, states, settings, share, key)
    return together(tilted, sites, states, share, _lanes(tilted))


def _lanes(tilted: ProductTilted) -> int | None:
    """Groups whose chains run side by side: all of them where that pays."""
    problem = tilted.problem
    alike = problem.packing.chunk_group.shape[0] == problem.num_groups
    pays = problem.together and alike and lanes_pay(problem.plan.partition.chunk_rows)
    return problem.num_groups if tilted.methods[0] == "mcmc" and pays else None


def product_evidence(
    problem: ProductProblem, sites: SiteStack, states: MatchStates, solver: Any, key: Any
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Power EP's estimate of log p(y) and its Monte Carlo standard error, in nats.

    ``A(eta_q) - A(eta_0) + sum_m (1/alpha) log E_q[(p(y_m | theta) / t_m)^alpha]``, where A of the prior counts the components
    whose prior is held exactly; see :func:`numpyro_pvi.runtime._moments.evidence`, also for tied sites and anchors.

    Args:
        problem: the factors.
        sites: all sites.
        states: what factors remember.
        solver: whose ``factors``, ``power`` and ``moments`` count.
        key: of draws.

    Returns:
        ``(value, standard error, False)``: no finer rule is ever needed.
    """
    q, tilted, family = posterior(problem.prior, sites), tilted_of(problem, solver, key), problem.family
    shared, factors, own = tilted.shared(q), tilted.problem, sites.groups
    if isinstance(factors, RowFactors):
        own = factors.site_of_rows(own, states.groups.sites)

    def look(operands: tuple) -> tuple[Array, Array]:
        index, state, chains = operands
        at, power = solver.vantage(state, q)
        site = tied_site(own, factors.num_groups) if problem.plan.tied else take(own, index)
        found = tilted.group(index, at, site, tilted.fresh(index, at, shared), chains, power)
        return found.value, found.variance

    chains, anchored = getattr(states.groups, "chains", None), states.groups if solver.anchored else ()
    values, variances = jax.lax.map(look, (jnp.arange(factors.num_groups), anchored, chains))
    value, variance = jnp.sum(values), jnp.sum(variances)
    if sites.prior is not None:
        at, power = solver.for_prior.vantage(states.prior, q)
        own = tilted.prior(at, sites.prior, getattr(states.prior, "chains", None), power)
        value, variance = value + own.value, variance + own.variance
    exact = [f.log_partition(problem.prior.parts[n]) for n, f in family.components if n in problem.plan.exact]
    base = sum((jnp.asarray(x) for x in exact), start=jnp.zeros(()))
    return family.log_partition(q) - base + value, jnp.sqrt(variance), jnp.array(False)
