"""Kinds of training: each is a `Task`. The decoder on text is the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "DecoderTask",
    "IGNORE",
    "find_task",
    "generate_text",
    "model_forward",
    "token_cross_entropy",
]

if TYPE_CHECKING:
    from weft.train.tasks.decoder_loss import IGNORE, model_forward, token_cross_entropy
    from weft.train.tasks.decoder_sample import generate_text
    from weft.train.tasks.decoder_task import DecoderTask
    from weft.train.tasks.task_choice import find_task

__getattr__ = loads(
    __name__,
    {
        "DecoderTask": ".decoder_task",
        "IGNORE": ".decoder_loss",
        "find_task": ".task_choice",
        "generate_text": ".decoder_sample",
        "model_forward": ".decoder_loss",
        "token_cross_entropy": ".decoder_loss",
    },
)
