"""What a config asks for as data: its sources with their files, and the content of these files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.data.prepared.prepared_data import key_of
from weft.data.read import Document, FileSet, Schema, detect_schema, find_files
from weft.data.tokens import DocumentStream, ReadLimits, Report, piece_bytes
from weft.errors import DataError
from weft.spec.config import DataSection, SourceSection
from weft.units import counted

_READ_BYTES = 2**20
#: Less is read before a line about it is.
_TOLD_BYTES = 2**28


@dataclass(frozen=True)
class WantedSource:
    """A source of the config with its files. preferences: whether the task learns from preferred answers alone."""

    section: SourceSection
    files: FileSet
    limits: ReadLimits
    preferences: bool = False

    @classmethod
    def of(
        cls, section: SourceSection, field: str, data: DataSection, holdout: float, *, preferences: bool = False
    ) -> WantedSource:
        """field: dotted key, such as "data.train.0". Raises DataError where there are no such files."""
        files = find_files(section.path, field)
        pieces = piece_bytes(files, holdout)
        limits = ReadLimits(holdout, data.max_record_bytes, data.max_bad_fraction, pieces)
        return cls(section, files, limits, preferences)

    @cached_property
    def schema(self) -> Schema:
        columns, most = {**self.section.columns}, self.limits.max_record_bytes
        return detect_schema(self.files, self.section.schema_, columns, most, preferences=self.preferences)

    def counted(self, number: int) -> str:
        """A number of its documents, as a reader calls them."""
        one, more = ("piece of text", "pieces of text") if self.files.format == "text" else ("document", "documents")
        if self.schema.kind == "preference":
            one, more = "pair", "pairs"
        return counted(number, one, more)

    def documents(self, files: FileSet | None = None) -> Iterator[Document]:
        """All documents that can be read, of any ids. files: the same ones in another order."""
        limits = ReadLimits(
            self.limits.holdout, self.limits.max_record_bytes, max_bad_fraction=1.0, piece_bytes=self.limits.piece_bytes
        )
        yield from DocumentStream(files or self.files, self.schema, limits, 2**31, on_broken=lambda _: None)

    def key(self, digests: list[str]) -> list[Any]:
        """What decides the tokens of the source. digests: of its files' content."""
        limits = self.limits
        reading = [limits.holdout, limits.max_record_bytes, limits.piece_bytes]
        files = [
            [file.format, file.compression, file.path.suffixes[-2:], digest]
            for file, digest in zip(self.files.files, digests, strict=True)
        ]
        of_preferences = ["preferences"] if self.preferences else []
        return [self.section.schema_, dict(self.section.columns), reading, files, *of_preferences]


def content_digests(cache: Path, files: FileSet, report: Report | None) -> list[str]:
    """Return the sha256 of each file. Size and time of change only tell whether what was read before is still true.

    So a file that is touched, copied or moved is read again, and gives the same digest.

    Args:
        cache: where digests are kept.
        files: to be read.
        report: told of the bytes that were read.
    """
    known = (
        cache
        / "contents"
        / (key_of([[str(file.path), file.size_bytes, file.mtime_ns] for file in files.files]) + ".json")
    )
    try:
        digests = json.loads(known.read_text("utf-8"))
        if isinstance(digests, list) and len(digests) == len(files.files):
            return [str(digest) for digest in digests]
    except (OSError, ValueError):
        pass  # not read yet, or damaged: the files tell
    digests, done = [], 0
    for file in files.files:
        digests.append(_digest(file.path, file.name))
        done += file.size_bytes
        if report is not None and files.size_bytes > _TOLD_BYTES:
            report(f"read {files.path}", done, files.size_bytes)
    known.parent.mkdir(parents=True, exist_ok=True)
    draft = known.with_name(f".{known.name}.{os.getpid()}")
    draft.write_text(json.dumps(digests), "utf-8")
    os.replace(draft, known)
    return digests


def _digest(path: Path, name: str) -> str:
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                hasher.update(block)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error}). Repair it or leave it out.") from error
    return hasher.hexdigest()
