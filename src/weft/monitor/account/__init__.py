"""Where a run's time went: the share that made steps that count, what took the rest, and what it cost."""

from __future__ import annotations

from weft.monitor.account.goodput import Goodput, best_interval, goodput
from weft.monitor.account.ledger import CAUSES, PRODUCTIVE, Ledger
from weft.monitor.account.price import Price

__all__ = ["CAUSES", "PRODUCTIVE", "Goodput", "Ledger", "Price", "best_interval", "goodput"]
