"""Effect handlers: which rows of a NumPyro model belong to which group."""

from ._groups import PRIOR, GroupTable
from ._partition import Partition
from ._plates import PlateInfo, choose_plate, find_plates

__all__ = ["PRIOR", "GroupTable", "Partition", "PlateInfo", "choose_plate", "find_plates"]
