"""The page's server: what it answers, whom it refuses, and how it is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["Serving", "serve"]

if TYPE_CHECKING:
    from weft.monitor.page.server.serving import Serving, serve

__getattr__ = loads(
    __name__,
    {"Serving": ".serving", "serve": ".serving"},
)
