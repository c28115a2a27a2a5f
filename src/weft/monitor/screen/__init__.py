"""What a person sees while a run goes on: the display, lines of text, and the curve of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Artist",
    "Display",
    "LastingStream",
    "busy",
    "columns_of",
    "make_display",
    "plot_loss",
    "tell",
    "wrapped",
]

if TYPE_CHECKING:
    from weft.monitor.screen.artist import Artist
    from weft.monitor.screen.display import Display, make_display
    from weft.monitor.screen.plot import plot_loss
    from weft.monitor.screen.terminal import LastingStream, busy, columns_of, tell, wrapped

__getattr__ = loads(
    __name__,
    {
        "Artist": ".artist",
        "Display": ".display",
        "LastingStream": ".terminal",
        "busy": ".terminal",
        "columns_of": ".terminal",
        "make_display": ".display",
        "plot_loss": ".plot",
        "tell": ".terminal",
        "wrapped": ".terminal",
    },
)
