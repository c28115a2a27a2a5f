"""The frozen base beside an adapter, as checkpoints know it: by digests."""

from __future__ import annotations

from weft.train.state.base.adapter_base import adapter_state, check_base, expect_same_base, names_left_out
from weft.train.state.base.packed_base import PackedSource, packed_source

__all__ = [
    "PackedSource",
    "adapter_state",
    "check_base",
    "expect_same_base",
    "names_left_out",
    "packed_source",
]
