"""What all techniques share: how parameters lie on ranks, in which formats, and who sums their gradients.

The rooms of techniques know each other through this one alone.
"""

from weft.parallel.placement.gradients import DataParallel, data_parallel, is_attached
from weft.parallel.placement.placement import Placement, merge_placements
from weft.parallel.placement.precision import Precision
from weft.parallel.placement.stretches import (
    PlacedPart,
    SavedTensor,
    StateSource,
    Stretch,
    WholeTensors,
    alone,
    filled,
    flat_of,
    read_whole,
    tell_places,
)

__all__ = [
    "DataParallel",
    "PlacedPart",
    "Placement",
    "Precision",
    "SavedTensor",
    "StateSource",
    "Stretch",
    "WholeTensors",
    "alone",
    "data_parallel",
    "filled",
    "flat_of",
    "is_attached",
    "merge_placements",
    "read_whole",
    "tell_places",
]
