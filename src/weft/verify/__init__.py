"""Comparison of the training under plans with one process, and a pool of local ranks for tests."""

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
    from weft.verify.matrix import covering, layout_of, legal
    from weft.verify.oracles import OpRecorder
    from weft.verify.parity import Case, DecoderCase, ParityResult, train_case, train_cases, train_decoder, train_plain
    from weft.verify.rank_pool import RankPool

__getattr__ = loads(
    __name__,
    {
        "Case": ".parity",
        "DecoderCase": ".parity",
        "OpRecorder": ".oracles",
        "ParityResult": ".parity",
        "RankPool": ".rank_pool",
        "covering": ".matrix",
        "layout_of": ".matrix",
        "legal": ".matrix",
        "train_case": ".parity",
        "train_cases": ".parity",
        "train_decoder": ".parity",
        "train_plain": ".parity",
    },
)
