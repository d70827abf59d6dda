"""What a fit under AutoExponentialFamily does when the model contradicts its structure: components are drawn, q stays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._exponential_matching import expectation_of, ready_to_match
from ._exponential_plan import components_of, plan_product
from ._initial import away_from
from ._state import Plan, PVIState
from ._user_inputs import float_dtype
from ._verified import Contradiction, cannot_go_on, remark
from .errors import PVIError
from .expectations import with_draws
from .factors import Planned, abstract_trace, is_latent, join_arguments
from .families import ProductNatural
from .runtime import ProductPlan
from .sites import posterior


def demoted(pvi: Any, state: PVIState, found: list[Contradiction], dynamic: list, static: tuple) -> PVIState:
    """The state with the contradicted structure given up: see :func:`numpyro_pvi._demoted.demoted`."""
    args, kwargs = join_arguments(dynamic, static)
    names: dict[str, list[str]] = {"likelihood": [], "prior factor": [], "prior": []}
    for one in found:
        factor, name = one.claim.split("/")
        names[factor].append(name)
    notes = tuple(_remark(state, one) for one in found)
    try:
        if names["prior"]:
            state = _with_prior_factor(pvi, state, names["prior"], args, kwargs)
        state = dataclasses.replace(state, plan=_drawn(pvi, state, names, notes))
    except PVIError as error:
        raise cannot_go_on(error, notes) from error
    return _begun_again(pvi, state, args, kwargs)


def _remark(state: PVIState, found: Contradiction) -> str:
    factor, name = found.claim.split("/")
    plan: Any = state.plan
    if factor == "prior":
        return remark(state, found, f"the prior of {name!r} was held exactly", "it is a factor of its own")
    structure = plan.likelihood if factor == "likelihood" else plan.prior_factor
    words = {"absent": "constant in", "predictors": "a function of one or two predictors of"}
    kind = words.get(next(role.kind for role in structure.roles if role.name == name), "conjugate in")
    if factor == "prior factor":
        return remark(state, found, f"the prior factor was taken as {kind} {name!r}", f"{name!r} is drawn")
    label = plan.partition.table.labels[found.factor]
    return remark(state, found, f"its likelihood was taken as {kind} {name!r}", f"{name!r} is drawn", label)


def _drawn(pvi: Any, state: PVIState, names: dict[str, list[str]], notes: tuple[str, ...]) -> ProductPlan:
    """The plan with contradicted components drawn."""
    plan: Any = state.plan
    expectation = expectation_of(pvi.solver)
    likelihood, prior_factor = plan.likelihood, plan.prior_factor
    if names["likelihood"]:
        likelihood = with_draws(likelihood, plan.family, names["likelihood"], expectation, "groups' likelihood")
    if names["prior factor"] and prior_factor is not None:
        prior_factor = with_draws(prior_factor, plan.family, names["prior factor"], expectation, "prior factor")
    part = dataclasses.replace(plan.partition, remarks=(*plan.partition.remarks, *notes))
    return dataclasses.replace(plan, partition=part, likelihood=likelihood, prior_factor=prior_factor, tilted=())


def _with_prior_factor(pvi: Any, state: PVIState, names: list[str], args: tuple, kwargs: dict) -> PVIState:
    """The same q, with the priors of some components in the PRIOR site; what the factor is conjugate in is found around q."""
    plan: Any = state.plan
    key, q = jax.random.fold_in(state.rng_key, 0xD1), posterior(state.prior, state.sites)
    trace = abstract_trace(pvi.model, key, args, kwargs)
    components = components_of(pvi.guide, {n: tuple(s["fn"].shape()) for n, s in trace.items() if is_latent(s)})
    components = dataclasses.replace(components, start=q)
    base = Plan(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(Plan)})
    planned = Planned(plan.partition, state.packing, jnp.zeros(0), jnp.zeros(0), {})
    kept = {*names, *(n for n, _ in plan.family.components if n not in plan.exact)}
    given = expectation_of(pvi.solver), plan.turns, plan.inside, key, kept
    call = pvi._engine.call(state, args, kwargs)
    new, _, _ = plan_product(planned, components, call, base, *given, away=away_from(pvi.guide, call.params, key))
    # What was found of the groups before stands, with what was already given up of it.
    proved = new.partition.proved & plan.partition.proved
    new = dataclasses.replace(
        new, likelihood=plan.likelihood, partition=dataclasses.replace(new.partition, proved=proved)
    )

    def only(parts: dict, moved: bool) -> ProductNatural:
        return ProductNatural(
            {n: x if (n in names) == moved else jax.tree.map(jnp.zeros_like, x) for n, x in parts.items()}
        )

    own = only(state.prior.parts, True)
    own = own if state.sites.prior is None else own + state.sites.prior
    sites = dataclasses.replace(state.sites, prior=own)
    return dataclasses.replace(state, plan=new, prior=only(state.prior.parts, False), sites=sites)


def _begun_again(pvi: Any, state: PVIState, args: tuple, kwargs: dict) -> PVIState:
    """The state with its schedule and solver at their beginnings."""
    dtype, last = float_dtype(), state.report
    fields = pvi._engine.unvisited(state, posterior(state.prior, state.sites), dtype)
    report = fields["report"]._replace(clock=last.clock, messages=last.messages, consensus=last.consensus)
    fresh = dataclasses.replace(state, **fields | {"report": report})
    return ready_to_match(pvi._engine, fresh, args, kwargs)


__all__ = ["demoted"]
