"""What all techniques share: how parameters lie on ranks, over whom they are divided, and who sums their gradients.

The rooms of techniques know each other through this one and those below it.
"""

from __future__ import annotations

from weft.parallel.placement.agree import check_same_model
from weft.parallel.placement.axes import Axes, AxisMap
from weft.parallel.placement.gradients import DataParallel, attach, data_parallel, is_attached, originals
from weft.parallel.placement.joined import join_cut
from weft.parallel.placement.materialise import Materialise, move
from weft.parallel.placement.placement import Placement, merge_placements
from weft.parallel.placement.state_guard import guard_model, guard_optimizer, pieces_allowed

__all__ = [
    "Axes",
    "AxisMap",
    "DataParallel",
    "Materialise",
    "Placement",
    "attach",
    "check_same_model",
    "data_parallel",
    "guard_model",
    "guard_optimizer",
    "is_attached",
    "join_cut",
    "merge_placements",
    "move",
    "originals",
    "pieces_allowed",
]
