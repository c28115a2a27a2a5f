"""A run's checkpoints: which one it goes on from, which weights may be saved, which of them stay.

Weights count as good once they gave a finite loss: at the step after, or in an evaluation of the same step. A step
whose loss was finite can still have spoilt the weights, and the step after tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from weft.checkpoint import (
    Block,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    set_aside,
    set_unfinished_aside,
    step_in_name,
    verify_checkpoint,
)
from weft.checkpoint.block import joined, whole_piece
from weft.errors import CheckpointError
from weft.spec import RunConfig
from weft.train.engine import GROUPS, Engine
from weft.train.progress import Progress
from weft.train.run.folder import RunFolder
from weft.train.run.rates import rate_change, rate_state

#: Weights beyond this are spoilt: their squares, which norms add up, leave fp32.
_LARGEST_WEIGHT = 1e18


class Keeper:
    """Saves and resumes one run, on all ranks together; the first rank writes."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        engine: Engine,
    ):
        self._folder, self._config, self._engine = folder, config, engine
        self._resumed = 0
        self._good_step: int | None = None

    def resume(self) -> tuple[Progress, list[str]]:
        """Load the newest valid checkpoint, or that of `resume.step`: the first rank looks, the others follow.

        Returns its progress, and lines that say what was found. Raises CheckpointError where there is nothing to
        resume from although there should be.
        """
        step, notes = self._engine.on_first(self._find)
        if step is None:
            return Progress(), notes
        with self._engine.pulse.doing("reads a checkpoint"):
            checkpoint = load_checkpoint(self._folder.checkpoint(step))
        groups = dict.fromkeys((*GROUPS, *checkpoint.groups))
        blocks = ((f"{group}/{name}", block) for group in groups for name, block in checkpoint.blocks(group))
        left_out = self._engine.load((whole_piece(name, block) for name, block in blocks), checkpoint.state)
        notes.append(f"resumed from step {step} ({checkpoint.state['plan']})")
        notes += [*left_out, *rate_change(self._config, step, checkpoint.state.get("rate"))]
        self._resumed = step
        return Progress(**checkpoint.state["progress"]), notes

    def _find(self) -> tuple[int | None, list[str]]:
        """The step to resume from, or None, and what was found on the way; for the first rank."""
        notes = _told_unfinished(set_unfinished_aside(self._folder.checkpoints))
        if self._config.resume.step:
            notes += go_back(self._folder, self._config.resume.step)
        found = newest_checkpoint(self._folder.checkpoints)
        if found is None:
            return None, notes
        return found.step, [*notes, *(f"checkpoint passed over: {one}" for one in found.passed_over)]

    def save(
        self, progress: Progress, is_good: bool, on_saved: Callable[[int, Path], None] | None = None
    ) -> str | None:
        """Gather a checkpoint on the first rank, write it, and drop those no longer wanted.

        is_good: these weights gave a finite loss in an evaluation. Returns why nothing was written, or None; the same
        on all ranks. What is dropped is never the newest one that is known to be good.
        """
        groups = self._gathered()
        if reason := self._engine.on_first(lambda: _fault(groups)):
            return reason
        if self._engine.rank == 0:
            path = self._write(progress, is_good, groups)
            if on_saved:
                on_saved(progress.step, path)
        if is_good:
            self._good_step = progress.step
        self._engine.barrier()
        return None

    def _gathered(self) -> dict[str, dict[str, Block]]:
        """What the engine saves, whole and by group, on the first rank."""
        groups: dict[str, dict[str, Block]] = {group: {} for group in GROUPS}
        for path, block in joined(self._engine.save()).items():
            group, _, name = path.partition("/")
            groups.setdefault(group, {})[name] = block
        return groups

    def _write(self, progress: Progress, is_good: bool, groups: Mapping[str, Mapping[str, Block]]) -> Path:
        position = progress.step * self._config.train.global_batch
        path = save_checkpoint(
            self._folder.checkpoints,
            progress.step,
            groups,
            {
                "progress": asdict(progress),
                "plan": str(self._engine.plan),
                **self._engine.state(),
                "data": {"next_sample": position, "sources": self._engine.batches.state_at(position)},
                # Random numbers of a step are drawn from seeds derived from these: there is no other state.
                "rng": {"seed": self._config.seed, "next_step": progress.step},
                "rate": rate_state(self._config),
                "evaluated": is_good,
            },
        )
        kept = self._config.checkpoint
        best = progress.best_step if kept.keep_best else None
        good = None if is_good else self._last_good(progress.step)
        prune_checkpoints(self._folder.checkpoints, kept.keep, best, spared=() if good is None else (good,))
        return path

    def _last_good(self, before: int) -> int | None:
        """The newest saved step before `before` whose weights gave a finite loss."""
        limit = self._good_step if self._good_step is not None else self._resumed
        steps = [step for step in saved_steps(self._folder) if step < before]
        return max((step for step in steps if step <= limit), default=max(steps, default=None))

    def confirm(self, step: int) -> None:
        """The weights after `step` steps gave a finite loss."""
        self._good_step = step

    def halted(self, first_bad: int) -> str:
        """Where the same command resumes after a stop whose first bad step was `first_bad`, in words; all ranks.

        The checkpoint of the step just before may hold what spoilt it: where there is an older one it is set aside,
        unless an evaluation gave a finite loss.
        """
        return self._engine.on_first(lambda: self._told_halt(first_bad))

    def _told_halt(self, first_bad: int) -> str:
        doubtful = self._set_doubtful_aside(first_bad)
        steps = saved_steps(self._folder)
        if not steps:
            return "it starts anew, since nothing was saved"
        *older, newest = steps
        if newest >= first_bad - 1 and not self._was_evaluated(newest):
            return (
                f"it resumes from step {newest}, the only checkpoint. Where that ends alike, its weights are spoilt: "
                f"start anew with another run.name"
            )
        text = f"it resumes from step {newest}, the last good checkpoint"
        if doubtful:
            text += f" (step {first_bad - 1} may be spoilt and was set aside: checkpoints/step_*.aside)"
        return text + (f"; from an older one with resume.step={older[-1]}" if older else "")

    def _set_doubtful_aside(self, first_bad: int) -> list[Path]:
        steps = saved_steps(self._folder)
        doubtful = {step for step in steps if step >= first_bad - 1 and not self._was_evaluated(step)}
        if not steps or doubtful >= {*steps}:
            return []
        return set_aside(self._folder.checkpoints, lambda one: one.committed and one.step in doubtful)

    def _was_evaluated(self, step: int) -> bool:
        return bool(load_checkpoint(self._folder.checkpoint(step)).state.get("evaluated"))


def saved_steps(folder: RunFolder) -> list[int]:
    """Steps of the committed checkpoints, in rising order."""
    return [step for path in list_checkpoints(folder.checkpoints) if (step := step_in_name(path.name)) is not None]


def go_back(folder: RunFolder, step: int) -> list[str]:
    """Set all checkpoints after `step` aside; lines that say so. CheckpointError where that step is not whole."""
    saved = saved_steps(folder)
    if step not in saved:
        known = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"resume.step={step}: there is no checkpoint of that step. Use one of: {known}.")
    if problems := verify_checkpoint(folder.checkpoint(step)):
        others = ", ".join(str(one) for one in saved if one != step) or "none"
        raise CheckpointError(f"resume.step={step}: {'; '.join(problems)}. Use another one: {others}.")
    moved = set_aside(folder.checkpoints, lambda one: one.step > step)
    if not moved:
        return []
    names = ", ".join(path.name for path in moved)
    return [
        f"resume.step={step}: newer checkpoints are set aside as {names}",
        "        leave resume.step out of the next command, or it goes back once more",
    ]


def _told_unfinished(moved: list[Path]) -> list[str]:
    if not moved:
        return []
    count = f"{len(moved)} unfinished checkpoint{'s' if len(moved) > 1 else ''}"
    steps = ", ".join(str(step_in_name(path.name.split(".")[0])) for path in moved)
    return [
        f"{count} ignored: step {steps}; COMMIT is missing (a crash while saving, or a copy that left files out)",
        f"        kept as {', '.join(path.name for path in moved)} in checkpoints/; delete or repair by hand",
    ]


def _fault(groups: Mapping[str, Mapping[str, Block]]) -> str:
    """What makes these tensors useless to train on from, or ''."""
    weights = [block.largest() for block in groups["model"].values()]
    if not all(map(math.isfinite, weights)):
        return "a weight is not finite"
    if max(weights, default=0.0) > _LARGEST_WEIGHT:
        return f"a weight is beyond {_LARGEST_WEIGHT:g}"
    states_are_finite = all(math.isfinite(block.largest()) for block in groups["optimizer"].values())
    return "" if states_are_finite else "a state of the optimizer is not finite"
