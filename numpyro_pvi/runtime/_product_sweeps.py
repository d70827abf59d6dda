"""One visit to every factor of a product of families that matches moments: all from one q, or one after another."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..families import ProductNatural
from ..sites import MAX_HALVINGS, SiteStack, back_off, damp, posterior, select, take
from ..solvers import LocalResult, MatchState
from ._product_rounds import Settings, Swept
from ._product_tilted import ProductTilted


class MatchStates(NamedTuple):
    """What the factors remember of their visits."""

    # Of every group; or of its rows, where each is a factor.
    groups: Any
    # None without a prior factor.
    prior: MatchState | None


class Visits(NamedTuple):
    """The last visit to every factor."""

    groups: LocalResult
    # None without a prior factor.
    prior: LocalResult | None


class Outcome(NamedTuple):
    """What a sweep made of the sites, and how much of the joint step was taken."""

    visits: Visits
    swept: Swept
    step: Any


def outcome_of(visits: Visits, sites: SiteStack, step: Any, halvings: Any = 0) -> Outcome:
    """A sweep in the terms of a round.

    Args:
        visits: the visits.
        sites: after them.
        step: how much of the joint step was taken.
        halvings: of the joint step.

    Returns:
        The outcome, the prior factor (if any) first.
    """
    backoffs, moved = visits.groups.backoffs + halvings, visits.groups.moved
    if visits.prior is not None:
        backoffs = jnp.concatenate([(visits.prior.backoffs + halvings)[None], backoffs])
        moved = jnp.concatenate([visits.prior.moved[None], moved])
    return Outcome(visits, Swept(sites, backoffs, ~moved), step)


def together(
    tilted: ProductTilted, sites: SiteStack, states: MatchStates, share: Any, batch: int | None = None
) -> Outcome:
    """All factors see one q, and one joint step is shortened until q is normalisable.

    Args:
        tilted: takes the moments.
        sites: before the sweep.
        states: what factors remember.
        share: of each change that is taken.
        batch: factors that are visited at a time; None is one.

    Returns:
        The outcome.
    """
    problem = tilted.problem
    family, q = problem.family, posterior(problem.prior, sites)
    shared = tilted.shared(q)

    def visit(operands: tuple) -> LocalResult:
        index, site, state = operands
        return tilted.visit(index, q, site, state, shared)

    operands = jnp.arange(problem.num_groups), sites.groups, states.groups
    visits = Visits(jax.lax.map(visit, operands, batch_size=batch), None)
    proposal = SiteStack(visits.groups.site, sites.prior)
    if sites.prior is not None:
        assert states.prior is not None  # there is a prior factor
        own = tilted.visit_prior(q, sites.prior, states.prior)
        visits, proposal = visits._replace(prior=own), SiteStack(visits.groups.site, own.site)

    def at(step: Any) -> SiteStack:
        new = damp(sites, proposal, step)
        # A full step to the letter, without the rounding of a difference.
        return jax.tree.map(lambda a, b: jnp.where(step == 1.0, b, a), new, proposal)

    step, halvings = back_off(lambda s: family.in_domain(posterior(problem.prior, at(s))), share)
    good = family.in_domain(posterior(problem.prior, at(step)))
    new = select(good, at(step), sites)
    return outcome_of(visits, new, jnp.where(good, step, 0.0), jnp.minimum(halvings, MAX_HALVINGS))


def order_of(settings: Settings, count: int, key: Any) -> Int[Array, "M"]:
    """The order in which groups are visited in turn."""
    order = jnp.arange(count)
    return jax.random.permutation(key, order) if settings.random else order


def visit_prior(
    tilted: ProductTilted, q: ProductNatural, site: Any, state: Any, share: Any
) -> tuple[ProductNatural, LocalResult | None]:
    """The prior factor's visit, the first of a sweep in turn.

    Args:
        tilted: takes the moments.
        q: natural parameters.
        site: the prior factor's; None where there is none.
        state: what it remembers.
        share: of its change that is taken.

    Returns:
        q afterwards, and the visit.
    """
    if site is None:
        return q, None
    return _taken(q, site, tilted.visit_prior(q, site, state), share)


def _taken(q: ProductNatural, site: Any, done: LocalResult, share: Any) -> tuple[ProductNatural, LocalResult]:
    new = select(share == 1.0, done.site, damp(site, done.site, share))
    return q - site + new, done._replace(site=new)


def in_turn(
    tilted: ProductTilted, sites: SiteStack, states: MatchStates, settings: Settings, share: Any, key: Any
) -> Outcome:
    """One factor after another, each from the q that the last one left.

    Args:
        tilted: takes the moments.
        sites: before the sweep.
        states: what factors remember.
        settings: whether the order is random.
        share: of each change that is taken.
        key: for the order.

    Returns:
        The outcome.
    """
    problem = tilted.problem
    family, q = problem.family, posterior(problem.prior, sites)
    order = order_of(settings, problem.num_groups, key)
    first = tilted.shared(q) if problem.plan.tilted[0] == "exact" else None
    q, prior = visit_prior(tilted, q, sites.prior, states.prior, share)

    def scanned(q: Any, operands: tuple) -> tuple[Any, LocalResult]:
        index, site, state = operands
        shared = first if first is not None else tilted.shared(q)
        return _taken(q, site, tilted.visit(index, q, site, state, shared), share)

    q, groups = jax.lax.scan(scanned, q, (order, *take((sites.groups, states.groups), order)))
    groups = take(groups, jnp.argsort(order))
    new = SiteStack(groups.site, None if prior is None else prior.site)
    good = family.in_domain(posterior(problem.prior, new))
    return outcome_of(Visits(groups, prior), select(good, new, sites), jnp.where(good, share, 0.0))
