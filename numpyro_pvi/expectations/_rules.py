"""Fixed node sets for Gaussian expectations: Gauss-Hermite for small predictor sd, plain trapezoids above it.

Nodes live in standardised units, u = mean + sd * z. Everything here is NumPy, computed on first use and cached.
"""

from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.polynomial.hermite_e import hermegauss

RULES: tuple[str, ...] = ("gh8", "gh20", "coarse", "trapezoid", "mapped")
"""Rules for expectations over one or two predictors, cheapest first; a rule's index is its place here."""

SD_LIMITS: dict[str, tuple[float, ...]] = {"float64": (0.1, 0.9, 1.7, 4.0), "float32": (0.35, 1.5, 2.2, 5.0)}
"""Largest predictor sd, in units of the link's own scale, up to which each rule but the last meets the target."""

TARGET: dict[str, float] = {"float64": 1e-8, "float32": 1e-6}
"""Relative error aimed at on the value and both derivatives."""

TOLERANCE: dict[str, float] = {"float64": 1e-8, "float32": 1e-5}
"""Error of all rows' curvature, relative to its sum or to q's precision, that a finer rule is tried for."""

# Range in sds and number of nodes of the coarse trapezoid: an even number, as of the fine one (see `fixed_nodes`).
_COARSE = {"float64": (7.5, 40), "float32": (6.0, 30)}
# Nodes of one and of two predictors that a pass over few rows takes at once, and the number of rows up to which it does.
BLOCKS, FEW_ROWS = (10, 40), (2048, 512)


def core_limit(dtype: np.dtype) -> float:
    """Standard deviations beyond which a Gaussian has no mass the dtype could see (unless the integrand grows)."""
    return 9.0 if np.dtype(dtype) == np.float64 else 6.5


def tail_limit(dtype: np.dtype) -> float:
    """Standard deviations beyond which the Gaussian density itself leaves the dtype's range."""
    return 37.0 if np.dtype(dtype) == np.float64 else 12.5


FIXED_RULES: tuple[str, ...] = RULES[:-1]
"""Rules with the same standardised nodes in every row."""


class NodeTable(NamedTuple):
    """Nodes of all fixed rules end to end, so that one loop serves whichever rule a traced index means."""

    nodes: tuple[np.ndarray, ...]  # one array per axis
    weights: np.ndarray
    starts: np.ndarray  # first node of each rule, and the total
    per_axis: np.ndarray  # nodes of each rule along one axis

    def width(self, num_rows: int) -> int:
        """Nodes that a pass over so many rows takes at once."""
        last = len(self.nodes) - 1
        return BLOCKS[last] if num_rows <= FEW_ROWS[last] else 1

    def span(self, index: int | Array) -> tuple[int | Array, int | Array, int | Array]:
        """First node, end and nodes per axis of a rule; Python ints for an index known while tracing."""
        if isinstance(index, int):
            return int(self.starts[index]), int(self.starts[index + 1]), int(self.per_axis[index])
        starts = jnp.asarray(self.starts)
        return starts[index], starts[index + 1], jnp.asarray(self.per_axis)[index]


@cache
def node_table(num_axes: int, dtype_name: str) -> NodeTable:
    """Tensor-product nodes of every fixed rule in one or two dimensions, each rule in whole blocks of nodes.

    Args:
        num_axes: 1 or 2.
        dtype_name: "float32" or "float64".

    Returns:
        The table; nodes of negligible weight are left out in two dimensions.
    """
    parts, weights, per_axis = [], [], []
    for name in FIXED_RULES:
        nodes, weight = fixed_nodes(name, dtype_name)
        per_axis.append(len(nodes))
        product = np.prod(np.meshgrid(*[weight] * num_axes), axis=0).ravel()
        kept = product > (0.0 if num_axes == 1 else 1e-18 if dtype_name == "float64" else 1e-10)
        grid = [g.ravel()[kept] for g in np.meshgrid(*[nodes] * num_axes)]
        grid, product = _whole_blocks(grid, product[kept], BLOCKS[num_axes - 1])
        parts.append(grid)
        weights.append(product)
    starts = np.concatenate([[0], np.cumsum([len(w) for w in weights])])
    axes = tuple(np.concatenate([p[k] for p in parts]) for k in range(num_axes))
    return NodeTable(axes, np.concatenate(weights), starts, np.asarray(per_axis))


def _whole_blocks(nodes: list[np.ndarray], weights: np.ndarray, block: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The same rule with some middle nodes taken twice at half their weight, for a multiple of a number of nodes.

    Nodes of no weight would not do: nothing times infinity is no number.
    """
    missing = -len(weights) % block
    twice = np.zeros(len(weights), bool)
    twice[(len(weights) - missing) // 2 :][:missing] = True
    times = 1 + twice
    return [np.repeat(axis, times) for axis in nodes], np.repeat(weights / times, times)


@cache
def fixed_nodes(name: str, dtype_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of a fixed rule for E[f(z)], z standard normal.

    Args:
        name: "gh8", "gh20", or one of the two trapezoids, "coarse" (for predictors a little wider than the link) and
            "trapezoid".
        dtype_name: "float32" or "float64"; the trapezoids' range and step follow it.

    Returns:
        Nodes (ascending) and weights that sum to one, both float64.
    """
    if name.startswith("gh"):
        nodes, weights = hermegauss(int(name[2:]))
        return nodes, weights / weights.sum()
    limit, step = core_limit(np.dtype(dtype_name)), 0.2 if dtype_name == "float64" else 0.22
    # An even number: no node falls on the mean. NumPyro's densities have the wrong derivative exactly at a logit of 0.
    count = 2 * int(np.ceil(limit / step))
    if name == "coarse":
        limit, count = _COARSE[dtype_name]
    nodes = np.linspace(-limit, limit, count)
    weights = np.exp(-0.5 * nodes**2)
    return nodes, weights / weights.sum()
