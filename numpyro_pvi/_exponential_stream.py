"""Groups that come and go under AutoExponentialFamily: how their rows are packed, and where their sites start."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._arriving_groups import Newcomers
from ._state import Plan, PVIState
from .errors import PVIError
from .factors import Arrival, arrive, choose_chunk_rows, pack_rows
from .handlers import GroupTable
from .runtime import ProductEngine
from .sites import posterior


@dataclasses.dataclass(frozen=True)
class ProductNewcomers(Newcomers):
    """:class:`Newcomers` where q is a product of families. What factors are conjugate in is what ``init`` found."""

    def arrival(self, plan: Plan, table: GroupTable, rows: dict[str, int]) -> Arrival:
        """The same; batches of rows are taken from a packing without empty slots."""
        found = arrive(plan.partition, table, rows, False)
        if not (found.padded_rows and self.solver.stochastic):
            return found
        length = choose_chunk_rows(table.sizes)
        part = dataclasses.replace(found.plan, chunk_rows=length, num_chunks=-(-table.num_rows // length))
        return Arrival(part, pack_rows(table, length), 0)


def start_of(engine: ProductEngine, state: PVIState, known: Any) -> dict[str, Any]:
    """Fields of a state whose groups have come: a new group's site is 1, and the schedule begins anew.

    Args:
        engine: of the fit.
        state: with the plan, packing and sites of the rows that came.
        known: Bool[M], which groups have a site.

    Returns:
        Fields to replace.
    """
    last, dtype = state.report, state.report.move.dtype
    fields = engine.unvisited(state, posterior(state.prior, state.sites), dtype, known)
    report = fields["report"]._replace(clock=last.clock, messages=last.messages, consensus=last.consensus)
    if bool(np.all(known)):
        # Sites that were fitted before are as settled as they were.
        report = report._replace(total_move=jnp.asarray(last.total_move))
    return fields | {"sites": state.sites, "report": report}


def refuse_own_rows(state: PVIState, call: str) -> None:
    """Raise where groups cannot come or go: where q has members of their rows.

    Args:
        state: a state.
        call: the method that was called.

    Raises:
        PVIError: naming the latent and what to write.
    """
    plan: Any = state.plan
    if plan.inside:
        raise PVIError(
            f"{call} is not possible where latents are inside the partitioned plate under AutoExponentialFamily "
            f"({plan.inside[0].name!r}): q has members for the rows that init saw. Make a fit of the other rows, "
            "pvi.init(key, *args, init_params=...) with the shared latents' params of this one."
        )
