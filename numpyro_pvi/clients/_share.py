"""What one client is given: its rows, and what the fit is made of."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._closures import SiteDigest, first_difference, model_digest
from ..errors import PVIError
from ..factors import choose_chunk_rows, join_arguments, pack_rows, split_arguments
from ..handlers import one_group_table
from ..runtime import Answers, ProductAnswers, ProductPlan, Units
from ._client import Respondent


@dataclasses.dataclass(frozen=True)
class Share:
    """All that one client is given: its rows, and what the fit is made of. Nothing of other groups."""

    label: Hashable
    model: Any
    solver: Any
    num_particles: int
    plan: Any
    packing: Any
    arrays: list
    static: tuple
    prior: tuple
    units: Units | None = None
    params: Any = None
    digest: dict[str, SiteDigest] | None = None

    def respondent(self, known: dict[Any, Any]) -> Respondent:
        """The client that answers for these rows; ``known`` as of :meth:`answers`.

        Raises PVIError where the model is not what it was in the process that has dealt out the rows.
        """
        if self.digest is not None:
            try:
                here = model_digest(self.model, self.arrays, self.static)
            except Exception as error:
                raise PVIError(
                    f"the model in the process of client {self.label!r} cannot be traced there ({type(error).__name__}: {error}), "
                    "and could be where the fit is: what it reads of its module or its machine is to be the same there."
                ) from error
            clause = first_difference(self.digest, here, "the fit")
            if clause is not None:
                raise PVIError(
                    f"the model in the process of client {self.label!r} is not the one that is fitted: {clause}. What a function "
                    "of a module closes over (a global of the module) is read anew there: pass such a number as an argument of "
                    "the model, or bind it with functools.partial, and it is handed over."
                )
        return Respondent(self.label, *self.answers(known))

    def answers(self, known: dict[Any, Any], token: Any = None) -> tuple[Any, dict[str, Any]]:
        """What answers for these rows, and what it says of itself.

        ``known``: programs of other clients, which serve this one where it differs from them in its rows only; ``token``:
        stands for what the model closes over.
        """
        key = token, self.model, self.solver, self.num_particles, self.plan, self.static
        kind: Any = ProductAnswers if isinstance(self.plan, ProductPlan) else Answers
        made = known.get(key) or (kind.compiled(*key[1:]), None)
        given = self.plan, self.packing, self.arrays, self.prior
        answers = kind(self.solver, *given, made[0], self.units, self.params)
        step = answers.tells_step() if made[1] is None else made[1]
        known[key] = made[0], step
        part = self.plan.partition
        return answers, {
            "rows": part.table.num_rows,
            "latents": tuple((n, tuple(s)) for n, s in zip(part.layout.names, part.layout.shapes, strict=True)),
            "family": type(self.plan.family).__name__,
            "dtype": str(answers.dtype),
            "structure": answers.structure,
            "step": step,
        }


def digest_at(model: Any, arrays: list, static: tuple) -> dict[str, SiteDigest] | None:
    """What a model is with arguments of these shapes; None where it cannot be traced with one group's rows alone."""
    try:
        return model_digest(model, arrays, static)
    except Exception:
        logging.getLogger("numpyro_pvi").debug("clients' models are not compared", exc_info=True)
        return None


def with_digests(shares: list[Share]) -> list[Share]:
    """Shares that are to be answered for in other processes, which see for themselves whether their model is the same."""
    known: dict[Any, Any] = {}
    found = []
    for share in shares:
        key = share.static, tuple((x.shape, x.dtype.name) for x in share.arrays)
        if key not in known:
            known[key] = digest_at(share.model, share.arrays, share.static)
        found.append(dataclasses.replace(share, digest=known[key]))
    return found


def shares_of(engine: Any, state: Any, dynamic: list, static: tuple) -> list[Share]:
    """Deal a fit's rows out to its groups. ``state``: a state, reduced but for its labels. Returns one entry per group."""
    part, packing = state.plan.partition, jax.device_get(state.packing)
    leaves, structure = jax.tree.flatten(join_arguments([np.asarray(x) for x in dynamic], static))
    prior = jax.device_get((state.prior, state.exact))
    params = jax.device_get(engine.constrain(state.plan, *join_arguments(dynamic, static), state.optim_state))
    found = []
    for place, label in enumerate(part.table.labels):
        mine = packing.chunk_group == place
        rows = packing.rows[mine][packing.mask[mine]]
        taken = [x if a is None else np.take(x, rows, axis=a) for x, a in zip(leaves, part.reading.axes, strict=True)]
        arrays, kept = split_arguments(
            *structure.unflatten([jnp.asarray(x) if hasattr(x, "dtype") else x for x in taken])
        )
        table = one_group_table(0, len(rows))
        own = pack_rows(table, choose_chunk_rows(table.sizes, dim=part.layout.dim))
        shape: dict[str, Any] = {"chunk_rows": own.rows.shape[1], "num_chunks": own.rows.shape[0]}
        units = None
        if part.local is not None:
            shape["local"] = dataclasses.replace(part.local, size=len(rows))
            units = Units(rows, *(np.asarray(x)[rows] for x in state.sites.local.first))
        plan = dataclasses.replace(state.plan, partition=dataclasses.replace(part, table=table, **shape))
        given = [np.asarray(x) for x in arrays], kept, prior, units, params
        made = label, engine.model, engine.solver, engine.num_particles, plan, jax.device_get(own)
        found.append(Share(*made, *given))
    return found
