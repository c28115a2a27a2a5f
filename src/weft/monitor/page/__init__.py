"""One page to look at, and the same in a terminal: runs, read from their folders while they train and afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["RunIndex", "Serving", "Shelf", "ledger_lines", "serve", "show_top"]

if TYPE_CHECKING:
    from weft.monitor.page.index import RunIndex, Shelf
    from weft.monitor.page.server import Serving, serve
    from weft.monitor.page.top import ledger_lines, show_top

__getattr__ = loads(
    __name__,
    {
        "RunIndex": ".index",
        "Serving": ".server",
        "Shelf": ".index",
        "ledger_lines": ".top",
        "serve": ".server",
        "show_top": ".top",
    },
)
