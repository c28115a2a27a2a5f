"""What a document is, and what all kinds of records are read with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.read.filled import (
    Filled,
    filled_by_table,
    parameters_of,
    schema_filled_by_table,
    without_nulls,
)
from weft.data.read.records import Record
from weft.data.read.schema import Schema
from weft.data.read.turns import Turn, Unusable, as_json

#: Number of values of a document's draw.
ALL_DRAWS = 2**32


@dataclass(frozen=True, slots=True)
class Document:
    """Exactly one of text, turns and ids is set. draw: 32 bits of the content's digest, which decide the split.

    trained: one bool per id, or None where all are trained. tools: JSON of what the assistant may call; "": nothing.
    prompt: what stands before the text without being trained. note: what people should know of it, countable.
    file, part, last: place of a text piece in its file. number: of the record in the file; 0 is unknown.
    other: the rejected one of a pair, beside the chosen. liking: factor on the weights of its trained tokens.
    """

    file: str
    draw: int
    text: str | None = None
    turns: tuple[Turn, ...] | None = None
    ids: np.ndarray | None = None
    trained: np.ndarray | None = None
    part: int = 0
    last: bool = True
    prompt: str | None = None
    note: str = ""
    tools: str = ""
    other: Document | None = None
    liking: float = 1.0
    number: int = 0

    @property
    def place(self) -> str:
        """Where it comes from, for errors."""
        return f"{self.file}:{self.number}" if self.number else self.file


def tools_of(record: Record, schema: Schema) -> str:
    """What the assistant may call, as JSON of a list; "" is nothing."""
    found = record.value.get(schema.tools) if schema.tools else None
    if isinstance(found, list) and (record.filled or schema_filled_by_table(found)):
        found = without_nulls(found)
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            raise Unusable("tools are not JSON") from None
    if not found:
        return ""
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise Unusable("tools are not a list of objects")
    return as_json(found)


def nulls_of(record: Record, schema: Schema, tools: str, *columns: str) -> Filled:
    """What is known of the nulls in a record.

    Args:
        record: as it was read.
        schema: which columns hold what.
        tools: JSON of its tools, or "".
        columns: that hold messages.
    """
    given = record.value.get(schema.tools) if schema.tools else None
    filled = record.filled or any(filled_by_table(record.value.get(name)) for name in columns)
    return Filled(filled or schema_filled_by_table(given), parameters_of(json.loads(tools)) if tools else {})


def column_of(record: Record, name: str) -> Any:
    """The value of a column. Raises Unusable where there is none."""
    if name not in record.value:
        raise Unusable("missing column")
    return record.value[name]


def draw_of(text: str) -> int:
    """32 bits that the text decides. Raises Unusable where it is not UTF-8."""
    try:
        return draw_of_bytes(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise Unusable("invalid UTF-8") from None


def draw_of_bytes(content: bytes) -> int:
    """32 bits that the bytes decide."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little")
