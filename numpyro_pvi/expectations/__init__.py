"""Expectations of a factor and its gradients under q: closed form, quadrature over affine predictors, points, draws."""

from ._affine import (
    AffineProgram,
    PredictorLaw,
    RowNumbers,
    RowNumbersProgram,
    RowProgram,
    SharedAffineProgram,
    TermNumbers,
    claimed_terms,
    expected_terms,
    worst_error,
)
from ._affinity import (
    MAX_TERMS,
    MOST_VALUES,
    find_structure,
    over_values,
    probe_values,
    some_values,
    sums_of,
    with_draws,
    with_rule,
)
from ._chains import Chains, from_chains, no_chains
from ._expected import Expected, QuadraticProgram, add_expected, read_quadratic, read_well, sum_by_group
from ._integrated_latents import IntegratedProgram, MaskedIntegratedProgram, owners
from ._local_latents import LocalChunk, LocalLatentProgram, LocalNoise, MaskedLocalProgram, own_normals
from ._local_reparameterisation import at_rows_draws
from ._mean_space import (
    FactorStructure,
    LatentRole,
    Laws,
    MeanSpace,
    RulePoints,
    all_signs,
    all_values,
    joint_design,
    latin_cube,
    rule_axes,
    rule_points,
)
from ._own_integrals import OVER_GRIDS, OwnDraws, OwnGrids, own_draws, own_grid, own_integral
from ._point_sets import (
    GRADIENT_TOLERANCE,
    VALUE_TOLERANCE,
    JointRules,
    PointSet,
    disagreement,
    joint_rules,
    product_nodes,
    random_points,
    sigma_points,
)
from ._points import PointsProgram, ReparameterisedProgram, log_densities_at, log_density_at
from ._product_moments import (
    ProductGrid,
    ThetaPoints,
    Unconstrained,
    discrete_of,
    draw,
    grid_of,
    paired,
    tilted_by_chains,
    tilted_by_draws,
    tilted_on_grid,
    weighable,
)
from ._rules import FIXED_RULES, RULES, TOLERANCE, fixed_nodes
from ._tilted import (
    GRID_DIM,
    LEAST_PER_LATENT,
    MOMENTS,
    SAMPLED,
    ImportanceMoments,
    LaplaceMoments,
    MCMCMoments,
    Moments,
    PointCloud,
    Proposal,
    Tilted,
    chain_settings,
    exact_tilted,
    from_points,
    grid_cloud,
    least_ess,
    linear_tilted,
    normal_cloud,
    num_draws,
    shifted_normals,
    with_settings,
)
from ._tilted_rows import row_sites_zero, row_targets, tilted_rows
from .quadrature import log_expectation_1d, refined, rule_index
