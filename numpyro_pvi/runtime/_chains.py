"""Factors whose tilted moments are taken by Markov chains: which groups run side by side, and when weights give way to chains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._compiling import on_device
from .._derivatives import value_and_grad
from ..expectations import Chains, MCMCMoments, Tilted, from_chains, log_density_at, no_chains
from ..factors import Packing
from ..sites import take
from ..solvers import COLLAPSES, LocalSolver
from ._factors import Factors
from ._rows import GroupRows

# Rows of a group up to which lanes pay on a CPU: beyond, arithmetic fills it, and lanes that wait for one another waste it
# (draws a second side by side over in turn: 2.7 times at 50 rows, 0.9 at 500, 0.8 at 3,000).
_LANE_ROWS = 256
# Groups run side by side while filling each up to the largest costs at most half of the rows.
_LARGEST_FILL = 1.5


def by_chains(solver: LocalSolver) -> bool:
    """Whether a solver's moments are taken by chains from the start."""
    return isinstance(chain_settings(solver), MCMCMoments) and solver.moments != "auto"


def chain_settings(solver: LocalSolver) -> MCMCMoments | None:
    """The chains' settings: those asked for, the default ones where weights may give way to chains, or None."""
    moments = solver.moments
    if isinstance(moments, MCMCMoments):
        return moments
    return MCMCMoments() if isinstance(moments, str) and moments in ("auto", "mcmc") else None


def chains_wanted(solver: LocalSolver, state: Any) -> Bool[Array, ""]:
    """Whether some group's weights have collapsed so often that chains should be compiled in.

    Args:
        solver: the groups' solver.
        state: the groups' solver states.

    Returns:
        False where there are chains already, or none were allowed.
    """
    if solver.moments != "auto" or not hasattr(state, "collapses") or state.chains is not None:
        return on_device(False)
    return jnp.any(state.collapses >= COLLAPSES)


def with_chains(solver: LocalSolver, state: Any, dim: int, dtype: Any) -> Any:
    """Solver states with room for chains that have not started.

    Args:
        solver: the groups' solver.
        state: solver states, one or stacked.
        dim: D.
        dtype: floating dtype.

    Returns:
        The states; as they are where they have chains or can have none.
    """
    settings = chain_settings(solver)
    if settings is None or not hasattr(state, "chains") or state.chains is not None:
        return state
    fresh = no_chains(settings, dim, dtype, False)
    batch = state.collapses.shape
    return state._replace(chains=jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), fresh))


def most_chunks(sizes: tuple[int, ...], packing: Any) -> int:
    """Chunks of the largest group, or 0 where sizes are not known beforehand."""
    if not isinstance(packing, Packing) or not any(sizes):
        return 0
    return max(-(-size // packing.rows.shape[1]) for size in sizes)


def lanes_pay(rows: int) -> bool:
    """Whether chains of groups of up to so many rows are faster side by side than in turn, on the default device."""
    return rows <= _LANE_ROWS or jax.default_backend() != "cpu"


def side_by_side(problem: Factors) -> bool:
    """Whether chains of all groups run in one vectorised program, each group filled up to the largest."""
    count, chunks = problem.num_groups, problem.data.chunk_group.shape[0]
    if not by_chains(problem.solver) or not lanes_pay(problem.longest):
        return False
    return count == chunks or 0 < count * problem.most_chunks <= _LARGEST_FILL * chunks


def group_total(problem: Factors, index: Int[Array, ""]) -> Callable[[Callable], Any]:
    """How to sum a function of the program and a chunk over one group's chunks.

    Args:
        problem: the factors.
        index: which group.

    Returns:
        ``total(look)``; the chunks are picked once, outside of whatever loop calls it, where groups run side by side.
    """
    data, program = problem.data, problem.program
    chunks = data.chunk_group.shape[0]
    if problem.quadratic or chunks == problem.num_groups:
        own = take(data.chunks, index)
        return lambda look: look(program, own)
    if side_by_side(problem):
        places = data.offsets[index] + jnp.arange(problem.most_chunks)
        mine = places < data.offsets[index + 1]
        # Filled up with the group's first chunk, whose numbers are finite wherever the group's are.
        picked = take(data.chunks, jnp.where(mine, places, data.offsets[index]))

        def add_up(look: Callable) -> Any:
            found = jax.vmap(lambda chunk: look(program, chunk))(picked)
            return jax.tree.map(lambda x: jnp.sum(jnp.where(_like(mine, x), x, 0.0), axis=0), found)

        return add_up

    def total(look: Callable) -> Any:
        shapes = jax.eval_shape(lambda: look(program, take(data.chunks, 0)))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(c, sums):
            return jax.tree.map(jnp.add, sums, look(program, take(data.chunks, c)))

        return jax.lax.fori_loop(data.offsets[index], data.offsets[index + 1], add, zero)

    return total


def chained_moments(
    problem: Factors, total: Callable, by_weights: Callable | None, index: Int[Array, ""] | None = None
) -> Callable[[Any, Any, float, Any, Chains | None], Tilted]:
    """Moments by chains, or by weights until a factor's memory says otherwise.

    Args:
        problem: the factors.
        total: sums a function of the program and a chunk over the factor's chunks.
        by_weights: the way to take moments that chains stand in for; None where there are chains only.
        index: the group whose rows chains may read in mini-batches; None for a factor without rows.

    Returns:
        A function of q, site, power, key and memory.
    """
    settings = chain_settings(problem.solver)
    assert settings is not None

    def look(point):
        def of(program, chunk):
            return value_and_grad(log_density_at, argnums=2)(program, chunk, point)

        return total(of)

    look_rows = None
    if settings.batch_size is not None and index is not None and problem.rows is not None:
        look_rows = partial(_batch_gradients, problem.rows, index, settings.batch_size // 2)

    def moments_of(q, site, power, key, memory=None):
        def run():
            return from_chains(problem.family, look, q, site, power, key, settings, memory, look_rows)

        if by_weights is None:
            return run()
        weighed = by_weights
        if memory is None:
            return weighed(q, site, power, key)
        return jax.lax.cond(memory.used, run, lambda: weighed(q, site, power, key)._replace(memory=memory))

    return moments_of


def _batch_gradients(
    rows: GroupRows, index: Int[Array, ""], half: int, point: Float[Array, "D"], other: Float[Array, "D"], key: Any
) -> Float[Array, "2 D"]:
    """The difference of a group's gradients at two points, from each of two independent halves of a mini-batch."""
    count = rows.num_rows(index)
    taken = jax.random.randint(key, (2, half), 0, count)

    def one(some):
        at = rows.derivatives(index, jnp.stack([point, other]), some, False).gradient
        return (at[0] - at[1]) * (count / half)

    return jax.vmap(one)(taken)


def _like(mine: Bool[Array, "K"], leaf: Array) -> Array:
    return mine.reshape(mine.shape + (1,) * (leaf.ndim - 1))
