"""The page's server: what it answers, whom it refuses, and how it is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["Access", "Serving", "make_app", "serve"]

if TYPE_CHECKING:
    from weft.watch.server.access import Access
    from weft.watch.server.routes import make_app
    from weft.watch.server.serving import Serving, serve

__getattr__ = loads(
    __name__,
    {"Access": ".access", "Serving": ".serving", "make_app": ".routes", "serve": ".serving"},
)
