"""Bytes of a loss that the head gives a few tokens at a time (`parallel/tensor/head_loss.py`), and where it does.

Letters: N tokens of a pass on a rank, V entries of the vocabulary on a rank, h hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.space import Columns
from weft.spec.shares import LossChunk

Array = NDArray[np.float64]

#: As in `parallel/tensor/head.py`, which loads torch: a test holds them together.
LARGE_LOGITS_BYTES = 2**28
#: Values of a token that the cut loss makes besides its logits: labels, masks, largest logit, sums.
_LABELS = 13.0
#: Bytes in which the runtime adds up.
_SUMS = 4.0


def is_loss_cut(columns: Columns, tokens: Array, vocab: Array) -> NDArray[np.bool_]:
    """Return for each row whether the head gives the loss at once: under tp, and where whole logits would be large.

    Args:
        columns: the plans.
        tokens: of a microbatch on a rank.
        vocab: entries on a rank.
    """
    return (columns.tp > 1) | (tokens * vocab * 4 > LARGE_LOGITS_BYTES)


def cut_loss_bytes(
    columns: Columns,
    tokens: Array,
    vocab: Array,
    hidden: float,
    width: Any,
    device_bytes: int = 0,
    *,
    frozen: bool = False,
) -> Array:
    """Return the most bytes that a cut loss makes: gradients of hidden states and weight, and logits of a few tokens.

    Args:
        columns: the plans.
        tokens: of a microbatch on a rank.
        vocab: entries on a rank.
        hidden: width of the hidden state.
        width: bytes of a weight and of an activation. A narrow format is rounded to and multiplied beside its sums.
        device_bytes: memory of a GPU, 0 of a CPU: chunks are those that the head asks `LossChunk` for.
        frozen: the head is not trained, and its weight has no gradient.
    """
    sums = np.maximum(_SUMS, width)
    rows = LossChunk.of_device(device_bytes).rows(tokens, vocab, sums)
    weight = 0.0 if frozen else vocab * hidden
    rounded = np.where(width < sums, width * (rows * vocab + weight), 0.0)
    gathered = np.where(columns.sp, tokens * hidden * width, 0.0)
    made = rows * vocab * sums + rounded + weight * sums
    return made + gathered + tokens * (hidden * width + _LABELS * sums)
