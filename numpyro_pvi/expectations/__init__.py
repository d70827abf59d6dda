"""Expectations of a factor and its gradients under q: closed form, quadrature over affine predictors, points, draws."""

from ._affine import AffineProgram, SharedAffineProgram, TermNumbers
from ._affinity import MAX_TERMS, find_structure, probe_values, with_draws
from ._agreement import disagreement
from ._cells import over_values, some_values, sums_of
from ._chains import Chains, no_chains
from ._clouds import GRID_DIM, grid_cloud, normal_cloud, shifted_normals
from ._draws import DrawsProgram
from ._expected import Expected, add_expected, sum_by_group, zero_expected
from ._factor_structure import FactorStructure, LatentRole
from ._integrated_program import IntegratedProgram, MaskedIntegratedProgram, owners
from ._local_latents import LocalChunk, LocalLatentProgram, LocalNoise, MaskedLocalProgram
from ._log_densities import log_densities_at, log_density_at
from ._mean_space import MeanSpace
from ._moments import MOMENTS, SAMPLED, ImportanceMoments, LaplaceMoments, MCMCMoments, Moments, with_settings
from ._points import PointSet, PointsProgram, random_points, sigma_points
from ._predictors import PredictorLaw, claimed_terms, expected_terms, worst_error
from ._product_chains import tilted_by_chains
from ._product_draws import WeightedDraws, draw, paired, tilted_by_draws, weighable
from ._product_grid import ProductGrid, grid_of, tilted_on_grid
from ._quadratic import QuadraticProgram
from ._reparameterised import ReparameterisedProgram
from ._row_laws import ROW_RULES, RowExpected, RowProgram
from ._row_numbers import RowNumbers, RowNumbersProgram
from ._rules import FIXED_RULES, RULES, TOLERANCE
from ._tilted import (
    LEAST_PER_LATENT,
    LEAST_SHARE,
    Proposal,
    Tilted,
    exact_tilted,
    from_points,
    least_ess,
    linear_tilted,
)
from ._tilted_chains import from_chains
from ._tilted_rows import RowReport, row_sites_zero, row_targets, tilted_rows
from ._unconstrained import Unconstrained, discrete_of
from .quadrature import refined, rule_index

__all__ = [
    "FIXED_RULES",
    "ROW_RULES",
    "GRID_DIM",
    "LEAST_PER_LATENT",
    "LEAST_SHARE",
    "MAX_TERMS",
    "MOMENTS",
    "RULES",
    "SAMPLED",
    "TOLERANCE",
    "AffineProgram",
    "Chains",
    "DrawsProgram",
    "Expected",
    "FactorStructure",
    "ImportanceMoments",
    "IntegratedProgram",
    "LaplaceMoments",
    "LatentRole",
    "LocalChunk",
    "LocalLatentProgram",
    "LocalNoise",
    "MCMCMoments",
    "MaskedIntegratedProgram",
    "MaskedLocalProgram",
    "MeanSpace",
    "Moments",
    "PointSet",
    "PredictorLaw",
    "PointsProgram",
    "ProductGrid",
    "Proposal",
    "QuadraticProgram",
    "ReparameterisedProgram",
    "RowExpected",
    "RowNumbers",
    "RowNumbersProgram",
    "RowProgram",
    "RowReport",
    "SharedAffineProgram",
    "TermNumbers",
    "Tilted",
    "Unconstrained",
    "WeightedDraws",
    "add_expected",
    "claimed_terms",
    "discrete_of",
    "expected_terms",
    "disagreement",
    "draw",
    "exact_tilted",
    "find_structure",
    "from_chains",
    "from_points",
    "grid_cloud",
    "grid_of",
    "least_ess",
    "linear_tilted",
    "log_densities_at",
    "log_density_at",
    "no_chains",
    "normal_cloud",
    "over_values",
    "owners",
    "paired",
    "probe_values",
    "random_points",
    "row_sites_zero",
    "row_targets",
    "refined",
    "rule_index",
    "shifted_normals",
    "sigma_points",
    "some_values",
    "sum_by_group",
    "sums_of",
    "tilted_by_chains",
    "tilted_by_draws",
    "tilted_on_grid",
    "tilted_rows",
    "weighable",
    "with_settings",
    "worst_error",
    "zero_expected",
    "with_draws",
]
