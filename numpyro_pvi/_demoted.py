"""What a Gaussian fit does when the model contradicts its structure: the factor is taken by draws, and q stays where it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._initial import check_structure, param_values
from ._row_states import dense_form
from ._state import PVIState
from ._user_inputs import draws_form
from ._verified import Contradiction, cannot_go_on, remark, restarted
from .errors import PVIError, StateError
from .factors import Planned, join_arguments, move_to_prior_factor, plan_factors, with_expectation
from .sites import posterior

_CLAIMED = {"quadratic": "its likelihood was taken as quadratic", "affine": "its likelihood was taken by quadrature"}
_DRAWS = "taken by draws"


def demoted(pvi: Any, state: PVIState, found: list[Contradiction], dynamic: list, static: tuple) -> PVIState:
    """The state with the contradicted structure given up.

    Args:
        pvi: whose.
        state: a state.
        found: what was contradicted.
        dynamic: arrays of the model's arguments.
        static: the other leaves.

    Returns:
        The state with the same q. What of it was held exactly as the prior is in the PRIOR site where the prior is a factor now.

    Raises:
        PVIError: where the solver cannot do without the structure.
    """
    state = dense_form(state)
    claims = {one.claim: one for one in found}
    notes = tuple(_remark(state, one) for one in found)
    q = posterior(state.prior, state.sites)
    moments = state.plan.family.moments(q)
    sds = state.plan.family.sds(moments)
    planned = Planned(state.plan.partition, state.packing, moments.loc, sds, {})
    if "additivity" in claims:
        planned = _masked(pvi, state, planned, dynamic, static)
    plan = planned.plan
    if "likelihood" in claims:
        plan = dataclasses.replace(plan, likelihood="draws", terms=())
    if "prior factor" in claims:
        plan = dataclasses.replace(plan, prior_kind="draws", prior_terms=())
    planned = dataclasses.replace(planned, plan=plan)
    if "prior" in claims:
        planned = move_to_prior_factor(planned)
        state = _without_exact_prior(state)
    planned = with_expectation(planned, pvi.solver.expectation, state.plan.family.full)
    part = dataclasses.replace(planned.plan, remarks=(*planned.plan.remarks, *notes))
    plan = dataclasses.replace(state.plan, partition=part)
    if part.unstructured == "monte_carlo":
        key = jax.random.fold_in(state.rng_key, 0xD0)
        form = draws_form(pvi._engine, plan, planned, dynamic, static, state.optim_state, key)
        plan = dataclasses.replace(plan, partition=dataclasses.replace(part, unstructured=form))
    try:
        check_structure(pvi.solver, plan)
    except PVIError as error:
        raise cannot_go_on(error, notes) from error
    sites = state.sites
    if "likelihood" in claims and sites.local is not None:
        # Sites of single rows are of their predictors; a group's site is their sum.
        sites = dataclasses.replace(sites, local=None)
    state = dataclasses.replace(state, plan=plan, packing=planned.packing, sites=sites)
    return restarted(pvi, state, dynamic, static)


def _remark(state: PVIState, found: Contradiction) -> str:
    part = state.plan.partition
    if found.claim == "likelihood":
        return remark(state, found, _CLAIMED[part.likelihood], _DRAWS, part.table.labels[found.factor])
    if found.claim == "additivity":
        claimed = "its rows were taken to be all that its likelihood depends on"
        instead = "all rows are evaluated for every group, the others masked,"
        return remark(state, found, claimed, instead, part.table.labels[found.factor])
    if found.claim == "prior":
        return remark(state, found, f"the prior of {', '.join(part.exact)} was taken as Gaussian", f"a factor {_DRAWS}")
    return remark(state, found, "the prior factor was taken by quadrature", _DRAWS)


def _without_exact_prior(state: PVIState) -> PVIState:
    """The same q with the prior's Gaussian in the PRIOR site, which stands in for it from now on."""
    own = state.prior if state.sites.prior is None else state.prior + state.sites.prior
    sites = dataclasses.replace(state.sites, prior=own)
    nothing = jax.tree.map(jnp.zeros_like, state.prior)
    return dataclasses.replace(state, prior=nothing, exact=jnp.zeros_like(state.exact), sites=sites)


def _masked(pvi: Any, state: PVIState, planned: Planned, dynamic: list, static: tuple) -> Planned:
    """The plan with every group evaluated on all rows, which needs no sum over groups of their own rows."""
    if state.plan.absent or state.plan.padded_rows:
        raise StateError(
            "numpyro.param values have moved to where the rows of one group depend on those of others, and some groups' rows are "
            "not at hand: fit all rows afresh with Partition(..., mode='mask')."
        )
    args, kwargs = join_arguments(dynamic, static)
    partition = pvi._partition_of(state, args, kwargs)._copy(mode="mask")
    key, params = jax.random.fold_in(state.rng_key, 0xAD), param_values(pvi.optim, pvi.guide, state)
    again = plan_factors(partition, args, kwargs, key=key, layout=planned.plan.layout, params=params)
    new = again.plan
    plan = dataclasses.replace(
        planned.plan,
        reading=new.reading,
        reason="rows of one group were found to depend on others at draws from q",
        sliced=new.sliced,
        chunk_rows=new.chunk_rows,
        num_chunks=new.num_chunks,
    )
    return dataclasses.replace(planned, plan=plan, packing=again.packing)


__all__ = ["demoted"]
