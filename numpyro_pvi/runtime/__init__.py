"""Runtimes: where the groups' passes over their rows are run."""

from ._answers import Answers, ProductAnswers
from ._base import LaxMap, Runtime, RuntimeDefaults, Vmap
from ._engine import Engine
from ._factors import FactorData
from ._held import Units
from ._local import LocalProblem
from ._moments import noise_floor, solver_of_prior
from ._network import Network
from ._product_engine import LookedAtLess, ProductEngine
from ._product_matching import factors_of, first_match_states
from ._product_plan import (
    SAMPLED_WAYS,
    JointBlock,
    ProductPlan,
    RowLatent,
    check_tilted,
    latent_values,
    prior_members,
    value_shapes,
    with_tilted,
)
from ._product_problem import ProductProblem
from ._product_tilted import jointly_affine
from ._programs import chunk_log_likelihoods, first_conditionals, sum_of_units, whole_call
from ._remote_engine import (
    RemoteEngine,
    RemoteProductEngine,
    RowlessEngine,
    RowlessProductEngine,
    SummedEngine,
)
from ._rounds import RoundsDone
from ._rule_checks import RULE
from ._sharded import Sharded
from ._starts import apart, best_of_short_runs, curvature_start, first_weights, site_with_rows, spread, tamed_sites
from ._tilted import by_chains, chains_wanted, with_chains
from ._verification import DESIGN, SHARED, SLOPES, SLOPES_OF, factor_values, product_claims

__all__ = [
    "DESIGN",
    "RULE",
    "SHARED",
    "SLOPES",
    "SLOPES_OF",
    "Answers",
    "Network",
    "RemoteEngine",
    "ProductAnswers",
    "RemoteProductEngine",
    "RowlessProductEngine",
    "RowlessEngine",
    "SummedEngine",
    "chunk_log_likelihoods",
    "sum_of_units",
    "whole_call",
    "solver_of_prior",
    "Engine",
    "RoundsDone",
    "FactorData",
    "JointBlock",
    "LaxMap",
    "LocalProblem",
    "LookedAtLess",
    "ProductEngine",
    "ProductPlan",
    "ProductProblem",
    "RowLatent",
    "Runtime",
    "RuntimeDefaults",
    "SAMPLED_WAYS",
    "Sharded",
    "Units",
    "Vmap",
    "apart",
    "best_of_short_runs",
    "by_chains",
    "chains_wanted",
    "curvature_start",
    "check_tilted",
    "factor_values",
    "factors_of",
    "first_conditionals",
    "first_match_states",
    "first_weights",
    "jointly_affine",
    "latent_values",
    "noise_floor",
    "prior_members",
    "product_claims",
    "site_with_rows",
    "spread",
    "tamed_sites",
    "value_shapes",
    "with_chains",
    "with_tilted",
]
