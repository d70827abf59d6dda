"""Which mechanism evaluates one group: tried in order, and trusted only after comparison with the untouched model."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._warnings import warn
from ..errors import PartitionError
from ..handlers import GroupTable, Partition, RowAxes
from ._arguments import is_dynamic
from ._chunks import MECHANISMS, GroupMasks, Packing, Reading, choose_chunk_rows, group_masks, pack_rows
from ._model import LocalLayout, ModelCall, is_observed, site_log_prob
from ._probe import Probe, ray_steps, run_probe

# ------------------------------------------------------------------------------------------------------- what must hold
# What must hold of a probe's values: groups' own rows add up to the whole, and own latents belong to one unit of one
# group.

# How many times worse than at its best a log-likelihood may be at a probe point.
HOSTILE = 1e3
# The same of factors without structure, which are seen at points farther out than these.
HOSTILE_TO_DRAWS = 1e2


class CoupledLatentError(PartitionError):
    """A latent inside the partitioned plate reaches beyond its own index or group."""


def check_additive(probe: Probe, where: str, table: GroupTable, reading: Reading, sliced: tuple[str, ...]) -> None:
    """Compare every group's factor, evaluated from its own rows alone, with the untouched model.

    ``table``: which row belongs to which group. Raises PartitionError naming the first group that differs by more than 1e-5
    (float32; 1e-10 in x64) of its own absolute row terms.
    """
    tolerance = 1e-5 if probe.reference.dtype == np.float32 else 1e-10
    index = table.index_of_row
    for reference, chunked in zip(probe.reference, probe.chunked, strict=True):
        for m, label in enumerate(table.labels):
            rows = index == m
            expected, got = reference[rows].astype(np.float64), chunked[rows].astype(np.float64)
            if not np.all(np.isfinite(expected)):
                continue
            gap, size = abs(expected.sum() - got.sum()), np.abs(expected).sum()
            if not gap <= tolerance * size + 100 * np.finfo(probe.reference.dtype).tiny:
                raise PartitionError(
                    f"{where} is not a sum over groups by {reading.mechanism!r}: the log-likelihood of group {label!r} from "
                    f"its own rows differs from its share of the whole model by {gap:.3g} nats. "
                    f"{_coupling_advice(reading, sliced)}"
                )


def check_local(probe: Probe, where: str, layout: LocalLayout | None) -> None:
    """Refuse latents inside the partitioned plate that reach beyond their own index or group.

    Raises CoupledLatentError naming the latent and an index of the plate; no mechanism can do with it.
    """
    if probe.local is None or layout is None:
        return
    found = probe.local
    # Every unit by its own scale: one steep row must not hide the coupling of the others.
    scale = 1 + np.max(np.where(np.isfinite(found.size), found.size, 0.0), axis=1, keepdims=True, initial=0.0)
    tolerance = 1e-3 if found.size.dtype == np.float32 else 1e-8
    reasons = (
        (found.between_units, "depends on the same terms as another index's, so it is not private to its own"),
        (found.between_groups, "enters rows of other groups: labels of the plates disagree, or ids tie it to them"),
        (found.outside, "enters terms outside the partitioned plates, which belong to no group"),
    )
    for gaps, reason in reasons:
        gaps = np.abs(np.where(np.isfinite(gaps), gaps, 0.0)) / scale
        if gaps.max(initial=0.0) > tolerance:
            unit, k = np.unravel_index(int(gaps.argmax()), gaps.shape)
            name = next(n for n in layout.names if layout.slice_of(n).start <= k < layout.slice_of(n).stop)
            raise CoupledLatentError(
                f"{where}: local latent {name!r} at index {unit} of plate {layout.key!r} {reason}. Declare it outside the "
                "partitioned plate, in a plate of its own, and index it by row; it is then shared by all groups."
            )


def _coupling_advice(reading: Reading, sliced: tuple[str, ...]) -> str:
    why = "Something couples rows (standardising inside the model, ids into an array that is restricted too, per-row randomness)"
    if reading.mechanism == "args":
        return (
            f"{why}, or an argument that is not per-row was sliced (sliced: {', '.join(sliced)}). Move such steps outside the "
            "model, or exclude the argument with Partition(..., data_axes={'name': None})."
        )
    return (
        f"{why}. Move such steps outside the model, or accept a full pass per group with Partition(..., mode='mask')."
    )


def densities_nearby(probe: Probe) -> Float[np.ndarray, "K"]:
    """Log-likelihoods of all rows within three prior sds, in nats: those of several sets of rows at the same points add up.

    Returns one number a point, to both sides of the prior's location last; NaN where one is not finite within ten prior sds.
    """
    near, nearer = (np.flatnonzero(np.tile(ray_steps() <= reach, probe.rays.blocks)) for reach in (10.0, 3.0))
    sizes = (v[nearer].reshape(nearer.size, -1).sum(axis=1, dtype=np.float64) for v in probe.rows.values())
    total = np.append(sum(sizes, start=np.zeros(nearer.size)), probe.sides.astype(np.float64))
    if not all(np.all(np.isfinite(v[near])) for v in (*probe.rows.values(), *probe.latents.values())):
        total = np.full_like(total, np.nan)
    return total


def is_hostile(nearby: Float[np.ndarray, "K"], worse: float = HOSTILE) -> bool:
    """Whether densities under the prior are of no use to start a fit from.

    Returns True when one is not finite, or rows are so many times less likely at some point than at the best one.
    """
    total = np.abs(nearby)
    return not np.all(np.isfinite(total)) or bool(np.max(total) > worse * np.min(total))


# ------------------------------------------------------------------------------------------------------------ mechanism

_REASONS = {
    "args": "the axis' size follows the arguments",
    "index": "the model indexes its data by the plate's indices",
    "mask": "every group is a full pass over all rows with the others' masked",
    "resized": "the arguments are per row, and the plate is given as many rows as they have",
    "whole": "one group, which is the whole model",
}
# Numbers that the full passes of one evaluation of all groups may read, below which nobody needs a warning: rounds of some
# hundred evaluations then take about a second.
_CHEAP_WORK = 1e7
# What a model that does not fit a chunk raises: shapes that do not go together, a series longer than its scan.
_CHUNK_ERRORS = (TypeError, ValueError, IndexError, KeyError, AssertionError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Read:
    """The mechanism that was chosen, with everything found on the way."""

    reading: Reading
    where: str
    table: GroupTable
    packing: Packing | GroupMasks
    probe: Probe
    reason: str
    sliced: tuple[str, ...]


def choose_reading(
    partition: Partition, call: ModelCall, trace: dict, rows: RowAxes, key: Any, params: dict | None, known: Any = None
) -> Read:
    """Try the mechanisms in order, and keep the first that passes the additive check.

    ``partition``: the model with its grouping, and the mode that was asked for; ``trace``: an abstract trace of it; ``params``:
    constrained values of ``numpyro.param`` sites, or None for their initial values. Returns the mechanism, the packing of rows
    and the probe. Falling back to masks warns with the cost and the reasons, or notes them where it costs little and nothing else
    would do. Raises PartitionError when the one mechanism that
    was asked for does not fit.
    """
    sizes = rows.sizes(trace)
    table, group_of_row = partition.tables(sizes)
    attempt = _Attempt(partition, call, trace, rows, sizes, table, key, params, known)
    if partition.mode in ("auto", "args"):
        attempt.data_axes()
    if partition.mode != "auto":
        return attempt.forced(group_of_row)
    failed: dict[str, PartitionError] = {}
    for mechanism in MECHANISMS[:-1]:
        try:
            return attempt.read(mechanism, group_of_row)
        except CoupledLatentError:
            raise
        except PartitionError as error:
            failed[mechanism] = error
    if rows.plates:
        try:
            # A plate whose size is a number does not follow the arguments by itself.
            return attempt.read("args", group_of_row, resized=True)
        except CoupledLatentError:
            raise
        except PartitionError:
            pass  # the reasons against the model as it is say more than this one
    read = attempt.read("mask", group_of_row)
    if table.num_groups == 1:
        return read
    reasons = " | ".join(f"{mechanism}: {error}" for mechanism, error in failed.items())
    cost = (
        f"every one of the {table.num_groups} groups costs a full pass over all {table.num_rows} rows, because no cheaper way to "
        f"evaluate one group fits the model. {reasons}"
    )
    # Of several plates nothing cheaper can be written: what costs little is a line of `info`.
    settled = partition.by_default or len(rows.plates) > 1
    if not settled or attempt.work() > _CHEAP_WORK:
        warn(f"{attempt.where}: {cost}")
    return dataclasses.replace(read, reason=cost) if settled else read


def row_arguments(
    partition: Partition, model: Callable, args: tuple, kwargs: dict, size: int
) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
    """Which arguments are per row: those that say so by ``data_axes``, else those whose leading axis has as many entries.

    ``partition``: the model with its grouping; ``model``: the NumPyro model, whose parameters have names; ``args``: positional
    arguments (arrays); ``kwargs``: keyword arguments; ``size``: rows. Returns of every leaf the axis that runs over the rows,
    or None; and the names of those that have one. Raises PartitionError where ``data_axes`` names an axis of another length.
    """
    names = _parameter_names(model, len(args))
    paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
    wanted = dict(partition.data_axes or {})
    axes, sliced = [], []
    for path, leaf in paths:
        key = path[1].key if path[0].idx == 1 else path[1].idx
        name = key if isinstance(key, str) else names.get(key, key)
        shown = str(name) + jax.tree_util.keystr(path[2:])
        axis: int | None = None
        if name in wanted or key in wanted:
            axis = wanted.get(name, wanted.get(key))
        elif hasattr(leaf, "shape") and leaf.ndim and leaf.shape[0] == size:
            axis = 0
        if axis is not None and (not hasattr(leaf, "shape") or leaf.ndim <= axis or leaf.shape[axis] != size):
            raise PartitionError(
                f"data_axes says that argument {shown!r} runs over the plate on axis {axis}, but it does not."
            )
        axes.append(axis)
        if axis is not None:
            sliced.append(shown)
    return tuple(axes), tuple(sliced)


def _double(x: Any) -> Any:
    return x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x


@dataclasses.dataclass(frozen=True)
class _Attempt:
    partition: Partition
    call: ModelCall
    trace: dict
    rows: RowAxes
    sizes: dict[str, int]
    table: GroupTable
    key: Any
    params: dict | None
    known: Any = None

    @property
    def where(self) -> str:
        """What is partitioned, in words."""
        if self.rows.whole:
            return "the whole model"
        if self.rows.sites:
            return ", ".join(f"axis {dim} of sample site {name!r}" for name, dim in self.rows.sites)
        return f"plate{'s' * (len(self.rows.plates) > 1)} " + ", ".join(repr(name) for name in self.rows.plates)

    def forced(self, group_of_row: dict) -> Read:
        """Evaluate groups by the mode that was asked for, or say that this one does not fit."""
        mode = self.partition.mode
        try:
            return self.read(mode, group_of_row)
        except CoupledLatentError:
            raise
        except PartitionError as error:
            raise PartitionError(f"mode={mode!r} was asked for, but {error}") from error

    def read(self, mechanism: str, group_of_row: dict, resized: bool = False) -> Read:
        """Evaluate groups by one mechanism, or say why not."""
        axes, sliced = (), ()
        packing: Packing | GroupMasks
        if mechanism == "mask":
            packing = group_masks(group_of_row, self.table.num_groups)
        else:
            self._refuse_several_plates(mechanism)
            packing = pack_rows(self.table, self._chunk_rows())
            if mechanism == "args":
                axes, sliced = self.data_axes()
        reading = Reading(mechanism, tuple(self.sizes), axes, resized)
        if isinstance(packing, Packing):
            self._try_chunk(reading, int(packing.rows.shape[1]), sliced)
        probe = run_probe(self.call, self.trace, self.rows, reading, packing, self.key, self.params, self.known)
        if self.partition.check:
            check_local(probe, self.where, self.call.local_layout)
            if isinstance(packing, Packing):
                self._check_additive(probe, reading, packing, sliced)
        reason = _REASONS["whole" if self.rows.whole else "resized" if reading.resized else mechanism]
        return Read(reading, self.where, self.table, packing, probe, reason, sliced)

    def _check_additive(self, probe: Probe, reading: Reading, packing: Packing, sliced: tuple[str, ...]) -> None:
        """Whether the groups' own rows add up to the whole; what single precision cannot tell is looked at in double."""
        try:
            check_additive(probe, self.where, self.table, reading, sliced)
        except PartitionError:
            if probe.reference.dtype != np.float32:
                raise
            # Parts of a density that cancel leave their rounding: y log(x) - x - log(y!) about x = y.
            precise = self._in_double(reading, packing)
            if precise is None:
                raise
            check_additive(precise, self.where, self.table, reading, sliced)

    def _in_double(self, reading: Reading, packing: Packing) -> Probe | None:
        """The probe in double precision, or None where the model does not follow."""
        with jax.enable_x64(True):
            held = (self.call.args, self.call.kwargs, self.call.params, self.call.local, packing, self.params)
            args, kwargs, own, local, packing, params = jax.tree.map(_double, held)
            call = dataclasses.replace(self.call, args=args, kwargs=kwargs, params=own, local=local)
            try:
                return run_probe(call, self.trace, self.rows, reading, packing, self.key, params)
            except _CHUNK_ERRORS:
                return None

    def work(self) -> float:
        """Numbers that full passes over all groups read: arguments and observed terms, once for each group."""
        arguments = sum(x.size for x in jax.tree.leaves((self.call.args, self.call.kwargs)) if hasattr(x, "dtype"))
        terms = sum(math.prod(site["fn"].batch_shape) for site in self.trace.values() if is_observed(site))
        return float(self.table.num_groups * (arguments + terms))

    def _chunk_rows(self) -> int:
        return choose_chunk_rows(self.table.sizes, self.partition.chunk_size, self.call.layout.dim)

    def _refuse_several_plates(self, mechanism: str) -> None:
        if len(self.rows.plates) > 1:
            remedy = ": leave mode='auto' or write mode='mask'" if self.partition.mode == mechanism else ""
            raise PartitionError(f"{self.where} are split together, which {mechanism!r} cannot do{remedy}.")
        if mechanism == "index" and not self.rows.plates:
            raise PartitionError(
                f"{self.where} has no plate whose indices could be set: put the site inside `with numpyro.plate(...)`."
            )

    def data_axes(self) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
        """Axes of the arguments that run over the rows, and the names of those arguments."""
        call = self.call
        return row_arguments(self.partition, call.model, call.args, call.kwargs, self.table.num_rows)

    def _try_chunk(self, reading: Reading, length: int, sliced: tuple[str, ...]) -> None:
        if reading.mechanism == "args" and not sliced:
            raise PartitionError(self._no_argument_message())
        # Two chunk lengths: one could meet a constant plate size by chance.
        for rows in {length, max(1, length // 2)} - {self.table.num_rows} or {length}:
            try:
                chunk, shapes = self._abstract_chunk(reading, rows)
            except _CHUNK_ERRORS as error:
                raise PartitionError(self._misfit_message(reading, sliced, rows, error)) from error
            for name, site in self.trace.items():
                if not is_observed(site) or self.rows.of(site) is None:
                    continue
                axis = self.rows.of(chunk[name]) if name in chunk else None
                if axis is None or axis.size != rows or chunk[name]["fn"].batch_shape[axis.dim] != rows:
                    got = "is missing" if axis is None else f"has batch shape {tuple(chunk[name]['fn'].batch_shape)}"
                    detail = ValueError(f"observed site {name!r}, which should have {rows} rows, {got}")
                    raise PartitionError(self._misfit_message(reading, sliced, rows, detail))
                if len(shapes[name]) >= -axis.dim and shapes[name][axis.dim] != rows:
                    # One row meets any number of observations without an error.
                    detail = ValueError(
                        f"the values of observed site {name!r} have {shapes[name][axis.dim]} rows, not {rows}"
                    )
                    raise PartitionError(self._misfit_message(reading, sliced, rows, detail))

    def _abstract_chunk(self, reading: Reading, length: int) -> tuple[dict, dict]:
        """A trace of the model on some rows, and the shapes of its observed sites' log densities."""
        found: dict = {}

        def run(arrays):
            args, kwargs = _join_static(arrays, static)
            rows = jnp.zeros((length,), jnp.int32)
            chunk = reading.call(dataclasses.replace(self.call, args=args, kwargs=kwargs), (rows, None))
            if (own := self.call.local_layout) is not None:
                chunk = dataclasses.replace(chunk, local=jnp.zeros((length, own.width)))
            # At a point, and not with latents drawn: a substituted series may be too long for a chunk's scan.
            found.update(chunk.trace(jnp.zeros((self.call.layout.dim,)))[0])
            # Rows of an argument that was not taken along show here, and not in the trace.
            return {n: site_log_prob(s) for n, s in found.items() if is_observed(s)}

        arrays, static = _split_static((self.call.args, self.call.kwargs))
        shapes = jax.eval_shape(run, arrays)
        return found, {n: jnp.shape(x) for n, x in shapes.items()}

    def _no_argument_message(self) -> str:
        size, (first, *_) = self.table.num_rows, self.sizes
        return (
            f"{self.where} has size {size}, but no argument of the model has {size} entries along its leading axis, so its rows "
            "cannot be taken from the arguments. Pass the data as arguments, model(X, y), size the plate by one, "
            f"numpyro.plate({first!r}, X.shape[0]), or name the axis with Partition(..., data_axes={{'X': 1}})."
        )

    def _misfit_message(self, reading: Reading, sliced: tuple[str, ...], length: int, error: BaseException) -> str:
        (first, *_) = self.sizes
        what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}."
        if reading.mechanism == "index":
            return (
                f"the model cannot be evaluated on {length} indices of {self.where}: {what} Index every per-row array by the "
                f"plate's value, `with numpyro.plate({first!r}, N) as i: ... X[i]`, or use numpyro.subsample."
            )
        return (
            f"the model cannot be evaluated on {length} rows of {self.where} with argument(s) {', '.join(sliced)} sliced: {what} "
            f"Size the plate by an argument's shape, numpyro.plate({first!r}, X.shape[0]), use the rows without an index of the "
            "full data, and pass every per-row array as an argument; arguments that are not per-row are excluded with "
            "Partition(..., data_axes={'name': None})."
        )


def _parameter_names(model: Callable, count: int) -> dict[int, str]:
    try:
        parameters = list(inspect.signature(model).parameters.values())
    except (TypeError, ValueError):
        return {}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {i: p.name for i, p in enumerate(positional[:count])}


def _split_static(tree):
    leaves, structure = jax.tree.flatten(tree)
    dynamic = [x if is_dynamic(x) else None for x in leaves]
    return dynamic, ([None if is_dynamic(x) else x for x in leaves], structure)


def _join_static(dynamic, static):
    leaves, structure = static
    return structure.unflatten([d if s is None and d is not None else s for d, s in zip(dynamic, leaves, strict=True)])
