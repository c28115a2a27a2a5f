"""What tasks share that write text token by token while they evaluate."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.train.task import Forwards

#: Tokens that an evaluation writes between two looks at whether every text has ended.
LOOK_EVERY = 8


def any_goes_on(forwards: Forwards | None, has_ended: Tensor) -> bool:
    """Return whether any rank has a text that goes on; a collective, since ranks that gather weights write together.

    Args:
        forwards: of the ranks; None: of this process alone, which then writes to the end.
        has_ended: whether each text of this rank has, (B,).
    """
    if forwards is None:
        return True
    return bool(forwards.total((~has_ended).sum(dtype=torch.float64)) > 0)
