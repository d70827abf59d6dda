"""The contract of a runtime: where the groups' passes over their rows are run; and two ways to run on one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..errors import PVIError
from ..expectations import Expected, add_expected, sum_by_group
from ..sites import take


@runtime_checkable
class Runtime(Protocol):
    """Map a chunk-level or group-level computation over all groups; what every implementor owes.

    Frozen and hashable (settings only). Results do not depend on the runtime beyond rounding. Functions handed in are
    pure and traceable; a runtime across machines evaluates them where a group's rows live and moves only their small
    arguments (q, a site, a key) and results.
    """

    @property
    def by_label(self) -> bool:
        """Whether programs name groups by their labels, so that they are kept when programs are compiled."""
        ...

    @property
    def traffic(self) -> Any:
        """Round trips, messages and bytes that were sent to clients so far; None where there are no clients."""
        ...

    def engine(self, engine: Any) -> Any:
        """The engine that runs a fit: the one given where programs that are compiled here pass over the rows.

        Args:
            engine: the engine of the fit's choices.

        Raises:
            PVIError: for choices that do not go with this runtime.
        """
        ...

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

    def map_groups(self, solve: Callable[..., Any], operands: Any, reads_rows: bool) -> Any:
        """Run a per-group computation on stacked operands.

        Args:
            solve: one group's operands to its result.
            operands: a tuple of pytrees with a leading group axis M.
            reads_rows: whether ``solve`` passes over the group's rows.

        Returns:
            Results with a leading group axis M.
        """
        ...


class RuntimeDefaults:
    """A base class to derive a runtime from: programs pass over the rows where they are compiled.

    See :class:`Runtime` for what each says. A subclass writes down ``sum_chunks`` and ``map_groups``.
    """

    by_label: Any = False
    traffic: Any = None

    def engine(self, engine: Any) -> Any:
        """The engine as it is."""
        return engine

    def call(
        self, program: Callable, engine: Any, state: Any, dynamic: list, static: tuple, *rest: Any, **options: Any
    ) -> Any:
        """The program's value."""
        return program(engine, state, dynamic, static, *rest, **options)


# ------------------------------------------------------------------------------------------------------ two ways to run
# Two ways to run on one device: all chunks at once, or one after another.

# Batches that the results of all chunks may be as large as.
_LARGE_RESULTS = 16


@dataclasses.dataclass(frozen=True)
class Vmap(RuntimeDefaults):
    """All chunks in one vectorised program, in batches whose arrays stay below ``batch_bytes``.

    Args:
        batch_bytes: largest size of one batch: its chunk arrays, and what a pass over them holds. Batches bound the
            temporary memory of a pass; within a batch chunks are vectorised, which beats a loop while the batch fits
            the cache.

    Raises:
        PVIError: on construction, for a size that is not positive.
    """

    batch_bytes: int = 1 << 21

    def __post_init__(self):
        if not isinstance(self.batch_bytes, int) or self.batch_bytes < 1:
            raise PVIError(f"Vmap(batch_bytes={self.batch_bytes!r}): expected a positive int, in bytes.")

    def sum_chunks(
        self,
        expect: Callable[[Any], Expected],
        chunks: Any,
        chunk_group: Int[Array, "C"],
        offsets: Int[Array, "ends"],
        working_bytes: int,
    ) -> Expected:
        """Evaluate chunks in batches: see :class:`numpyro_pvi.runtime.Runtime`."""
        count, num_groups = chunk_group.shape[0], offsets.shape[0] - 1
        batch = self._batch_size(chunks, count, working_bytes)
        if batch == 1 and num_groups < count and self._results_are_large(expect, chunks, count):
            # One at a time anyway: added up on the way, they hold one group's result each and not one chunk's.
            return LaxMap().sum_chunks(expect, chunks, chunk_group, offsets, working_bytes)
        if batch >= count:
            results = jax.vmap(expect)(chunks)
        else:
            results = jax.lax.map(expect, chunks, batch_size=batch if batch > 1 else None)
        return results if count == num_groups else sum_by_group(results, chunk_group, num_groups)

    def map_groups(self, solve: Callable[..., Any], operands: Any, reads_rows: bool) -> Any:
        """Vectorise over groups, or loop when each reads rows of its own (groups differ in their number of chunks)."""
        if reads_rows:
            return jax.lax.map(lambda xs: solve(*xs), operands)
        return jax.vmap(solve)(*operands)

    def _results_are_large(self, expect: Callable[[Any], Expected], chunks: Any, count: int) -> bool:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), chunks)
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(expect, one)))
        return count * size > _LARGE_RESULTS * self.batch_bytes

    def _batch_size(self, chunks: Any, count: int, working_bytes: int) -> int:
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(chunks)) + count * working_bytes
        return max(1, int(count * self.batch_bytes / max(size, 1)))


@dataclasses.dataclass(frozen=True)
class LaxMap(RuntimeDefaults):
    """One chunk after another: the least temporary memory, one group's result at a time."""

    def sum_chunks(
        self,
        expect: Callable[[Any], Expected],
        chunks: Any,
        chunk_group: Int[Array, "C"],
        offsets: Int[Array, "ends"],
        working_bytes: int,
    ) -> Expected:
        """Loop over groups and their chunks: see :class:`numpyro_pvi.runtime.Runtime`."""
        del working_bytes
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), chunks)
        if jax.eval_shape(expect, first).local is not None:
            # What rows want of their own latents is kept, not summed, so each chunk leaves its result.
            return sum_by_group(jax.lax.map(expect, chunks), chunk_group, offsets.shape[0] - 1)
        return jax.lax.map(lambda m: sum_one_group(expect, chunks, offsets, m), jnp.arange(offsets.shape[0] - 1))

    def map_groups(self, solve: Callable[..., Any], operands: Any, reads_rows: bool) -> Any:
        """Loop over groups."""
        del reads_rows
        return jax.lax.map(lambda xs: solve(*xs), operands)


def sum_one_group(
    expect: Callable[[Any], Expected], chunks: Any, offsets: Int[Array, "ends"], group: Int[Array, ""]
) -> Expected:
    """Add up one group's chunks in a loop of as many steps as the group has chunks.

    Args:
        expect: one chunk's arrays to its expectations.
        chunks: arrays with a leading chunk axis C, sorted by group.
        offsets: first chunk of each group, and C.
        group: which group.

    Returns:
        The group's expectations.
    """
    first = offsets[group]
    shapes = jax.eval_shape(expect, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), chunks))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.fori_loop(
        first, offsets[group + 1], lambda c, total: add_expected(total, expect(take(chunks, c))), zero
    )
