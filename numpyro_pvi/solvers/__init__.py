"""Local solvers: a cavity in, a site out. Each is a frozen set of options with ``init`` and ``solve``."""

from ..expectations import ImportanceMoments, LaplaceMoments, MCMCMoments
from ._alpha_divergence import AlphaDivergence
from ._base import (
    BatchStep,
    ByLabel,
    Derivatives,
    LocalFactor,
    LocalResult,
    LocalSolver,
    PrivacySpent,
    SolverDefaults,
    TiltedFactor,
    by_label,
    check_labels,
    freeze,
    local_free_energy,
    resolve,
)
from ._differential_privacy import DifferentialPrivacy, counts_releases
from ._local_elbo import LocalELBO
from ._matching import (
    TROUBLES,
    Matched,
    MatchRules,
    MatchState,
    RowMatches,
    first_match_state,
    match_rules,
    match_visit,
    matched,
    trouble_of,
)
from ._minibatch import late_from, late_weight, of_params, plan_batches, share_of_steps, step_and_slope
from ._natural_gradient import Conjugate, NaturalGradient, StochasticNaturalGradient
from ._power_ep import PowerEP, StochasticEP
from ._snep import SNEP

__all__ = [
    "plan_batches",
    "ByLabel",
    "by_label",
    "counts_releases",
    "freeze",
    "check_labels",
    "resolve",
    "AlphaDivergence",
    "BatchStep",
    "Conjugate",
    "Derivatives",
    "DifferentialPrivacy",
    "ImportanceMoments",
    "LaplaceMoments",
    "LocalELBO",
    "LocalFactor",
    "LocalResult",
    "LocalSolver",
    "SolverDefaults",
    "MCMCMoments",
    "MatchRules",
    "Matched",
    "MatchState",
    "RowMatches",
    "matched",
    "NaturalGradient",
    "PowerEP",
    "PrivacySpent",
    "SNEP",
    "StochasticEP",
    "StochasticNaturalGradient",
    "TROUBLES",
    "TiltedFactor",
    "first_match_state",
    "late_from",
    "late_weight",
    "local_free_energy",
    "match_rules",
    "match_visit",
    "of_params",
    "share_of_steps",
    "step_and_slope",
    "trouble_of",
]
