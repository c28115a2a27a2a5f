"""Files of text, tables and chats, record by record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "ALL_DRAWS",
    "Broken",
    "Document",
    "FileSet",
    "RecordReader",
    "Schema",
    "Turn",
    "Unusable",
    "detect_schema",
    "find_files",
    "read_document",
    "read_turns",
]

if TYPE_CHECKING:
    from weft.data.read.documents import Document, read_document
    from weft.data.read.one_document import ALL_DRAWS
    from weft.data.read.records import Broken, RecordReader
    from weft.data.read.schema import Schema, detect_schema
    from weft.data.read.source import FileSet, find_files
    from weft.data.read.turns import Turn, Unusable, read_turns

__getattr__ = loads(
    __name__,
    {
        "Broken": ".records",
        "ALL_DRAWS": ".one_document",
        "Document": ".documents",
        "FileSet": ".source",
        "RecordReader": ".records",
        "Schema": ".schema",
        "Turn": ".turns",
        "Unusable": ".turns",
        "detect_schema": ".schema",
        "find_files": ".source",
        "read_document": ".documents",
        "read_turns": ".turns",
    },
)
