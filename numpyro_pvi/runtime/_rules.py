"""Which quadrature rule an evaluation uses, and when it refines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..expectations import FIXED_RULES, Expected, refined, rule_index
from ..schedules import Points, Rule

# Relative quadrature error that does no harm while q still moves by more than a posterior sd in a round.
LOOSE_TOLERANCE = 2e-2
LOOSE_MOVE = 1.0


def first_rule(dtype, spread: Float[Array, ""] | None = None, cheaper: Any = 0) -> Rule:
    """The rule of a fresh state: the cheapest, or (less ``cheaper``) the one for predictors known to be so wide."""
    zero = jnp.zeros((), dtype)
    loose = zero + LOOSE_TOLERANCE
    # Nothing compared yet: as if q had come from far away.
    points = Points(jnp.zeros((2,), bool), jnp.full((2,), jnp.inf, dtype), zero + jnp.inf)
    if spread is None:
        return Rule(jnp.int32(0), zero, zero, loose, points)
    level = jnp.clip(rule_index(spread) - cheaper, 0, len(FIXED_RULES) - 1).astype(jnp.int32)
    return Rule(level, spread, spread, loose, points)


def cheaper_rule(rule: Rule) -> Rule:
    """Where the next evaluation starts: a cheaper rule is tried again whenever the predictor sd has halved."""
    lower = (rule.level > 0) & (rule.spread < 0.5 * rule.anchor)
    level = jnp.minimum(rule.level - 1, rule_index(rule.spread))
    return rule._replace(
        level=jnp.where(lower, level, rule.level).astype(jnp.int32), anchor=jnp.where(lower, rule.spread, rule.anchor)
    )


def next_rule(rule: Rule, used: Int[Array, ""], spread: Float[Array, ""]) -> Rule:
    """What an evaluation leaves behind: the rule it ended with, and the sd at which it had to refine."""
    return rule._replace(level=used, spread=spread, anchor=jnp.where(used > rule.level, spread, rule.anchor))


def relative_error(expected: Expected) -> Float[Array, ""]:
    """Estimated quadrature error of all rows, relative to the precision of q.

    Errors and sizes are weighted by the predictors' variances, so both are traces of (a precision times the covariance
    of q), and the trace of q's own precision times its covariance is D: curvature much smaller than that needs no
    relative accuracy.

    Args:
        expected: expectations of one or more groups.

    Returns:
        The ratio; infinity where the error is unknown.
    """
    total = jnp.maximum(jnp.sum(expected.weight), expected.product.shape[-1])
    ratio = jnp.sum(expected.error) / total
    return jnp.where(jnp.isnan(ratio), jnp.inf, ratio)


def escalate(
    evaluate: Callable[[Any], tuple[Any, Float[Array, ""]]], rule: Rule, num_rules: int
) -> tuple[Any, Int[Array, ""], Float[Array, ""]]:
    """Evaluate with a quadrature rule, and again with finer ones while the error is above the rule's tolerance.

    Args:
        evaluate: the index of a quadrature rule to ``(result, relative error)``.
        rule: where to start, and the tolerance.
        num_rules: how many rules there are.

    Returns:
        ``(result, rule used, relative error)``; the error is above the tolerance only where the finest rule missed it.
    """
    return refined(evaluate, rule.level, rule.tolerance, num_rules)


def escalated(evaluate: Callable[[Any], Expected], rule: Rule, num_rules: int) -> Expected:
    """:func:`escalate` for one factor, judged by its own error.

    Args:
        evaluate: the index of a quadrature rule to the factor's expectations.
        rule: where to start, and the tolerance.
        num_rules: how many rules there are.

    Returns:
        The expectations under the rule that was accurate enough, or the finest.
    """

    def split(level):
        result = evaluate(level)
        return result, relative_error(result)

    return escalate(split, rule, num_rules)[0]
