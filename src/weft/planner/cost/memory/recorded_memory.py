"""What recorded passes keep: a CUDA graph holds the memory of its activations for good."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.planner.space import Columns

#: Passes of a step from which on one between the first and the last is recorded while the last still runs eagerly: it
#: is seen twice in one step (WARM_UPS of train/microbatch/passes/graphed_passes.py).
_EAGER_BESIDE = 4
#: Recordings of a step: of its first pass, of those between, and of its last.
_PLACES = 3


def passes_held(columns: Columns) -> NDArray[np.float64]:
    """Return how many passes' activations are in memory at once, one entry per plan.

    Recordings share their memory, but for passes whose gradients the next pass adds to: under zero=2 over ranks each
    place in a step has its own. While the first steps record, an eager pass lies beside what is recorded.
    """
    apart = (columns.zero == 2) & (columns.dp_shard * columns.cp > 1)
    several = np.where(apart, np.minimum(_PLACES, columns.num_micro), np.where(columns.num_micro < _EAGER_BESIDE, 1, 2))
    return np.where(columns.graphs, several, 1).astype(np.float64)
