"""Ranks of one machine: started, watched, and heard when they fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "RankFailed",
    "Restarts",
    "Stopped",
    "copy_home",
    "count_ranks",
    "exit_code_of",
    "for_those_there",
    "launch_ranks",
    "process_age_s",
    "process_beside",
    "rank_starter",
    "run_as_rank",
    "second_handle",
    "typed_command",
    "usable_cores",
    "visible_gpus",
]

if TYPE_CHECKING:
    from weft.cli.launcher.beside import process_beside
    from weft.cli.launcher.copy_holder import copy_home
    from weft.cli.launcher.failure import exit_code_of
    from weft.cli.launcher.launch import RankFailed, Stopped, launch_ranks
    from weft.cli.launcher.rank import run_as_rank, second_handle
    from weft.cli.launcher.restarts import Restarts, for_those_there
    from weft.cli.launcher.starting import rank_starter
    from weft.cli.launcher.typed import typed_command
    from weft.cli.launcher.world import count_ranks, process_age_s, usable_cores, visible_gpus

__getattr__ = loads(
    __name__,
    {
        "RankFailed": ".launch",
        "Restarts": ".restarts",
        "Stopped": ".launch",
        "copy_home": ".copy_holder",
        "count_ranks": ".world",
        "exit_code_of": ".failure",
        "for_those_there": ".restarts",
        "launch_ranks": ".launch",
        "process_age_s": ".world",
        "process_beside": ".beside",
        "rank_starter": ".starting",
        "run_as_rank": ".rank",
        "second_handle": ".rank",
        "typed_command": ".typed",
        "usable_cores": ".world",
        "visible_gpus": ".world",
    },
)
