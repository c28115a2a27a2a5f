"""Build models that read pictures, sound and text together: to write text, or to find what belongs together."""

from __future__ import annotations

from weft.models.multimodal.media_decoder import MediaDecoder
from weft.models.multimodal.media_pairs import MediaPairs
from weft.models.multimodal.named_models import (
    MULTIMODAL_MODELS,
    ModelInputs,
    build_media_decoder,
    build_media_pairs,
    hears,
)
from weft.models.multimodal.towers import encoder_tokens, sound_tokens

__all__ = [
    "MULTIMODAL_MODELS",
    "ModelInputs",
    "MediaDecoder",
    "MediaPairs",
    "build_media_decoder",
    "build_media_pairs",
    "encoder_tokens",
    "hears",
    "sound_tokens",
]
