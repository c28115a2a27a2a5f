"""What tests of distributed code need: ranks on this machine, plans to try, and one process to compare with.

Names are loaded at first use: listing plans needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

#: Public name -> module that holds it.
_HOMES = {
    "Case": "weft.testing.parity",
    "DecoderCase": "weft.testing.parity",
    "ParityResult": "weft.testing.parity",
    "RankPool": "weft.testing.spawn",
    "covering": "weft.testing.matrix",
    "legal": "weft.testing.matrix",
    "train_case": "weft.testing.parity",
    "train_decoder": "weft.testing.parity",
    "train_plain": "weft.testing.parity",
}

__all__ = [
    "Case",
    "DecoderCase",
    "ParityResult",
    "RankPool",
    "covering",
    "legal",
    "train_case",
    "train_decoder",
    "train_plain",
]

if TYPE_CHECKING:
    from weft.testing.matrix import covering, legal
    from weft.testing.parity import Case, DecoderCase, ParityResult, train_case, train_decoder, train_plain
    from weft.testing.spawn import RankPool


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
