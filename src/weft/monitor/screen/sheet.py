"""A sheet of samples as a model gets them: pictures, waves, bands of pitch, texts, and what of them is learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import DataError

#: Formats of files that a sheet is drawn into.
SUFFIXES = (".png", ".svg", ".pdf")
_WIDTH_IN, _MEDIA_IN, _LINE_IN, _MARGIN_IN = 10.0, 1.5, 0.19, 0.4
#: A letter's width, and how many stand in a line.
_LETTER_IN, _COLUMNS, _MOST_LINES = 0.0669, 136, 40
#: Room for the numbers on an axis.
_AXIS_IN = 0.25
#: Points of a wave that are drawn across.
_WAVE_POINTS = 1200
_LEARNT, _OTHER, _NEVER, _CONTEXT = "#1a7f37", "#b45309", "#c1121f", "#8a8f98"


@dataclass(frozen=True, slots=True)
class SheetEntry:
    """One sample. title: where it is from. picture: (3, height, width), 0 to 255. wave: samples, `rate` a second.

    bands: (bands, frames). text: stretches of text, each with its weight in the loss; 0: it is read and not learnt.
    """

    title: str
    picture: np.ndarray | None = None
    wave: np.ndarray | None = None
    rate: int = 1
    bands: np.ndarray | None = None
    text: Sequence[tuple[str, float]] = ()


def check_sheet(path: Path) -> None:
    """Refuse a file that no sheet can be drawn into.

    Raises:
        DataError: for another suffix, or a folder that is not there.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"--sheet={path}: a sheet is drawn into {', '.join(SUFFIXES)}. Give such a file.")
    if not path.parent.is_dir():
        raise DataError(f"--sheet={path}: there is no folder {path.parent}. Make it, or give another file.")


def draw_sheet(path: Path, entries: Sequence[SheetEntry]) -> None:
    """Draw samples below one another.

    Args:
        path: of the file, whose suffix says the format.
        entries: the samples.

    Raises:
        DataError: for another suffix, or a file that cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_sheet(path)
    heights = [_height(entry) for entry in entries]
    total = sum(heights) + _MARGIN_IN
    figure = Figure(figsize=(_WIDTH_IN, total))
    FigureCanvasAgg(figure)
    top = total - _MARGIN_IN / 2
    for entry, height in zip(entries, heights, strict=True):
        _draw(figure, entry, top, total)
        top -= height
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"--sheet={path}: it cannot be written ({why}). Give another file.") from error


def _height(entry: SheetEntry) -> float:
    has_media = entry.picture is not None or entry.wave is not None or entry.bands is not None
    return (1 + len(_lines(entry.text))) * _LINE_IN + has_media * (_MEDIA_IN + _LINE_IN) + _MARGIN_IN


def _draw(figure: Any, entry: SheetEntry, top: float, total: float) -> None:
    """Draw one sample below a height, in inches from the bottom."""
    title = {"fontsize": 9, "weight": "bold", "parse_math": False}
    figure.text(_MARGIN_IN / _WIDTH_IN, (top - _LINE_IN) / total, _plain(entry.title)[:_COLUMNS], **title)
    top -= 1.6 * _LINE_IN
    at = _MARGIN_IN
    for draw, share in _panels(entry):
        at += _AXIS_IN if share else 0.0
        width = _MEDIA_IN if not share else share * (_WIDTH_IN - at - _MARGIN_IN)
        place = (at / _WIDTH_IN, (top - _MEDIA_IN) / total, width / _WIDTH_IN, _MEDIA_IN / total)
        axes = figure.add_axes(place)
        axes.tick_params(labelsize=7, length=2)
        draw(axes)
        at += width + _MARGIN_IN
    if at > _MARGIN_IN:
        top -= _MEDIA_IN + 1.2 * _LINE_IN
    for line in _lines(entry.text):
        top -= _LINE_IN
        column = 0
        for stretch, weight in line:
            x = _MARGIN_IN + column * _LETTER_IN
            kind = {"fontsize": 8, "family": "monospace", "color": _colour(weight), "parse_math": False}
            figure.text(x / _WIDTH_IN, top / total, stretch, **kind)
            column += len(stretch)


def _panels(entry: SheetEntry) -> Iterator[tuple[Any, float]]:
    """What draws each part of a sample, and its share of the width that is left; 0: a square."""
    picture, wave, bands = entry.picture, entry.wave, entry.bands
    if picture is not None:

        def show(axes: Any) -> None:
            axes.imshow(picture.transpose(1, 2, 0), interpolation="nearest")
            axes.set_axis_off()

        yield show, 0.0
    if wave is not None:

        def swing(axes: Any) -> None:
            low, high = _envelope(wave)
            seconds = np.linspace(0, len(wave) / entry.rate, len(low))
            axes.fill_between(seconds, low, high, color="#2f6f9f", linewidth=0.4)
            axes.set_xlim(0, max(seconds[-1], 1 / entry.rate))
            axes.set_xlabel("s", fontsize=7, labelpad=0)

        yield swing, 0.5 if bands is not None else 1.0
    if bands is not None:

        def glow(axes: Any) -> None:
            axes.imshow(bands, origin="lower", aspect="auto", interpolation="nearest", cmap="magma")
            axes.set_xlabel("frames; bands of pitch upwards", fontsize=7, labelpad=0)

        yield glow, 1.0


def _envelope(wave: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest of the samples at each point across."""
    parts = np.array_split(wave, min(_WAVE_POINTS, max(1, len(wave))))
    return np.array([part.min(initial=0.0) for part in parts]), np.array([part.max(initial=0.0) for part in parts])


def _lines(text: Sequence[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    """The text in lines of so many columns."""
    lines: list[list[tuple[str, float]]] = [[]] if text else []
    left = _COLUMNS
    for stretch, weight in text:
        for number, part in enumerate(_plain(stretch, keep="\n").split("\n")):
            if number:
                lines.append([])
                left = _COLUMNS
            while part:
                if not left:
                    lines.append([])
                    left = _COLUMNS
                lines[-1].append((part[:left], weight))
                part, left = part[left:], left - len(part[:left])
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], [("...", 0.0)]]
    return lines


def _plain(text: str, keep: str = "") -> str:
    """Text without what a font cannot show."""
    return "".join(one if one.isprintable() or one in keep else "·" for one in text)


def _colour(weight: float) -> str:
    return _CONTEXT if weight == 0 else _NEVER if weight < 0 else _LEARNT if weight == 1 else _OTHER
