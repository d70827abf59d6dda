"""One site that all groups share: ``q = prior * t^M``, held as the product ``t^M`` in the place of a stack of one site."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def tie(groups: Any) -> Any:
    """Put the product of all groups' sites in the place of the sites.

    Args:
        groups: natural parameters with a leading group axis M.

    Returns:
        Their sum with a leading axis of 1: q is the same.
    """
    return jax.tree.map(lambda x: jnp.sum(x, axis=0, keepdims=True), groups)


def tied_site(whole: Any, count: int) -> Any:
    """The site that each of ``count`` groups has: the count-th root of the product, ``eta_t = eta_(t^M) / M``.

    Args:
        whole: natural parameters of the product, with a leading axis of 1.
        count: M.

    Returns:
        Natural parameters of t.
    """
    return jax.tree.map(lambda x: x[0] / count, whole)
