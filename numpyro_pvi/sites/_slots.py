"""Sites of groups whose rows are not at hand: slots along a leading axis whose length doubles, empty ones zero.

A zero site is the unit factor, so the sum over all slots is the sum over the groups, and a program that is compiled for a
number of slots serves every number of groups up to it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_FEWEST = 4


def capacity(count: int) -> int:
    """Slots for ``count`` sites: the next power of two, at least four."""
    return max(_FEWEST, 1 << (count - 1).bit_length())


def sum_slots(others: Any) -> Any:
    """The product of all factors in the slots, in natural space.

    Args:
        others: natural parameters with a leading axis of slots.

    Returns:
        Natural parameters without it.
    """
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), others)


def add_slots(others: Any, count: int, sites: Any) -> Any:
    """Put more sites behind those that are there, in twice the slots when they do not fit.

    Args:
        others: the slots, or None.
        count: slots in use.
        sites: natural parameters with a leading axis.

    Returns:
        The slots; None when there is nothing to hold.
    """
    more = jax.tree.leaves(sites)[0].shape[0]
    if count + more == 0:
        return None
    wanted = capacity(count + more)
    if others is None:
        others = jax.tree.map(lambda x: jnp.zeros((wanted, *x.shape[1:]), x.dtype), sites)
    elif jax.tree.leaves(others)[0].shape[0] < wanted:
        others = _grow(others, wanted)
    return others if more == 0 else _write(others, jnp.int32(count), sites)


def keep_slots(others: Any, kept: np.ndarray) -> Any:
    """Some of the slots, moved to the front in the order given; the others become empty.

    Args:
        others: the slots.
        kept: positions of those to keep.

    Returns:
        As many slots as before; None when none is kept.
    """
    if len(kept) == 0:
        return None
    size = jax.tree.leaves(others)[0].shape[0]
    order = np.zeros(size, np.int32)
    order[: len(kept)] = kept
    return _keep(others, order, jnp.int32(len(kept)))


def stack_sites(others: Any, chosen: np.ndarray) -> Any:
    """The sites in some slots, with a leading axis of their number."""
    return _take(others, np.asarray(chosen, np.int32))


_grow = jax.jit(
    lambda others, size: jax.tree.map(
        lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype).at[: x.shape[0]].set(x), others
    ),
    static_argnums=1,
)


@jax.jit
def _write(others: Any, start: Any, sites: Any) -> Any:
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, 0), others, sites)


@jax.jit
def _keep(others: Any, order: Any, count: Any) -> Any:
    def keep(x):
        used = jnp.arange(x.shape[0]) < count
        return jnp.where(used.reshape(-1, *(1,) * (x.ndim - 1)), x[order], 0)

    return jax.tree.map(keep, others)


@jax.jit
def _take(others: Any, chosen: Any) -> Any:
    return jax.tree.map(lambda x: x[chosen], others)
