"""Partitioned variational inference for NumPyro."""

from ._compiling import use_compilation_cache
from ._exponential_guide import AutoExponentialFamily
from ._state import PVIInfo, PVIRunResult, PVIState, PVITrace
from .errors import (
    CheckpointError,
    DataError,
    GuideError,
    ImproperError,
    NonFiniteLossError,
    PartitionError,
    PVIError,
    SkippedGroupError,
    StateError,
)
from .handlers import PRIOR, Partition
from .pvi import PVI

__version__ = "0.1.0.dev0"

__all__ = [
    "PRIOR",
    "PVI",
    "AutoExponentialFamily",
    "CheckpointError",
    "DataError",
    "GuideError",
    "ImproperError",
    "PVIError",
    "PVIInfo",
    "PVIRunResult",
    "PVIState",
    "PVITrace",
    "Partition",
    "PartitionError",
    "NonFiniteLossError",
    "SkippedGroupError",
    "StateError",
    "use_compilation_cache",
]
