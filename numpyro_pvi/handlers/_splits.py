"""What a `Partition` was asked to split: plates or sample sites, each with its labels or number of blocks."""

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from ..errors import PartitionError
from ._groups import (
    DEFAULT_NUM_GROUPS,
    PRIOR,
    GroupTable,
    blocks_table,
    known_labels,
    labels_table,
)

__all__ = ["Split", "as_int", "checked_axes", "checked_group", "parse_splits", "split_table"]

# A table of labels; a number of random blocks; None: the default number of them.
Split = GroupTable | int | None


def parse_splits(
    plate: str | None, groups: Any, sites: Mapping[str, int] | None
) -> tuple[str | None, dict[str | None, Split]]:
    """Name and parse what is split.

    Args:
        plate: Name of the plate, or None.
        groups: Labels, a number of blocks, None, or a dict of these by plate.
        sites: Batch axis by sample site name, or None.

    Returns:
        The one plate's name (None: to be found, or several), and a split by plate name (None: to be found) or by sample
        site name.

    Raises:
        PartitionError: For labels or combinations that make no sense.
    """
    if plate is not None and not isinstance(plate, str):
        raise PartitionError(
            f"plate is a {type(plate).__name__}; expected the plate's name: write Partition(model, 'data', groups)."
        )
    if isinstance(groups, Mapping):
        if plate is not None or sites or not groups or not all(isinstance(name, str) for name in groups):
            raise PartitionError(
                "`groups` as a dict names the plates itself: write Partition(model, groups={'A': labels_a, "
                "'B': labels_b}) without `plate` or `sites`, plate names as keys."
            )
        splits = {name: _parse(labels) for name, labels in groups.items()}
        return (next(iter(splits)) if len(splits) == 1 else None), splits
    if sites and plate is not None:
        raise PartitionError(f"plate={plate!r} and sites={dict(sites)!r} are both given: write one of them.")
    parsed = _parse(groups)
    return plate, dict.fromkeys(sites, parsed) if sites else {plate: parsed}


def split_table(split: Split, size: int, plate: str | None) -> GroupTable:
    """Table of one split for a plate of known size.

    Args:
        split: Table, number of blocks, or None for at most 10 blocks.
        size: Number of indices N of the plate.
        plate: Its name for messages, or None.

    Returns:
        The table of N rows.

    Raises:
        PartitionError: If the number of labels is not N, or there are more groups than rows.
    """
    if isinstance(split, int):
        return blocks_table(split, size)
    if split is None:
        return blocks_table(min(DEFAULT_NUM_GROUPS, size), size)
    if split.num_rows != size:
        raise PartitionError(
            f"{f'plate {plate!r}' if plate else 'the plate'} has size {size} but `groups` has {split.num_rows} labels: "
            "write one label per plate index, in the order of the rows."
        )
    return split


def checked_group(group: Hashable, splits: Mapping[str | None, Split]) -> Hashable:
    """Refuse a label that no split has, where that can be known before the plate's size is.

    Args:
        group: A label or `PRIOR`.
        splits: As `parse_splits` gives them.

    Returns:
        The label, as a Python scalar.

    Raises:
        PartitionError: If there is no such group.
    """
    if isinstance(group, np.generic) and not isinstance(group, np.datetime64 | np.timedelta64):
        group = group.item()
    if group is PRIOR or any(split is None for split in splits.values()):
        return group
    known = dict.fromkeys(label for split in splits.values() for label in _labels(split))
    try:
        is_known = group in known
    except TypeError:  # not hashable
        is_known = False
    if not is_known:
        raise PartitionError(f"there is no group {group!r}; the groups are: {known_labels(known)}.")
    return group


def checked_axes(axes: Mapping[Any, int | None] | None, word: str) -> dict[Any, int | None] | None:
    """Refuse anything but a dict of axis numbers.

    Args:
        axes: The user's dict, or None; "data_axes" may say None for an argument that does not run over rows.
        word: What the user calls it.

    Returns:
        A plain dict of Python ints (or Nones), or None.

    Raises:
        PartitionError: For anything else.
    """
    if axes is None:
        return None
    optional = word == "data_axes"
    wrong = not isinstance(axes, Mapping) or not axes
    if wrong or any(as_int(axis) is None and not (optional and axis is None) for axis in axes.values()):
        none = ", or None for what does not run over rows" if optional else ""
        raise PartitionError(f"{word} is {axes!r}; expected a dict from name to axis number{none}.")
    return {name: None if axis is None else operator.index(axis) for name, axis in axes.items()}


def as_int(value: Any) -> int | None:
    """Read an integer scalar.

    Args:
        value: Anything.

    Returns:
        The integer in a Python, NumPy or JAX integer scalar; None for anything else, bool included.
    """
    if isinstance(value, bool | np.bool_) or getattr(value, "ndim", 0):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _parse(groups: Any) -> Split:
    if groups is None or isinstance(groups, GroupTable):
        return groups
    number = as_int(groups)
    if number is None:
        return labels_table(groups)
    if number < 1:
        raise PartitionError(f"{number} groups were asked for; write at least 1, or one label per plate index.")
    return number


def _labels(split: Split) -> tuple[Hashable, ...] | range:
    return split.labels if isinstance(split, GroupTable) else range(split or 0)
