"""Sound: what its headers say, samples decoded when they are asked for, and the features that models read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "FolderFeatures",
    "Hearing",
    "LogMel",
    "Sounds",
    "folder_features",
    "hear",
    "log_mel",
    "mel_filters",
    "sound_size",
]

if TYPE_CHECKING:
    from weft.data.media.sound.features import FolderFeatures, LogMel, folder_features
    from weft.data.media.sound.hearing import Hearing, hear
    from weft.data.media.sound.mel import log_mel, mel_filters
    from weft.data.media.sound.sound_file import sound_size
    from weft.data.media.sound.sounds import Sounds

__getattr__ = loads(
    __name__,
    {
        "FolderFeatures": ".features",
        "Hearing": ".hearing",
        "LogMel": ".features",
        "Sounds": ".sounds",
        "folder_features": ".features",
        "hear": ".hearing",
        "log_mel": ".mel",
        "mel_filters": ".mel",
        "sound_size": ".sound_file",
    },
)
