"""One picture: its size from its header, and its pixels at a wanted size.

Pillow decodes (extra `media`). What is drawn at random, crop and mirror image, follows from a key, so that a picture
has the same pixels on any rank, in any order, and after a resume.
"""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.encoded import Encoded
from weft.data.media.sample_draws import drawn_from
from weft.errors import DataError, MissingExtra

#: Pixels of a picture above which it is taken for a mistake, or for a bomb: a few bytes that decode to gigabytes.
MOST_PIXELS = 100_000_000
#: A random crop covers at least this share of a picture, and is at most so much wider than high, or higher than wide.
_LEAST_SHARE, _MOST_RATIO = 0.35, 4 / 3
#: Bytes that are read for a header, and looked at for the mark that ends a file of a format.
_HEAD_BYTES, _TAIL_BYTES = 16384, 64
_ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}
#: Share of red, green and blue in how bright a colour seems.
_LUMA = np.array((0.299, 0.587, 0.114), np.float32)


@dataclass(frozen=True, slots=True)
class Look:
    """How a picture is seen.

    side: of the square that is made of it, in pixels. crops: a random part is taken, in place of the middle. mirrors:
    half of the pictures are mirrored. colour: brightness, contrast and saturation each change by a factor between
    1 - colour and 1 + colour. noise: deviation of what is added to each value, in values of 0 to 255.
    """

    side: int
    crops: bool = False
    mirrors: bool = False
    colour: float = 0.0
    noise: float = 0.0


def pillow() -> Any:
    """Return Pillow's Image module.

    Raises:
        MissingExtra: where Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("Pillow", "media", "a folder of pictures") from error
    return Image


def picture_size(source: Path | Encoded) -> tuple[int, int]:
    """Return width and height, from the header alone; of a file whose end looks cut off, all is decoded once.

    Raises:
        DataError: where the file is no picture, has no pixels or too many, or is cut off.
    """
    encoded = _encoded(source)
    head, tail = encoded.ends(_HEAD_BYTES)
    try:
        picture = _opened(head, encoded.name)
    except DataError:
        # What stands before the size, such as a preview, may be long.
        picture = _opened(encoded.whole(), encoded.name)
    with picture:
        end = _ENDS.get(picture.format or "")
        if end is not None and end not in tail[-_TAIL_BYTES:]:
            with _opened(encoded.whole(), encoded.name) as whole:
                _decoded(whole, encoded.name, lambda: whole.load())
        return picture.size


def read_picture(source: Path | Encoded, look: Look, key: tuple[int | str, ...] = ()) -> NDArray[np.uint8]:
    """Return a picture's pixels, (3, side, side). Of an animated one the first frame; transparent parts are white.

    Args:
        source: a file, whose suffix does not matter, or where else the picture lies.
        look: size, and what is drawn at random.
        key: what is drawn follows from it.

    Raises:
        DataError: where the pixels cannot be decoded.
    """
    image, encoded = pillow(), _encoded(source)
    rng = drawn_from(key)
    with _opened(encoded.whole(), encoded.name) as picture:
        width, height = picture.size
        left, top, right, bottom = _random_box(width, height, rng) if look.crops else _middle(width, height)

        def decode() -> Any:
            # A JPEG is decoded at a half, a quarter or an eighth where that is still large enough.
            scale = look.side / min(right - left, bottom - top)
            picture.draft("RGB", (int(width * scale) or 1, int(height * scale) or 1))
            return _rgb(picture, image)

        seen = _decoded(picture, encoded.name, decode)
    across, down = seen.width / width, seen.height / height
    box = (left * across, top * down, right * across, bottom * down)
    square = seen.resize((look.side, look.side), image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    pixels = np.asarray(square, dtype=np.uint8).transpose(2, 0, 1)
    if look.mirrors and rng.random() < 0.5:
        pixels = pixels[:, :, ::-1]
    if look.colour or look.noise:
        pixels = _recoloured(pixels, look, rng)
    return np.ascontiguousarray(pixels)


def _encoded(source: Path | Encoded) -> Encoded:
    return source if isinstance(source, Encoded) else Encoded.of_file(source)


def _opened(data: bytes, name: str) -> Any:
    """The picture of some bytes, whose header alone was read. DataError where its size is no picture's."""
    image = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image.DecompressionBombWarning)
            picture = image.open(io.BytesIO(data))
    except image.DecompressionBombError as error:
        raise DataError(f"{name}: it has more than {MOST_PIXELS:,} pixels. Make it smaller, or delete it.") from error
    except (OSError, ValueError, SyntaxError) as error:
        why = "it is empty" if not data else "no known format" if "cannot identify" in str(error) else error
        raise DataError(f"{name}: it cannot be read as a picture ({why}). Repair it, or delete it.") from error
    width, height = picture.size
    if not width * height:
        raise DataError(f"{name}: it has {width} x {height} pixels. Delete it.")
    if width * height > MOST_PIXELS:
        raise DataError(
            f"{name}: it has {width} x {height} pixels, more than {MOST_PIXELS:,}. Make it smaller, or delete it."
        )
    return picture


def _decoded(picture: Any, name: str, decode: Callable[[], Any]) -> Any:
    """What decoding an open picture returns. DataError where its pixels are damaged or cut off."""
    image = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image.DecompressionBombWarning)
            picture.seek(0)
            return decode()
    except (OSError, ValueError, SyntaxError, EOFError, zlib.error, image.DecompressionBombError) as error:
        raise DataError(f"{name}: its pixels cannot be decoded ({error}). Repair it, or delete it.") from error


def _recoloured(pixels: NDArray[np.uint8], look: Look, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Brightness, contrast and saturation changed by factors, then noise on every value."""
    values = pixels.astype(np.float32)
    if look.colour:
        bright, contrast, colourful = rng.uniform(1 - look.colour, 1 + look.colour, 3).astype(np.float32)
        values *= bright
        grey = np.tensordot(_LUMA, values, 1)
        # A sum of whole numbers has the same bits in any order.
        middle = np.float32(int(grey.astype(np.int64).sum()) / grey.size)
        values = (values - grey) * (colourful * contrast) + (grey - middle) * contrast + middle
    if look.noise:
        values += rng.standard_normal(values.shape, np.float32) * np.float32(look.noise)
    return np.rint(values).clip(0, 255).astype(np.uint8)


def _rgb(picture: Any, image: Any) -> Any:
    """Three channels of 8 bits, on white."""
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


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """A part of a random share and shape, as large as fits."""
    area = width * height * rng.uniform(_LEAST_SHARE, 1.0)
    ratio = float(np.exp(rng.uniform(-np.log(_MOST_RATIO), np.log(_MOST_RATIO))))
    across, down = min(width, float(np.sqrt(area * ratio))), min(height, float(np.sqrt(area / ratio)))
    left, top = rng.uniform(0.0, width - across), rng.uniform(0.0, height - down)
    return left, top, left + across, top + down
