"""Exponential families: natural and mean parameters, log-partition, and the maps between them."""

from ._base import Family, Vector, inner, natural_parameters
from ._conditional import (
    ConditionalMoments,
    ConditionalNatural,
    bounded_precision,
    conditional_divergence,
    conditional_moments,
    schur_complement,
)
from ._distance import marginal_distance
from ._gaussian import (
    GaussianFamily,
    GaussianMean,
    GaussianMoments,
    GaussianNatural,
    MultivariateNormalFamily,
    NormalFamily,
)

__all__ = [
    "ConditionalMoments",
    "ConditionalNatural",
    "Family",
    "GaussianFamily",
    "GaussianMean",
    "GaussianMoments",
    "GaussianNatural",
    "MultivariateNormalFamily",
    "NormalFamily",
    "Vector",
    "bounded_precision",
    "conditional_divergence",
    "conditional_moments",
    "inner",
    "marginal_distance",
    "natural_parameters",
    "schur_complement",
]
