"""Rows of groups by mini-batches, where q is a product of families: what a visit of one group takes its steps from."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..expectations import Expected
from ..factors import Packing
from ..families import ProductFamily, ProductNatural
from ..sites import MemberSites, SiteStack, take
from ..solvers import BatchStep
from ._product_problem import ProductProblem
from ._product_rounds import (
    SomeRows,
    batch_rows,
    family_of_rows,
    row_ids,
    rows_of,
    shared_of,
    step_in_turns,
    view_of,
    whole_groups,
    with_local,
)


@dataclasses.dataclass(frozen=True)
class ProductRows:
    """The rows of all groups, a batch of one group's at a time, beside a cavity.

    Natural parameters of rows' own latents are those of one group's rows, by their places among these.

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

        ``cavity``: natural parameters of q without its site; ``rows``: positions within the group, or None for all. Returns
        value and message, times ``N_m / B``; of rows' own latents, those of the rows that are looked at.
        """
        view = self._view(group, cavity, rows)
        values, messages = view.group_values(self._seen(view, cavity + site), key, self._stacked(view, site))
        return expected_of(values[0], self._site(view, messages, site))

    def value(self, group: Any, cavity: ProductNatural, q: ProductNatural, site: Any, key: Any) -> Float[Array, ""]:
        """``E_q[log f]`` of all of a group's rows, in nats; ``site`` stands beside it on the draws."""
        view = self._view(group, cavity, None)
        return view.group_averages(self._seen(view, q), key, self._stacked(view, site))[0]

    def step(self, group: Any, cavity: ProductNatural, site: Any, share: Any, key: Any, rows: Any) -> BatchStep:
        """See :meth:`numpyro_pvi.solvers.LocalFactor.step`; the other arguments are those of :meth:`message`."""
        view = self._view(group, cavity, rows)
        stack, halvings, good = step_in_turns(view, self._stacked(view, site), jnp.ones((1,), bool), share, key)
        return BatchStep(self._site(view, stack, site), halvings, good[0])

    def _own(self, view: SomeRows, natural: ProductNatural) -> dict[str, Any]:
        """What is said of the latents of the rows that are looked at."""
        return rows_of(self.problem.plan, natural.parts, row_ids(view.chosen.within))

    def _seen(self, view: SomeRows, q: ProductNatural) -> ProductNatural:
        """q as some rows see it."""
        return ProductNatural(q.parts | self._own(view, q))

    def _stacked(self, view: SomeRows, site: ProductNatural) -> SiteStack:
        return stacked(self.problem.plan, site, self._own(view, site))

    def _site(self, view: SomeRows, stack: SiteStack, site: Any) -> ProductNatural:
        """The site of a stack of one, which says of other rows' own latents what it said before."""
        shared, plan = take(stack.groups, 0), self.problem.plan
        if stack.local is None:
            return shared
        before = MemberSites(rows_of(plan, site.parts, None))
        return ProductNatural(shared.parts | with_local(self.problem, view.chosen.within, before, stack.local).parts)

    def _view(self, group: Any, cavity: ProductNatural, rows: Any) -> SomeRows:
        groups, there = jnp.asarray(group, jnp.int32)[None], jnp.ones((1,), bool)
        if rows is None:
            chosen = whole_groups(self.problem, groups, there)
        else:
            chosen = batch_rows(self.problem, groups, there, rows[None])
        view = view_of(self.problem, chosen, cavity)
        return dataclasses.replace(view, prior=ProductNatural(view.prior.parts | self._own(view, cavity)))


def stacked(plan: Any, site: ProductNatural, own: dict[str, Any]) -> SiteStack:
    """A site as a stack of one, with what it says of rows' own latents beside it."""
    groups = jax.tree.map(lambda x: x[None], shared_of(plan, site))
    return SiteStack(groups, None, MemberSites(own) if own else None)


def expected_of(value: Float[Array, "*M"], target: Any) -> Expected:
    """A value and a message without quadrature whose error would be known.

    ``value``: in nats. Returns as solvers and schedules read them.
    """
    zero = jnp.zeros_like(value)
    return Expected(value, target, None, zero, zero, zero)


def visit_family(problem: ProductProblem) -> ProductFamily:
    """The family of q as a visit of one group sees it: with the latents of as many rows as the largest group has room for."""
    plan, packing = problem.plan, problem.packing
    if not plan.inside or not isinstance(packing, Packing):
        return plan.family
    length = packing.rows.shape[1]
    return family_of_rows(plan, -(-max(plan.partition.table.sizes) // length) * length)
