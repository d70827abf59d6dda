"""Runtimes: where the groups' passes over their rows are run."""

from ._base import Runtime
from ._engine import Engine, RoundsDone
from ._forms import gradient_jumps
from ._local import FactorData, LocalProblem
from ._mapping import LaxMap, Vmap
from ._moments import noise_floor

__all__ = [
    "Engine",
    "RoundsDone",
    "FactorData",
    "LaxMap",
    "LocalProblem",
    "Runtime",
    "Vmap",
    "gradient_jumps",
    "noise_floor",
]
