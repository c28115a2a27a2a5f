"""Checkpoints of a run of `weft train`: the one it resumes from, its saves, and its copies in memory."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict

from weft.checkpoint.folders import RankGroup, step_in_name
from weft.checkpoint.load import Found, list_checkpoints, load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.object_store import Location
from weft.checkpoint.peer_copies import CopyHome
from weft.checkpoint.prune import set_aside, set_unfinished_aside
from weft.checkpoint.save import SavedSlice, save_slices
from weft.config.run_config import RunConfig
from weft.errors import CheckpointError, UnfitError
from weft.train.batches.batching_by_cost import StepBorders
from weft.train.engine import GROUPS, Engine
from weft.train.folder import RunFolder
from weft.train.hooks import Progress, SaveEnd
from weft.train.loop.callbacks import Checkpoints
from weft.train.loop.checkpointer import Checkpointer, Retention, Save, refuse_unfit, steps_in
from weft.train.loop.cpu_evaluation import CpuEvaluator
from weft.train.loop.peer_copies import Copies
from weft.train.loop.reporting import rate_change
from weft.units import counted

#: Maximum number of skipped checkpoints in the log.
_MOST_SHOWN = 8
#: A rank's share of up to this many bytes is verified before the first step, in a second or less.
_VERIFIED_FIRST = 256 * 2**20


class RunCheckpoints(Checkpoints):
    """Saves checkpoints of a run on all ranks together, in the background if configured.

    Args:
        folder: the run's folder.
        config: the run's config.
        engine: the engine whose state is saved.
        home: server of in-memory copies on this host.
        elsewhere: function that takes the step of the run's newest checkpoint, and returns another location to resume
            from or None. All ranks call it.
        aside: on rank 0, evaluates checkpoints on the CPU, which stay until then.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        engine: Engine,
        home: CopyHome | None = None,
        elsewhere: Callable[[int | None], Location | None] = lambda own: None,
        aside: CpuEvaluator | None = None,
    ):
        self._config, self._engine = config, engine
        self._keeps = (lambda step: False) if aside is None else aside.keeps
        self._in_background, self._channel = config.checkpoint.background, engine.background_ranks()
        self._checkpointer = Checkpointer(engine.ranks)
        self._retention = Retention(folder.checkpoints, config.checkpoint)
        self._ends = deque[SaveEnd]()  # the thread of a save appends to it
        self._num_reported = 0
        self._copies: Copies | None = None
        notes: list[str] = []
        if every := config.checkpoint.peer_every:
            self._copies, notes = Copies.open(home, engine.ranks, every, engine.reports.checkpoint_bytes)
        self._start = StartingPoint(folder, config, engine, self._copies, elsewhere, notes)

    def resume(self) -> tuple[Progress, list[str]]:
        """Load the checkpoint to start from, and return the progress and lines for the log. See `StartingPoint`."""
        progress, notes = self._start.resume(self._ends)
        self._retention.confirm(progress.step)
        return progress, notes

    def moved(self, before: int, step: int) -> None:
        """Set checkpoints after `step` aside (rename them) if training goes back. All ranks call it."""
        if step < before:
            self._finish()
            self._retention.good_step = min(self._retention.good_step, step)
            root = self._retention.root
            self._engine.ranks.on_first(lambda: bool(set_aside(root, lambda one: one.step > step)))

    def save(self, progress: Progress, is_good: bool, *, last: bool = False) -> str | None:
        """Begin to write a checkpoint. Each rank writes its part, and `ended` returns the outcome.

        Waits for the previous save, or returns why this one is skipped; all ranks do the same.

        Args:
            progress: progress to save.
            is_good: True if an evaluation of these weights gave a finite loss.
            last: True after the last step.

        Raises:
            CheckpointError: if the previous save failed, or if the checkpoint that the run resumed from is damaged.
        """
        settings = self._config.checkpoint
        if not last and settings.busy == "skip" and self._engine.ranks.on_first(lambda: self._checkpointer.is_busy):
            return "the checkpoint before it is still being written (checkpoint.busy=skip)"
        best = progress.best_step if settings.keep_best else None

        def saved(step: int) -> None:
            if is_good:
                self.confirm(step)
            if self._channel.rank == 0:
                try:
                    self._retention.prune(step, best, self._keeps)
                except CheckpointError as error:
                    self._ends.append(SaveEnd(step, note=str(error)))

        self._begin(self._retention.root, progress, is_good, saved)
        return None

    def copy(self, progress: Progress) -> bool:
        """Begin to copy the state into memory, and return False if a save is running. `ended` returns the outcome."""
        copies = self._copies
        if copies is None:
            return True
        if self._engine.ranks.on_first(lambda: self._checkpointer.is_busy):
            return False

        def saved(step: int) -> None:
            if self._channel.rank == 0:
                copies.keep_only(step)

        self._begin(copies.root, progress, False, saved, is_copy=True)
        return True

    def _begin(
        self, root: Location, progress: Progress, is_good: bool, saved: Callable[[int], None], is_copy: bool = False
    ) -> None:
        self._finish()
        self._start.prove()
        began, step = time.perf_counter(), progress.step
        state, slices = _run_state(self._engine, self._config, progress, is_good), self._slices()

        look = functools.partial(refuse_unfit, self._engine.state.buffers)

        def write() -> Location:
            path = save_slices(root, step, slices, state, self._channel, GROUPS, look)
            saved(step)
            return path

        settings = self._config.checkpoint
        retries, holds = (0, False) if is_copy else (settings.retries, settings.on_failure == "hold")
        save, self._num_reported = Save(step, write, retries, holds, is_copy), 0
        self._checkpointer.begin(save, in_background=self._in_background)
        save.stall_s = time.perf_counter() - began

    def ended(self, wait: bool = False) -> list[SaveEnd]:
        """Return the outcomes of saves since the last call. With `wait`, wait for the running one too.

        If a save failed after all retries, all ranks are asked to stop. Its CheckpointError is raised once it is waited
        for.
        """
        save = self._checkpointer.save
        if save is not None and not wait:
            failures = save.failures[self._num_reported :]
            self._num_reported += len(failures)
            self._ends += [SaveEnd(save.step, note=f"{one} Weft tries again.") for one in failures if not save.error]
            if save.is_over and not save.is_copy and save.error is not None and not isinstance(save.error, UnfitError):
                self._engine.wants_stop = True
            elif save.is_over or (save.blocks_training and not failures):
                self._finish()
        elif save is not None:
            self._finish()
        return [self._ends.popleft() for _ in range(len(self._ends))]

    def drop_copies(self) -> None:
        """Delete the copies in memory, so that the next start resumes from disk. All ranks call it."""
        if self._copies is not None:
            self._engine.ranks.on_first(self._copies.clear)

    def leave(self, error: Exception) -> None:
        """Wait briefly for the running save after an error, because committing needs all ranks."""
        self._checkpointer.leave(error)

    def confirm(self, step: int) -> None:
        """Record that the weights after `step` steps gave a finite loss."""
        self._retention.confirm(step)

    def halted(self, first_bad: int) -> str:
        """Set doubtful checkpoints aside as `Retention.halted` does, and return its message about the restart.

        Copies in memory are deleted. All ranks call it.
        """

        def describe() -> str:
            if self._copies is not None:
                self._copies.clear()
            return self._retention.halted(first_bad)

        return self._engine.ranks.on_first(describe)

    def _finish(self) -> None:
        if self._checkpointer.save is not None:
            with self._engine.pulse.doing("writes a checkpoint"):
                end = self._checkpointer.finish()
            assert end is not None
            self._ends.append(end)

    def _slices(self) -> list[SavedSlice]:
        if self._in_background:
            try:
                return list(self._engine.state.slices(aside=True))
            except CheckpointError as error:
                self._in_background = False
                self._ends.append(SaveEnd(0, note=f"{error} Meanwhile training waits for each save."))
        return list(self._engine.state.slices())


def _run_state(engine: Engine, config: RunConfig, progress: Progress, is_good: bool) -> dict[str, object]:
    position = StepBorders.of(engine.batches, config.train.global_batch).first(progress.step)
    return {
        "progress": asdict(progress),
        "plan": str(engine.plan),
        **engine.state.values(),
        "data": {"next_sample": position, "sources": engine.batches.state_at(position)},
        # Random numbers of a step derive from these seeds, so there is no other state.
        "rng": {"seed": config.seed, "next_step": progress.step},
        # Settings that determine the learning rate of every step.
        "rate": {
            "steps": config.train.steps,
            "lr": config.optimizer.lr,
            "schedule": config.schedule.model_dump(mode="json"),
        },
        "evaluated": is_good,
    }


class StartingPoint:
    """Finds, loads and verifies the checkpoint that a run resumes from. All ranks call every method."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        engine: Engine,
        copies: Copies | None,
        elsewhere: Callable[[int | None], Location | None],
        notes: Sequence[str] = (),
    ):
        self._root, self._config, self._engine = folder.checkpoints, config, engine
        self._copies, self._elsewhere, self._notes = copies, elsewhere, notes
        self._step = 0
        self._digests: BackgroundDigests | None = None

    def resume(self, ends: deque[SaveEnd]) -> tuple[Progress, list[str]]:
        """Load the newest valid checkpoint, or the one of `resume.step`. Rank 0 searches and the others use its result.

        Returns the progress and lines for the log.

        Args:
            ends: outcomes of saves; a message is added if the checkpoint later turns out to be damaged.

        Raises:
            CheckpointError: if the checkpoint of `resume.step` is missing or damaged, or if all are damaged.
        """
        path, notes = self._copied()
        is_copy = path is not None
        if path is None:
            found, is_verified, more = self._find()
            notes += more
            path = self._elsewhere(None if found is None else found.step)
            if path is None and found is not None:
                path = found.path
                if not is_verified:
                    self._digests = self._verify_later(found, ends)
            if path is None:
                return Progress(), notes
        with self._engine.pulse.doing("reads a checkpoint"):
            checkpoint = load_checkpoint(path, lazily=True)
            left_out = self._engine.state.load(checkpoint)
        self._step = step = checkpoint.step
        notes.append(f"resumed from step {step}{' from memory' if is_copy else ''} ({checkpoint.state['plan']})")
        notes += [*left_out, *rate_change(self._config, step, checkpoint.state.get("rate"))]
        return Progress(**checkpoint.state["progress"]), notes

    def _copied(self) -> tuple[Location | None, list[str]]:
        """Return the in-memory copy to resume from or None, and lines for the log.

        With `resume.step`, all copies are deleted.
        """
        if self._copies is None:
            return None, [*self._notes]
        if self._config.resume.step:
            self._engine.ranks.on_first(self._copies.clear)
            return None, []
        saved = self._engine.ranks.on_first(lambda: max(steps_in(self._root), default=None))
        return self._copies.newest(saved)

    def _find(self) -> tuple[Found | None, bool, list[str]]:
        """Return the checkpoint to resume from or None, True if it is already verified, and lines for the log.

        Sets aside (renames) unfinished and damaged checkpoints, and those after `resume.step`.
        """
        root, ranks, on_first = self._root, self._engine.ranks, self._engine.ranks.on_first
        notes = on_first(lambda: _unfinished_message(set_unfinished_aside(root)))
        if step := self._config.resume.step:
            # Rank 0 raises errors before newer checkpoints are set aside.
            path = root / on_first(lambda: _name_of(root, step))
            problems = verify_checkpoint(path, together=ranks)
            notes += on_first(lambda: _go_back(root, step, problems))
        verify = self._config.checkpoint.verify
        found = newest_checkpoint(root, verify=verify == "start", together=ranks)
        if found is None:
            return None, False, notes
        path, limit = found.path, _VERIFIED_FIRST * ranks.number
        if is_quick := verify == "auto" and on_first(
            lambda: sum(load_checkpoint(path, lazily=True).files.values()) <= limit
        ):
            found = newest_checkpoint(root, together=ranks)
            assert found is not None
        newest, is_verified = found, is_quick or verify == "start" or bool(self._config.resume.step)
        return found, is_verified, [*notes, *on_first(lambda: _set_skipped_aside(root, newest))]

    def _verify_later(self, found: Found, ends: deque[SaveEnd]) -> BackgroundDigests:
        def stop(problems: list[str]) -> None:
            """Request a stop because the checkpoint is damaged. Runs in a thread of one rank."""
            ends.extend(
                SaveEnd(found.step, note=f"step {found.step}, which the run went on from: {one}") for one in problems
            )
            self._engine.wants_stop = True

        return BackgroundDigests(found.path, self._engine.rank, self._engine.ranks.number, stop)

    def prove(self) -> None:
        """Verify the resumed checkpoint before the first save. All ranks raise CheckpointError if it is damaged.

        The damaged checkpoint is then set aside. Nothing derived from it was saved.
        """
        digests, self._digests = self._digests, None
        if digests is None:
            return
        with self._engine.pulse.doing("waits for the digests of its checkpoint"):
            found = json.dumps(digests.wait()).encode()
        answers = self._engine.ranks.gather(found)
        self._engine.ranks.on_first(lambda: self._refuse([one for text in answers for one in json.loads(text)]))

    def _refuse(self, problems: list[str]) -> None:
        if not problems:
            return
        set_aside(self._root, lambda one: one.step == self._step)
        steps = steps_in(self._root)
        goes_on = (
            f"it resumes from step {steps[-1]}" if steps else "it starts from the beginning, because no other was saved"
        )
        raise CheckpointError(
            f"checkpoint of step {self._step}, which the run went on from: {'; '.join(dict.fromkeys(problems))}. "
            f"It is set aside, and no step since is saved. Run the command again: {goes_on}."
        )


def _name_of(root: Location, step: int) -> str:
    """Return the folder name of a step's checkpoint. Raise CheckpointError if no checkpoint of that step exists."""
    saved = {step_in_name(path.name): path.name for path in list_checkpoints(root)}
    if step not in saved:
        known = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"resume.step={step}: there is no checkpoint of that step. Use one of: {known}.")
    return saved[step]


def _go_back(root: Location, step: int, problems: Sequence[str]) -> list[str]:
    """Set all checkpoints after `step` aside (rename them), and return lines for the log.

    Raise CheckpointError if the checkpoint of `step` has problems.
    """
    if problems:
        others = ", ".join(str(one) for one in steps_in(root) if one != step) or "none"
        raise CheckpointError(f"resume.step={step}: {'; '.join(problems)}. Use another one: {others}.")
    moved = set_aside(root, lambda one: one.step > step)
    if not moved:
        return []
    names = ", ".join(path.name for path in moved)
    return [
        f"resume.step={step}: newer checkpoints are set aside as {names}",
        "        leave resume.step out of the next command, or the run goes back again",
    ]


def _set_skipped_aside(root: Location, found: Found) -> list[str]:
    skipped = found.passed_over
    paths = {one.path for one in skipped}
    moved = set_aside(root, lambda one: one.committed and one.path in paths) if paths else []
    lines = [f"skipped checkpoint: {one}" for one in skipped[:_MOST_SHOWN]]
    if more := len(skipped) - len(lines):
        lines.append(f"skipped checkpoint: {more} more, down to {skipped[-1].path.name}")
    if moved:
        names = ", ".join(path.name for path in moved[-_MOST_SHOWN:])
        more = f" and {len(moved) - _MOST_SHOWN} more" if len(moved) > _MOST_SHOWN else ""
        lines.append(f"        kept as {names}{more} in checkpoints/; delete or repair by hand")
    return lines


def _unfinished_message(moved: list[Location]) -> list[str]:
    if not moved:
        return []
    count = counted(len(moved), "unfinished checkpoint")
    steps = ", ".join(str(step_in_name(path.name.split(".")[0])) for path in moved)
    return [
        f"{count} ignored: step {steps}; COMMIT is missing (a crash while saving, or a copy that left files out)",
        f"        kept as {', '.join(path.name for path in moved)} in checkpoints/; delete or repair by hand",
    ]


# Background verification of the resumed checkpoint. Each rank verifies its share.


class BackgroundDigests:
    """Verifies a rank's share of a checkpoint in a thread. `problems` is complete after `wait`.

    Args:
        found: called in the thread with the problems, if there are any.
    """

    def __init__(self, path: Location, rank: int, number: int, found: Callable[[list[str]], None]):
        self.path, self.problems, self._found = path, list[str](), found
        # The thread must not communicate, so each rank verifies its share alone.
        self._share = RankGroup(rank, number)
        self._thread = threading.Thread(target=self._run, name="weft-digests", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.problems = verify_checkpoint(self.path, together=self._share)
        if self.problems:
            self._found(self.problems)

    def wait(self) -> list[str]:
        """Wait for the digests, and return the problems in this rank's share."""
        self._thread.join()
        return self.problems
