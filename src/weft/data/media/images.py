"""Encoded images and audio clips, and decoding of images.

Encoded media is a full file, a byte range of an archive, or bytes in a record.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.records import generator_of
from weft.errors import DataError, MissingExtra, WeftError
from weft.files import open_regular
from weft.units import format_bytes

#: Maximum number of open archives in a process. The least recently used is closed first.
_MOST_OPEN = 256
#: Maximum size of encoded media that is read in full.
_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded media for a decoder.

    Attributes:
        name: name for messages.
        path: the file.
        offset: start of the byte range in the file.
        length: bytes of the range, or -1 for the full file.
        held: the bytes, if they are not in a file.
    """

    name: str
    path: str = ""
    offset: int = 0
    length: int = -1
    held: bytes | None = None

    @classmethod
    def of_file(cls, path: Path) -> Encoded:
        """Return the media of a file."""
        return cls(str(path), str(path))

    def ends(self, size: int) -> tuple[bytes, bytes]:
        """Return the first and the last `size` bytes, or fewer if the media is shorter.

        Raises:
            DataError: if the file cannot be read.
        """
        if self.held is not None:
            return self.held[:size], self.held[-size:]
        try:
            if self.length >= 0:
                return self._read(0, size), self._read(max(0, self.length - size), size)
            with os.fdopen(open_regular(self.path), "rb", buffering=0) as file:
                head, length = file.read(size), os.fstat(file.fileno()).st_size
                return head, head if length <= size else os.pread(file.fileno(), size, length - size)
        except (OSError, ValueError, OverflowError) as error:
            raise self._unread(error) from error

    def size(self) -> int:
        """Return the number of bytes.

        Raises:
            DataError: if the file cannot be read.
        """
        if self.held is not None:
            return len(self.held)
        try:
            return self.length if self.length >= 0 else os.stat(self.path).st_size
        except (OSError, ValueError) as error:
            raise self._unread(error) from error

    def part(self, start: int, size: int) -> bytes:
        """Return a range of the bytes, which is shorter at the end of the media.

        Raises:
            DataError: if the file cannot be read.
        """
        if self.held is not None:
            return self.held[start : start + size]
        try:
            most = size if self.length < 0 else max(0, min(size, self.length - start))
            return os.pread(_opened(self.path).fd, most, self.offset + start)
        except (OSError, ValueError, OverflowError) as error:
            raise self._unread(error) from error

    def read_all(self) -> bytes:
        """Return all bytes.

        Raises:
            DataError: if the file cannot be read, is larger than 1 GiB, or ends before the byte range does.
        """
        if self.held is not None:
            return self.held
        size = self.size()
        if size > _MAX_BYTES:
            raise DataError(
                f"{self.name}: it has {format_bytes(size)}, and {format_bytes(_MAX_BYTES)} can be read. Delete it."
            )
        try:
            if self.length < 0:
                with os.fdopen(open_regular(self.path), "rb") as file:
                    return file.read(_MAX_BYTES)
            found = self._read(0, self.length)
        except (OSError, ValueError, OverflowError) as error:
            raise self._unread(error) from error
        if len(found) < self.length:
            raise DataError(f"{self.name}: {self.path} ends before it does. Copy that file again.")
        return found

    def _read(self, start: int, size: int) -> bytes:
        return os.pread(_opened(self.path).fd, min(size, self.length - start), self.offset + start)

    def _unread(self, error: Exception) -> DataError:
        reason = getattr(error, "strerror", None) or error
        return DataError(f"{self.name}: it cannot be read ({reason}). Bring it back, or leave it out.")


class _Open:
    """A file for reads at any offset from any thread, closed with the last reference."""

    def __init__(self, path: str):
        self.fd = -1
        self.fd = open_regular(path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


@lru_cache(maxsize=_MOST_OPEN)
def _opened(path: str) -> _Open:
    return _Open(path)


# Reading an image: its size from the header, and its pixels at a requested size.

#: Maximum pixels of an image. More are a mistake or a decompression bomb: a few bytes that decode to gigabytes.
MOST_PIXELS = 100_000_000
#: Minimum share of an image that a random crop covers, and its maximum aspect ratio.
_LEAST_SHARE, _MOST_RATIO = 0.35, 4 / 3
#: Formats that Pillow may open. Pillow decodes all of them itself. Other formats may start programs: EPS starts
#: Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF", "QOI")
#: Maximum product of scans and pixels of a progressive JPEG. Each scan visits all pixels, and a scan may have few
#: bytes.
_MAX_SCANNED_PIXELS = 2_000_000_000
#: Maximum CPU time (s) between opening an image and reading its last bytes.
_MAX_READ_S = 10.0
#: Bytes that are read for a header, and bytes that are searched for the end marker of a format.
_HEAD_BYTES, _TAIL_BYTES = 16384, 64
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}
#: Weights of red, green and blue in the luma.
_LUMA = np.array((0.299, 0.587, 0.114), np.float32)


@dataclass(frozen=True, slots=True)
class Look:
    """Resizing, cropping and augmentation of images.

    Attributes:
        side: side of the square output, in pixels.
        crops: whether to take a random part instead of the middle.
        mirrors: whether to mirror a random half of the images.
        colour: brightness, contrast and saturation each change by a factor between 1 - colour and 1 + colour.
        noise: standard deviation of noise that is added to each value, on the scale of 0 to 255.
    """

    side: int
    crops: bool = False
    mirrors: bool = False
    colour: float = 0.0
    noise: float = 0.0


def pillow() -> Any:
    """Return Pillow's Image module.

    Raises:
        MissingExtra: if Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("Pillow", "media", "a folder of pictures") from error
    return Image


def picture_size(source: Path | Encoded, *, upright: bool = False) -> tuple[int, int]:
    """Return width and height from the header. A file that seems to be truncated is decoded once to check it.

    upright: return the size after the rotation that the EXIF data of a photo asks for, as `read_upright` applies it.

    Raises:
        DataError: if the file is not an image of one of the `FORMATS`, has no pixels or too many, is truncated, or is a
            progressive JPEG with too many scans.
    """
    encoded = _encoded(source)
    head, tail = encoded.ends(_HEAD_BYTES)
    try:
        picture = _open_image(head, encoded.name)
    except DataError:
        # The data before the size, such as a preview, may be longer than the head.
        picture = _open_image(encoded.read_all(), encoded.name)
    with picture:
        if picture.info.get("progressive") and len(head) < encoded.size():
            _refuse_many_scans(picture, encoded.read_all(), encoded.name)
        end = _ENDS.get(picture.format or "")
        if end is not None and end not in tail[-_TAIL_BYTES:]:
            with _open_image(encoded.read_all(), encoded.name) as whole:
                _decoded(whole, encoded.name, lambda: whole.load())
        return picture.size[::-1] if upright and _turn_of(picture) in _SWAPS else picture.size


def read_upright(source: Path | Encoded) -> Any:
    """Return an RGB Pillow image of full size, rotated as its EXIF data asks. Transparent parts become white.

    Raises:
        DataError: if the pixels cannot be decoded.
    """
    image, encoded = pillow(), _encoded(source)
    with _open_image(encoded.read_all(), encoded.name) as picture:
        turn = _turn_of(picture)
        found = _decoded(picture, encoded.name, lambda: _rgb(picture, image).copy())
    return found if turn is None else found.transpose(turn)


#: Pillow's transposition for each orientation of EXIF data, and those that swap width and height.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
_SWAPS = (5, 4, 6, 2)


def _turn_of(picture: Any) -> int | None:
    """Return the transposition that the EXIF data before an image's pixels asks for, or None."""
    exif = pillow().Exif()
    with contextlib.suppress(Exception):  # damaged metadata, which viewers ignore too
        exif.load(picture.info.get("exif") or b"")
    return _TURNS.get(exif.get(0x0112))


def read_picture(source: Path | Encoded, look: Look, key: tuple[int | str, ...] = ()) -> NDArray[np.uint8]:
    """Return an image's pixels, uint8 (3, side, side).

    Of an animated image, the first frame is returned. Transparent parts become white.

    Args:
        source: a file, whose suffix is ignored, or encoded media.
        look: size and random transforms.
        key: seed of the random numbers, as in `generator_of`.

    Raises:
        DataError: if the pixels cannot be decoded.
    """
    image, encoded = pillow(), _encoded(source)
    rng = generator_of(key)
    with _open_image(encoded.read_all(), encoded.name) as picture:
        width, height = picture.size
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        right, bottom = left + side, top + side
        if look.crops:
            left, top, right, bottom = _random_box(width, height, rng)

        def decode() -> Any:
            # Decode a JPEG at a half, a quarter or an eighth of its size if that is still large enough.
            scale = look.side / min(right - left, bottom - top)
            picture.draft("RGB", (int(width * scale) or 1, int(height * scale) or 1))
            seen = _rgb(picture, image)
            across, down = seen.width / width, seen.height / height
            box = (left * across, top * down, right * across, bottom * down)
            return seen.resize((look.side, look.side), image.Resampling.BILINEAR, box=box, reducing_gap=2.0)

        square = _decoded(picture, encoded.name, decode)
    pixels = np.asarray(square, dtype=np.uint8).transpose(2, 0, 1)
    if look.mirrors and rng.random() < 0.5:
        pixels = pixels[:, :, ::-1]
    if look.colour or look.noise:
        pixels = _recoloured(pixels, look, rng)
    return np.ascontiguousarray(pixels)


def _encoded(source: Path | Encoded) -> Encoded:
    return source if isinstance(source, Encoded) else Encoded.of_file(source)


class _TimedBytes(io.BytesIO):
    """Encoded bytes whose reads fail once this thread has spent too long on the image.

    Pillow decodes most formats block by block. Formats that it decodes in one call are limited by `_MAX_DECODE_S` of
    decode processes.
    """

    def __init__(self, data: bytes, name: str):
        super().__init__(data)
        self._name, self._since = name, time.thread_time()

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() - self._since > _MAX_READ_S:
            raise DataError(
                f"{self._name}: its decoding took more than {_MAX_READ_S:.0f} s of processor time. Save it smaller or "
                "in another format, or delete it."
            )
        return super().read(size)


def _open_image(data: bytes, name: str) -> Any:
    """Open encoded bytes with Pillow, which reads the header.

    Raises DataError for formats outside `FORMATS`, invalid sizes, and a progressive JPEG with too many scans.
    """
    image = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = image.open(_TimedBytes(data, name), formats=_formats())
    except image.DecompressionBombError as error:
        raise DataError(f"{name}: it has more than {MOST_PIXELS:,} pixels. Make it smaller, or delete it.") from error
    except WeftError:
        raise
    except Exception as error:  # decoders raise almost anything for damaged headers
        why = "it is empty" if not data else "no known format" if "cannot identify" in str(error) else _reason(error)
        raise DataError(f"{name}: it cannot be read as an image ({why}). Repair it, or delete it.") from error
    width, height = picture.size
    if width <= 0 or height <= 0:
        raise DataError(f"{name}: it has {width} x {height} pixels. Delete it.")
    if width * height > MOST_PIXELS:
        raise DataError(
            f"{name}: it has {width} x {height} pixels, more than {MOST_PIXELS:,}. Make it smaller, or delete it."
        )
    _refuse_many_scans(picture, data, name)
    return picture


@cache
def _formats() -> list[str]:
    image = pillow()
    image.init()
    return [name for name in FORMATS if name in image.OPEN]


def _refuse_many_scans(picture: Any, data: bytes, name: str) -> None:
    """Raise DataError for a progressive JPEG that would take minutes to decode."""
    if not picture.info.get("progressive"):
        return
    scans, pixels = data.count(b"\xff\xda"), picture.size[0] * picture.size[1]
    if scans * pixels > _MAX_SCANNED_PIXELS:
        raise DataError(
            f"{name}: its {pixels:,} pixels are stored in {scans:,} scans, and pixels times scans may be "
            f"{_MAX_SCANNED_PIXELS:,}. Save it as a plain JPEG, or delete it."
        )


def _reason(error: Exception) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:200]


def _decoded(picture: Any, name: str, decode: Callable[[], Any]) -> Any:
    """Return the result of `decode` on an open image. Raise DataError if its pixels are damaged or incomplete."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture.seek(0)
            return decode()
    except WeftError:
        raise
    except Exception as error:  # decoders raise almost anything for damaged pixels
        why = _reason(error)
        raise DataError(f"{name}: its pixels cannot be decoded ({why}). Repair it, or delete it.") from error


def _recoloured(pixels: NDArray[np.uint8], look: Look, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return the pixels with random changes of brightness, contrast and saturation, and with noise, as `look` asks."""
    values = pixels.astype(np.float32)
    if look.colour:
        bright, contrast, colourful = rng.uniform(1 - look.colour, 1 + look.colour, 3).astype(np.float32)
        values *= bright
        grey = np.tensordot(_LUMA, values, 1)
        # A sum of integers does not depend on the order, unlike one of floats.
        middle = np.float32(int(grey.astype(np.int64).sum()) / grey.size)
        values = (values - grey) * (colourful * contrast) + (grey - middle) * contrast + middle
    if look.noise:
        values += rng.standard_normal(values.shape, np.float32) * np.float32(look.noise)
    return np.rint(values).clip(0, 255).astype(np.uint8)


def _rgb(picture: Any, image: Any) -> Any:
    """Convert an image to three channels of 8 bits. Transparent parts become white."""
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        ground = image.new("RGBA", layer.size, (255, 255, 255, 255))
        return image.alpha_composite(ground, layer).convert("RGB")
    if picture.mode.startswith("I;16") or picture.mode == "I":
        wide = np.asarray(picture, dtype=np.float64)
        top = 65535.0 if wide.max(initial=0.0) > 255 else 255.0
        return image.fromarray((wide / top * 255.0).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode == "RGB":
        picture.load()
        return picture  # `convert` would copy it
    return picture.convert("RGB")


def _random_box(width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Return a random crop box (left, top, right, bottom) of random area and aspect ratio, at most the full image."""
    area = width * height * rng.uniform(_LEAST_SHARE, 1.0)
    ratio = float(np.exp(rng.uniform(-np.log(_MOST_RATIO), np.log(_MOST_RATIO))))
    across, down = min(width, float(np.sqrt(area * ratio))), min(height, float(np.sqrt(area / ratio)))
    left, top = rng.uniform(0.0, width - across), rng.uniform(0.0, height - down)
    return left, top, left + across, top + down
