"""Expectations of a factor and its gradients under q: closed form, quadrature over affine predictors, antithetic draws."""

from ._affine import AffineProgram, SharedAffineProgram
from ._draws import DrawsProgram
from ._expected import Expected, add_expected, sum_by_group, zero_expected
from ._quadratic import QuadraticProgram
from ._reparameterised import ReparameterisedProgram
from ._rules import FIXED_RULES, RULES
from .quadrature import rule_index

__all__ = [
    "FIXED_RULES",
    "RULES",
    "AffineProgram",
    "DrawsProgram",
    "Expected",
    "QuadraticProgram",
    "ReparameterisedProgram",
    "SharedAffineProgram",
    "add_expected",
    "rule_index",
    "sum_by_group",
    "zero_expected",
]
