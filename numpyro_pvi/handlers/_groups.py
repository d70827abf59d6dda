"""Labels to groups: what a `Partition` was asked to split, and one label per plate index as a `GroupTable`."""

import datetime
import hashlib
import operator
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import jax
import jax.core
import numpy as np
from jaxtyping import Int

from ..errors import PartitionError

DEFAULT_NUM_GROUPS = 10
_SHOWN_LABELS = 10
# Types with a total order; others (frozenset, complex, user classes) keep the order of first appearance.
_SORTABLE = (bool, int, float, str, bytes, tuple, datetime.date, datetime.timedelta, np.datetime64, np.timedelta64)


class _Prior:
    """The one address of the prior factor; equal to nothing but itself, so that every user label stays free."""

    def __repr__(self) -> str:
        return "PRIOR"

    def __reduce__(self) -> str:
        # A string makes pickle and copy look the object up by name: there is only ever one.
        return "PRIOR"


PRIOR: Final = _Prior()


@dataclass(frozen=True)
class GroupTable:
    """Which group every row (plate index) belongs to. Static and hashable, so it can travel in a state's plan.

    Two tables are equal when their labels, sizes and `digest` are; the row array itself is never compared.

    Attributes:
        labels: The distinct labels as Python objects. Sorted when all are of one sortable type (bool, int, float, str,
            bytes, tuple, date, ...), else in order of first appearance.
        sizes: Rows per group, in the order of `labels`; every entry is at least 1.
        digest: SHA-256 of the row array and the label types.
        index_of_row: Position in `labels` for each row; read-only.
    """

    labels: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    digest: str
    index_of_row: Int[np.ndarray, " N"] = field(compare=False, repr=False)

    @property
    def num_groups(self) -> int:
        """Number of groups M."""
        return len(self.labels)

    @property
    def num_rows(self) -> int:
        """Number of rows N of the plate."""
        return len(self.index_of_row)

    @cached_property
    def _positions(self) -> dict[Hashable, int]:
        return {label: position for position, label in enumerate(self.labels)}

    def __contains__(self, label: Any) -> bool:
        """Whether `label` (a Python or NumPy scalar) is a group of this table."""
        return _is_hashable(label) and plain(label) in self._positions

    def index(self, label: Any) -> int:
        """Position of a group.

        ``label``: A label; NumPy scalars count as the Python scalars they hold. Returns the position in `labels`, from 0.
        Raises PartitionError if there is no such group; names the known ones.
        """
        if label not in self:
            raise PartitionError(f"there is no group {label!r}; the groups are: {known_labels(self.labels)}.")
        return self._positions[plain(label)]

    def rows(self, label: Any) -> Int[np.ndarray, " n"]:
        """Row indices of one group, ascending.

        ``label``: A label of this table. Returns the plate indices that carry the label. Raises PartitionError if there is no
        such group.
        """
        return np.flatnonzero(self.index_of_row == self.index(label)).astype(np.int32)


def labels_table(groups: Any) -> GroupTable:
    """Build the table of one label per row.

    ``groups``: A sequence or a NumPy, JAX or pandas array with one hashable label per row. Returns the table; its row order is
    that of `groups`. Raises PartitionError for a missing (NaN, None), unhashable or reserved label, labels that are equal but
    of different types (1 and True), a label array that is not one-dimensional, no labels, or a category that no row uses.
    """
    values = _label_values(groups)
    if isinstance(values, np.ndarray):
        # Sorted already, and the fast way for the many rows of a numeric or text array.
        uniques, index = np.unique(values, return_inverse=True)
        return _table(tuple(plain(value) for value in uniques), index)
    missing = [
        row for row, value in enumerate(values) if _is_hashable(value) and value is not PRIOR and _is_missing(value)
    ]
    if missing:
        raise PartitionError(_missing_message(missing))
    positions: dict[Hashable, int] = {}
    index = np.empty(len(values), dtype=np.int32)
    first: list[Hashable] = []
    for row, value in enumerate(values):
        label = _checked_label(value, row)
        index[row] = positions.setdefault(label, len(positions))
        if index[row] == len(first):
            first.append(label)
        elif type(label) is not type(first[index[row]]):
            raise PartitionError(
                f"`groups` has labels {first[index[row]]!r} and {label!r} (row {row}) that are equal but of different "
                "types: "
                "write every group's label in one type."
            )
    order = _order(first)
    rank = np.argsort(np.asarray(order))
    return _table(tuple(first[position] for position in order), rank[index])


def blocks_table(num_groups: int, num_rows: int) -> GroupTable:
    """Cut the rows into random blocks, labelled 0, 1, ..., whose sizes differ by at most one.

    The permutation is NumPy's default generator at seed 0, so the blocks depend on the two counts only. ``num_groups``: Number
    of blocks M, at least 1; ``num_rows``: Number of rows N of the plate, at least M. Raises PartitionError if there are fewer
    than one group or more groups than rows.
    """
    if num_groups < 1:
        raise PartitionError(f"{num_groups} groups were asked for; write at least 1.")
    if num_groups > num_rows:
        raise PartitionError(
            f"{num_groups} groups were asked for but the plate has {num_rows} rows, so some groups would be empty: "
            f"write at most {num_rows} groups."
        )
    index = np.empty(num_rows, dtype=np.int32)
    permutation = np.random.default_rng(0).permutation(num_rows)
    for group, rows in enumerate(np.array_split(permutation, num_groups)):
        index[rows] = group
    return _table(tuple(range(num_groups)), index)


def one_group_table(label: Any, num_rows: int) -> GroupTable:
    """The table of rows that all belong to one group.

    ``label``: The group's label; ``num_rows``: Number of rows, at least 1. Returns the table. Raises PartitionError for a label
    that is missing (NaN, None), unhashable or reserved.
    """
    return _table((_checked_label(label, 0),), np.zeros(num_rows, np.int32))


def numbered_table(sizes: tuple[int, ...]) -> GroupTable:
    """Groups of these sizes under the labels 0, 1, ...: what a program needs that must not depend on labels.

    ``sizes``: Rows of each group. Returns a table that says nothing of which row belongs where, equal to every other of the
    same sizes.
    """
    return GroupTable(tuple(range(len(sizes))), sizes, "", np.zeros(0, np.int32))


def known_labels(labels: Iterable[Hashable]) -> str:
    """Write labels for a message, the first ten of them.

    ``labels``: The labels. Returns for example ``'a', 'b'`` or ``0, 1, ... (200 in all)``.
    """
    labels = tuple(labels)
    shown = ", ".join(repr(label) for label in labels[:_SHOWN_LABELS])
    return shown if len(labels) <= _SHOWN_LABELS else f"{shown}, ... ({len(labels)} in all)"


def _label_values(groups: Any) -> np.ndarray | list[Any]:
    """One-dimensional labels: an array where NumPy can sort them safely, else a list of objects."""
    if isinstance(groups, jax.core.Tracer):
        raise PartitionError(
            "`groups` is a traced array; groups are fixed before compiling: pass a NumPy array or a list."
        )
    if isinstance(groups, str | bytes) or not (hasattr(groups, "__array__") or isinstance(groups, Iterable)):
        raise PartitionError(
            f"`groups` is {groups!r}; expected one label per plate index (a list or array), or an int for that many "
            "random blocks."
        )
    if isinstance(groups, Set):
        raise PartitionError(
            f"`groups` is a {type(groups).__name__}, whose order says nothing of rows: expected one label per plate index in a "
            "list or array, such as a column of the data."
        )
    if isinstance(groups, np.ma.MaskedArray):
        raise PartitionError(
            "`groups` is a masked array, whose mask would be lost: write `groups.filled('unknown')` (or a number that no "
            "other label has), or drop the rows that are masked."
        )
    _refuse_unused_categories(groups)
    # A list must not pass through np.asarray: it would turn [1, "a"] into text.
    values = np.asarray(groups) if hasattr(groups, "__array__") else list(groups)
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise PartitionError(f"`groups` has shape {values.shape}; expected one axis, one label per plate index.")
    if len(values) == 0:
        raise PartitionError("`groups` is empty; expected one label per plate index.")
    if isinstance(values, np.ndarray) and values.dtype.kind not in "biufUSMm":
        return values.tolist()
    if isinstance(values, np.ndarray):
        missing = np.flatnonzero(values != values)
        if missing.size:
            raise PartitionError(_missing_message(missing.tolist()))
    return values


def _refuse_unused_categories(groups: Any) -> None:
    """A pandas category that no row has would be a group nobody belongs to."""
    categorical = getattr(groups, "cat", groups)
    categories = getattr(categorical, "categories", None)
    codes = getattr(categorical, "codes", None)
    if categories is None or codes is None:
        return
    unused = sorted(set(range(len(categories))) - set(np.asarray(codes).tolist()))
    if unused:
        raise PartitionError(
            f"`groups` has categories that no row uses: {known_labels(categories[position] for position in unused)}. "
            "Every group needs a row: call `.remove_unused_categories()` first."
        )


def _missing_message(rows: Iterable[int]) -> str:
    rows = tuple(rows)
    return (
        f"`groups` has {len(rows)} missing label(s) (NaN or None), at row(s) {known_labels(rows)}: "
        "drop those rows, or give them a label of their own such as 'unknown'."
    )


def _checked_label(value: Any, row: int) -> Hashable:
    if not _is_hashable(value):
        raise PartitionError(
            f"the label of row {row} is a {type(value).__name__}, which is not hashable: write a tuple, str or int."
        )
    if value is PRIOR:
        raise PartitionError(f"the label of row {row} is PRIOR, which addresses the prior factor: write another label.")
    if _is_missing(value):
        raise PartitionError(_missing_message([row]))
    return plain(value)


def _is_missing(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_is_missing(part) for part in value if part is not None)
    # NaN and NaT differ from themselves; pandas.NA answers with itself, which is neither True nor False.
    unequal = value != value
    return value is None or not isinstance(unequal, bool | np.bool_) or bool(unequal)


def plain(value: Any) -> Any:
    """The Python scalar in a NumPy scalar. Dates stay: `.item()` turns nanoseconds into a bare int."""
    if isinstance(value, np.generic) and not isinstance(value, np.datetime64 | np.timedelta64):
        return value.item()
    return value


def _is_hashable(value: Any) -> bool:
    # isinstance(value, Hashable) says yes to a tuple that holds a list.
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _order(labels: list[Any]) -> list[int]:
    """Positions of labels in the table's order."""
    positions = list(range(len(labels)))
    if len({type(label) for label in labels}) > 1 or not isinstance(labels[0], _SORTABLE):
        return positions
    try:
        return sorted(positions, key=labels.__getitem__)
    except TypeError:  # tuples of mixed types
        return positions


def _table(labels: tuple[Hashable, ...], index: np.ndarray) -> GroupTable:
    index = np.ascontiguousarray(index, dtype=np.int32).reshape(-1)
    index.flags.writeable = False
    sizes = tuple(np.bincount(index, minlength=len(labels)).tolist())
    # 1, 1.0 and True are equal as labels; the digest keeps tables that differ so apart.
    types = "|".join(type(label).__qualname__ for label in labels)
    digest = hashlib.sha256(index.tobytes() + types.encode()).hexdigest()
    return GroupTable(labels=labels, sizes=sizes, digest=digest, index_of_row=index)


# --------------------------------------------------------------------------------------------------------------- splits
# What a `Partition` was asked to split: plates or sample sites, each with its labels or number of blocks.

# A table of labels; a number of random blocks; None: the default number of them.
Split = GroupTable | int | None


def parse_splits(
    plate: str | None, groups: Any, sites: Mapping[str, int] | None
) -> tuple[str | None, dict[str | None, Split]]:
    """Name and parse what is split.

    ``groups``: Labels, a number of blocks, None, or a dict of these by plate; ``sites``: Batch axis by sample site name, or
    None. Returns the one plate's name (None: to be found, or several), and a split by plate name (None: to be found) or by
    sample site name. Raises PartitionError for labels or combinations that make no sense.
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

    ``split``: Table, number of blocks, or None for at most 10 blocks; ``size``: Number of indices N of the plate. Returns the
    table of N rows. Raises PartitionError if the number of labels is not N, or there are more groups than rows.
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

    Returns the label, as a Python scalar. Raises PartitionError if there is no such group.
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

    ``axes``: The user's dict, or None; "data_axes" may say None for an argument that does not run over rows. Returns a plain
    dict of Python ints (or Nones), or None. Raises PartitionError for anything else.
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

    Returns the integer in a Python, NumPy or JAX integer scalar; None for anything else, bool included.
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
