"""ZeRO: weights, gradients and optimizer states divided among the ranks that read samples.

`flat` is zero=0, 1 and 2 over flat buckets, `sharded` is zero=3 on fully_shard. What both need lies beside them.
"""

from __future__ import annotations

from weft.parallel.zero.choose_engine import build_engine, recorded_passes
from weft.parallel.zero.magnitudes import load_base, start_magnitudes
from weft.parallel.zero.meetings import (
    ApartSync,
    RareSync,
    StreamedSync,
    anchored,
    meet_apart,
    meet_rarely,
    rare_sync,
)
from weft.parallel.zero.seen_weights import seen_stretches, take_seen
from weft.parallel.zero.wire_states import carried_here, load_carried

__all__ = [
    "ApartSync",
    "RareSync",
    "StreamedSync",
    "anchored",
    "build_engine",
    "carried_here",
    "load_base",
    "load_carried",
    "meet_apart",
    "meet_rarely",
    "rare_sync",
    "recorded_passes",
    "seen_stretches",
    "start_magnitudes",
    "take_seen",
]
