"""Local solvers: a cavity in, a site out. Each is a frozen set of options with ``init`` and ``solve``."""

from ..expectations import ImportanceMoments, LaplaceMoments, MCMCMoments
from ._alpha_divergence import AlphaDivergence
from ._base import (
    BatchStep,
    Derivatives,
    LocalFactor,
    LocalResult,
    LocalSolver,
    SolverDefaults,
    TiltedFactor,
    local_free_energy,
)
from ._chained import COLLAPSES
from ._conjugate import Conjugate
from ._local_elbo import LocalELBO
from ._minibatch import plan_batches
from ._natural_gradient import NaturalGradient
from ._optimiser import of_params
from ._power_ep import PowerEP, trouble_of
from ._product_visits import MatchRules, MatchState, first_match_state, match_visit, trouble_sentence
from ._settings import ByLabel, by_label, freeze, resolve
from ._snep import SNEP
from ._stochastic import StochasticNaturalGradient
from ._stochastic_ep import StochasticEP

__all__ = [
    "plan_batches",
    "COLLAPSES",
    "ByLabel",
    "by_label",
    "freeze",
    "resolve",
    "AlphaDivergence",
    "BatchStep",
    "Conjugate",
    "Derivatives",
    "ImportanceMoments",
    "LaplaceMoments",
    "LocalELBO",
    "LocalFactor",
    "LocalResult",
    "LocalSolver",
    "SolverDefaults",
    "MCMCMoments",
    "MatchRules",
    "MatchState",
    "NaturalGradient",
    "PowerEP",
    "SNEP",
    "StochasticEP",
    "StochasticNaturalGradient",
    "TiltedFactor",
    "first_match_state",
    "local_free_energy",
    "match_visit",
    "of_params",
    "trouble_of",
    "trouble_sentence",
]
