"""The exactly held prior of a state that was made when the model closed over something else."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax

from ._compiling import is_traced, owned_jit
from ._numerics import nearly_same
from ._state import Plan, PVIState
from .errors import StateError
from .factors import GAUSSIAN, abstract_trace, base_distribution, join_arguments, read_row_prior
from .runtime import Engine, whole_call


def with_prior_of_now(pvi: Any, state: PVIState, dynamic: list, static: tuple) -> PVIState:
    """A state with the prior that the model has at this call.

    A state carries the prior that is held exactly. States that the model as it is now has made are taken as they are; of others the
    prior is read anew, and put in where it differs.

    Args:
        pvi: the PVI.
        state: a state.
        dynamic: arrays of the model's arguments.
        static: the rest of them.

    Returns:
        The state. Under ``jit`` it is the one given.

    Raises:
        StateError: where a prior that was held exactly is of another family now.
    """
    followed = pvi._followed.programs
    if is_traced((state, dynamic)) or followed.has_made(state):
        return state
    now = pvi._read_prior(state, dynamic, static)
    if not nearly_same(state.prior, now):
        state = dataclasses.replace(state, prior=now)
    followed.note(state)
    return state


def read_prior(engine: Engine, state: PVIState, dynamic: list, static: tuple) -> Any:
    """The exactly held prior as the model has it now, of a Gaussian q.

    Args:
        engine: of the fit.
        state: a state.
        dynamic: arrays of the model's arguments.
        static: the rest of them.

    Returns:
        What the state's ``prior`` is made of.

    Raises:
        StateError: where it is no Gaussian now.
    """
    trace = abstract_trace(engine.model, jax.random.key(0), *join_arguments(dynamic, static))
    for name in state.plan.partition.exact:
        if not isinstance(base_distribution(trace[name]["fn"]), GAUSSIAN):
            raise other_family(name)
    return _read(engine, state.plan, state.packing, dynamic, static, state.optim_state, level="cheap")


def other_family(name: str) -> StateError:
    """The error for a prior of another kind than the state's."""
    return StateError(
        f"the prior of {name!r} is of another family than when this state was made, since what the model closes over has changed: "
        "start anew with init, or with run without init_state."
    )


@partial(owned_jit, static_argnames=("engine", "plan", "static"))
def _read(engine: Engine, plan: Plan, packing: Any, dynamic: list, static: tuple, optim_state: Any) -> Any:
    args, kwargs = join_arguments(dynamic, static)
    call = whole_call(engine.model, plan.partition, args, kwargs, engine.constrain(plan, args, kwargs, optim_state))
    if plan.rows is not None:
        return read_row_prior(call, plan.partition, packing, plan.rows == "latents")
    return engine.exact_prior(plan, call)[0]


__all__ = ["other_family", "read_prior", "with_prior_of_now"]
