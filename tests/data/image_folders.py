"""Folders of small images for tests: each class has a color, and some have faults."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"blue": (20, 40, 220), "green": (30, 200, 60), "red": (220, 30, 40)}


def picture(colour: tuple[int, int, int], seed: int, size: tuple[int, int] = (20, 16)) -> Image.Image:
    noise = np.random.default_rng(seed).integers(-30, 30, (size[1], size[0], 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def class_folder(root: Path, count: int = 6) -> Path:
    """Write `count` images in each of three classes, of several sizes and formats."""
    for number, (name, colour) in enumerate(COLOURS.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            size = (16 + 4 * (index % 3), 16 + 2 * (index % 2))
            suffix = ("png", "jpg", "bmp")[index % 3]
            picture(colour, 100 * number + index, size).save(root / name / f"{index}.{suffix}")
    return root
