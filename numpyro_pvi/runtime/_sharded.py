"""Chunks of groups over the devices of a mesh: rows placed once, everything else on every device, sums by collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from .._compiling import is_traced, on_device
from ..errors import PVIError
from ..expectations import Expected, add_expected
from ..factors import Packing, even_packing
from ..sites import take
from ._base import RuntimeDefaults, Vmap, sum_span

# What is on every device alike.
_EVERYWHERE = PartitionSpec()
# Sets of arrays that were placed last: a fit has one, and a stream of batches no use for those before.
_REMEMBERED = 2


# ------------------------------------------------------------------------------------------------- inside of the program
# What every device runs: sums over the devices, and slices of what all of them hold.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _total(x: Array, axis: str) -> Array:
    """Sum over the devices. In reverse mode each device's part has the cotangent that all of them know."""
    return jax.lax.psum(x, axis)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _shared(x: Array, axis: str) -> Array:
    """The same value. In reverse mode the devices' parts of its cotangent are added up."""
    return x


_total.defvjp(lambda x, axis: (jax.lax.psum(x, axis), None), lambda axis, _, cotangent: (cotangent,))
_shared.defvjp(lambda x, axis: (x, None), lambda axis, _, cotangent: (jax.lax.psum(cotangent, axis),))


@dataclasses.dataclass(frozen=True)
class _OwnGroups(RuntimeDefaults):
    """One device alone with groups whose rows are all its own: no collective, so that its loops may be as long as it likes."""

    axis: str
    batch_bytes: int | None

    def span(self, offsets: Int[Array, "ends"], group: Int[Array, "*k"], count: int) -> tuple[Any, Any]:
        """A group's chunks among those held here; none where they are elsewhere."""
        first = jax.lax.axis_index(self.axis) * count
        return jnp.clip(offsets[group] - first, 0, count), jnp.clip(offsets[group + 1] - first, 0, count)

    def holds(self, offsets: Int[Array, "ends"], group: Int[Array, "*k"], count: int) -> Any:
        """Whether a group begins here; what fills the devices' shares up may count to it elsewhere."""
        return offsets[group] // count == jax.lax.axis_index(self.axis)

    def mine(self, tree: Any, count: int) -> Any:
        """Of arrays with a leading axis of all chunks, those held here."""
        first = jax.lax.axis_index(self.axis) * count
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), tree)

    def sum_chunks(
        self, expect: Callable, chunks: Any, chunk_group: Array, offsets: Array, working_bytes: int
    ) -> Expected:
        """The sums of the chunks held here: see :class:`numpyro_pvi.runtime.Runtime`."""
        count = _held(chunks)
        group, ends = self.mine(chunk_group, count), jnp.clip(offsets - jax.lax.axis_index(self.axis) * count, 0, count)
        return Vmap(self.batch_bytes).sum_held(expect, chunks, group, ends, working_bytes, False)

    def sum_group(self, expect: Callable, chunks: Any, offsets: Array, group: Array) -> Expected:
        """One group's chunks that are held here."""
        return sum_span(expect, chunks, *self.span(offsets, group, _held(chunks)), add_expected)

    def map_groups(
        self, solve: Callable, operands: Any, reads_rows: bool, side_by_side: bool = False, holds: Any = True
    ) -> Any:
        """The groups held here, one after another or side by side; zeros for those elsewhere, and NaN nowhere."""
        shapes = jax.eval_shape(lambda: jax.vmap(solve)(*operands))
        if side_by_side:
            return self._in_lanes(solve, operands, holds, shapes)

        def visit(xs: tuple) -> Any:
            here, own = xs
            return jax.lax.cond(here, lambda: solve(*own), lambda: _zeros(shapes, 1))

        return jax.lax.map(visit, (holds, operands))

    def _in_lanes(self, solve: Callable, operands: Any, holds: Any, shapes: Any) -> Any:
        """As many groups at once as there are to a device; where some have more of them, these go on."""
        count = holds.shape[0]
        lanes = -(-count // jax.lax.axis_size(self.axis))
        # The places of those held here, then places of none.
        places = jnp.nonzero(holds, size=count + lanes, fill_value=count)[0]

        def visit(step: Array, results: Any) -> Any:
            some = jax.lax.dynamic_slice_in_dim(places, step * lanes, lanes)
            # A lane without a group does as the first one.
            found = jax.vmap(solve)(*take(operands, jnp.where(some < count, some, places[0])))
            return jax.tree.map(lambda held, x: held.at[some].set(x, mode="drop"), results, found)

        return jax.lax.fori_loop(0, -(-jnp.sum(holds) // lanes), visit, _zeros(shapes))


@dataclasses.dataclass(frozen=True)
class Sharded(RuntimeDefaults):
    """Chunks of groups over the devices of a mesh: one process with several devices, or several under ``jax.distributed``.

    Rows are laid out once in the order of the chunks, each device's share is put there, and none ever leaves it. Everything
    else (q, sites, what solvers and groups remember) is on every device alike. Each device runs the same program over its own
    chunks, and messages are summed by collectives. A solver whose visits read rows again and again (``LocalELBO``, ``PowerEP``,
    ``NaturalGradient(num_steps=2)``) has all rows of a group on one device and visits the groups of different devices at the
    same time: with fewer groups than devices some are idle. For other solvers groups may span devices. Sites of two numbers a
    row are on every device, with the matrix through which the prior is seen; each device takes the expectations of its own rows.

    Results are those of :class:`Vmap` up to rounding. Rows have to be arguments whose leading axis is the plate's.

    Args:
        mesh: of one axis; by default over all devices, of all processes.
        batch_bytes: as of :class:`Vmap`, on each device.

    Raises:
        PVIError: on construction, for anything but a mesh of one axis.
    """

    mesh: Mesh | None = None
    batch_bytes: int | None = None
    _placed: Any = dataclasses.field(default_factory=lambda: _Placed(), init=False, repr=False, compare=False)

    def __post_init__(self):
        Vmap(self.batch_bytes)
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise PVIError(
                f"Sharded(mesh={self.mesh!r}): expected a jax.sharding.Mesh of one axis, jax.make_mesh((8,), ('rows',)) say, or "
                "None for all devices."
            )
        if self.mesh is not None and len(self.mesh.axis_names) != 1:
            raise PVIError(
                f"Sharded(mesh=...): the mesh has axes {self.mesh.axis_names}, and rows go over one: "
                "jax.make_mesh((jax.device_count(),), ('rows',))."
            )

    @property
    def devices(self) -> Mesh:
        """The mesh, in JAX's automatic mode."""
        if self.mesh is None:
            return Mesh(np.asarray(jax.devices()), ("rows",), axis_types=(AxisType.Auto,))
        return Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=(AxisType.Auto,))

    @property
    def _axis(self) -> str:
        return "rows" if self.mesh is None else self.mesh.axis_names[0]

    # ------------------------------------------------------------------------------------------------------ before and after

    @property
    def alone(self) -> Any:
        """What plans, starts and verifies: :class:`Vmap`, where the arguments are."""
        return Vmap(self.batch_bytes)

    @property
    def within(self) -> Any:
        """One device alone with groups of its own."""
        return _OwnGroups(self._axis, self.batch_bytes)

    @property
    def side_by_side(self) -> Any:
        """All chunks on every device, of whose rows each has its own."""
        return _AllChunks(self)

    def lay_out(self, packing: Any, whole: bool, mechanism: str = "args") -> Any:
        """As many chunks for every device: see :class:`numpyro_pvi.runtime.Runtime`.

        Raises:
            PVIError: where rows are not read off the arguments.
        """
        if mechanism != "args" or not isinstance(packing, Packing):
            how = "with masks, every group on all rows" if mechanism == "mask" else "by the plate's indices"
            raise PVIError(
                f"Sharded() divides the rows of the arguments among the devices, but this model is read {how}: each device would "
                "need all of them. Pass the data as arguments whose leading axis is the plate's, and let rows depend on no other "
                "rows (Partition.plan(*args) shows how a model is read); or write runtime=Vmap()."
            )
        return even_packing(packing, self.devices.size, whole)

    def place(self, rows: list, axes: tuple[int | None, ...], packing: Any, whole: bool) -> tuple[list, Any]:
        """Rows in the order of the chunks, each device's share put there; other arrays on every device."""
        if is_traced((rows, packing)):
            # The state's own packing was laid out when it was made.
            return self._ordered(jnp, rows, axes, packing), packing

        def anew() -> tuple[list, Any]:
            mechanism = "index" if all(a is None for a in axes) else "args"
            return self._placed_anew(rows, axes, self.lay_out(packing, whole, mechanism))

        return self._placed.of((rows, packing, axes, whole), anew)

    def _ordered(self, room: Any, rows: list, axes: tuple[int | None, ...], packing: Packing) -> list:
        order = room.asarray(packing.rows).reshape(-1)
        return [x if a is None else room.take(room.asarray(x), order, axis=a) for x, a in zip(rows, axes, strict=True)]

    def _placed_anew(self, rows: list, axes: tuple[int | None, ...], packing: Packing) -> tuple[list, Any]:
        # By one array after another: of the largest no more than one copy is held on the host.
        placed = [
            self._put(*self._ordered(np, [x], (a,), packing), _spec(self._axis, a))
            if a is not None
            else self.publish(x)
            for x, a in zip(rows, axes, strict=True)
        ]
        own = _spec(self._axis, 0)
        ends = self.publish((packing.chunk_group, packing.offsets))
        return placed, Packing(
            self._put(np.asarray(packing.rows), own), self._put(np.asarray(packing.mask), own), *ends
        )

    def _put(self, array: np.ndarray, spec: PartitionSpec) -> Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(self.devices, spec), lambda index: array[index])

    def publish(self, tree: Any) -> Any:
        """A copy for every device of this process; other processes have made the same arrays."""
        if is_traced(tree):
            return tree
        mesh = self.devices
        everywhere = NamedSharding(mesh, _EVERYWHERE)

        def one(x: Any) -> Array:
            copies = [jax.device_put(x, device) for device in mesh.local_devices]
            return jax.make_array_from_single_device_arrays(copies[0].shape, everywhere, copies)

        return jax.tree.map(one, tree)

    def fetch(self, tree: Any) -> Any:
        """The copy of this process's first device, as arrays that are bound to no device: a program of the user's may take them."""

        def one(x: Array) -> Array:
            here = x.addressable_data(0)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                data = on_device(jax.random.key_data(here))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(here))
            return on_device(here)

        return tree if is_traced(tree) else jax.tree.map(one, tree)

    def over_rows(self, program: Callable, rows: list, axes: tuple[int | None, ...], packing: Any, *others: Any) -> Any:
        """The program on every device, with its share of the rows: see :class:`numpyro_pvi.runtime.Runtime`."""
        own = _spec(self._axis, 0)

        def on_one(rows: list, slots: tuple, ends: tuple, *others: Any) -> Any:
            places = jnp.arange(slots[0].size, dtype=jnp.int32).reshape(slots[0].shape)
            return program(rows, Packing(*slots, *ends, places), *others)

        specs = [_EVERYWHERE if a is None else _spec(self._axis, a) for a in axes]
        # Without the check of what varies between devices: with it, the gradient by a value that every device knows alike is
        # summed over the devices without a word, where a group's visit wants the gradient of its own rows alone.
        mapped = jax.shard_map(
            on_one,
            mesh=self.devices,
            in_specs=(specs, (own, own), _EVERYWHERE, *(_EVERYWHERE for _ in others)),
            out_specs=_EVERYWHERE,
            check_vma=False,
        )
        return mapped(rows, (packing.rows, packing.mask), (packing.chunk_group, packing.offsets), *others)

    # ------------------------------------------------------------------------------------------------------ inside of programs

    def span(self, offsets: Int[Array, "ends"], group: Int[Array, "*k"], count: int) -> tuple[Any, Any]:
        """A group's chunks among those held here; none where they are elsewhere."""
        return self.within.span(offsets, group, count)

    def holds(self, offsets: Int[Array, "ends"], group: Int[Array, "*k"], count: int) -> Any:
        """Whether a group begins here."""
        return self.within.holds(offsets, group, count)

    def mine(self, tree: Any, count: int) -> Any:
        """Of arrays with a leading axis of all chunks, those held here."""
        return self.within.mine(tree, count)

    def gathered(self, tree: Any) -> Any:
        """What the groups of all devices hold, for every device."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self._axis, tiled=True), tree)

    def total(self, tree: Any, holds: Any = True) -> Any:
        """Sums over the devices, by a collective."""

        def one(x: Any) -> Array:
            x = jnp.asarray(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
            if x.dtype == jnp.bool_:
                return one(x.astype(jnp.int32)) > 0
            here = jnp.reshape(holds, jnp.shape(holds) + (1,) * (x.ndim - jnp.ndim(holds)))
            return _total(jnp.where(here, x, jnp.zeros_like(x)), self._axis)

        return jax.tree.map(one, tree)

    def largest(self, x: Array) -> Array:
        """The largest of any device, by a collective."""
        return jax.lax.pmax(x, self._axis)

    def shared(self, tree: Any) -> Any:
        """The same values, whose derivatives in reverse mode are summed over the devices."""
        return jax.tree.map(lambda x: _shared(jnp.asarray(x), self._axis), tree)

    def sum_chunks(
        self, expect: Callable, chunks: Any, chunk_group: Array, offsets: Array, working_bytes: int
    ) -> Expected:
        """Every device's chunks, then a sum over the devices: see :class:`numpyro_pvi.runtime.Runtime`."""
        found = self.within.sum_chunks(expect, chunks, chunk_group, offsets, working_bytes)
        local = None if found.local is None else self.gathered(found.local)
        return dataclasses.replace(self.total_expected(dataclasses.replace(found, local=None)), local=local)

    def sum_group(self, expect: Callable, chunks: Any, offsets: Array, group: Array) -> Expected:
        """The group's chunks on every device that holds some, then a sum over the devices."""
        return self.total_expected(self.within.sum_group(expect, chunks, offsets, group))

    def map_groups(
        self, solve: Callable, operands: Any, reads_rows: bool, side_by_side: bool = False, holds: Any = True
    ) -> Any:
        """Each device visits its own groups, and all hear of the results; what reads no rows is computed on every device."""
        if not reads_rows:
            return jax.vmap(solve)(*operands)
        return self.total(self.within.map_groups(solve, operands, reads_rows, side_by_side, holds), holds)

    def total_expected(self, found: Expected) -> Expected:
        """The same for expectations, whose widest predictor is the widest of any device."""
        widest = self.largest(found.spread)
        return dataclasses.replace(self.total(dataclasses.replace(found, spread=jnp.zeros_like(widest))), spread=widest)


@dataclasses.dataclass(frozen=True)
class _AllChunks(RuntimeDefaults):
    """All chunks on every device, of whose rows each has its own: what they find is summed, and nothing is divided."""

    over: Sharded

    def total(self, tree: Any, holds: Any = True) -> Any:
        """Sums over the devices."""
        return self.over.total(tree, holds)

    def total_expected(self, found: Expected) -> Expected:
        """The same for expectations."""
        return self.over.total_expected(found)

    def largest(self, x: Array) -> Array:
        """The largest of any device."""
        return self.over.largest(x)

    def shared(self, tree: Any) -> Any:
        """The same values, whose derivatives in reverse mode are summed over the devices."""
        return self.over.shared(tree)


class _Placed:
    """Arrays that were placed before, by the arrays that they were made of: these cannot change, so identity tells."""

    def __init__(self) -> None:
        self._known: list[tuple[list, Any, Any]] = []

    def __reduce__(self) -> tuple:
        return _Placed, ()

    def of(self, given: Any, place: Callable[[], Any]) -> Any:
        """What was made of these very arrays before, or is now.

        ``given``: a pytree of arrays, and of what else the result depends on.
        """
        leaves, structure = jax.tree.flatten(given)
        for kept, how, placed in self._known:
            if how == structure and all(_same(a, b) for a, b in zip(kept, leaves, strict=True)):
                return placed
        placed = place()
        if all(isinstance(x, jax.Array | int) for x in leaves):
            self._known = [*self._known, (leaves, structure, placed)][-_REMEMBERED:]
        return placed


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def _held(chunks: Any) -> int:
    return jax.tree.leaves(chunks)[0].shape[0]


def _spec(axis: str, place: int | None) -> PartitionSpec:
    """An array whose axis ``place`` goes over the devices."""
    return _EVERYWHERE if place is None else PartitionSpec(*(None,) * place, axis)


def _zeros(shapes: Any, skipped: int = 0) -> Any:
    """Zeros of these shapes without their leading axes."""

    def one(s: Any) -> Array:
        if jnp.issubdtype(s.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                jnp.zeros(jax.eval_shape(jax.random.key_data, s).shape[skipped:], jnp.uint32)
            )
        return jnp.zeros(s.shape[skipped:], s.dtype)

    return jax.tree.map(one, shapes)
