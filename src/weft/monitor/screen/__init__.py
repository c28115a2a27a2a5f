"""What a person sees: the display of a run, lines of text, the curve of the loss, a sheet of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Artist",
    "Display",
    "LastingStream",
    "SheetEntry",
    "busy",
    "check_sheet",
    "columns_of",
    "draw_sheet",
    "make_display",
    "plot_loss",
    "tell",
    "wrapped",
]

if TYPE_CHECKING:
    from weft.monitor.screen.artist import Artist
    from weft.monitor.screen.display import Display, make_display
    from weft.monitor.screen.plot import plot_loss
    from weft.monitor.screen.sheet import SheetEntry, check_sheet, draw_sheet
    from weft.monitor.screen.terminal import LastingStream, busy, columns_of, tell, wrapped

__getattr__ = loads(
    __name__,
    {
        "Artist": ".artist",
        "Display": ".display",
        "LastingStream": ".terminal",
        "SheetEntry": ".sheet",
        "busy": ".terminal",
        "check_sheet": ".sheet",
        "columns_of": ".terminal",
        "draw_sheet": ".sheet",
        "make_display": ".display",
        "plot_loss": ".plot",
        "tell": ".terminal",
        "wrapped": ".terminal",
    },
)
