"""The contract of a runtime: where the groups' passes over their rows are run; and two ways to run on one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._numerics import in_batches
from ..errors import PVIError
from ..expectations import Expected, add_expected, sum_by_group
from ..sites import take


@runtime_checkable
class Elsewhere(Protocol):
    """Who has the rows of a fit whose server has none, as the server asks them before and between rounds."""

    def arguments(self, pvi: Any, args: tuple, kwargs: dict, names: tuple[str, ...]) -> tuple[tuple, dict]:
        """What stands in for the model's arguments: arrays of the rows' shapes that hold nothing.

        ``pvi``: the fit, of the same guide and solver as the holders'; ``args``: positional arguments as the user gave them, of
        which no per-row array is read; nothing at all where the holders say what the arguments are. Raises PVIError where they
        do not fit what the holders have, or a holder is of another fit.
        """
        ...

    @property
    def came(self) -> tuple[int, ...]:
        """By group, its holder's number among those that were given: what takes groups as they came goes by it."""
        ...

    def compare(self, plan: Any) -> None:
        """Raise where a state's groups are others than the holders'.

        Raises StateError naming the labels, or the group that has another number of rows.
        """
        ...

    def partitions(self, model: Callable, given: Any) -> tuple:
        """The model with its rows in the groups of their holders.

        Raises PVIError for a partition of the user's own: the holders' labels are the groups.
        """
        ...

    def plan(self, pvi: Any, layout: Any, family: Any, arguments: tuple, key: Any) -> Any:
        """How every holder's rows are to be taken, agreed from what each has found at its own.

        ``arguments``: ``(args, kwargs, signature)``, what stands in for the rows; ``key``: random key of the points that
        structure is looked for at. Returns a :class:`numpyro_pvi.factors.Planned`, the solver's expectation put in. Raises
        PVIError naming what does not go, or the holders that disagree.
        """
        ...

    def plan_families(self, family: Any, expectation: str, key: Any) -> Any:
        """The same where q is a product of families.

        ``expectation``: how components are taken of which the holders have found different things; ``key``: random key of the
        points that structure is looked for at. Returns a :class:`numpyro_pvi.factors.Planned`, with what the groups' factors
        are conjugate in wherever there are rows. Raises PVIError naming what does not go, or the holders that disagree.
        """
        ...

    def compare_priors(self, engine: Any, plan: Any, arguments: tuple) -> None:
        """Raise where a holder's prior is another than the server's, which has nothing to read it off but the model.

        ``arguments``: positional and keyword ones, what stands in for the rows. Raises PVIError naming the holder.
        """
        ...

    def expect_answers(self, verb: str) -> None:
        """Raise where holders are not heard one by one, which a method needs. Raises PVIError naming it."""
        ...

    def judged(self, plan: Any, rng_key: Any, q: Any, sites: Any, params: dict, num_samples: int) -> dict:
        """How well each holder finds that its site stands in for its factor, at draws from q that all share: one number each.

        ``sites``: the groups', with a leading axis; ``params``: constrained values of the model's ``numpyro.param`` sites.
        Returns k-hat by label: see :func:`numpyro_pvi.diagnostics.khat_by_group`. Raises PVIError where holders are not heard
        one by one.
        """
        ...

    def watched(self, plan: Any, run: Callable[[], Any]) -> Any:
        """Run programs that ask the holders in their course; what went wrong there is raised here."""
        ...


class _RuntimeVerbs(Protocol):
    """What a runtime may do otherwise than one device that has all rows, and what that one does."""

    def engine(self, engine: Any) -> Any:
        """The engine that runs a fit: the one given where programs that are compiled here pass over the rows.

        Args:
            engine: the engine of the fit's choices.

        Raises:
            PVIError: for choices that do not go with this runtime.
        """
        return engine

    def call(
        self, program: Callable, engine: Any, state: Any, dynamic: list, static: tuple, *rest: Any, **options: Any
    ) -> Any:
        """Call a compiled program that passes over rows; ``program(engine, state, dynamic, static, *rest, **options)``.

        Args:
            program: the program.
            engine: what :meth:`engine` has given.
            state: a state, reduced.
            dynamic: arrays of the model's arguments.
            static: the static leaves.
            rest: its other arguments.
            options: its static ones.

        Returns:
            The program's value.
        """
        return program(engine, state, dynamic, static, *rest, **options)

    def hold(self, what: str, state: Any) -> None:
        """Keep within reach what a state names that is elsewhere, until another state is held as the same.

        Args:
            what: "call" for what a run begins with, "checkpoint" for what its file has.
            state: the state.
        """

    @property
    def alone(self) -> Any:
        """The runtime of programs that have all rows on one device: planning, starts, verification."""
        return self

    @property
    def within(self) -> Any:
        """The runtime inside a group's visit that a device makes by itself: the group's rows are all its own."""
        return self

    @property
    def side_by_side(self) -> Any:
        """The runtime of a program that has all chunks on every device, whose rows elsewhere count for nothing."""
        return self

    def lay_out(self, packing: Any, whole: bool, mechanism: str = "args") -> Any:
        """The packing whose chunks can be divided among the devices; refuses one that cannot.

        Args:
            packing: rows of each chunk, or masks.
            whole: whether a group's chunks have to be on one device, for visits that read its rows again and again.
            mechanism: how a model's rows are read: "args", "index" or "mask".
        """
        return packing

    def place(self, rows: list, axes: tuple[int | None, ...], packing: Any, whole: bool) -> tuple[list, Any]:
        """The model's arrays and the packing as programs over rows take them; the same arrays are placed once.

        Args:
            rows: arrays of the model's arguments.
            axes: of each, the axis that runs over the rows, or None.
            packing: rows of each chunk, laid out where it is not.
            whole: as of :meth:`lay_out`.
        """
        return rows, packing

    def publish(self, tree: Any) -> Any:
        """What is on every device alike, put there."""
        return tree

    def fetch(self, tree: Any) -> Any:
        """What is on every device alike, as arrays of one."""
        return tree

    def over_rows(self, program: Callable, rows: list, axes: tuple[int | None, ...], packing: Any, *others: Any) -> Any:
        """``program(rows, packing, *others)``, on every device with its share of the rows and of the packing.

        Args:
            program: traceable; its results are the same on every device.
            rows: what :meth:`place` made of the arrays.
            axes: of each, the axis that runs over the rows, or None.
            packing: what :meth:`place` made of the packing.
            others: on every device alike.
        """
        return program(rows, packing, *others)

    def span(self, offsets: Int[Array, "ends"], group: Int[Array, "*k"], count: int) -> tuple[Any, Any]:
        """First chunk of a group among those held here, and past its last.

        Args:
            offsets: first chunk of each group among all, and C.
            group: which.
            count: how many chunks are held here.
        """
        return offsets[group], offsets[group + 1]

    def holds(self, offsets: Int[Array, "ends"], group: Int[Array, "*k"], count: int) -> Any:
        """Whether a group begins here: True on one of the devices."""
        return True

    def mine(self, tree: Any, count: int) -> Any:
        """Of arrays with a leading axis of all chunks, the ``count`` that are held here."""
        return tree

    def gathered(self, tree: Any) -> Any:
        """The inverse of :meth:`mine`: for what groups hold of their rows, never for the rows."""
        return tree

    def total(self, tree: Any, holds: Any = True) -> Any:
        """Sums over the devices, of those of them for which ``holds``."""
        return tree

    def total_expected(self, found: Expected) -> Expected:
        """The same for expectations, whose widest predictor is the widest of any device."""
        return found

    def shared(self, tree: Any) -> Any:
        """What every device knows alike, for a sum over rows that is differentiated by it in reverse mode."""
        return tree

    def largest(self, x: Array) -> Array:
        """The largest of what the devices hold."""
        return x

    def sum_group(
        self, expect: Callable[[Any], Expected], chunks: Any, offsets: Int[Array, "ends"], group: Int[Array, ""]
    ) -> Expected:
        """Evaluate one group's chunks and add the results up: in a loop, unless a runtime says otherwise.

        Args:
            expect: one chunk's arrays to its expectations.
            chunks: arrays with a leading axis of the chunks held here, sorted by group.
            offsets: first chunk of each group among all, and C.
            group: which group.

        Returns:
            The group's expectations.
        """
        return sum_span(expect, chunks, offsets[group], offsets[group + 1], add_expected)


@runtime_checkable
class Runtime(_RuntimeVerbs, Protocol):
    """Map a chunk-level or group-level computation over all groups; what every implementor owes.

    Frozen and hashable (settings only). Results do not depend on the runtime beyond rounding. Functions handed in are
    pure and traceable; a runtime across machines evaluates them where a group's rows live and moves only their small
    arguments (q, a site, a key) and results.

    Programs over rows run between :meth:`lay_out` and :meth:`fetch`: rows are placed once, everything else (q, sites, memories,
    what groups know of their own latents) is on every device alike, and each device runs the same program over the chunks that
    it holds. Within that program :meth:`span`, :meth:`mine`, :meth:`total` and :meth:`gathered` are where the devices' shares
    meet. On one device they are nothing: :class:`RuntimeDefaults` answers for those.
    """

    @property
    def vectorised(self) -> bool:
        """Whether chunks of a fit under families are evaluated many at a time."""
        ...

    @property
    def by_label(self) -> bool:
        """Whether programs name groups by their labels, so that they are kept when programs are compiled."""
        ...

    @property
    def traffic(self) -> Any:
        """Round trips, messages and bytes that were sent to clients so far; None where there are no clients."""
        ...

    @property
    def workers(self) -> str:
        """What a progress bar says of those that answer for the groups; empty where nobody else does."""
        ...

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Who has the rows where this process has none; None where the model's arguments are the rows."""
        ...

    def sum_chunks(
        self,
        expect: Callable[[Any], Expected],
        chunks: Any,
        chunk_group: Int[Array, "C"],
        offsets: Int[Array, "ends"],
        working_bytes: int,
    ) -> Expected:
        """Evaluate every chunk and add the results up by group.

        Args:
            expect: one chunk's arrays to its expectations.
            chunks: arrays with a leading chunk axis C, sorted by group.
            chunk_group: each chunk's group.
            offsets: first chunk of each group, and C.
            working_bytes: roughly what one call of ``expect`` holds beside its chunk's arrays; 0 where nothing is known.

        Returns:
            Expectations with a leading group axis M.
        """
        ...

    def map_groups(
        self,
        solve: Callable[..., Any],
        operands: Any,
        reads_rows: bool,
        side_by_side: bool = False,
        holds: Any = True,
    ) -> Any:
        """Run a per-group computation on stacked operands.

        Args:
            solve: one group's operands to its result; where it reads rows, under :attr:`within`.
            operands: a tuple of pytrees with a leading group axis M.
            reads_rows: whether ``solve`` passes over the group's rows.
            side_by_side: whether it may do so for all groups in one vectorised program.
            holds: Bool[M], whose rows are held here.

        Returns:
            Results with a leading group axis M.
        """
        ...


class RuntimeDefaults(_RuntimeVerbs):
    """A base class to derive a runtime from: all rows are on one device, where programs that pass over them are compiled.

    See :class:`Runtime` for what each says. A subclass writes down ``sum_chunks`` and ``map_groups``.
    """

    vectorised: Any = True
    by_label: Any = False
    traffic: Any = None
    workers: Any = ""
    elsewhere: Any = None


# ------------------------------------------------------------------------------------------------------ two ways to run
# Two ways to run on one device: all chunks at once, or one after another.

# Batches that the results of all chunks may be as large as.
_LARGE_RESULTS = 16
# What a batch holds by default: what a CPU keeps near (rounds of 20,000 to 200,000 rows take .87 to .94 of what they take with half
# of it, and .99 to 1.06 with twice as much). Elsewhere a batch takes as long as its programs take to be launched (three
# rounds of 20,000 rows of 50 columns on an H200: 4,711 launches by the one, 2,471 by the other).
_CACHE_BYTES, _DEVICE_BYTES = 1 << 22, 1 << 28


@dataclasses.dataclass(frozen=True)
class Vmap(RuntimeDefaults):
    """All chunks in one vectorised program, in batches whose arrays stay below ``batch_bytes``.

    Args:
        batch_bytes: largest size of one batch: its chunk arrays, and what a pass over them holds. Batches bound the
            temporary memory of a pass; within a batch chunks are vectorised, which beats a loop while the batch fits
            the cache. By default 4 MiB on a CPU, and 256 MiB on other devices.

    Raises:
        PVIError: on construction, for a size that is not positive.
    """

    batch_bytes: int | None = None

    def __post_init__(self):
        asked = self.batch_bytes
        if asked is not None and (not isinstance(asked, int) or asked < 1):
            raise PVIError(
                f"Vmap(batch_bytes={asked!r}): expected a positive int, in bytes, or None for the device's own size."
            )

    @property
    def _most(self) -> int:
        """Bytes of a batch."""
        if self.batch_bytes is not None:
            return self.batch_bytes
        return _CACHE_BYTES if jax.default_backend() == "cpu" else _DEVICE_BYTES

    def sum_chunks(
        self,
        expect: Callable[[Any], Expected],
        chunks: Any,
        chunk_group: Int[Array, "C"],
        offsets: Int[Array, "ends"],
        working_bytes: int,
    ) -> Expected:
        """Evaluate chunks in batches: see :class:`numpyro_pvi.runtime.Runtime`."""
        one_each = chunk_group.shape[0] == offsets.shape[0] - 1
        return self.sum_held(expect, chunks, chunk_group, offsets, working_bytes, one_each)

    def sum_held(
        self,
        expect: Callable[[Any], Expected],
        chunks: Any,
        chunk_group: Int[Array, "C"],
        offsets: Int[Array, "ends"],
        working_bytes: int,
        one_each: bool,
    ) -> Expected:
        """The same where groups may have no chunk among them; ``one_each`` says that every group has exactly one."""
        count, num_groups = chunk_group.shape[0], offsets.shape[0] - 1
        batch = self._batch_size(chunks, count, working_bytes)
        if batch == 1 and num_groups < count and self._results_are_large(expect, chunks, count):
            # One at a time anyway: added up on the way, they hold one group's result each and not one chunk's.
            return LaxMap().sum_chunks(expect, chunks, chunk_group, offsets, working_bytes)
        results = in_batches(expect, chunks, batch)
        return results if one_each else sum_by_group(results, chunk_group, num_groups)

    def map_groups(
        self,
        solve: Callable[..., Any],
        operands: Any,
        reads_rows: bool,
        side_by_side: bool = False,
        holds: Any = True,
    ) -> Any:
        """Vectorise over groups, or loop when each reads rows of its own (groups differ in their number of chunks)."""
        if reads_rows and not side_by_side:
            return jax.lax.map(lambda xs: solve(*xs), operands)
        return jax.vmap(solve)(*operands)

    def _results_are_large(self, expect: Callable[[Any], Expected], chunks: Any, count: int) -> bool:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), chunks)
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(expect, one)))
        return count * size > _LARGE_RESULTS * self._most

    def _batch_size(self, chunks: Any, count: int, working_bytes: int) -> int:
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(chunks)) + count * working_bytes
        return max(1, int(count * self._most / max(size, 1)))


@dataclasses.dataclass(frozen=True)
class LaxMap(RuntimeDefaults):
    """One chunk after another: the least temporary memory, one group's result at a time."""

    vectorised = False

    def sum_chunks(
        self,
        expect: Callable[[Any], Expected],
        chunks: Any,
        chunk_group: Int[Array, "C"],
        offsets: Int[Array, "ends"],
        working_bytes: int,
    ) -> Expected:
        """Loop over groups and their chunks: see :class:`numpyro_pvi.runtime.Runtime`."""
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), chunks)
        if jax.eval_shape(expect, first).local is not None:
            # What rows want of their own latents is kept, not summed, so each chunk leaves its result.
            return sum_by_group(jax.lax.map(expect, chunks), chunk_group, offsets.shape[0] - 1)
        return jax.lax.map(lambda m: self.sum_group(expect, chunks, offsets, m), jnp.arange(offsets.shape[0] - 1))

    def map_groups(
        self,
        solve: Callable[..., Any],
        operands: Any,
        reads_rows: bool,
        side_by_side: bool = False,
        holds: Any = True,
    ) -> Any:
        """Loop over groups."""
        return jax.lax.map(lambda xs: solve(*xs), operands)


def add(total: Any, more: Any) -> Any:
    """The sum of two trees of arrays."""
    return jax.tree.map(jnp.add, total, more)


def sum_span(of_chunk: Callable, chunks: Any, first: Any, last: Any, plus: Callable[[Any, Any], Any] = add) -> Any:
    """Add up neighbouring chunks in a loop of as many steps as there are.

    ``of_chunk``: one chunk's arrays to what it says; ``chunks``: arrays with a leading chunk axis. Returns the sum; zero where
    there are none.
    """
    shapes = jax.eval_shape(of_chunk, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), chunks))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.fori_loop(first, last, lambda c, total: plus(total, of_chunk(take(chunks, c))), zero)
