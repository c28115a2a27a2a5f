"""Documents of packed sequences: from an id for each token to the borders between them.

B sequences, T tokens of this rank, S of the whole sequence.
"""

from __future__ import annotations

import numpy as np
import torch

from weft.comm import all_gather
from weft.errors import ModelError
from weft.mesh import Axis
from weft.parallel.context.order import SequenceOrder, whole_values
from weft.parallel.context.pieces import Borders

#: The id of padding. Padded tokens see each other alone, and nothing that is trained sees them.
PADDING = -1


def whole_sequence(x_BT: torch.Tensor, axis: Axis, order: SequenceOrder) -> torch.Tensor:
    """What all ranks have of a sequence, in its order; (B, S). A collective over the axis."""
    x_BT = x_BT.contiguous()
    parts = all_gather(x_BT, axis, out=x_BT.new_empty((axis.size, *x_BT.shape)))
    return order.join(list(parts.unbind(0)))


def find_borders(ids_BT: torch.Tensor, axis: Axis, order: SequenceOrder) -> tuple[Borders, ...] | None:
    """Borders of the documents in whole sequences, from the ids of each rank's own tokens; the same on all ranks.

    None where no sequence has a border inside. Where the batch came from the host, its values say them; of ids that the
    device made, this is a collective over the axis, and the host waits for it. Raises ModelError where a document goes
    on after another.
    """
    known = whole_values(ids_BT)
    ids_BS = (whole_sequence(ids_BT.flatten(1), axis, order).cpu() if known is None else known).numpy()
    changes = np.diff(ids_BS, axis=1)
    if not changes.any():
        return None
    if (changes < 0).any():
        for row in ids_BS:
            _check_row(row)
    return tuple((0, *(np.flatnonzero(change) + 1).tolist(), order.seq_len) for change in changes)


def _check_row(row: np.ndarray) -> None:
    """Each document is in one place; padding may be in several."""
    starts = row[np.flatnonzero(np.diff(row, prepend=row[0] - 1))]
    real = starts[starts != PADDING]
    if len(np.unique(real)) != len(real):
        ids, counts = np.unique(real, return_counts=True)
        raise ModelError(
            f"document_ids: document {ids[counts > 1][0]} continues after another one has begun, and a cut sequence "
            "needs each document in one piece. Give each piece an id of its own."
        )
