"""Images and their classes by index, from any kind of source, decoded on access."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.media.class_folder import ClassFolder
from weft.data.media.images import Encoded, Look, read_picture
from weft.data.media.media_records import MediaRecords
from weft.data.media.mixed_records import MixedRecords
from weft.data.media.records import CHAT, SAMPLE


class PictureSource(Protocol):
    """A source of images with classes."""

    @property
    def root(self) -> str:
        """The path or pattern that the user gave."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of class numbers."""
        ...

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Files that were skipped, with the reason."""
        ...

    def __len__(self) -> int: ...

    def label(self, index: int) -> int:
        """Return the class number of an image."""
        ...

    def encoded(self, index: int) -> Encoded:
        """Return an encoded image."""
        ...

    def file(self, index: int) -> object:
        """Return the location of an image, for messages."""
        ...

    def format(self) -> str:
        """Return the text that `parse_source` reads."""
        ...


def parse_source(text: str) -> ClassFolder | MediaRecords:
    """Parse the output of a source's `format`.

    Raises:
        DataError: if the text is not valid.
    """
    try:
        found = json.loads(text)
        kind = found["columns"]["kind"] if "records" in found else ""
    except (ValueError, TypeError, KeyError):
        kind = ""
    if kind == CHAT.one:
        from weft.data.media.chat_records import ChatRecords  # imported here, because it loads jinja2

        return ChatRecords.parse(text)
    if kind == SAMPLE.one:
        return MixedRecords.parse(text)
    return MediaRecords.parse(text) if kind else ClassFolder.parse(text)


class Pictures:
    """Decoded images of a source, with one transform. Augmentation is a function of (seed, epoch, index).

    Args:
        source: the images.
        look: the image transform.
        seed: the run's seed.
    """

    dtype = np.dtype(np.uint8)
    #: Name of the option that reduces the size of a decoded sample, for error messages.
    smaller = "side"

    def __init__(self, source: PictureSource, look: Look, seed: int):
        self.source, self.look, self.seed = source, look, seed
        #: Shape of a sample.
        self.shape = (3, look.side, look.side)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        return self.in_epoch(0, index)

    def __iter__(self) -> Iterator[tuple[NDArray[np.uint8], int]]:
        return (self[index] for index in range(len(self)))

    def in_epoch(self, epoch: int, index: int) -> tuple[NDArray[np.uint8], int]:
        """Return the pixels and the class of a sample in an epoch."""
        return self.decoded(epoch, index), self.learnt(index)

    def learnt(self, index: int) -> int:
        """Return the class number of a sample."""
        return self.source.label(index)

    def decoded(self, epoch: int, index: int) -> NDArray[np.uint8]:
        """Return the pixels of a sample in an epoch, (3, side, side)."""
        return read_picture(self.source.encoded(index), self.look, (self.seed, epoch, index))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that describe this object to decode processes."""
        return {"kind": "pictures", "source": self.source.format(), "look": asdict(self.look), "seed": self.seed}

    @classmethod
    def of(cls, told: dict[str, Any]) -> Pictures:
        """Return the object that `to_json` described."""
        return cls(parse_source(told["source"]), Look(**told["look"]), told["seed"])
