"""A run of `weft train`: its folder, one rank of it from start to end, its checkpoints, what people see. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "RunFolder",
    "RunResult",
    "Start",
    "circumstances",
    "prepare_run",
    "run_rank",
]

if TYPE_CHECKING:
    from weft.train.run.folder import RunFolder, prepare_run
    from weft.train.run.rank_run import RunResult, Start, run_rank
    from weft.train.run.surroundings import circumstances

__getattr__ = loads(
    __name__,
    {
        "RunFolder": ".folder",
        "RunResult": ".rank_run",
        "Start": ".rank_run",
        "circumstances": ".surroundings",
        "prepare_run": ".folder",
        "run_rank": ".rank_run",
    },
)
