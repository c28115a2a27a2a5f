"""A run's checkpoints: which one it goes on from, which weights may be saved, which of them stay.

Weights count as good once they gave a finite loss: at the step after, or in an evaluation of the same step. A step
whose loss was finite can still have spoilt the weights, and the step after tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from weft.checkpoint import (
    SavedPiece,
    Together,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_pieces,
    set_aside,
    set_unfinished_aside,
    step_in_name,
    verify_checkpoint,
)
from weft.checkpoint.arrays import RawArray, block_of
from weft.errors import CheckpointError
from weft.spec import RunConfig
from weft.train.engine import GROUPS, Engine
from weft.train.folder import RunFolder
from weft.train.progress import Progress
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
        self._together = Together(engine.rank, engine.plan.world_size, engine.on_first, engine.gather)
        self._resumed = 0
        self._good_step: int | None = None

    def resume(self) -> tuple[Progress, list[str]]:
        """Load the newest valid checkpoint, or that of `resume.step`: the first rank looks, the others follow.

        Returns its progress, and lines that say what was found. Raises CheckpointError where there is nothing to
        resume from although there should be.
        """
        step, notes = self._find()
        if step is None:
            return Progress(), notes
        with self._engine.pulse.doing("reads a checkpoint"):
            checkpoint = load_checkpoint(self._folder.checkpoint(step), lazily=True)
            left_out = self._engine.load(checkpoint)
        notes.append(f"resumed from step {step} ({checkpoint.state['plan']})")
        notes += [*left_out, *rate_change(self._config, step, checkpoint.state.get("rate"))]
        self._resumed = step
        return Progress(**checkpoint.state["progress"]), notes

    def _find(self) -> tuple[int | None, list[str]]:
        """The step to resume from, or None, and what was found on the way; all ranks, each verifies its share."""
        notes = self._engine.on_first(lambda: _told_unfinished(set_unfinished_aside(self._folder.checkpoints)))
        if step := self._config.resume.step:
            # What is wrong with it the first rank says, before newer ones are set aside.
            self._engine.on_first(lambda: _check_saved(self._folder, step))
            problems = verify_checkpoint(self._folder.checkpoint(step), together=self._together)
            notes += self._engine.on_first(lambda: go_back(self._folder, step, problems))
        found = newest_checkpoint(self._folder.checkpoints, together=self._together)
        if found is None:
            return None, notes
        return found.step, [*notes, *(f"checkpoint passed over: {one}" for one in found.passed_over)]

    def save(
        self, progress: Progress, is_good: bool, on_saved: Callable[[int, Path], None] | None = None
    ) -> str | None:
        """Write a checkpoint, each rank its part, and drop those no longer wanted.

        is_good: these weights gave a finite loss in an evaluation. Returns why nothing was written, or None; the same
        on all ranks. What is dropped is never the newest one that is known to be good.
        """
        pieces = list(self._engine.save())
        answers = self._engine.gather(_fault(pieces).encode())
        if reason := next((answer.decode() for answer in answers if answer), None):
            return reason
        root = self._folder.checkpoints
        path = save_pieces(root, progress.step, pieces, self._state(progress, is_good), self._together, GROUPS)
        self._engine.on_first(lambda: self._drop_old(progress, is_good, path, on_saved))
        if is_good:
            self._good_step = progress.step
        return None

    def _state(self, progress: Progress, is_good: bool) -> dict[str, object]:
        """All but arrays."""
        position = progress.step * self._config.train.global_batch
        return {
            "progress": asdict(progress),
            "plan": str(self._engine.plan),
            **self._engine.state(),
            "data": {"next_sample": position, "sources": self._engine.batches.state_at(position)},
            # Random numbers of a step are drawn from seeds derived from these: there is no other state.
            "rng": {"seed": self._config.seed, "next_step": progress.step},
            "rate": rate_state(self._config),
            "evaluated": is_good,
        }

    def _drop_old(
        self, progress: Progress, is_good: bool, path: Path, on_saved: Callable[[int, Path], None] | None
    ) -> None:
        """On the first rank, after a save."""
        kept = self._config.checkpoint
        best = progress.best_step if kept.keep_best else None
        good = None if is_good else self._last_good(progress.step)
        spared = () if good is None else (good,)
        prune_checkpoints(self._folder.checkpoints, kept.keep, best, spared=spared, whole=progress.step)
        if on_saved:
            on_saved(progress.step, path)

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
        return bool(load_checkpoint(self._folder.checkpoint(step), lazily=True).state.get("evaluated"))


def saved_steps(folder: RunFolder) -> list[int]:
    """Steps of the committed checkpoints, in rising order."""
    return [step for path in list_checkpoints(folder.checkpoints) if (step := step_in_name(path.name)) is not None]


def _check_saved(folder: RunFolder, step: int) -> None:
    """CheckpointError where there is no checkpoint of that step."""
    saved = saved_steps(folder)
    if step not in saved:
        known = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"resume.step={step}: there is no checkpoint of that step. Use one of: {known}.")


def go_back(folder: RunFolder, step: int, problems: Sequence[str]) -> list[str]:
    """Set all checkpoints after `step` aside; lines that say so. CheckpointError where that step has problems."""
    if problems:
        others = ", ".join(str(one) for one in saved_steps(folder) if one != step) or "none"
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


def _fault(pieces: Iterable[SavedPiece]) -> str:
    """What makes this rank's part of a checkpoint useless to train on, or ''."""
    largest = dict.fromkeys(GROUPS, 0.0)
    for piece in pieces:
        if piece.group in largest:
            data = piece.data if isinstance(piece.data, RawArray) else block_of(piece.data)
            value = data.largest()
            largest[piece.group] = value if math.isnan(value) else max(largest[piece.group], value)
            if not math.isfinite(value):
                return "a weight is not finite" if piece.group == "model" else "a state of the optimizer is not finite"
    return f"a weight is beyond {_LARGEST_WEIGHT:g}" if largest["model"] > _LARGEST_WEIGHT else ""
