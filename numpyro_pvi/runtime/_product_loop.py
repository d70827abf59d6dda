"""Rounds of a product of families in one compiled loop, whatever a round is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._state import SKIP_LIMIT, PVIState
from ..schedules import finished
from ._chains import chains_wanted
from ._engine import RoundsDone
from ._moments import noise_floor


def run_rounds(
    state: PVIState,
    carry: Any,
    one: Callable[[PVIState, Any], tuple[PVIState, Any, Float[Array, ""]]],
    count: Int[Array, ""],
    tol: Float[Array, ""],
    length: int,
    solver: Any,
) -> RoundsDone:
    """Run up to ``count`` rounds: see :meth:`numpyro_pvi.runtime.Engine.rounds`.

    Args:
        state: where they start.
        carry: what rounds hand on to one another beside the state.
        one: a round: the state and the carry afterwards, and the loss in nats.
        count: most rounds.
        tol: largest move of a round, in posterior sds, that ends them; no lower than what the noise of sampled moments explains.
            Negative never ends them.
        length: rounds that there is room for.
        solver: where its weights keep collapsing rounds end early, so that chains can be compiled in.

    Returns:
        The rounds; no quadrature is ever missed.
    """

    def unfinished(loop: tuple) -> Array:
        i, state, *_ = loop
        floor = noise_floor(state.solver_state, state.report)
        halted = finished(state.report, tol, floor) | jnp.any(state.report.skip_run >= SKIP_LIMIT)
        halted = halted | chains_wanted(solver, state.solver_state)
        return (i < count) & ~((i > 0) & halted)

    def again(loop: tuple) -> tuple:
        i, state, carry, losses, reports = loop
        state, carry, loss = one(state, carry)
        reports = jax.tree.map(lambda all_, new: all_.at[i].set(new), reports, state.report)
        return i + 1, state, carry, losses.at[i].set(loss), reports

    losses = jnp.full((length,), jnp.nan, state.report.move.dtype)
    reports = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), state.report)
    done, state, _, losses, reports = jax.lax.while_loop(
        unfinished, again, (jnp.int32(0), state, carry, losses, reports)
    )
    return RoundsDone(state, losses, reports, done, jnp.array(False))


def stepped(state: PVIState, next_key: Any, done: Any) -> PVIState:
    """The state after a round.

    Args:
        state: before.
        next_key: the next round's.
        done: the round: its ``sites``, ``memory`` and ``report``.

    Returns:
        The state.
    """
    found = {"sites": done.sites, "schedule_state": done.memory, "report": done.report}
    return dataclasses.replace(state, rng_key=next_key, step=state.step + 1, **found)
