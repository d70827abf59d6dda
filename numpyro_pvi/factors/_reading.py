"""The model on one chunk of rows, by the mechanism that a plan chose, and which of its terms then count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .._compiling import on_device
from ..handlers import PlateRows
from ._model import ModelCall
from ._packing import Packing

# Tried in this order: rows of the arguments, indices of the plate, everything with the other groups masked.
MECHANISMS = ("args", "index", "mask")


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupMasks:
    """One "chunk" per group, of all rows with the other groups' masked: what every model allows, at M full passes.

    Attributes:
        group_of_row: Position of each row's group, by plate (or labelled site); -1 is nobody's.
        chunk_group: 0 to M - 1.
        offsets: 0 to M.
    """

    group_of_row: dict[str, Int[Array, " N"]]
    chunk_group: Int[Array, " C"]
    offsets: Int[Array, " G"]

    @property
    def chunks(self) -> Int[Array, " C"]:
        """What identifies each chunk: its group."""
        return self.chunk_group

    def masks(self, chunk: Int[Array, ""], keys: tuple[str, ...]) -> Mapping[str | None, Bool[Array, " N"]]:
        """Which rows of every partitioned axis belong to the chunk's group."""
        return {key: self.group_of_row[key] == chunk for key in keys}

    def first_rows(self) -> Int[Array, " M"]:
        """Place of every group's first row, those of several plates end to end."""
        owner = jnp.concatenate(list(self.group_of_row.values()))
        return jnp.argmax(owner == self.chunk_group[:, None], axis=1)


def group_masks(group_of_row: dict[str, np.ndarray], num_groups: int) -> GroupMasks:
    """Masks from the position of each row's group.

    Args:
        group_of_row: by partitioned axis.
        num_groups: M.

    Returns:
        One chunk per group.
    """
    return GroupMasks(
        {key: on_device(index, np.int32) for key, index in group_of_row.items()},
        on_device(np.arange(num_groups), np.int32),
        on_device(np.arange(num_groups + 1), np.int32),
    )


@dataclasses.dataclass(frozen=True)
class Reading:
    """How one chunk is read; static and hashable.

    Args:
        mechanism: "args", "index" or "mask".
        keys: the partitioned axes: names of plates, or of labelled sites.
        axes: per leaf of ``(args, kwargs)``, the axis that runs over the rows, or None ("args" only).
        resized: whether the model sizes its plate by a number, which a chunk's plate does not follow by itself ("args" only).
    """

    mechanism: str
    keys: tuple[str, ...]
    axes: tuple[int | None, ...]
    resized: bool = False

    def sized(self, model: Callable, count: int) -> Callable:
        """The model with as many rows in its plate as it is given.

        Args:
            model: the NumPyro model.
            count: rows of the arguments.

        Returns:
            The model itself where its plate's size follows the arguments.
        """
        return PlateRows(model, self.keys[0], jnp.arange(count)) if self.resized else model

    def call(self, call: ModelCall, chunk: Any) -> ModelCall:
        """The model with one chunk's rows.

        Args:
            call: the model on all rows.
            chunk: one entry of the packing's ``chunks``.

        Returns:
            The model on the chunk's rows; on all rows where they are masked.
        """
        if self.mechanism == "mask":
            return call
        rows = chunk[0]
        if call.local is not None:
            call = dataclasses.replace(call, local=call.local[rows])
        if self.mechanism == "index":
            return dataclasses.replace(call, model=PlateRows(call.model, self.keys[0], rows))
        args, kwargs = slice_rows((call.args, call.kwargs), self.axes, rows)
        return dataclasses.replace(call, model=self.sized(call.model, rows.shape[0]), args=args, kwargs=kwargs)

    def masks(self, packing: Packing | GroupMasks, chunk: Any) -> Mapping[str | None, Bool[Array, " R"]]:
        """Which rows of the evaluated model count for the chunk, by partitioned axis."""
        if isinstance(packing, GroupMasks):
            return packing.masks(chunk, self.keys)
        return dict.fromkeys(self.keys, chunk[1])


def slice_rows(tree: tuple, axes: tuple[int | None, ...], rows) -> tuple:
    """Take rows of every argument leaf that runs over the plate.

    Args:
        tree: ``(args, kwargs)``.
        axes: per leaf, the axis of the plate or None.
        rows: Int[R] plate indices.

    Returns:
        ``(args, kwargs)`` of those rows.
    """
    leaves, structure = jax.tree.flatten(tree)
    taken = [
        x if axis is None else jnp.take(x, rows, axis=axis, indices_are_sorted=False, mode="clip")
        for x, axis in zip(leaves, axes, strict=True)
    ]
    return structure.unflatten(taken)
