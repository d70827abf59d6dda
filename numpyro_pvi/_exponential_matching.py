"""PowerEP under AutoExponentialFamily: what is decided at init, and what a state says of its visits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._compiling import look
from ._posterior_views import chain_reading, moment_notes
from ._state import PVIState
from ._user_inputs import float_dtype
from .factors import join_arguments, split_arguments
from .runtime import (
    ProductEngine,
    check_tilted,
    factors_of,
    jointly_affine,
    with_tilted,
)
from .sites import posterior

# How tilted moments are taken, in words.
_WORDS = {
    "exact": "closed form",
    "quadrature": "quadrature over the latents",
    "importance": "weighted draws",
    "laplace": "weighted draws of a Laplace approximation",
    "mcmc": "mcmc",
}


def expectation_of(solver: Any) -> str:
    """How a solver has the expectations of factors taken: as of :func:`numpyro_pvi.expectations.find_structure`."""
    if solver.matches_moments:
        return "values"
    return "exact" if solver.closed_form else solver.expectation


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
    if not engine.solver.matches_moments:
        return state
    plan: Any = state.plan
    solver: Any = engine.solver
    check_tilted(plan, type(solver).__name__)
    arrays, static = split_arguments(args, kwargs)

    def affine(state: PVIState, arrays: list) -> Any:
        args, kwargs = join_arguments(arrays, static)
        problem = factors_of(engine.problem(state, args, kwargs), solver)
        return jointly_affine(problem, state.sites, engine.noise(state.rng_key))

    likelihood, prior = look(affine, state, arrays)
    plan = with_tilted(plan, solver, (bool(likelihood), bool(prior)))
    state = dataclasses.replace(state, plan=plan)
    fields = engine.unvisited(state, posterior(state.prior, state.sites), float_dtype(), None, args, kwargs)
    return dataclasses.replace(state, **fields | {"report": state.report})


def matching_info(state: PVIState) -> dict[str, Any]:
    """What the last visits found, as fields of :class:`numpyro_pvi.PVIInfo`.

    Args:
        state: of a fit that matches moments.

    Returns:
        Fields by name: ``ess``, ``expectation``, ``notes``, ``rhat`` and ``divergent``.
    """
    plan: Any = state.plan
    groups, prior = jax.device_get((state.solver_state, state.prior_solver_state))
    count = len(plan.partition.table.labels)
    ways = [(groups, _WORDS[plan.tilted[0]], count)]
    if prior is not None:
        ways.insert(0, (prior, _WORDS[plan.tilted[1]], 1))

    def read(of: Callable[[Any], Any]) -> np.ndarray:
        return np.concatenate([np.broadcast_to(of(one), size) for one, _, size in ways])

    def of_chains(name: str) -> np.ndarray:
        readings = {id(one): chain_reading(one, name) for one, *_ in ways}
        return read(lambda one: np.nan if readings[id(one)] is None else readings[id(one)])

    rhat, divergent = of_chains("rhat"), of_chains("divergent")
    words = [word for _, word, size in ways for _ in range(size)]
    return {
        "ess": read(lambda one: np.asarray(one.ess)),
        "expectation": tuple("mcmc" if x == x else word for x, word in zip(rhat, words, strict=True)),
        "notes": moment_notes(state),
        "rhat": rhat,
        "divergent": divergent,
    }
