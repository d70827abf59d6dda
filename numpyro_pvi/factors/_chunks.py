"""Rows of unequal groups in chunks of equal length, and the model on one chunk by the mechanism that a plan chose.

Padding every group to the largest costs M times the data when one group holds half the rows. Chunks cost at most
`MAX_PADDED_SHARE` of the rows, and there are at most `MAX_CHUNKS_PER_GROUP` of them per group on average, because every
chunk leaves a result as large as a site.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from .._compiling import on_device
from ..errors import DataError
from ..handlers import GroupTable, PlateRows
from ._model import ModelCall

MAX_PADDED_SHARE: Final = 1.3
# Chunks of R > s a rows (a the average group size, s the padding allowed) number less than M (1 + 1/s), and with
# R - 1 <= s a they pad at most s N: both limits can always be met.
MAX_CHUNKS_PER_GROUP: Final = 1 + 1 / (MAX_PADDED_SHARE - 1)
# What a chunk costs besides its rows (its result, its share of the model's global part), in units of `chunk_size` rows.
_CHUNK_COST = 1 / 16
_MAX_CANDIDATES = 2048
# Longest chunk: a pass holds some hundred numbers for every row of a chunk. Each chunk leaves a result of D^2 numbers,
# so it should be several times longer than D all the same.
_LONGEST_CHUNK = 1024
_LONGEST_PER_DIM = 8


# JAX rebuilds pytrees around placeholders (vmap axes, shapes), so the constructor must not check its arguments.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packing:
    """Which row stands where in the chunks. Chunks are sorted by group.

    Attributes:
        rows: Plate index of each slot; slots of padding repeat the chunk's first row.
        mask: True where a slot holds a row, False where it is padding. Every row is in exactly one such slot.
        chunk_group: Position of each chunk's group in the group table; ascending.
        offsets: First chunk of each group, and the number of chunks at the end; G = M + 1 entries.
        places: Where each slot's row stands in the arguments, where these hold the rows in the order of the slots (one device's
            share of them, where there are several: `rows`, `mask` and `places` are then of its own chunks, E of them, and
            `chunk_group` and `offsets` of all); None where rows stand at their plate index.
    """

    rows: Int[Array, "E R"]
    mask: Bool[Array, "E R"]
    chunk_group: Int[Array, " C"]
    offsets: Int[Array, " G"]
    places: Int[Array, "E R"] | None = None

    @property
    def chunks(self) -> tuple[Int[Array, "E R"], Bool[Array, "E R"]]:
        """What identifies each chunk: where its rows stand, and which of them are no padding."""
        return self.stands, self.mask

    @property
    def stands(self) -> Int[Array, "E R"]:
        """Where each slot's row stands in the arguments."""
        return self.rows if self.places is None else self.places

    def first_rows(self) -> Int[Array, " M"]:
        """Index of every group's first row."""
        # A chunk's padding repeats its own first row.
        return jnp.min(self.rows, axis=1)[self.offsets[:-1]]


def plate_rows(chunk: tuple) -> Int[Array, " R"]:
    """Plate indices of a chunk's rows.

    ``chunk``: where they stand, which are no padding, and their plate indices where these are others. Returns the indices.
    """
    return chunk[0] if len(chunk) == 2 else chunk[2]


def choose_chunk_rows(sizes: tuple[int, ...], chunk_size: int = 128, dim: int = 1) -> int:
    r"""Choose the chunk length R that makes rows and chunks together cheapest.

    With C(R) = sum_m ceil(n_m / R) chunks, it minimises

        R C(R) + (chunk_size / 16) C(R)   subject to   R C(R) <= 1.3 N,   R <= R_max = max(1024, 8 D),
                                      C(R) <= max(4.3 M, M + N / R_max).

    Groups of equal size get one chunk each and no padding. The minimum is at some R = ceil(n_m / k), since between
    those C is constant; all of them are tried (evenly thinned out above 2048).

    Args:
        sizes: Rows of each group, n_m >= 1.
        chunk_size: Rows worth 16 chunks' own cost: a larger number accepts more padding to have fewer chunks.
        dim: D, the number of latents.

    Returns:
        R, between 1 and the largest group's size, and at most ``max(1024, 8 D)``, which bounds the memory of a pass.
    """
    rows_of, count = np.unique(np.asarray(sizes, dtype=np.int64), return_counts=True)
    num_rows, num_groups = int(rows_of @ count), int(count.sum())
    longest = min(max(_LONGEST_CHUNK, _LONGEST_PER_DIM * dim), int(rows_of[-1]))
    most = max(MAX_CHUNKS_PER_GROUP * num_groups, num_rows / longest + num_groups)
    # One past the padding allowed per group: feasible for any sizes (see MAX_CHUNKS_PER_GROUP).
    safe = min(int((MAX_PADDED_SHARE - 1) * num_rows / num_groups) + 1, longest)
    candidates = _candidates(rows_of, max(1, int(num_rows / most)), safe)
    candidates = candidates[candidates <= longest]
    chunks = np.array([int(-(-rows_of // length) @ count) for length in candidates])
    padded = candidates * chunks
    feasible = (padded <= MAX_PADDED_SHARE * num_rows) & (chunks <= most)
    cost = np.where(feasible, padded + _CHUNK_COST * chunk_size * chunks, np.inf)
    # Among equals the longest: fewest chunks.
    return int(candidates[cost == cost.min()].max())


def pack_rows(table: GroupTable, chunk_rows: int) -> Packing:
    """Pack the rows of every group into chunks.

    ``table``: Group of each row; ``chunk_rows``: Chunk length R, at least 1. Returns the packing; within a group, rows keep
    their order.
    """
    sizes = np.asarray(table.sizes, dtype=np.int64)
    order = np.argsort(table.index_of_row, kind="stable")
    ends = np.cumsum(sizes)
    chunks = -(-sizes // chunk_rows)
    offsets = np.concatenate([[0], np.cumsum(chunks)])
    group = np.repeat(np.arange(len(sizes)), chunks)
    start = (ends - sizes)[group] + (np.arange(offsets[-1]) - offsets[group]) * chunk_rows
    slots = start[:, None] + np.arange(chunk_rows)
    mask = slots < ends[group][:, None]
    rows = order[np.where(mask, slots, start[:, None])]
    return Packing(
        rows=on_device(rows, np.int32),
        mask=on_device(mask),
        chunk_group=on_device(group, np.int32),
        offsets=on_device(offsets, np.int32),
    )


def gather_rows(leaf: Shaped[Array, "..."], packing: Packing, axis: int = 0) -> Shaped[Array, "C ..."]:
    """Arrange an array's rows in chunks.

    ``leaf``: Array whose `axis` runs over the plate's rows; ``packing``: Where each row stands; ``axis``: The axis of the rows.
    Returns the chunks along a new leading axis; within a chunk the rows stay on `axis`, so ``(N, D)`` gives ``(C, R, D)`` and,
    with axis 1, ``(D, N)`` gives ``(C, D, R)``. Slots of padding repeat the chunk's first row. Raises DataError if the array
    has no such axis.
    """
    if not -leaf.ndim <= axis < leaf.ndim:
        raise DataError(f"an array of shape {leaf.shape} has no axis {axis} for its rows.")
    axis %= leaf.ndim
    if packing.places is not None:
        # They stand in the order of the slots already.
        shape = leaf.shape[:axis] + packing.places.shape + leaf.shape[axis + 1 :]
        return jnp.moveaxis(jnp.reshape(leaf, shape), axis, 0)
    return jnp.moveaxis(jnp.take(leaf, packing.rows, axis=axis), axis, 0)


def even_packing(packing: Packing, parts: int, whole: bool) -> Packing:
    """Fill a packing up with empty chunks until it falls into parts of as many chunks.

    ``packing``: rows of each chunk, on the host; ``parts``: how many parts; ``whole``: whether all chunks of a group have to be
    in one part. Returns the packing; empty chunks count to the group before them. One that is so already is handed back.
    """
    rows, mask, group = (np.asarray(x) for x in (packing.rows, packing.mask, packing.chunk_group))
    kept = mask.any(axis=1)
    if not kept.any():
        return packing
    full = np.flatnonzero(kept)
    count = len(packing.offsets) - 1
    if whole:
        ends = _even_ends(np.bincount(group[full], minlength=count), parts)
    else:
        ends = np.minimum(-(-len(full) // parts) * np.arange(1, parts + 1), len(full))
    starts = np.concatenate([[0], ends[:-1]])
    slots = starts[:, None] + np.arange(int(max(ends - starts)))
    held = (slots < ends[:, None]).reshape(-1)
    # What fills a part up is empty, and counts to the last group so far.
    source = full[np.minimum(slots, ends[:, None] - 1).reshape(-1)]
    filled = mask[source] & held[:, None]
    if filled.shape == mask.shape and np.array_equal(filled, mask) and np.array_equal(group[source], group):
        return packing
    return Packing(
        rows=on_device(rows[source], np.int32),
        mask=on_device(filled),
        chunk_group=on_device(group[source], np.int32),
        offsets=on_device(np.searchsorted(group[source], np.arange(count + 1)), np.int32),
    )


def _even_ends(chunks: np.ndarray, parts: int) -> np.ndarray:
    """Ends of runs of whole groups, in chunks: those whose longest run is shortest, found by halving its length."""
    ends = np.cumsum(chunks)

    def cut(limit: int) -> np.ndarray:
        found, done = [], 0
        for _ in range(parts):
            place = int(np.searchsorted(ends, done + limit, side="right"))
            done = int(ends[place - 1]) if place else done
            found.append(done)
        return np.asarray(found)

    low, high = int(chunks.max()), int(ends[-1])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(middle)[-1] == ends[-1] else (middle + 1, high)
    return cut(low)


def _candidates(rows_of: np.ndarray, shortest: int, safe: int) -> np.ndarray:
    # Shorter chunks would exceed the allowed number, as C >= N / R.
    lengths = [np.unique(-(-int(rows) // np.arange(1, int(rows) // shortest + 2))) for rows in rows_of]
    lengths = np.unique(np.concatenate(lengths))
    lengths = lengths[lengths >= shortest]
    if len(lengths) > _MAX_CANDIDATES:
        lengths = lengths[np.linspace(0, len(lengths) - 1, _MAX_CANDIDATES).astype(int)]
    return np.union1d(lengths, [safe])


# ------------------------------------------------------------------------------------------------------------ one chunk
# The model on one chunk of rows, by the mechanism that a plan chose, and which of its terms then count.

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
    """Masks from the position of each row's group. Returns one chunk per group."""
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

        ``model``: the NumPyro model; ``count``: rows of the arguments. Returns the model itself where its plate's size follows
        the arguments.
        """
        return PlateRows(model, self.keys[0], jnp.arange(count)) if self.resized else model

    def call(self, call: ModelCall, chunk: Any) -> ModelCall:
        """The model with one chunk's rows.

        ``call``: the model on all rows; ``chunk``: one entry of the packing's ``chunks``. Returns the model on the chunk's
        rows; on all rows where they are masked.
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

    ``tree``: ``(args, kwargs)``; ``axes``: per leaf, the axis of the plate or None; ``rows``: Int[R] plate indices. Returns
    ``(args, kwargs)`` of those rows.
    """
    leaves, structure = jax.tree.flatten(tree)
    taken = [
        x if axis is None else jnp.take(x, rows, axis=axis, indices_are_sorted=False, mode="clip")
        for x, axis in zip(leaves, axes, strict=True)
    ]
    return structure.unflatten(taken)
