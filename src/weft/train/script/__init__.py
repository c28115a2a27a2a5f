"""What a script of one's own has of a run: saving, loading, averages and export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Ema",
    "Evaluated",
    "Loaded",
    "Run",
    "ScriptState",
    "init",
    "pretrained_from_whole",
]

if TYPE_CHECKING:
    from weft.train.script.ema import Ema
    from weft.train.script.export import pretrained_from_whole
    from weft.train.script.script_run import Run, init
    from weft.train.script.script_state import Evaluated, Loaded, ScriptState

__getattr__ = loads(
    __name__,
    {
        "Ema": ".ema",
        "Evaluated": ".script_state",
        "Loaded": ".script_state",
        "Run": ".script_run",
        "ScriptState": ".script_state",
        "init": ".script_run",
        "pretrained_from_whole": ".export",
    },
)
