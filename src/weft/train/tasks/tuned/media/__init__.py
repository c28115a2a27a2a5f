"""Tasks on pictures and sound: records found once, decoded by processes ahead of use, classes and texts learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["AudioClassTask", "CaptionTask", "ContrastTask", "ImageClassTask", "MediaTask", "TranscribeTask"]

if TYPE_CHECKING:
    from weft.train.tasks.tuned.media.audio_class_task import AudioClassTask
    from weft.train.tasks.tuned.media.caption_task import CaptionTask
    from weft.train.tasks.tuned.media.contrast_task import ContrastTask
    from weft.train.tasks.tuned.media.image_class_task import ImageClassTask
    from weft.train.tasks.tuned.media.media_task import MediaTask
    from weft.train.tasks.tuned.media.transcribe_task import TranscribeTask

__getattr__ = loads(
    __name__,
    {
        "AudioClassTask": ".audio_class_task",
        "CaptionTask": ".caption_task",
        "ContrastTask": ".contrast_task",
        "ImageClassTask": ".image_class_task",
        "MediaTask": ".media_task",
        "TranscribeTask": ".transcribe_task",
    },
)
