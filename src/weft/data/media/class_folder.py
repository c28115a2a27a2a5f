"""Folders of images, one for each class: `cats/1.png`, `dogs/2.jpg`. Only names and headers are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from weft.data.media.files import printable
from weft.data.media.images import Encoded, picture_size
from weft.data.media.records import PICTURE, class_files
from weft.data.order.stream import permutation
from weft.errors import DataError
from weft.units import format_count

#: Maximum share of unreadable images.
MOST_BAD = 0.01
#: Threads that read headers. They mostly wait for the disk.
_THREADS = 8
_CHUNK = 512
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ClassFolder:
    """Images below a folder, in order of their names.

    Attributes:
        root: the folder.
        classes: names of its folders, in order.
        paths: paths of the images, relative to the folder.
        labels: class number of each image.
        unreadable: files that were skipped, with the reason.
    """

    root: str
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: tuple[int, ...]
    unreadable: tuple[str, ...] = ()

    def format(self) -> str:
        """Return the text that `parse` reads."""
        return json.dumps(
            {
                "root": self.root,
                "classes": self.classes,
                "paths": self.paths,
                "labels": self.labels,
                "unreadable": self.unreadable,
            }
        )

    @classmethod
    def parse(cls, text: str) -> ClassFolder:
        """Parse the output of `format`.

        Raises:
            DataError: if the text is not valid.
        """
        try:
            found = json.loads(text)
            names = ("classes", "paths", "labels", "unreadable")
            return cls(str(found["root"]), *(tuple(found[name]) for name in names))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"pictures.json: it is damaged ({error}). Delete it to have the images found again."
            ) from error

    def part(self, chosen: Sequence[int]) -> ClassFolder:
        """Return a copy with only the images at the indices `chosen`."""
        paths, labels = tuple(self.paths[i] for i in chosen), tuple(self.labels[i] for i in chosen)
        return ClassFolder(self.root, self.classes, paths, labels)

    def split(self, share: float) -> tuple[ClassFolder, ClassFolder]:
        """Return a training part, and a held-out part with `share` of the images, but at least one.

        The split depends only on the number of images and on `share`.
        """
        # The positions depend on the number of images. An added image therefore moves others between the parts.
        order = permutation(len(self.paths), "held out pictures")
        held = sorted(order(place) for place in range(max(1, round(share * len(self.paths)))))
        rest = self.part(sorted({*range(len(self.paths))} - {*held}))
        return replace(rest, unreadable=self.unreadable), self.part(held)

    def __len__(self) -> int:
        return len(self.paths)

    def label(self, index: int) -> int:
        """Return the class number of an image."""
        return self.labels[index]

    def file(self, index: int) -> Path:
        """Return the path of an image."""
        return Path(self.root) / self.paths[index]

    def encoded(self, index: int) -> Encoded:
        """Return an encoded image."""
        return Encoded.of_file(self.file(index))


def find_pictures(root: Path, report: Callable[[int, int], None] | None = None) -> ClassFolder:
    """Find the images of a folder of classes. Images with an unreadable header, and links out of it, are skipped.

    Args:
        root: the folder. Each folder in it is a class, and may have subfolders.
        report: called with (images checked, images in total).

    Raises:
        DataError: if the folder does not exist, a class has no image, there is only one class, or more than 1 % of
            the images cannot be read.
    """
    files = class_files(root, PICTURE)
    classes = sorted({name for _, name in files})
    numbers = {name: number for number, name in enumerate(classes)}
    found = [(root / path, numbers[name]) for path, name in files]
    reasons: list[str | None] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(found), _CHUNK):
            reasons += pool.map(lambda one: _unreadable(root, one[0]), found[start : start + _CHUNK])
            if report is not None:
                report(len(reasons), len(found))
    bad = tuple(reason for reason in reasons if reason is not None)
    if len(bad) > MOST_BAD * len(found):
        shown = "; ".join(bad[:_SHOWN])
        raise DataError(
            f"data={root}: {len(bad)} of {format_count(len(found))} images cannot be read, more than {MOST_BAD:.0%}. "
            f"The first: {shown}"
        )
    good = [one for one, reason in zip(found, reasons, strict=True) if reason is None]
    paths = tuple(path.relative_to(root).as_posix() for path, _ in good)
    return ClassFolder(str(root.absolute()), tuple(classes), paths, tuple(label for _, label in good), bad)


def _unreadable(root: Path, path: Path) -> str | None:
    try:
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root.resolve()):
            return f"{path}: it links out of the folder"
        picture_size(path)
    except DataError as error:
        return printable(str(error))
    return None
