"""A run of `weft train`: its folder, one rank of it from start to end, its checkpoints, what people see. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "RunResult",
    "STOP_SIGNALS",
    "Save",
    "Start",
    "circumstances",
    "heeded_signals",
    "new_files_like",
    "prepare_run",
    "restrict_new_files",
    "run_lock",
    "run_rank",
]

if TYPE_CHECKING:
    from weft.train.run.folder_lock import new_files_like, restrict_new_files, run_lock
    from weft.train.run.preparation import prepare_run
    from weft.train.run.rank_run import RunResult, Start, run_rank
    from weft.train.run.save_thread import Save
    from weft.train.run.signals import STOP_SIGNALS, heeded_signals
    from weft.train.run.surroundings import circumstances

__getattr__ = loads(
    __name__,
    {
        "RunResult": ".rank_run",
        "STOP_SIGNALS": ".signals",
        "Save": ".save_thread",
        "Start": ".rank_run",
        "circumstances": ".surroundings",
        "heeded_signals": ".signals",
        "new_files_like": ".folder_lock",
        "prepare_run": ".preparation",
        "restrict_new_files": ".folder_lock",
        "run_lock": ".folder_lock",
        "run_rank": ".rank_run",
    },
)
