"""Pictures and sound: which there are, found by their headers, decoded when a sample is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "ClassFolder",
    "RecordColumns",
    "DecodedAhead",
    "Look",
    "Pictures",
    "MediaRecords",
    "SAMPLE",
    "SOUND",
    "Sounds",
    "Survey",
    "find_pictures",
    "find_records",
    "parse_source",
    "record_files",
    "usual_workers",
    "with_classes",
]

if TYPE_CHECKING:
    from weft.data.media.class_folder import ClassFolder, find_pictures
    from weft.data.media.decoding import DecodedAhead, usual_workers
    from weft.data.media.file_forms import RecordColumns
    from weft.data.media.media_kinds import SAMPLE, SOUND
    from weft.data.media.media_records import MediaRecords, Survey, find_records, record_files, with_classes
    from weft.data.media.pictures import Pictures, parse_source
    from weft.data.media.pixels import Look
    from weft.data.media.sounds import Sounds

__getattr__ = loads(
    __name__,
    {
        "ClassFolder": ".class_folder",
        "RecordColumns": ".file_forms",
        "DecodedAhead": ".decoding",
        "Look": ".pixels",
        "Pictures": ".pictures",
        "MediaRecords": ".media_records",
        "SAMPLE": ".media_kinds",
        "SOUND": ".media_kinds",
        "Sounds": ".sounds",
        "Survey": ".media_records",
        "find_pictures": ".class_folder",
        "find_records": ".media_records",
        "parse_source": ".pictures",
        "record_files": ".media_records",
        "usual_workers": ".decoding",
        "with_classes": ".media_records",
    },
)
