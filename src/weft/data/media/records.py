"""Kinds of media: images or audio, with their file suffixes, column names and nouns for messages."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.errors import DataError


@dataclass(frozen=True, slots=True)
class MediaKind:
    """A kind of media.

    Attributes:
        one: singular for messages.
        many: plural for messages.
        option: name of the task option that sets the column.
        suffixes: file suffixes. The content of a file determines whether it is valid.
        columns: usual column names in records.
    """

    one: str
    many: str
    option: str
    suffixes: tuple[str, ...]
    columns: tuple[str, ...]


PICTURE = MediaKind(
    "picture", "pictures", "picture",
    (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
    ("image", "picture", "img", "jpg", "jpeg", "png", "webp", "file_name", "image_path", "path", "bytes"),
)  # fmt: skip
SOUND = MediaKind(
    "recording", "recordings", "audio",
    (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".aifc", ".au", ".snd", ".caf", ".w64"),
    ("audio", "sound", "recording", "wav", "flac", "ogg", "mp3", "file_name", "audio_path", "audio_filepath", "path",
     "bytes"),
)  # fmt: skip
#: Text with any number of images and audio clips.
SAMPLE = MediaKind("sample", "samples", "text", (), ())
#: Conversations with any number of images and audio clips.
CHAT = MediaKind("conversation", "conversations", "text", (), ())
#: Kinds by singular name.
KINDS = {kind.one: kind for kind in (PICTURE, SOUND, SAMPLE, CHAT)}


def class_files(root: Path, kind: MediaKind) -> list[tuple[str, str]]:
    """Return (path below the root, class) of the files of a folder of classes, sorted by name.

    Raises:
        DataError: if the folder does not exist, it has fewer than two classes, or a class has no file of the kind.
    """
    if not root.is_dir():
        raise DataError(
            f"data={root}: there is no such folder. Give one that has a folder of {kind.many} for each class."
        )
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise DataError(
            f"data={root}: its folders are the classes, and it has {len(classes)}. Give a folder with 2 or more."
        )
    found: list[tuple[str, str]] = []
    for name in classes:
        before = len(found)
        for place, folders, names in os.walk(root / name):
            folders.sort()
            below = Path(place).relative_to(root).as_posix()
            wanted = (each for each in sorted(names) if each.lower().endswith(kind.suffixes) and each[0] != ".")
            found += [(f"{below}/{each}", name) for each in wanted]
        if len(found) == before:
            raise DataError(
                f"data={root}: class {name!r} has no {kind.one}. Add some, or take the folder away. Suffixes: "
                f"{', '.join(kind.suffixes)}."
            )
    return found


# Random numbers for a sample: a function of its key only, on any rank, in any order and after a resume.


def generator_of(key: tuple[int | str, ...]) -> np.random.Generator:
    """Return the random generator of a key, such as (seed, epoch, index)."""
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
