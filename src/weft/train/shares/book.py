"""The record of a run's shares, which a resumed run repeats step by step.

Sums of gradients depend on which rank computes which sample in their last bits. So a run that continues from a
checkpoint uses the shares of its first time, also in the steps after the checkpoint that it repeats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from weft.comm.rank_positions import strides
from weft.config.partitioning import ShareTimeline, fastest_shares
from weft.config.plan import PLAN_FIELDS, Plan
from weft.errors import PlanError
from weft.files import replace_text
from weft.train.engine import Engine
from weft.train.hooks import Progress

#: File of the run folder with the changes of shares.
SHARES = "shares.json"
#: Largest number of recorded changes. A run changes its shares a few times.
_MOST = 10_000


@runtime_checkable
class TimesPasses(Protocol):
    """An engine that can time the passes of a step without an update."""

    def pass_seconds(self, number: int) -> float:
        """Return this rank's seconds for the forward and backward passes of a step. All ranks call it."""
        ...


class ShareBook:
    """The shares of a run by step. All ranks call every method.

    Args:
        path: folder of the run, whose file shares.json rank 0 writes.
        plan: the run's plan.
        global_batch: samples of an optimizer step.
        timeline: the shares by step, which the engine's batches read.
    """

    def __init__(self, path: Path, plan: Plan, global_batch: int, timeline: ShareTimeline):
        self._path, self._plan, self._global_batch, self.timeline = path / SHARES, plan, global_batch, timeline

    def open(self, engine: Engine, progress: Progress) -> list[str]:
        """Restore the shares of earlier starts, and measure the shares if the plan asks for it.

        Returns lines for the log.

        Raises:
            PlanError: if shares=auto cannot be measured by the engine.
        """
        if self._plan.dp_size == 1:
            return []
        found = engine.ranks.on_first(lambda: self._known(progress.shares))
        for step, shares in found or ():
            self.timeline.change(step, tuple(shares))
        if found is None and self._plan.measures_shares:
            self.change(engine, progress, measured_shares(engine, self._plan, self._global_batch, progress.step))
        progress.shares = self._json()
        shares = self.timeline.at(progress.step)
        if not (found or shares):
            return []
        how = "measured" if found is None and self._plan.measures_shares else "of the plan" if found is None else "kept"
        return [f"shares  {self.written(shares)} ({how})"]

    def written(self, shares: Sequence[int]) -> str:
        """Return shares as text, with equal parts as 1+1."""
        return PLAN_FIELDS["shares"].kind.write(tuple(shares) or (1,) * self._plan.dp_size)

    def change(self, engine: Engine, progress: Progress, shares: Sequence[int]) -> None:
        """Use other shares from the next step on, and record them before that step."""
        self.timeline.change(progress.step, tuple(shares))
        progress.shares = self._json()
        engine.ranks.on_first(lambda: replace_text(self._path, json.dumps(progress.shares) + "\n"))

    @property
    def last_change(self) -> int:
        """Steps done before the last recorded change. A resumed run repeats changes after its checkpoint."""
        return self.timeline.changes[-1][0]

    def _json(self) -> dict[str, Any]:
        own = PLAN_FIELDS["shares"].kind.write(self._plan.shares)
        changes = [[step, list(shares)] for step, shares in self.timeline.changes]
        return {"ranks": self._plan.dp_size, "plan": own, "changes": changes}

    def _known(self, saved: object) -> list[list[Any]] | None:
        """Return the changes in shares.json, else those of the checkpoint; None if there are none for this plan."""
        try:
            on_disk = json.loads(self._path.read_text())
        except (OSError, ValueError):
            on_disk = None
        mine = self._json()
        for source in (on_disk, saved):
            changes = _changes(source, mine["ranks"], mine["plan"])
            if changes is not None:
                return changes
        return None


def _changes(source: object, num_ranks: int, plan_shares: str) -> list[list[Any]] | None:
    """Return the recorded changes if they are valid and belong to the same plan, else None."""
    if not isinstance(source, dict):
        return None
    table = cast(dict[str, Any], source)
    changes = table.get("changes")
    if table.get("ranks") != num_ranks or table.get("plan") != plan_shares or not isinstance(changes, list):
        return None
    entries = cast(list[Any], changes)[:_MOST]
    return entries if entries and all(_is_change(one, num_ranks) for one in entries) else None


def _is_change(entry: Any, num_ranks: int) -> bool:
    if not (isinstance(entry, list) and len(cast(list[Any], entry)) == 2):
        return False
    step, shares = cast(list[Any], entry)
    if type(step) is not int or step < 0 or not isinstance(shares, list):
        return False
    parts = cast(list[Any], shares)
    return len(parts) in (0, num_ranks) and all(type(part) is int and 0 < part < 10**9 for part in parts)


def data_rank_of(plan: Plan, rank: int) -> int:
    """Return a global rank's index among the ranks that read different samples."""
    places, index = strides(plan, ("dp_replicate", "dp_shard")), 0
    for name in plan.axis_order:
        if name in ("dp_replicate", "dp_shard"):
            stride, size = places[name]
            index = index * size + rank // stride % size
    return index


def measured_shares(engine: Engine, plan: Plan, global_batch: int, step: int) -> tuple[int, ...]:
    """Measure the passes of one step on all ranks, without an update, and return the fastest shares on all ranks.

    Raises:
        PlanError: if the engine cannot measure.
    """
    if not isinstance(engine, TimesPasses):
        raise PlanError("shares=auto: this engine cannot measure its passes. Write numbers, such as shares=3+1.")
    with engine.pulse.doing("measures the shares of the ranks"):
        seconds = engine.pass_seconds(step)
        answers = engine.ranks.gather(json.dumps(seconds).encode())

        def choose() -> list[int]:
            slowest = [0.0] * plan.dp_size
            for rank, text in enumerate(answers):
                index = data_rank_of(plan, rank)
                slowest[index] = max(slowest[index], float(json.loads(text)))
            # The pass had equal parts, so speeds are inverse to the times.
            speeds = [1.0 / max(one, 1e-9) for one in slowest]
            return list(fastest_shares(global_batch, speeds, plan.microbatches_per_step))

        return tuple(engine.ranks.on_first(choose))
