"""What tests of distributed code need: ranks on this machine, plans to try, and one process to compare with.

Names are loaded at first use: listing plans needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Case",
    "DecoderCase",
    "OpRecorder",
    "ParityResult",
    "RankPool",
    "covering",
    "layout_of",
    "legal",
    "train_case",
    "train_cases",
    "train_decoder",
    "train_plain",
]

if TYPE_CHECKING:
    from weft.testing.matrix import covering, layout_of, legal
    from weft.testing.parity import Case, DecoderCase, ParityResult, train_case, train_cases, train_decoder, train_plain
    from weft.testing.recorded_ops import OpRecorder
    from weft.testing.spawn import RankPool

__getattr__ = loads(
    __name__,
    {
        "Case": ".parity",
        "DecoderCase": ".parity",
        "OpRecorder": ".recorded_ops",
        "ParityResult": ".parity",
        "RankPool": ".spawn",
        "covering": ".matrix",
        "layout_of": ".matrix",
        "legal": ".matrix",
        "train_case": ".parity",
        "train_cases": ".parity",
        "train_decoder": ".parity",
        "train_plain": ".parity",
    },
)
