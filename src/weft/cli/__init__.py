"""The `weft` command: one thin file per verb. Nothing here is imported before its verb is typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "main",
]

if TYPE_CHECKING:
    from weft.cli.app import main

__getattr__ = loads(
    __name__,
    {
        "main": ".app",
    },
)
