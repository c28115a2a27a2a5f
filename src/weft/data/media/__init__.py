"""Pictures: which there are, found by their headers, and their pixels, decoded when a sample is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["ClassFolder", "Look", "find_pictures", "read_picture"]

if TYPE_CHECKING:
    from weft.data.media.class_folder import ClassFolder, find_pictures
    from weft.data.media.pixels import Look, read_picture

__getattr__ = loads(
    __name__,
    {
        "ClassFolder": ".class_folder",
        "Look": ".pixels",
        "find_pictures": ".class_folder",
        "read_picture": ".pixels",
    },
)
