"""Local solvers: a cavity in, a site out. Each is a frozen set of options with ``init`` and ``solve``."""

from ._base import LocalFactor, LocalResult, LocalSolver, local_free_energy
from ._conjugate import Conjugate
from ._natural_gradient import NaturalGradient

__all__ = ["Conjugate", "LocalFactor", "LocalResult", "LocalSolver", "NaturalGradient", "local_free_energy"]
