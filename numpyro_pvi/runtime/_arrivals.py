"""The first arrays of groups whose rows have come to a state that was fitted before."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from numpyro.distributions.transforms import biject_to

from .._state import Plan, PVIState
from ..expectations import FIXED_RULES
from ..factors import (
    GroupMasks,
    ModelCall,
    Packing,
    PartitionPlan,
    claimed_rows,
    claims_likelihood,
    row_log_likelihood,
)
from ..families import GaussianMoments
from ..sites import LocalSites, OwnConditionals, SiteStack, posterior, select, sum_slots
from ._local import LocalProblem
from ._programs import first_conditionals, whole_call
from ._rules import first_rule
from ._starts import first_local_sites, first_sites, refuse_curvature
from ._tilted import refuse_arrivals

# Points at which arriving rows are compared with the structure that was found before, and draws of local latents' priors.
_POINTS, _PRIOR_DRAWS = 2, 64


class Comparison(NamedTuple):
    """Log-likelihoods of arriving rows at points drawn from q, in nats: two ways to get them, and the size of their parts."""

    # Sum over the rows, from the untouched model and from the program of the structure found before.
    model: Float[Array, "P"]
    program: Float[Array, "P"]
    # The largest difference of a row's value when half as many rows are evaluated together.
    split: Float[Array, "P"]
    size: Float[Array, "P"]


def start_arrivals(
    engine: Any, state: PVIState, args: tuple, kwargs: dict, known: Bool[Array, "M"], mode: str
) -> tuple[dict[str, Any], Comparison]:
    """Solver and schedule states of groups that have come, and where their sites start.

    Args:
        engine: the model and the choices.
        state: the state, with the plan and packing of the new rows; ``sites.groups`` holds the site that each group
            already has, zero where it has none.
        args: the new rows.
        kwargs: likewise.
        known: which groups have a site.
        mode: "prior" (a new group's site is 1) or "curvature" (its factor's positive semi-definite curvature at q's
            location).

    Returns:
        Fields of the state to replace, and the comparison with the untouched model.
    """
    plan, packing = state.plan, state.packing
    others = None if state.sites.others is None else sum_slots(state.sites.others)
    params = engine.constrain(plan, args, kwargs, state.optim_state)
    problem = engine.problem(plan, packing, args, kwargs, params, (state.prior, state.exact), len(FIXED_RULES), others)
    refuse_arrivals(problem)
    moments = plan.family.moments(posterior(state.prior, state.sites))
    key = jax.random.fold_in(state.rng_key, 0xA77)
    groups, local = state.sites.groups, None
    if plan.partition.local is None:
        if mode == "curvature":
            groups = select(known, groups, first_sites(problem, moments, moments.loc, mode)[0].groups)
    else:
        loc, sd = _local_prior(engine, plan, args, kwargs, params, moments.loc, key)
        rows = first_conditionals(plan, packing, loc, sd)
        # Without coupling to the shared latents, integrating the local ones out leaves a known site as it is.
        local = OwnConditionals(rows) if problem.matches_moments else LocalSites(groups, rows)
        if problem.matches_moments:
            refuse_curvature(problem.solver, mode)
        elif mode == "curvature":
            fresh = first_local_sites(problem, moments, moments.loc, mode, rows)[0].local
            chunk_known = known[packing.chunk_group]
            local = LocalSites(select(known, groups, fresh.shared), select(chunk_known, rows, fresh.rows))
    sites = problem.tidy(SiteStack(groups, state.sites.prior, local))
    sites = dataclasses.replace(sites, others=state.sites.others)
    fields = engine.unvisited(dataclasses.replace(problem, known=known))
    last = state.report
    report = fields["report"]._replace(clock=last.clock, messages=last.messages, consensus=last.consensus)
    # Sites that were fitted before are as settled as they were: a first round at loose accuracy would only be refused.
    report = report._replace(total_move=jnp.where(jnp.all(known), last.total_move, report.total_move))
    fields |= {"sites": sites, "rule": first_rule(problem.dtype), "report": report}
    call = whole_call(engine.model, plan.partition, args, kwargs, params)
    return fields, compare(problem, plan, packing, call, moments, key)


def compare(
    problem: LocalProblem,
    plan: Plan,
    packing: Packing | GroupMasks,
    call: ModelCall,
    moments: GaussianMoments,
    key: Any,
) -> Comparison:
    """Evaluate arriving rows by the structure found before, by the untouched model, and in halves.

    Args:
        problem: the factors of the arriving rows.
        plan: the plan.
        packing: the arriving rows' packing.
        call: the model on all of them.
        moments: q, from which the points are drawn.
        key: a random key.

    Returns:
        The comparison; where there is no structure, or local latents, only what applies.
    """
    part, family = plan.partition, problem.family
    points = family.draw(moments, jax.random.normal(key, (_POINTS, family.dim), problem.dtype))

    def rows_at(at: ModelCall, point) -> Float[Array, "N"]:
        terms = row_log_likelihood(at, point, part.rows)
        if len(terms) and len({key for key, _ in terms.values()}) > 1:
            return jnp.concatenate([values for _, values in terms.values()])
        return sum((values for _, values in terms.values()), start=jnp.zeros((), point.dtype))

    def total(point):
        rows = rows_at(call, point)
        rows = jnp.where(_counted(part, packing, rows.shape[0]), rows, 0.0)
        return rows, jnp.sum(rows), jnp.sum(jnp.abs(rows))

    rows, model, size = jax.vmap(total)(points)
    # A quadratic is read at the origin, so its rounding is that of the values there.
    _, _, at_origin = total(jnp.zeros((family.dim,), problem.dtype))
    program = model
    if claims_likelihood(part):
        program = jax.lax.map(partial(_claimed_sum, part, packing, call), points)
    split = jnp.zeros_like(model)
    if isinstance(packing, Packing) and part.mechanism == "args" and packing.rows.shape[1] % 2 == 0:
        halves = packing.rows.reshape(packing.rows.shape[0] * 2, -1)

        def by_halves(point):
            values = jax.lax.map(lambda chunk: rows_at(part.reading.call(call, (chunk, None)), point), halves)
            found = jnp.zeros(rows.shape[1:], point.dtype).at[halves.reshape(-1)].set(values.reshape(-1))
            return jnp.where(_counted(part, packing, found.shape[0]), found, 0.0)

        split = jnp.max(jnp.abs(jax.lax.map(by_halves, points) - rows), axis=1)
    return Comparison(model, program, split, size + at_origin)


def _claimed_sum(
    part: PartitionPlan, packing: Packing | GroupMasks, call: ModelCall, point: Float[Array, "D"]
) -> Float[Array, ""]:
    """The rows' log-likelihood at a point, as the structure found before has it: see :func:`numpyro_pvi.factors.claimed_rows`."""
    rows = (own.claimed for own in claimed_rows(call, part, point).values())
    counted = (jnp.sum(jnp.where(_counted(part, packing, x.shape[0]), x, 0.0)) for x in rows)
    return sum(counted, start=jnp.zeros((), point.dtype))


def _counted(part: Any, packing: Packing | GroupMasks, num_rows: int) -> Bool[Array, "N"]:
    """Which of the arguments' rows count, in their own order."""
    if isinstance(packing, GroupMasks) or part.mechanism != "args":
        return jnp.ones((num_rows,), bool)
    return jnp.zeros((num_rows,), bool).at[packing.rows.reshape(-1)].max(packing.mask.reshape(-1))


def _local_prior(
    engine: Any, plan: Plan, args: tuple, kwargs: dict, params: dict, loc: Float[Array, "D"], key: Any
) -> tuple[Float[Array, "U K"], Float[Array, "U K"]]:
    """Location and sd of every unit's local latents under their prior at one value of the shared ones, from draws."""
    part = plan.partition
    call = ModelCall(part.model(engine.model), part.layout, args, kwargs, params)

    def one(key):
        trace, _ = call.trace(loc, key)
        drawn = {n: biject_to(trace[n]["fn"].support).inv(trace[n]["value"]) for n in part.local.names}
        return part.local.flatten(drawn)

    draws = jax.vmap(one)(jax.random.split(key, _PRIOR_DRAWS)).astype(loc.dtype)
    spread = jnp.std(draws, axis=0)
    return jnp.mean(draws, axis=0), jnp.where(jnp.isfinite(spread) & (spread > 0), spread, 1.0)
