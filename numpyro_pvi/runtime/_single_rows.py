"""Factors whose site is a group's as a whole: a group of a single row by quadrature, whatever its site."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Int

from ..expectations import row_sites_zero, tilted_rows
from ..schedules import Rule
from ..sites import cavity, take
from ._factors import Factors
from ._rules import cheaper_rule, escalated
from ._tilted import MomentFactor, group_factor, method_of, of_rows, with_arrays


def whole_factor(problem: Factors, index: Int[Array, ""], rule: Rule, looked: Callable | None = None) -> MomentFactor:
    """One group's factor, for a site that is any member of the family.

    Of a single row with affine predictors moments are integrals over these. The cavity takes the place of q, and a unit
    site that of the row's: ``q (p / t)^alpha = cavity p^alpha``.

    Args:
        problem: the factors.
        index: which group.
        rule: quadrature rule to start from, and the error aimed at.
        looked: how moments are taken from points at which the factor has been evaluated already, or None.

    Returns:
        The factor; its tilted distribution counts as invalid where the cavity is not normalisable.
    """
    if method_of(problem, False) != "row":
        return group_factor(problem, index, looked)
    family = problem.family
    program, chunk = with_arrays(problem.program, take(problem.data.chunks, index))

    def moments_of(q, site, power, key, memory):
        del key, memory
        rest = cavity(q, site, power)
        moments, unit = family.moments(rest), row_sites_zero(program, chunk, q.precision_mean.dtype)
        found = escalated(
            lambda level: tilted_rows(program, chunk, unit, moments, power, level, problem.num_rules),
            cheaper_rule(rule),
            problem.num_rules,
        )
        tilted = of_rows(found, rule)
        shift = (family.log_partition(rest) - family.log_partition(q)) / power
        usable = tilted.valid & moments.valid
        return tilted._replace(change=tilted.change - site, value=tilted.value + shift, valid=usable)

    return MomentFactor(family, moments_of)
