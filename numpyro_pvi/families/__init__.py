"""Exponential families: natural and mean parameters, log-partition, and the maps between them."""

from ._base import Family, FamilyDefaults, Vector, implicit_inverse, inner, natural_parameters
from ._conditional import (
    ConditionalMoments,
    ConditionalNatural,
    bounded_precision,
    conditional_divergence,
    conditional_moments,
    schur_complement,
)
from ._dirichlet import BetaFamily, BetaMean, BetaNatural, DirichletFamily, DirichletMean, DirichletNatural
from ._discrete import (
    BernoulliFamily,
    BernoulliMean,
    BernoulliNatural,
    CategoricalFamily,
    CategoricalMean,
    CategoricalNatural,
)
from ._distance import marginal_distance
from ._family_for import family_for
from ._gamma import (
    ExponentialLawFamily,
    ExponentialMean,
    ExponentialNatural,
    GammaFamily,
    GammaMean,
    GammaNatural,
    InverseGammaFamily,
    InverseGammaMean,
    InverseGammaNatural,
)
from ._gaussian import GaussianFamily, MultivariateNormalFamily, NormalFamily
from ._gaussian_base import GaussianMean, GaussianMoments, GaussianNatural
from ._grids import GridRule, grid_rule
from ._independent import IndependentFamily, base_family, member_family, repeated
from ._markov import MarkovGaussianFamily, MarkovMean, MarkovNatural, MarkovNormal
from ._metric import FamilyMoments, MetricDefaults, fisher_matrix, minimal_mean
from ._normal import (
    LogNormalFamily,
    LogNormalMean,
    LogNormalNatural,
    ScalarNormalFamily,
    ScalarNormalMean,
    ScalarNormalNatural,
)
from ._pair_contract import PairRule
from ._pairs import members_of, pair_rule
from ._product import (
    BlockNormalFamily,
    ProductFamily,
    ProductMean,
    ProductNatural,
)
from ._registry import register_family, registered_families
from ._row_distribution import RowGaussian, RowRoot, dense_natural, row_gaussian
from ._row_gaussian import RowFamily, RowMoments
from ._row_prior import RowPrior, see_latents, see_rows
from ._supports import Support, support_of
from ._von_mises import VonMisesFamily, VonMisesMean, VonMisesNatural
from ._whitening import Whitening, member_metrics, whitening
from ._wishart import WishartFamily, WishartMean, WishartNatural

# What a family says of one member, as rounds ask it.
Moments = GaussianMoments | RowMoments | FamilyMoments

__all__ = [
    "FamilyMoments",
    "MetricDefaults",
    "fisher_matrix",
    "member_metrics",
    "minimal_mean",
    "Moments",
    "BernoulliFamily",
    "BernoulliMean",
    "BernoulliNatural",
    "BetaFamily",
    "BetaMean",
    "BetaNatural",
    "BlockNormalFamily",
    "CategoricalFamily",
    "CategoricalMean",
    "CategoricalNatural",
    "ConditionalMoments",
    "ConditionalNatural",
    "DirichletFamily",
    "DirichletMean",
    "DirichletNatural",
    "ExponentialLawFamily",
    "ExponentialMean",
    "ExponentialNatural",
    "Family",
    "FamilyDefaults",
    "GammaFamily",
    "GammaMean",
    "GammaNatural",
    "GaussianFamily",
    "GaussianMean",
    "GaussianMoments",
    "GaussianNatural",
    "GridRule",
    "IndependentFamily",
    "InverseGammaFamily",
    "InverseGammaMean",
    "InverseGammaNatural",
    "LogNormalFamily",
    "LogNormalMean",
    "LogNormalNatural",
    "MarkovGaussianFamily",
    "MarkovMean",
    "MarkovNatural",
    "MarkovNormal",
    "MultivariateNormalFamily",
    "NormalFamily",
    "PairRule",
    "ProductFamily",
    "ProductMean",
    "ProductNatural",
    "RowFamily",
    "RowGaussian",
    "RowMoments",
    "RowPrior",
    "RowRoot",
    "ScalarNormalFamily",
    "ScalarNormalMean",
    "ScalarNormalNatural",
    "Support",
    "Vector",
    "VonMisesFamily",
    "VonMisesMean",
    "VonMisesNatural",
    "WishartFamily",
    "WishartMean",
    "WishartNatural",
    "base_family",
    "member_family",
    "bounded_precision",
    "conditional_divergence",
    "conditional_moments",
    "dense_natural",
    "family_for",
    "grid_rule",
    "implicit_inverse",
    "inner",
    "marginal_distance",
    "members_of",
    "natural_parameters",
    "pair_rule",
    "register_family",
    "registered_families",
    "repeated",
    "row_gaussian",
    "schur_complement",
    "see_latents",
    "see_rows",
    "support_of",
    "Whitening",
    "whitening",
]
