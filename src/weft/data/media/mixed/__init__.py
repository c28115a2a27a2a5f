"""Find samples of text with any number of pictures and recordings, and decode these ahead of use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "ByteText",
    "FeatureShards",
    "MixedAhead",
    "MixedColumns",
    "MixedItems",
    "MixedRecords",
    "MixedSample",
    "MixedSurvey",
    "PICTURE_MARK",
    "SOUND_MARK",
    "find_mixed",
]

if TYPE_CHECKING:
    from weft.data.media.mixed.kept_features import FeatureShards
    from weft.data.media.mixed.mixed_items import MixedAhead, MixedItems, MixedSample
    from weft.data.media.mixed.mixed_records import MixedRecords, MixedSurvey, find_mixed
    from weft.data.media.mixed.sample_parts import MixedColumns
    from weft.data.media.mixed.sample_tokens import PICTURE_MARK, SOUND_MARK, ByteText

__getattr__ = loads(
    __name__,
    {
        "FeatureShards": ".kept_features",
        "MixedAhead": ".mixed_items",
        "MixedItems": ".mixed_items",
        "MixedRecords": ".mixed_records",
        "MixedSample": ".mixed_items",
        "ByteText": ".sample_tokens",
        "MixedColumns": ".sample_parts",
        "MixedSurvey": ".mixed_records",
        "PICTURE_MARK": ".sample_tokens",
        "SOUND_MARK": ".sample_tokens",
        "find_mixed": ".mixed_records",
    },
)
