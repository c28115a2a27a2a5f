"""Better shares for a run with a slow rank, from the ranks' own times: reported, or applied between steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence

from weft.config.partitioning import fastest_shares, largest_remainder
from weft.config.rules.share_config_rules import SHARE_CONFIG_RULES
from weft.config.run_config import RunConfig
from weft.train.engine import Engine
from weft.train.hooks import Hook, Progress
from weft.train.shares.book import ShareBook, data_rank_of

#: A change must shorten the step by at least this factor.
_WORTH = 1.03


class Balancer:
    """Proposes shares on rank 0 when a rank becomes slow. With balance=apply, `take` returns them to the loop.

    The monitoring thread calls `advise`; the loop calls the other methods.

    Args:
        engine: the engine, held by a weak reference.
        book: the run's shares by step.
        config: the run's config.
    """

    def __init__(self, engine: Engine, book: ShareBook, config: RunConfig):
        self._engine, self._book, self._plan = weakref.ref(engine), book, engine.plan
        self._applies, self._global_batch = config.balance == "apply", config.train.global_batch
        as_applied = config.model_copy(update={"balance": "apply"})
        self._can_change = self._plan.dp_size > 1 and not any(rule.check(as_applied) for rule in SHARE_CONFIG_RULES)
        self._lock = threading.Lock()
        self._pending: tuple[int, ...] | None = None
        #: Steps up to this one were done with other shares, or repeat recorded ones, so their times are not compared.
        self.since = book.last_change + 1 if book.last_change else 0

    def advise(self, step: int, seconds: Sequence[float | None]) -> Mapping[str, object]:
        """Return fields for the event about a slow rank: better shares, or {} if there are none.

        Args:
            step: the newest step, counted from 1.
            seconds: median seconds of own work per step by rank; None if they are unknown.
        """
        if not self._can_change or any(one is None for one in seconds) or step <= self._book.last_change:
            return {}
        now = self._book.timeline.at(step - 1)
        counts = largest_remainder(self._global_batch, now or (1,) * self._plan.dp_size)
        slowest = [0.0] * self._plan.dp_size
        for rank, own_s in enumerate(seconds):
            index = data_rank_of(self._plan, rank)
            slowest[index] = max(slowest[index], own_s or 0.0)
        if min(slowest) <= 0 or min(counts) <= 0:
            return {}
        speeds = [count / own_s for count, own_s in zip(counts, slowest, strict=True)]
        least = self._plan.microbatches_per_step
        better = fastest_shares(self._global_batch, speeds, least)
        sizes = largest_remainder(self._global_batch, better or (1,) * len(speeds))
        gain = max(slowest) / max(size / speed for size, speed in zip(sizes, speeds, strict=True))
        if gain < _WORTH:
            return {}
        written = self._book.written(better)
        if self._applies:
            self._request(better)
        does = "they are applied between steps" if self._applies else f"use plan shares={written}, or balance=apply"
        return {"shares": written, "advice": f"shares={written} would take {1 / gain:.0%} of the time; {does}"}

    def _request(self, shares: tuple[int, ...]) -> None:
        engine = self._engine()
        if engine is not None:
            with self._lock:
                self._pending = shares
            engine.asks = True

    def take(self) -> list[int] | None:
        """Return the shares to apply, once, or None without a change."""
        with self._lock:
            found, self._pending = self._pending, None
        return None if found is None else list(found)

    def ignore_before(self, step: int) -> None:
        """Do not compare the times of steps up to `step`, counted from 1."""
        self.since = step


class LiveShares:
    """Changes of shares between the steps of a run, for the loop. All ranks construct it.

    Args:
        engine: the engine.
        book: the run's shares by step.
        progress: the run's progress, which checkpoints store.
        balancer: proposes changes, on rank 0; None on the others.
        recorder: receives the changes.
    """

    def __init__(self, engine: Engine, book: ShareBook, progress: Progress, balancer: Balancer | None, recorder: Hook):
        self._engine, self._book, self._progress = engine, book, progress
        self._balancer, self._recorder = balancer, recorder

    def take(self) -> list[int] | None:
        """Return the shares to use from the next step on, on rank 0; None without a change."""
        return None if self._balancer is None else self._balancer.take()

    def change(self, shares: Sequence[int]) -> None:
        """Use the shares from the next step on, and record them. All ranks call it."""
        step = self._progress.step
        self._book.change(self._engine, self._progress, shares)
        if self._balancer is not None:
            self._balancer.ignore_before(step + 1)
        self._recorder.on_shares(step, self._book.written(shares))
