"""Runtimes: where the groups' passes over their rows are run."""

from ._base import Runtime
from ._chains import by_chains, chains_wanted, with_chains
from ._engine import Engine, RoundsDone
from ._forms import gradient_jumps
from ._local import FactorData, LocalProblem
from ._mapping import LaxMap, Vmap
from ._moments import noise_floor
from ._product_engine import ProductEngine
from ._product_plan import JointBlock, ProductPlan, latent_values
from ._product_rounds import first_memory

__all__ = [
    "Engine",
    "RoundsDone",
    "FactorData",
    "JointBlock",
    "LaxMap",
    "LocalProblem",
    "ProductEngine",
    "ProductPlan",
    "Runtime",
    "Vmap",
    "by_chains",
    "chains_wanted",
    "first_memory",
    "gradient_jumps",
    "latent_values",
    "noise_floor",
    "with_chains",
]
