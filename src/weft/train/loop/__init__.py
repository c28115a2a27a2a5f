"""The training loop: the steps that it takes and leaves out, what hooks see of it, and how far it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "ASKED_TO_STOP",
    "GOES_BACK",
    "Hook",
    "LEFT_OUT",
    "Progress",
    "SaveEnd",
    "Trainer",
    "leave_out",
    "steps_left_out",
    "stretches",
]

if TYPE_CHECKING:
    from weft.train.loop.hooks import Hook, SaveEnd
    from weft.train.loop.left_out import LEFT_OUT, leave_out, steps_left_out, stretches
    from weft.train.loop.progress import Progress
    from weft.train.loop.trainer import ASKED_TO_STOP, GOES_BACK, Trainer

__getattr__ = loads(
    __name__,
    {
        "ASKED_TO_STOP": ".trainer",
        "GOES_BACK": ".trainer",
        "Hook": ".hooks",
        "LEFT_OUT": ".left_out",
        "Progress": ".progress",
        "SaveEnd": ".hooks",
        "Trainer": ".trainer",
        "leave_out": ".left_out",
        "steps_left_out": ".left_out",
        "stretches": ".left_out",
    },
)
