"""Evaluating a model at many draws: compiled once per model, in batches of bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# Array elements that one batch of draws may hold per intermediate array; 2^22 are 32 MB in float64.
BATCH_ELEMENTS = 2**22


def map_draws(one: Callable, draws: Any, num_samples: int, elements_of: Callable | None = None) -> Any:
    """``vmap(one)(draws)`` in batches, so that memory beyond the result itself does not grow with the number of draws.

    Args:
        one: function of one draw.
        draws: pytree of arrays with a leading axis of length ``num_samples``.
        num_samples: number of draws.
        elements_of: function of one draw whose outputs are as large as what is computed on the way to ``one``'s;
            ``one`` itself by default.

    Returns:
        What ``one`` returns, with a leading axis of length ``num_samples``.
    """
    first = jax.tree.map(lambda x: x[0], draws)
    elements = sum(x.size for x in jax.tree.leaves(jax.eval_shape(elements_of or one, first)))
    batch = max(1, min(num_samples, BATCH_ELEMENTS // max(1, elements)))
    return jax.lax.map(one, draws, batch_size=batch)
