"""Expectations of a factor and its gradients under q: closed form, quadrature over affine predictors, points, draws."""

from ._affine import AffineProgram, SharedAffineProgram
from ._agreement import disagreement
from ._draws import DrawsProgram
from ._expected import Expected, add_expected, sum_by_group, zero_expected
from ._local_latents import LocalChunk, LocalLatentProgram, LocalNoise, MaskedLocalProgram
from ._points import PointSet, PointsProgram, random_points, sigma_points
from ._quadratic import QuadraticProgram
from ._reparameterised import ReparameterisedProgram
from ._row_laws import ROW_RULES, RowExpected, RowProgram
from ._rules import FIXED_RULES, RULES
from .quadrature import rule_index

__all__ = [
    "FIXED_RULES",
    "ROW_RULES",
    "RULES",
    "AffineProgram",
    "DrawsProgram",
    "Expected",
    "LocalChunk",
    "LocalLatentProgram",
    "LocalNoise",
    "MaskedLocalProgram",
    "PointSet",
    "PointsProgram",
    "QuadraticProgram",
    "ReparameterisedProgram",
    "RowExpected",
    "RowProgram",
    "SharedAffineProgram",
    "add_expected",
    "disagreement",
    "random_points",
    "rule_index",
    "sigma_points",
    "sum_by_group",
    "zero_expected",
]
