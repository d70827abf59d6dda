"""Effect handlers: which rows of a NumPyro model belong to which group."""

from ._groups import PRIOR, GroupTable, known_labels, labels_table, numbered_table, one_group_table, plain
from ._missing import Completed, completed_in, missing_of
from ._partition import (
    Axis,
    BatchPlates,
    FullPlates,
    Partition,
    PlateInfo,
    PlateRows,
    RowAxes,
    WholePartition,
    choose_plate,
    find_plates,
    kept_batch,
    refuse_latents,
)
