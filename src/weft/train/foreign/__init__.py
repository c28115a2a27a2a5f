"""Checkpoints of other trainers, made into Weft's: torch.distributed.checkpoint and DeepSpeed; pickled weights.

Their files are pickles. A child process without network and secrets reads them, with nothing but weights allowed, and
writes safetensors; this process reads those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "BroughtIn",
    "bring_in",
    "pickled_weights",
]

if TYPE_CHECKING:
    from weft.train.foreign.into_weft import BroughtIn, bring_in
    from weft.train.foreign.pickled_model import pickled_weights

__getattr__ = loads(
    __name__, {"BroughtIn": ".into_weft", "bring_in": ".into_weft", "pickled_weights": ".pickled_model"}
)
