"""Local solvers: a cavity in, a site out. Each is a frozen set of options with ``init`` and ``solve``."""

from ..expectations import ImportanceMoments, LaplaceMoments, MCMCMoments
from ._base import Derivatives, LocalFactor, LocalResult, LocalSolver, TiltedFactor, local_free_energy
from ._conjugate import Conjugate
from ._local_elbo import LocalELBO
from ._natural_gradient import NaturalGradient
from ._power_ep import PowerEP, trouble_of
from ._stochastic import StochasticNaturalGradient

__all__ = [
    "Conjugate",
    "Derivatives",
    "ImportanceMoments",
    "LaplaceMoments",
    "LocalELBO",
    "LocalFactor",
    "LocalResult",
    "LocalSolver",
    "MCMCMoments",
    "NaturalGradient",
    "PowerEP",
    "StochasticNaturalGradient",
    "TiltedFactor",
    "local_free_energy",
    "trouble_of",
]
