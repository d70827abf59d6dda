"""The contract of a runtime: where the groups' passes over their rows are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Int

from ..expectations import Expected


@runtime_checkable
class Runtime(Protocol):
    """Map a chunk-level or group-level computation over all groups; what every implementor owes.

    Frozen and hashable (settings only). Results do not depend on the runtime beyond rounding. Functions handed in are
    pure and traceable; a runtime across machines evaluates them where a group's rows live and moves only their small
    arguments (q, a site, a key) and results.
    """

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
