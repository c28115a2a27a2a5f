"""Sound: what its headers say, samples decoded when they are asked for, and the features that models read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Features",
    "FolderFeatures",
    "Hearing",
    "LogMel",
    "folder_features",
    "hear",
    "log_mel",
    "masked",
    "mel_filters",
    "parse_features",
    "sound_size",
]

if TYPE_CHECKING:
    from weft.data.media.sound.features import Features, FolderFeatures, LogMel, folder_features, parse_features
    from weft.data.media.sound.hearing import Hearing, hear, masked
    from weft.data.media.sound.mel import log_mel, mel_filters
    from weft.data.media.sound.sound_file import sound_size

__getattr__ = loads(
    __name__,
    {
        "Features": ".features",
        "FolderFeatures": ".features",
        "Hearing": ".hearing",
        "LogMel": ".features",
        "folder_features": ".features",
        "hear": ".hearing",
        "log_mel": ".mel",
        "masked": ".hearing",
        "mel_filters": ".mel",
        "parse_features": ".features",
        "sound_size": ".sound_file",
    },
)
