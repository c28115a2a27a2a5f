"""Alerts over a run's figures, and what people, pages and alerts ask of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "RUN_ACTIONS",
    "Wish",
    "WishBox",
    "action_line",
    "ask",
]

if TYPE_CHECKING:
    from weft.monitor.alerts.wishes import RUN_ACTIONS, Wish, WishBox, action_line, ask

__getattr__ = loads(
    __name__,
    {
        "RUN_ACTIONS": ".wishes",
        "Wish": ".wishes",
        "WishBox": ".wishes",
        "action_line": ".wishes",
        "ask": ".wishes",
    },
)
