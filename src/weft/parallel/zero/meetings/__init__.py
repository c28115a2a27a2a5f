"""Meetings of replicas that train by themselves: all at once, fragment by fragment, or of worlds of their own."""

from __future__ import annotations

from weft.parallel.zero.meetings.apart_sync import ApartSync, meet_apart
from weft.parallel.zero.meetings.rare_sync import RareSync, anchored, keep_sync, rare_sync
from weft.parallel.zero.meetings.streamed_sync import StreamedSync, meet_rarely

__all__ = [
    "ApartSync",
    "RareSync",
    "StreamedSync",
    "anchored",
    "keep_sync",
    "meet_apart",
    "meet_rarely",
    "rare_sync",
]
