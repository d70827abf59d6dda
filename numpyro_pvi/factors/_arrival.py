"""Rows that come after planning: checked against the plan, filled up to a length that programs are compiled for, packed."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..errors import DataError, PartitionError, StateError
from ..handlers import GroupTable, numbered_table
from ._model import abstract_trace, is_observed
from ._packing import Packing, choose_chunk_rows, pack_rows
from ._plan import PartitionPlan
from ._reading import GroupMasks, group_masks
from ._validate import ArgumentSignature

# Chunks of arriving rows are as long as this at most, or as eight times D.
_LONGEST_CHUNK = 1024
# Rows that every group is filled up to: a few more cost nothing beside a program of their own.
_FEWEST_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Rows that have come, in the form that programs take."""

    plan: PartitionPlan
    packing: Packing | GroupMasks
    # Rows to which the arguments are to be filled up; 0 to take them as they are.
    padded_rows: int


def padded_length(num_rows: int) -> int:
    """The power of two at or above a number of rows, at least 16: groups of similar size share a program."""
    return max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())


def pad_rows(axes: tuple[int | None, ...], args: tuple, kwargs: dict, length: int) -> tuple[tuple, dict]:
    """Fill every per-row argument up by repeating its first row, which masks then keep out of the likelihood.

    Args:
        axes: per leaf of ``(args, kwargs)``, the axis that runs over the rows, or None.
        args: positional arguments (arrays).
        kwargs: keyword arguments.
        length: rows wanted; 0 leaves everything as it is.

    Returns:
        ``(args, kwargs)`` with ``length`` rows.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    if length == 0:
        return args, kwargs

    def pad(leaf: Any, axis: int | None) -> Any:
        if axis is None or leaf.shape[axis] == length:
            return leaf
        index = np.where(np.arange(length) < leaf.shape[axis], np.arange(length), 0)
        if isinstance(leaf, jax.core.Tracer):
            return jnp.take(leaf, index, axis=axis)
        # Outside of JAX: there, every number of rows would be a program of its own.
        return jnp.asarray(np.take(np.asarray(leaf), index, axis=axis))

    return structure.unflatten([pad(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)])


def count_rows(
    plan: PartitionPlan,
    model: Any,
    expected: ArgumentSignature,
    got: ArgumentSignature,
    args: tuple,
    kwargs: dict,
    who: str,
) -> dict[str, int]:
    """Check arriving arguments against those the plan was made for, and count their rows.

    Args:
        plan: the plan.
        model: the NumPyro model (traced abstractly where rows are not read off the arguments).
        expected: signature of the arguments before.
        got: signature of those that arrive.
        args: the arguments that arrive (arrays).
        kwargs: likewise.
        who: whose rows they are, for messages.

    Returns:
        Rows by partitioned axis (plate, or labelled sample site).

    Raises:
        StateError: for another structure, dtype, number of columns, or static value.
        DataError: for no rows at all, or per-row arguments of different lengths.
        PartitionError: where the model's plate does not follow its arguments.
    """
    if plan.rows.whole:
        raise PartitionError(
            f"{who}: the model was kept whole ({plan.why}), so it has no rows that could come or go by group. Name what is "
            "split: Partition(model, plate, groups), or Partition(model, groups=..., sites={'obs': -1})."
        )
    if expected.structure != got.structure:
        raise StateError(
            f"{who}: the arguments are {_names(got)}, but the state was made with {_names(expected)}. Pass what `init` was "
            "given, with the rows of this group only, positional and by keyword alike."
        )
    by_rows = plan.mechanism == "args"
    axes = plan.reading.axes if by_rows else (None,) * len(got.leaves)
    sizes: dict[str, int] = {}
    for before, now, axis in zip(expected.leaves, got.leaves, axes, strict=True):
        _check_leaf(before, now, axis, by_rows, who)
        if axis is not None and now.shape is not None:
            sizes[now.name] = now.shape[axis]
    if by_rows:
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise DataError(f"{who}: per-row arguments differ in their number of rows ({found}).")
        num_rows = next(iter(sizes.values()))
        rows = dict.fromkeys(plan.reading.keys, num_rows)
    else:
        rows = _traced_rows(plan, model, args, kwargs, who)
    if min(rows.values()) < 1:
        raise DataError(f"{who} has no rows: pass at least one, or leave the group out.")
    return rows


def arrive(plan: PartitionPlan, table: GroupTable, rows: dict[str, int], full: bool) -> Arrival:
    """Pack the rows of groups that are at hand from now on.

    Args:
        plan: the plan of the rows before; its structure stays.
        table: groups of the arriving rows.
        rows: rows by partitioned axis, from :func:`count_rows`.
        full: whether q has full covariance (chunks are then several times longer than D).

    Returns:
        The plan and packing of the new rows. A single group's rows are filled up to a power of two where they are read
        off the arguments, so that its programs serve other groups.
    """
    padded, packing = 0, None
    if plan.mechanism == "mask":
        ends = np.cumsum([0, *rows.values()])
        index = {key: table.index_of_row[a:b] for key, (a, b) in zip(rows, itertools.pairwise(ends), strict=True)}
        packing = group_masks(index, table.num_groups)
    elif plan.mechanism == "args" and table.num_groups == 1:
        padded = padded_length(table.num_rows)
        packing = _pack_padded(table.num_rows, padded, plan.layout.dim if full else 1)
    else:
        packing = pack_rows(table, choose_chunk_rows(table.sizes, dim=plan.layout.dim))
    local = plan.local
    if local is not None:
        local = dataclasses.replace(local, size=rows[local.key])
    chunk_rows = packing.rows.shape[1] if isinstance(packing, Packing) else table.num_rows
    chunks = int(packing.chunk_group.shape[0])
    found = dataclasses.replace(plan, table=table, local=local, chunk_rows=chunk_rows, num_chunks=chunks)
    return Arrival(found, packing, padded)


def nobody(plan: PartitionPlan, packing: Packing | GroupMasks) -> Arrival:
    """The plan when no group's rows are at hand."""
    none = np.zeros(0, np.int32)
    if isinstance(packing, GroupMasks):
        empty: Packing | GroupMasks = group_masks(dict.fromkeys(plan.reading.keys, none), 0)
    else:
        slots = jnp.zeros((0, 1), jnp.int32)
        empty = Packing(slots, slots > 0, jnp.asarray(none), jnp.zeros(1, jnp.int32))
    local = None if plan.local is None else dataclasses.replace(plan.local, size=0)
    table = numbered_table(())
    return Arrival(dataclasses.replace(plan, table=table, local=local, chunk_rows=0, num_chunks=0), empty, 0)


def without_labels(plan: PartitionPlan, padded_rows: int, keep_sizes: bool, keep_labels: bool = False) -> PartitionPlan:
    """The plan as compiled programs may see it: equal for all groups that one program serves.

    Args:
        plan: the plan.
        padded_rows: rows to which arguments are filled up, or 0.
        keep_sizes: whether programs read the groups' sizes (a stochastic solver's do).
        keep_labels: whether they read the labels (those of a schedule with settings by label).

    Returns:
        The plan under the labels 0, 1, ..., or its own.
    """
    count = plan.table.num_groups
    sizes = (padded_rows,) if padded_rows else plan.table.sizes if keep_sizes else (0,) * count
    local = plan.local
    if local is not None and padded_rows:
        local = dataclasses.replace(local, size=padded_rows)
    table = numbered_table(sizes)
    if keep_labels:
        table = dataclasses.replace(table, labels=plan.table.labels)
    return dataclasses.replace(plan, table=table, local=local, remarks=())


def _pack_padded(num_rows: int, length: int, dim: int) -> Packing:
    chunk_rows = min(length, max(_LONGEST_CHUNK, padded_length(8 * dim)))
    slots = np.arange(length).reshape(-1, chunk_rows)
    chunks = np.zeros(slots.shape[0], np.int32)
    return Packing(
        rows=jnp.asarray(slots.astype(np.int32)),
        mask=jnp.asarray(slots < num_rows),
        chunk_group=jnp.asarray(chunks),
        offsets=jnp.asarray(np.array([0, slots.shape[0]], np.int32)),
    )


def _check_leaf(before: Any, now: Any, axis: int | None, by_rows: bool, who: str) -> None:
    if before.shape is None or now.shape is None:
        # Where rows follow a static number, it may well differ from group to group.
        if before.dtype == now.dtype and (before == now or not by_rows):
            return
        raise StateError(f"{who}: {now.name} is {now}, but the state was made with {before}: pass the same value.")
    if before.dtype != now.dtype or len(before.shape) != len(now.shape):
        raise StateError(f"{who}: {now.name} is {now}, but the state was made with {before}.")
    if not by_rows:
        return
    kept = [i for i in range(len(now.shape)) if i != axis]
    if [before.shape[i] for i in kept] != [now.shape[i] for i in kept]:
        what = "only the number of rows may differ" if axis is not None else "it is not per row, so its shape must stay"
        raise StateError(f"{who}: {now.name} is {now}, but the state was made with {before}; {what}.")


def _traced_rows(plan: PartitionPlan, model: Any, args: tuple, kwargs: dict, who: str) -> dict[str, int]:
    trace = abstract_trace(plan.model(model), jax.random.key(0), args, kwargs)
    missing = [name for name in plan.observed if name not in trace or not is_observed(trace[name])]
    rows = {} if missing else plan.rows.sizes(trace)
    if missing or set(rows) != set(plan.reading.keys):
        what = ", ".join(map(repr, missing or plan.observed))
        raise PartitionError(
            f"{who}: with these arguments the model has no observed sample site {what} in {plan.where}."
        )
    lengths = {size for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "shape") for size in leaf.shape}
    for key, size in rows.items():
        if size not in lengths:
            raise PartitionError(
                f"{who}: {key!r} has {size} rows, but no argument given has as many, so the model does not take its rows from its "
                f"arguments: size the plate by one, numpyro.plate({key!r}, X.shape[0]), and pass all per-row data as arguments."
            )
    return rows


def _names(signature: ArgumentSignature) -> str:
    return ", ".join(leaf.name for leaf in signature.leaves) or "none"
