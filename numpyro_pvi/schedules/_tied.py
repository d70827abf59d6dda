"""Sweeps over groups that share one site: every visit moves it by 1/M of what the group asks for."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..sites import tied_site
from ..solvers import LocalResult
from ._contract import Problem, RoundCarry


class TiedSteps(NamedTuple):
    """Shares of what is asked for: of each visit's change, and of the sweep's."""

    visit: Float[Array, ""]
    joint: Float[Array, ""]


def tied_steps(problem: Problem, share: Float[Array, ""]) -> TiedSteps:
    """How far a sweep goes.

    Groups are mini-batches of the site's mean: at a fixed step the last ones always weigh more, so steps shrink within the
    sweep, and no part of the sweep is held back after it. One group is no mini-batch.

    Args:
        problem: the factors.
        share: ``10 / (10 + k)`` with k the sweeps so far; for one group, the rounds in which draws decided the move.

    Returns:
        The steps.
    """
    one = jnp.ones_like(share)
    return TiedSteps(one, share) if problem.num_groups == 1 else TiedSteps(share, one)


def sweep_tied(
    problem: Problem, carry: RoundCarry, q: Any, order: Int[Array, "M"], key: Any, noise: Any, step: Any
) -> tuple[Any, LocalResult]:
    """Visit all groups, each from the q that the last one left: ``eta_t <- eta_t + step / M (wanted - eta_t)``.

    Args:
        problem: the factors.
        carry: where things stand.
        q: natural parameters of q (the prior factor may have moved it).
        order: of the groups.
        key: a random key.
        noise: the round's draws, or None.
        step: share of each visit's change.

    Returns:
        The product of all M sites, with a leading axis of 1; and what the visits report, in the order of the groups.
    """
    count = problem.num_groups

    def visit(before, operands):
        q, whole = before
        index, state, key = operands
        site = tied_site(whole, count)
        result, _ = problem.visit_group(index, q, site, state, key, carry.evaluation.rule, noise, None)
        # Of M equal sites each moves by an M-th of this, and their product by all of it.
        change = (result.site - site) * step
        return (q + change, whole + change), result._replace(site=None)

    states = jax.tree.map(lambda x: x[order], carry.solver)
    operands = (order, states, jax.random.split(key, count))
    (_, whole), results = jax.lax.scan(visit, (q, carry.sites.groups), operands)
    back = jnp.argsort(order)
    return whole, jax.tree.map(lambda x: x[back], results)
