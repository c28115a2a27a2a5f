"""One picture: its size from its header, and its pixels at a wanted size.

Pillow decodes (extra `media`). What is drawn at random, crop and mirror image, follows from a key, so that a picture
has the same pixels on any rank, in any order, and after a resume.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError, MissingExtra

#: Pixels of a picture above which it is taken for a mistake, or for a bomb: a few bytes that decode to gigabytes.
MOST_PIXELS = 100_000_000
#: A random crop covers at least this share of a picture, and is at most so much wider than high, or higher than wide.
_LEAST_SHARE, _MOST_RATIO = 0.35, 4 / 3


@dataclass(frozen=True, slots=True)
class Look:
    """How a picture is seen.

    side: of the square that is made of it, in pixels. crops: a random part is taken, in place of the middle. mirrors:
    half of the pictures are mirrored.
    """

    side: int
    crops: bool = False
    mirrors: bool = False


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


def picture_size(path: Path) -> tuple[int, int]:
    """Return width and height, from the header alone.

    Raises:
        DataError: where the file is no picture, or has no pixels or too many.
    """
    image = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image.DecompressionBombWarning)
            with image.open(path) as picture:
                width, height = picture.size
    except image.DecompressionBombError as error:
        raise DataError(f"{path}: it has more than {MOST_PIXELS:,} pixels. Make it smaller, or delete it.") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path}: it cannot be read as a picture ({error}). Repair it, or delete it.") from error
    if not width * height:
        raise DataError(f"{path}: it has {width} x {height} pixels. Delete it.")
    if width * height > MOST_PIXELS:
        raise DataError(
            f"{path}: it has {width} x {height} pixels, more than {MOST_PIXELS:,}. Make it smaller, or delete it."
        )
    return width, height


def read_picture(path: Path, look: Look, key: tuple[int | str, ...] = ()) -> NDArray[np.uint8]:
    """Return a picture's pixels, (3, side, side). Of an animated one the first frame; transparent parts are white.

    Args:
        path: of the file; its suffix does not matter.
        look: size, and what is drawn at random.
        key: what is drawn follows from it.

    Raises:
        DataError: where the pixels cannot be decoded.
    """
    image = pillow()
    width, height = picture_size(path)
    rng = np.random.Generator(np.random.Philox(key=_number(key)))
    left, top, right, bottom = _random_box(width, height, rng) if look.crops else _middle(width, height)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image.DecompressionBombWarning)
            with image.open(path) as picture:
                picture.seek(0)
                # A JPEG is decoded at a half, a quarter or an eighth where that is still large enough.
                scale = look.side / min(right - left, bottom - top)
                picture.draft("RGB", (int(width * scale) or 1, int(height * scale) or 1))
                seen = _rgb(picture, image)
    except (OSError, ValueError, SyntaxError, EOFError, image.DecompressionBombError) as error:
        raise DataError(f"{path}: its pixels cannot be decoded ({error}). Repair it, or delete it.") from error
    across, down = seen.width / width, seen.height / height
    box = (left * across, top * down, right * across, bottom * down)
    square = seen.resize((look.side, look.side), image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    pixels = np.asarray(square, dtype=np.uint8).transpose(2, 0, 1)
    if look.mirrors and rng.random() < 0.5:
        pixels = pixels[:, :, ::-1]
    return np.ascontiguousarray(pixels)


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


def _number(key: tuple[int | str, ...]) -> int:
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")
