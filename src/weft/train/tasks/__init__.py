"""Kinds of training: each is a `Task`. The decoder on text is the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "DecoderTask",
    "IGNORE",
    "TextModel",
    "base_name",
    "exported_tensors",
    "fill_whole",
    "find_task",
    "generate_text",
    "open_text_model",
    "sample_text",
    "is_exportable",
    "model_forward",
    "pretrained_source",
    "token_cross_entropy",
    "write_beside",
    "write_card",
]

if TYPE_CHECKING:
    from weft.train.tasks.decoder_loss import IGNORE, model_forward, token_cross_entropy
    from weft.train.tasks.decoder_sample import TextModel, generate_text, open_text_model, sample_text
    from weft.train.tasks.decoder_task import DecoderTask
    from weft.train.tasks.exported import exported_tensors, is_exportable, write_beside, write_card
    from weft.train.tasks.merged_export import base_name
    from weft.train.tasks.published_weights import fill_whole, pretrained_source
    from weft.train.tasks.task_choice import find_task

__getattr__ = loads(
    __name__,
    {
        "DecoderTask": ".decoder_task",
        "IGNORE": ".decoder_loss",
        "TextModel": ".decoder_sample",
        "base_name": ".merged_export",
        "exported_tensors": ".exported",
        "fill_whole": ".published_weights",
        "find_task": ".task_choice",
        "generate_text": ".decoder_sample",
        "open_text_model": ".decoder_sample",
        "sample_text": ".decoder_sample",
        "is_exportable": ".exported",
        "model_forward": ".decoder_loss",
        "pretrained_source": ".published_weights",
        "token_cross_entropy": ".decoder_loss",
        "write_beside": ".exported",
        "write_card": ".exported",
    },
)
