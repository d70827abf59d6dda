"""PowerEP under AutoExponentialFamily: what is decided at init, and what a state says of its visits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._entry import float_dtype
from ._state import PVIState
from ._views import moment_notes
from .factors import join_arguments, split_arguments
from .runtime import ProductEngine, check_tilted, factors_of, first_match_states, jointly_affine, with_tilted
from .solvers import Conjugate

# How tilted moments are taken, in words.
_WORDS = {"exact": "closed form", "quadrature": "quadrature over the latents", "importance": "weighted draws"}


def expectation_of(solver: Any) -> str:
    """How a solver has the expectations of factors taken: as of :func:`numpyro_pvi.expectations.find_structure`."""
    if getattr(solver, "matches_moments", False):
        return "values"
    return "exact" if isinstance(solver, Conjugate) else getattr(solver, "expectation", "auto")


def ready_to_match(engine: ProductEngine, state: PVIState, args: tuple, kwargs: dict) -> PVIState:
    """A first state with the ways to take tilted moments, where the solver matches them.

    Args:
        engine: of the fit.
        state: with a normalisable q.
        args: positional arguments as arrays.
        kwargs: keyword arguments as arrays.

    Returns:
        The state; as it is under solvers that match no moments.

    Raises:
        PVIError: for latents inside the partitioned plate, or moments that do not fit a factor.
    """
    if not getattr(engine.solver, "matches_moments", False):
        return state
    plan: Any = state.plan
    solver: Any = engine.solver
    check_tilted(plan)
    arrays, static = split_arguments(args, kwargs)

    def look(state: PVIState, arrays: list) -> Any:
        args, kwargs = join_arguments(arrays, static)
        problem = engine.problem(state, args, kwargs)
        affine = jointly_affine(factors_of(problem, solver), state.sites, engine.noise(state.rng_key))
        return affine, first_match_states(problem, solver, float_dtype())

    (likelihood, prior), states = jax.jit(look)(state, arrays)
    plan = with_tilted(plan, solver, (bool(likelihood), bool(prior)))
    # Moments may be drawn where expectations are not, and the other way round.
    last = jax.tree.map(jnp.zeros_like, state.prior) if "importance" in plan.tilted else None
    memory = state.schedule_state._replace(last=last)
    found = {"schedule_state": memory, "solver_state": states.groups, "prior_solver_state": states.prior}
    return dataclasses.replace(state, plan=plan, **found)


def matching_info(state: PVIState) -> dict[str, Any]:
    """What the last visits found, as fields of :class:`numpyro_pvi.PVIInfo`.

    Args:
        state: of a fit that matches moments.

    Returns:
        Fields by name: ``ess``, ``expectation`` and ``notes``.
    """
    plan: Any = state.plan
    groups, prior = state.solver_state, state.prior_solver_state
    ess, words = np.asarray(groups.ess), (_WORDS[plan.tilted[0]],) * len(plan.partition.table.labels)
    if prior is not None:
        ess, words = np.concatenate([np.asarray(prior.ess)[None], ess]), (_WORDS[plan.tilted[1]], *words)
    return {"ess": ess, "expectation": words, "notes": moment_notes(state)}
