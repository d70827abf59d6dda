"""Single rows of the groups as affine predictors, read off the model when they are asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
from numpyro.distributions import constraints

from ..errors import PVIError
from ..expectations import RowProgram
from ..factors import ModelCall, Packing, PartitionPlan, TermData, prepare_term

# A response of more values than these has no classes to balance.
_MOST_CLASSES = 64


@dataclasses.dataclass(frozen=True)
class RowStream:
    """The rows of every group in their order: implements :class:`numpyro_pvi.schedules.Stream`.

    Nothing is prepared: a row's design is computed where it is used, by one reverse pass of the model on that row.

    Args:
        part: the static plan.
        call: the model on all rows.
        packing: where each group's rows stand.
        padded: whether rows were filled up after a group came, so that the plan does not know how many there are.
    """

    part: PartitionPlan
    call: ModelCall
    packing: Any
    padded: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        return self.part.table.sizes

    def first_rows(self) -> Int[Array, "M"]:
        """Index of every group's first row."""
        return self.packing.first_rows()

    def program(self, expectation: str) -> RowProgram:
        """How a row's expectations are taken.

        Args:
            expectation: "auto" (closed form where the log-likelihood is quadratic, else quadrature), "quadrature" or
                "probit".

        Returns:
            The program.

        Raises:
            PVIError: where rows are not seen through affine predictors, or cannot be read one by one.
        """
        part = self.part
        if not part.terms or part.likelihood not in ("quadratic", "affine") or part.params:
            found = "params to optimise" if part.params else f"likelihood {part.likelihood!r}"
            raise PVIError(
                f"Decentralized(mixing='consensus') takes rows one by one through their affine predictors (regressions, "
                f"classification), but in {part.where} there are {found}: use mixing='tracking'. Partition.plan(*args) shows "
                "what was found."
            )
        if not isinstance(self.packing, Packing):
            raise PVIError(
                "Decentralized(mixing='consensus') reads rows one by one, but this model is read with masks: pass the data as "
                "arguments whose leading axis is the plate's, or index them by the plate's value."
            )
        if self.padded:
            raise PVIError(
                "Decentralized(mixing='consensus') goes with one fixed set of agents: make a new state with the new group's rows."
            )
        rule = "exact" if part.likelihood == "quadratic" else "quadrature"
        program = RowProgram(part.terms, rule if expectation == "auto" else expectation)
        program.check(self.row(jnp.int32(0), jnp.int32(0)))
        return program

    def row(self, group: Int[Array, ""], position: Int[Array, ""]) -> tuple[TermData, ...]:
        """The arrays of one row.

        Args:
            group: whose.
            position: which of its rows, from 0.

        Returns:
            One entry per term of the likelihood.
        """
        call = self._call(group, position)
        return tuple(prepare_term(call, spec, few=True) for spec in self.part.terms)

    def classes(self) -> tuple[Int[Array, "M N"], int] | None:
        """The class of every group's rows in their order, and how many classes there are.

        Classes are the values of the first response that has finitely many (a Bernoulli's, a Categorical's); positions
        after a group's last row are of class -1.

        Returns:
            None where every response is a number among many.
        """
        found = self._response(jnp.int32(0), jnp.int32(0))
        if found is None:
            return None
        most = jnp.arange(max(self.sizes))
        groups = jnp.arange(len(self.sizes))

        def one(group, position):
            value, _ = self._response(group, position)  # type: ignore[misc]
            inside = position < jnp.asarray(self.sizes, jnp.int32)[group]
            return jnp.where(inside, jnp.reshape(value, (-1,))[0].astype(jnp.int32), -1)

        return jax.vmap(lambda group: jax.vmap(lambda at: one(group, at))(most))(groups), found[1]

    def _response(self, group, position) -> tuple[Array, int] | None:
        """The value of the first response with classes, and their number."""
        call = self._call(group, position)
        trace, _ = call.trace(jnp.zeros((call.layout.dim,), jnp.result_type(float)))
        for spec in self.part.terms:
            support = trace[spec.site]["fn"].support
            if support is constraints.boolean:
                return trace[spec.site]["value"], 2
            upper = getattr(support, "upper_bound", None)
            if support.is_discrete and isinstance(upper, int) and upper < _MOST_CLASSES:
                return trace[spec.site]["value"], upper + 1
        return None

    def _call(self, group, position) -> ModelCall:
        packing, length = self.packing, self.packing.rows.shape[1]
        # Positions beyond a group's end read its last chunk's padding, or another group's row: masked by who asks.
        chunk = jnp.minimum(packing.offsets[group] + position // length, packing.rows.shape[0] - 1)
        row = packing.rows[chunk, position % length][None]
        return self.part.reading.call(self.call, (row, jnp.ones(row.shape, bool)))
