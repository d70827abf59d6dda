"""Values of the factors alone, for solvers that take gradients of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..expectations import Expected
from ..schedules import Evaluation, Rule
from ._rules import escalate, next_rule, relative_error


def values_at(problem: Any, q: Any, rule: Rule, noise: Any) -> Evaluation:
    """The ELBO at a Gaussian and nothing that only a natural gradient would read.

    Args:
        problem: the factors.
        q: its natural parameters.
        rule: quadrature rule to start from.
        noise: the draws of the loss, or None.

    Returns:
        The evaluation, without targets.
    """
    moments = problem.family.moments(q)
    if not problem.program.noisy:
        found = problem.evaluate_at(q, moments, rule, noise)
        return found._replace(groups=_values_only(found.groups), prior=_values_only(found.prior))
    values = problem.rows.values(problem.family.draw(moments, noise.pairs))
    zero = jnp.zeros_like(values)
    groups = Expected(values, None, None, zero, zero, zero)
    draws = problem.draws_of(problem.prior_program, noise, rule)

    def prior_at(level):
        prior = problem.prior_expected(moments, None, level, draws, False)
        return prior, relative_error(prior)

    prior, error = None, jnp.zeros((), values.dtype)
    if problem.has_prior_factor:
        prior, used, error = escalate(prior_at, rule, problem.num_rules)
        rule = next_rule(rule, used, prior.spread)
    rest = problem.rest(moments)
    own = jnp.zeros((), values.dtype) if prior is None else prior.value
    elbo, size = jnp.sum(values) + rest + own, jnp.sum(jnp.abs(values)) + jnp.abs(rest) + jnp.abs(own)
    return Evaluation(q, moments, groups, _values_only(prior), rest, elbo, size, rule, error > rule.tolerance)


def _values_only(expected: Expected | None) -> Expected | None:
    return None if expected is None else dataclasses.replace(expected, target=None, product=None)
