"""Tasks beside the decoder: on Hugging Face folders (a head, rows of tables, a loss, scores), on pictures and sound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "AudioClassTask",
    "CaptionTask",
    "ContrastTask",
    "EmbedTask",
    "FolderTask",
    "ImageClassTask",
    "MaskedTask",
    "MediaTask",
    "Seq2SeqTask",
    "TextClassTask",
    "TokenClassTask",
    "TranscribeTask",
]

if TYPE_CHECKING:
    from weft.train.tasks.tuned.embed_task import EmbedTask
    from weft.train.tasks.tuned.folder_task import FolderTask
    from weft.train.tasks.tuned.masked_task import MaskedTask
    from weft.train.tasks.tuned.media import (
        AudioClassTask,
        CaptionTask,
        ContrastTask,
        ImageClassTask,
        MediaTask,
        TranscribeTask,
    )
    from weft.train.tasks.tuned.seq2seq_task import Seq2SeqTask
    from weft.train.tasks.tuned.text_class_task import TextClassTask
    from weft.train.tasks.tuned.token_class_task import TokenClassTask

__getattr__ = loads(
    __name__,
    {
        "EmbedTask": ".embed_task",
        "FolderTask": ".folder_task",
        "AudioClassTask": ".media",
        "CaptionTask": ".media",
        "ContrastTask": ".media",
        "ImageClassTask": ".media",
        "MediaTask": ".media",
        "TranscribeTask": ".media",
        "MaskedTask": ".masked_task",
        "Seq2SeqTask": ".seq2seq_task",
        "TextClassTask": ".text_class_task",
        "TokenClassTask": ".token_class_task",
    },
)
