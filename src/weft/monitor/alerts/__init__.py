"""Alerts over a run's figures, and what people, pages and alerts ask of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "AlertDesk",
    "AlertRule",
    "Companion",
    "HoldPlace",
    "Notice",
    "RUN_ACTIONS",
    "Wish",
    "WishBox",
    "action_line",
    "ask",
    "backtest",
    "rules_of",
    "with_settings",
]

if TYPE_CHECKING:
    from weft.monitor.alerts.alert_desk import AlertDesk, AlertRule, Notice, rules_of
    from weft.monitor.alerts.companion import Companion, backtest
    from weft.monitor.alerts.hold_place import HoldPlace, with_settings
    from weft.monitor.alerts.wishes import RUN_ACTIONS, Wish, WishBox, action_line, ask

__getattr__ = loads(
    __name__,
    {
        "AlertDesk": ".alert_desk",
        "AlertRule": ".alert_desk",
        "Companion": ".companion",
        "HoldPlace": ".hold_place",
        "Notice": ".alert_desk",
        "RUN_ACTIONS": ".wishes",
        "Wish": ".wishes",
        "WishBox": ".wishes",
        "action_line": ".wishes",
        "ask": ".wishes",
        "backtest": ".companion",
        "rules_of": ".alert_desk",
        "with_settings": ".hold_place",
    },
)
