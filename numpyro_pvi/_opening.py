"""The first half of a Gaussian fit's beginning: what its rows are taken for, before any site starts."""

from __future__ import annotations

import dataclasses
from typing import Any

from ._initial import as_the_solver_takes, init_optim, initial_params, refuse_nothing_shared
from ._state import Plan
from ._user_inputs import Opening, draws_form, open_call
from .factors import Layout, Planned, model_layout, plan_factors, split_arguments
from .guides import family_of, guide_layout


@dataclasses.dataclass(frozen=True)
class Begun:
    """A fit that is planned.

    Attributes:
        opening: the call of ``init``.
        planned: the partition's plan, and what was found on the way.
        plan: the state's.
        optim_state: of the optimiser of the model's ``numpyro.param`` sites, or None.
        dynamic: arrays of the model's arguments.
        static: the static leaves.
    """

    opening: Opening
    planned: Planned
    plan: Plan
    optim_state: Any
    dynamic: list
    static: tuple


def begin_fit(
    pvi: Any, rng_key: Any, args: tuple, kwargs: dict, init_params: dict | None = None, plan_key: Any = None
) -> Begun:
    """Split a model and find the structure of every factor; where the rows are elsewhere, ask for what was found there.

    Args:
        pvi: whose.
        rng_key: random key.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        init_params: the user's, or None.
        plan_key: random key of the points at which structure is looked for; None takes one of ``rng_key``'s.

    Returns:
        The plan. How sites are held is still to be decided.

    Raises:
        PVIError: as of ``PVI.init``.
    """
    opening = open_call(pvi, rng_key, args, kwargs)
    if plan_key is not None:
        opening = dataclasses.replace(opening, plan_key=plan_key)
    args, kwargs, plan_key, engine = opening.args, opening.kwargs, opening.plan_key, pvi._engine
    opening.set_up(pvi.guide)
    own = model_layout(opening.trace)
    layout = Layout(*guide_layout(pvi.guide, dict(zip(own.names, own.shapes, strict=True))))
    family, elsewhere = family_of(pvi.guide, layout.dim), pvi.runtime.elsewhere

    def split(opening: Opening) -> Planned:
        if elsewhere is not None:
            return elsewhere.plan(pvi, layout, family, (args, kwargs, opening.signature), plan_key)
        planned = plan_factors(opening.partition, args, kwargs, key=plan_key, layout=layout)
        refuse_nothing_shared(planned.plan)
        return planned

    opening, planned = opening.plan(pvi, split)
    # Latents inside the plate are not q's.
    family = family_of(pvi.guide, planned.plan.layout.dim)
    if elsewhere is None:
        planned = as_the_solver_takes(pvi.solver, planned, family.full)
    plan = Plan(planned.plan, family, opening.signature, tied=pvi.solver.tied)
    params = initial_params(planned.params, init_params, pvi.optim is not None)
    optim_state = init_optim(pvi.optim, pvi.guide, params)
    dynamic, static = split_arguments(args, kwargs)
    if planned.plan.unstructured == "monte_carlo" and elsewhere is None:
        form = draws_form(engine, plan, planned, dynamic, static, optim_state, plan_key)
        planned = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, unstructured=form))
        plan = dataclasses.replace(plan, partition=planned.plan)
    return Begun(opening, planned, plan, optim_state, dynamic, static)
