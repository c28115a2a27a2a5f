"""Where a run's time went: the share that made steps that count, what took the rest, and what it cost."""

from __future__ import annotations

from weft.monitor.account.goodput import Goodput, best_interval, goodput
from weft.monitor.account.price import Price
from weft.monitor.account.time_ledger import CAUSES, PRODUCTIVE, TimeLedger

__all__ = ["CAUSES", "PRODUCTIVE", "Goodput", "TimeLedger", "Price", "best_interval", "goodput"]
