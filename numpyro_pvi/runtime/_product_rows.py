"""The rows of groups where q is a product of families: what a visit of one group by mini-batches takes its steps from."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..expectations import Expected
from ..families import ProductNatural
from ..sites import SiteStack, take
from ..solvers import BatchStep
from ._product_problem import ProductProblem
from ._product_rounds import step_in_turns
from ._product_view import SomeRows, batch_rows, view_of, whole_groups


@dataclasses.dataclass(frozen=True)
class ProductRows:
    """The rows of all groups, a batch of one group's at a time, beside a cavity.

    Args:
        problem: of all groups, with as many draws as a step takes.
    """

    problem: ProductProblem

    # Rows give messages.
    pointwise = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        return self.problem.plan.partition.table.sizes

    def num_rows(self, group: Int[Array, ""]) -> int | Int[Array, ""]:
        """Rows of one group: a number known beforehand where it is the same for all."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else jnp.asarray(self.sizes, jnp.int32)[group]

    def message(self, group: Any, cavity: ProductNatural, site: Any, key: Any, rows: Any) -> Expected:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.message`.

        Args:
            group: position of the group.
            cavity: natural parameters of q without its site.
            site: its site.
            key: of the draws.
            rows: positions within the group, or None for all.

        Returns:
            Value and message, times ``N_m / B``.
        """
        stack = _stacked(site)
        values, messages = self._view(group, cavity, rows).group_values(cavity + site, key, stack)
        return expected_of(values[0], take(messages.groups, 0))

    def step(self, group: Any, cavity: ProductNatural, site: Any, share: Any, key: Any, rows: Any) -> BatchStep:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.step`; the other arguments are those of :meth:`message`."""
        there = jnp.ones((1,), bool)
        view = self._view(group, cavity, rows)
        stack, halvings, good = step_in_turns(view, _stacked(site), there, share, key)
        return BatchStep(take(stack.groups, 0), halvings, good[0])

    def _view(self, group: Any, cavity: ProductNatural, rows: Any) -> SomeRows:
        groups, there = jnp.asarray(group, jnp.int32)[None], jnp.ones((1,), bool)
        if rows is None:
            chosen = whole_groups(self.problem, groups, there)
        else:
            chosen = batch_rows(self.problem, groups, there, rows[None])
        return view_of(self.problem, chosen, cavity)


def _stacked(site: Any) -> SiteStack:
    return SiteStack(jax.tree.map(lambda x: x[None], site), None)


def expected_of(value: Float[Array, "*M"], target: Any) -> Expected:
    """A value and a message without quadrature whose error would be known.

    Args:
        value: in nats.
        target: natural parameters, or None.

    Returns:
        As solvers and schedules read them.
    """
    zero = jnp.zeros_like(value)
    return Expected(value, target, None, zero, zero, zero)
