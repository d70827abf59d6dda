"""Rounds that match moments of products of families, and the evidence that goes with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..schedules import RoundReport
from ..sites import MAX_HALVINGS, SiteStack, back_off, damp, posterior, select, take
from ..solvers import LocalResult, MatchState, first_match_state, match_visit
from ._product_problem import Objective, ProductProblem
from ._product_rounds import LATE, ProductMemory, Round, Settings, Swept, report_of
from ._product_tilted import ProductTilted


class MatchStates(NamedTuple):
    """What the groups and the prior factor remember of their visits; None without a prior factor."""

    groups: MatchState
    prior: MatchState | None


def first_match_states(plan: Any, prior: Any, solver: Any, dtype: Any) -> MatchStates:
    """The memory of factors that nobody has visited.

    Args:
        plan: the plan.
        prior: natural parameters of the exactly held prior, for shapes.
        solver: the solver.
        dtype: floating dtype.

    Returns:
        The memory.
    """
    one = first_match_state(jax.tree.map(jnp.zeros_like, prior), float(solver.damping), dtype)
    count = len(plan.partition.table.labels)
    groups = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), one)
    return MatchStates(groups, None if plan.prior_factor is None else one)


class Matched(NamedTuple):
    """The outcome of :func:`matching_round`."""

    round: Round
    states: MatchStates


class _Visits(NamedTuple):
    groups: LocalResult
    prior: LocalResult | None


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
    sampled = "importance" in problem.plan.tilted
    late = LATE / (LATE + memory.turns) if sampled else 1.0
    share = jnp.asarray(settings.damping * late, before.elbo.dtype)
    tilted = ProductTilted(problem, solver, noise)
    run = _in_turn if settings.sequential else _together
    visits, swept, step = run(tilted, sites, states, settings, share, key)
    taken, old = swept.sites, posterior(problem.prior, sites)
    q = posterior(problem.prior, taken)
    turns, moved = memory.turns, memory.last
    if sampled:
        moved = q - old
        turned = problem.family.inner(moved, problem.family.fisher_product(q, memory.last)) < 0
        turns = turns + turned
    # Of draws the engine takes the ELBO again, on the next round's.
    found = before if problem.plan.noisy else problem.objective(taken, noise)
    report = report_of(problem, sites, taken, q, old, swept, step, jnp.int32(0), last)
    steps = visits.groups.step
    if visits.prior is not None:
        steps = jnp.concatenate([visits.prior.step[None], steps])
    report = report._replace(step=jnp.where(swept.skipped, 0.0, step * steps).astype(report.move.dtype))
    new = MatchStates(visits.groups.state, None if visits.prior is None else visits.prior.state)
    return Matched(Round(taken, found, ProductMemory(memory.step, turns, moved), report), new)


def _swept(problem: ProductProblem, visits: _Visits, sites: SiteStack, halvings: Any = 0) -> Swept:
    backoffs, moved = visits.groups.backoffs + halvings, visits.groups.moved
    if visits.prior is not None:
        backoffs = jnp.concatenate([(visits.prior.backoffs + halvings)[None], backoffs])
        moved = jnp.concatenate([visits.prior.moved[None], moved])
    del problem
    return Swept(sites, backoffs, ~moved)


def _together(tilted: ProductTilted, sites, states, settings, share, key) -> tuple[_Visits, Swept, Any]:
    """All factors see one q, and one joint step is shortened until q is normalisable."""
    del settings, key
    problem, damping = tilted.problem, float(tilted.solver.damping)
    family, q = problem.family, posterior(problem.prior, sites)
    shared = tilted.shared(q)

    def visit(operands: tuple) -> LocalResult:
        index, site, state = operands
        return match_visit(family, q, site, tilted.group(index, q, site, shared), state, damping)

    operands = jnp.arange(problem.num_groups), sites.groups, states.groups
    visits = _Visits(jax.lax.map(visit, operands), None)
    proposal = SiteStack(visits.groups.site, sites.prior)
    if sites.prior is not None:
        found = tilted.prior(q, sites.prior)
        own = match_visit(family, q, sites.prior, found, states.prior, damping)
        visits, proposal = visits._replace(prior=own), SiteStack(visits.groups.site, own.site)

    def at(step: Any) -> SiteStack:
        new = damp(sites, proposal, step)
        # A full step to the letter, without the rounding of a difference.
        return jax.tree.map(lambda a, b: jnp.where(step == 1.0, b, a), new, proposal)

    step, halvings = back_off(lambda s: family.in_domain(posterior(problem.prior, at(s))), share)
    good = family.in_domain(posterior(problem.prior, at(step)))
    new = select(good, at(step), sites)
    return visits, _swept(problem, visits, new, jnp.minimum(halvings, MAX_HALVINGS)), jnp.where(good, step, 0.0)


def _in_turn(tilted: ProductTilted, sites, states, settings, share, key) -> tuple[_Visits, Swept, Any]:
    """One factor after another, each from the q that the last one left."""
    problem, damping = tilted.problem, float(tilted.solver.damping)
    family, q = problem.family, posterior(problem.prior, sites)
    order = jnp.arange(problem.num_groups)
    if settings.random:
        order = jax.random.permutation(key, order)
    first = tilted.shared(q) if problem.plan.tilted[0] == "exact" else None

    def visit(q: Any, site: Any, state: Any, found: Any) -> tuple[Any, LocalResult]:
        done = match_visit(family, q, site, found, state, damping)
        new = select(share == 1.0, done.site, damp(site, done.site, share))
        return q - site + new, done._replace(site=new)

    prior = None
    if sites.prior is not None:
        q, prior = visit(q, sites.prior, states.prior, tilted.prior(q, sites.prior))

    def scanned(q: Any, operands: tuple) -> tuple[Any, LocalResult]:
        index, site, state = operands
        shared = first if first is not None else tilted.shared(q)
        return visit(q, site, state, tilted.group(index, q, site, shared))

    q, groups = jax.lax.scan(scanned, q, (order, *take((sites.groups, states.groups), order)))
    groups = take(groups, jnp.argsort(order))
    visits = _Visits(groups, prior)
    new = SiteStack(groups.site, None if prior is None else prior.site)
    good = family.in_domain(posterior(problem.prior, new))
    return visits, _swept(problem, visits, select(good, new, sites)), jnp.where(good, share, 0.0)


def product_evidence(
    problem: ProductProblem, sites: SiteStack, solver: Any, key: Any
) -> tuple[Float[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """Power EP's estimate of log p(y) and its Monte Carlo standard error, in nats.

    ``A(eta_q) - A(eta_0) + sum_m (1/alpha) log E_q[(p(y_m | theta) / t_m)^alpha]``, where A of the prior counts the components
    whose prior is held exactly; see :func:`numpyro_pvi.runtime._moments.evidence`.

    Args:
        problem: the factors.
        sites: all sites.
        solver: whose ``power`` and ``moments`` count.
        key: of draws.

    Returns:
        ``(value, standard error, False)``: no finer rule is ever needed.
    """
    q, tilted, family = posterior(problem.prior, sites), ProductTilted(problem, solver, key), problem.family
    shared = tilted.shared(q)

    def look(operands: tuple) -> tuple[Array, Array]:
        found = tilted.group(operands[0], q, operands[1], shared)
        return found.value, found.variance

    values, variances = jax.lax.map(look, (jnp.arange(problem.num_groups), sites.groups))
    value, variance = jnp.sum(values), jnp.sum(variances)
    if sites.prior is not None:
        own = tilted.prior(q, sites.prior)
        value, variance = value + own.value, variance + own.variance
    exact = [f.log_partition(problem.prior.parts[n]) for n, f in family.components if n in problem.plan.exact]
    base = sum((jnp.asarray(x) for x in exact), start=jnp.zeros(()))
    return family.log_partition(q) - base + value, jnp.sqrt(variance), jnp.array(False)
