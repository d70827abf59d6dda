"""Rows as they come: the order in which a group's rows are taken, and draws from those seen so far."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..expectations import RowProgram


@runtime_checkable
class Stream(Protocol):
    """What a runtime offers to a schedule that takes rows as they come."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        ...

    def first_rows(self) -> Int[Array, "M"]:
        """Index of every group's first row: where its label first appears."""
        ...

    def program(self, expectation: str) -> RowProgram:
        """How expectations of single rows are taken; raises where rows have no affine predictors."""
        ...

    def row(self, group: Int[Array, ""], position: Int[Array, ""]) -> Any:
        """The arrays of one row of one group."""
        ...

    def classes(self) -> tuple[Int[Array, "M N"], int] | None:
        """The class of every group's rows (-1 beyond the last), and the number of classes; None without classes."""
        ...


class Replay(NamedTuple):
    """Where each class's rows stand, for draws from the rows seen so far."""

    # Positions of each group's rows, sorted by class, and within a class in their order.
    order: Int[Array, "M N"]
    # First entry of each class, and of what comes after the last.
    starts: Int[Array, "M ends"]


def sort_classes(stream: Stream) -> Replay:
    """Sort every group's rows by class; one class where the responses have none.

    Args:
        stream: the rows.

    Returns:
        The order, in which rows seen so far are the first of each class.
    """
    found = stream.classes()
    sizes = jnp.asarray(stream.sizes, jnp.int32)
    positions = jnp.arange(max(stream.sizes), dtype=jnp.int32)
    inside = positions < sizes[:, None]
    classes, count = (jnp.where(inside, 0, -1), 1) if found is None else found
    kept = jnp.where(classes < 0, count, classes)
    order = jnp.argsort(kept, axis=1, stable=True).astype(jnp.int32)
    starts = jnp.stack([jnp.sum(kept < c, axis=1) for c in range(count + 1)], axis=1).astype(jnp.int32)
    return Replay(order, starts)


def draw_seen(
    replay: Replay, group: Int[Array, ""], seen: Int[Array, ""], key: Any, count: int
) -> tuple[Int[Array, "r"], Bool[Array, "r"]]:
    """Draw positions among a group's first rows: a class with a seen row uniformly, then one of its seen rows uniformly.

    Args:
        replay: the sorted rows.
        group: whose.
        seen: how many of its rows it has seen.
        key: random key.
        count: how many to draw, with replacement.

    Returns:
        The positions, and whether there was anything to draw.
    """
    order, starts = replay.order[group], replay.starts[group]
    # Rows of one class stand in their order, so those seen are a prefix: found by bisection.
    before = jax.vmap(lambda low, high: _count_below(order, low, high, seen))(starts[:-1], starts[1:])
    class_key, row_key = jax.random.split(key)
    chosen = jax.random.categorical(class_key, jnp.where(before > 0, 0.0, -jnp.inf), shape=(count,))
    offset = jax.random.randint(row_key, (count,), 0, jnp.maximum(before[chosen], 1))
    return order[starts[chosen] + offset], jnp.full((count,), seen > 0)


def _count_below(order, low, high, limit) -> Int[Array, ""]:
    """How many of the ascending entries of ``order[low:high]`` are below a limit."""

    def halve(at, _):
        left, right = at
        middle = (left + right) // 2
        below = (order[jnp.minimum(middle, order.shape[0] - 1)] < limit) & (left < right)
        return (jnp.where(below, middle + 1, left), jnp.where(below | (left >= right), right, middle)), None

    steps = max(order.shape[0], 1).bit_length() + 1
    (left, _), _ = jax.lax.scan(halve, (low, high), None, length=steps)
    return left - low
