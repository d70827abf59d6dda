"""What the natural gradient at one q asks of every site."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from .._numerics import all_finite
from ..expectations import Expected
from ..sites import SiteStack, select
from ._contract import Problem, RoundCarry


def natural_gradient_proposal(problem: Problem, carry: RoundCarry) -> SiteStack:
    """Every site's natural-gradient target at the carry's q (PVI eq. 10): small joint steps towards it raise the ELBO.

    Args:
        problem: the factors.
        carry: where things stand.

    Returns:
        Targets; a site whose factor was not finite stays.
    """

    def usable(expected: Expected, site: Any) -> Any:
        expected = dataclasses.replace(expected, local=None)
        good = jax.vmap(all_finite)(expected) if jnp.ndim(expected.value) else all_finite(expected)
        return select(good, expected.target, site)

    if problem.flat:
        return cast(Any, problem).natural_gradient_proposal(carry)
    sites, evaluation = carry.sites, carry.evaluation
    prior = None if evaluation.prior is None or sites.prior is None else usable(evaluation.prior, sites.prior)
    local = problem.local_proposal(carry, jnp.ones((problem.num_groups,), bool))
    return SiteStack(usable(evaluation.groups, sites.groups), sites.prior if prior is None else prior, local)
