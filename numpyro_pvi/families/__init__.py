"""Exponential families: natural and mean parameters, log-partition, and the maps between them."""

from ._base import Family, Vector, inner, natural_parameters
from ._gaussian import (
    GaussianFamily,
    GaussianMean,
    GaussianMoments,
    GaussianNatural,
    MultivariateNormalFamily,
    NormalFamily,
)

__all__ = [
    "Family",
    "GaussianFamily",
    "GaussianMean",
    "GaussianMoments",
    "GaussianNatural",
    "MultivariateNormalFamily",
    "NormalFamily",
    "Vector",
    "inner",
    "natural_parameters",
]
