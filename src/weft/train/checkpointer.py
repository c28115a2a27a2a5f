"""Saving and resuming a run: background saves with retries, and one checkpointer per run."""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict

from weft.checkpoint.folders import RankGroup, step_in_name
from weft.checkpoint.load import Found, list_checkpoints, load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.object_store import Location
from weft.checkpoint.peer_copies import CopyHome
from weft.checkpoint.prune import prune_checkpoints, set_aside, set_unfinished_aside
from weft.checkpoint.safetensors_files import RawArray
from weft.checkpoint.save import SavedSlice, save_slices
from weft.config.run_config import RunConfig
from weft.errors import CheckpointError, CommError, UnfitError
from weft.train.batching_by_cost import StepBorders
from weft.train.engine import GROUPS, Engine
from weft.train.folder import RunFolder
from weft.train.hooks import Progress, SaveEnd
from weft.train.peer_copies import Copies
from weft.train.reporting import rate_change, rate_state
from weft.units import counted

#: Seconds before a failed save is retried: the first pause, and the maximum.
_PAUSE_S = (1.0, 30.0)
#: Seconds that a failing rank waits for a running save, normally and if another rank is gone.
_LAST_WAIT_S, _LAST_WAIT_ALONE_S = 30.0, 0.5


class Save:
    """One save on one rank. All ranks raise the same errors, so all retry together.

    Args:
        step: optimizer steps done.
        act: writes and commits the checkpoint with all ranks, and returns its path.
        retries: number of retries after a CheckpointError.
        holds: keep retrying after that, while training waits.
        is_copy: the save goes to memory. Training continues without it if it fails.
    """

    def __init__(
        self, step: int, act: Callable[[], Location], retries: int = 0, holds: bool = False, is_copy: bool = False
    ):
        self.step, self.is_copy = step, is_copy
        self._act, self._retries, self._holds = act, retries, holds
        self._began = time.perf_counter()
        self._over = threading.Event()
        self._given_up = threading.Event()
        self._path: Location | None = None
        self._durable_s = 0.0
        #: Seconds that training waited for this save.
        self.stall_s = 0.0
        #: Error messages of the failed tries.
        self.failures: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Write the checkpoint in this thread. `end` raises a failure later."""
        try:
            self._path = self._tried()
        except Exception as error:
            self.error = error
        finally:
            self._durable_s = time.perf_counter() - self._began
            self._over.set()

    def start(self) -> None:
        """Write the checkpoint in a daemon thread. A save that ends without COMMIT is never valid."""
        threading.Thread(target=self.run, name="weft-save", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True if the save has ended, with or without success."""
        return self._over.is_set()

    @property
    def is_held(self) -> bool:
        """True if training waits until the save succeeds."""
        return self._holds and not self.is_over and len(self.failures) > self._retries

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the save has ended. The wait counts as its stall."""
        began = time.perf_counter()
        self._over.wait(seconds)
        self.stall_s += time.perf_counter() - began

    def leave(self, error: BaseException) -> None:
        """Wait for the save a last time after an error that ends this rank, because committing needs all ranks.

        The wait is short if another rank is gone or silent.
        """
        self._given_up.set()
        is_alone = isinstance(error, CommError) and not error.peer_ends
        self.wait(_LAST_WAIT_ALONE_S if is_alone else _LAST_WAIT_S)

    def end(self) -> SaveEnd:
        """Return the outcome of the save, or raise its error."""
        if self.error is not None and self.is_copy:
            return SaveEnd(self.step, note=f"step {self.step} is not copied to memory: {self.error}")
        if isinstance(self.error, UnfitError):
            return SaveEnd(self.step, why=str(self.error))
        if self.error is not None:
            raise self.error
        return SaveEnd(self.step, self._path, "", "", self.stall_s, self._durable_s, self.is_copy)

    def _tried(self) -> Location:
        pause = _PAUSE_S[0]
        while True:
            try:
                return self._act()
            except UnfitError:
                raise
            except CheckpointError as error:
                self.failures.append(str(error))
                if len(self.failures) > self._retries and not self._holds:
                    raise
                if self._given_up.wait(pause):
                    raise
                pause = min(2 * pause, _PAUSE_S[1])


# Checkpoints of a run: resuming, validation of weights, retention.

#: Larger weights are unusable, because their squares overflow fp32 in norms.
_LARGEST_WEIGHT = 1e18
#: Maximum number of skipped checkpoints in the log.
_MOST_SHOWN = 8


class Keeper:
    """Saves and resumes one run on all ranks together. At most one save is in flight, in the background if configured.

    Args:
        folder: the run's folder.
        config: the run's config.
        engine: the engine whose state is saved.
        home: storage for copies in this host's memory.
        elsewhere: returns the checkpoint to resume from instead of the run's newest one, or None for the run's own. Its
            argument is the step of the newest one. All ranks call it.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        engine: Engine,
        home: CopyHome | None = None,
        elsewhere: Callable[[int | None], Location | None] = lambda own: None,
    ):
        self._elsewhere = elsewhere
        self._folder, self._config, self._engine = folder, config, engine
        self._background, self._talk = config.checkpoint.background, engine.store_channel()
        self._save: Save | None = None
        self._ends = deque[SaveEnd]()  # the thread of a save appends to it
        self._num_told = 0
        self._joint_parts = RankGroup(engine.rank, engine.plan.world_size, engine.on_first, engine.gather)
        self._resumed = 0
        self._digests: DigestsBehind | None = None
        self._good_step = 0
        self._copies: Copies | None = None
        self._notes: list[str] = []
        if every := config.checkpoint.peer_every:
            self._copies, self._notes = Copies.open(home, self._joint_parts, every, engine.checkpoint_bytes)

    def resume(self) -> tuple[Progress, list[str]]:
        """Load the newest valid checkpoint, or the one of `resume.step`. Rank 0 searches and the others use its result.

        Returns the progress and lines for the log.

        Raises:
            CheckpointError: if a required checkpoint is missing.
        """
        path, notes = self._copied()
        if from_disk := path is None:
            step, more = self._find()
            path = self._elsewhere(step)
            if path is not None:
                self._digests = None
            elif step is not None:
                path = self._folder.checkpoint(step)
            notes += more
            if path is None:
                return Progress(), notes
        with self._engine.pulse.doing("reads a checkpoint"):
            checkpoint = load_checkpoint(path, lazily=True)
            left_out = self._engine.load(checkpoint)
        self._resumed = step = checkpoint.step
        where = "" if from_disk else " from memory"
        notes.append(f"resumed from step {step}{where} ({checkpoint.state['plan']})")
        notes += [*left_out, *rate_change(self._config, step, checkpoint.state.get("rate"))]
        return Progress(**checkpoint.state["progress"]), notes

    def moved(self, before: int, step: int) -> None:
        """Set checkpoints after `step` aside if training continues from an earlier step. All ranks call it."""
        if step < before:
            self._finish()
            self._good_step = min(self._good_step, step)
            self._engine.on_first(lambda: bool(set_aside(self._folder.checkpoints, lambda one: one.step > step)))

    def _copied(self) -> tuple[Location | None, list[str]]:
        """Return the in-memory copy to resume from, or None, and lines for the log. All ranks call it."""
        if self._copies is None:
            return None, [*self._notes]
        if self._config.resume.step:
            self._engine.on_first(self._copies.clear)
            return None, []
        saved = self._engine.on_first(lambda: max(saved_steps(self._folder), default=None))
        return self._copies.newest(saved)

    def _find(self) -> tuple[int | None, list[str]]:
        """Return the step to resume from, or None, and lines for the log.

        All ranks call it, and each verifies its share.
        """
        notes = self._engine.on_first(lambda: _unfinished_message(set_unfinished_aside(self._folder.checkpoints)))
        if step := self._config.resume.step:
            # Rank 0 reports problems before newer checkpoints are set aside.
            self._engine.on_first(lambda: _check_saved(self._folder, step))
            problems = verify_checkpoint(self._folder.checkpoint(step), together=self._joint_parts)
            notes += self._engine.on_first(lambda: go_back(self._folder, step, problems))
        verify, number = self._config.checkpoint.verify, self._joint_parts.number
        found = newest_checkpoint(self._folder.checkpoints, verify=verify == "start", together=self._joint_parts)
        if found is None:
            return None, notes
        path = found.path
        if verify == "auto" and self._engine.on_first(lambda: DigestsBehind.are_quick(path, number)):
            found = newest_checkpoint(self._folder.checkpoints, together=self._joint_parts)
            assert found is not None
        elif verify != "start" and not self._config.resume.step:
            self._digests = DigestsBehind(
                path, self._joint_parts.rank, number, functools.partial(self._stop, found.step)
            )
        newest = found
        return found.step, [*notes, *self._engine.on_first(lambda: _set_skipped_aside(self._folder, newest))]

    def save(self, progress: Progress, is_good: bool, *, last: bool = False) -> str | None:
        """Begin to write a checkpoint. Each rank writes its part, and `ended` returns the outcome.

        Waits for the previous save, or returns why this one is skipped, with the same result on all ranks. Retention
        never deletes the newest checkpoint that is known to be good.

        Args:
            progress: progress to save.
            is_good: an evaluation of these weights gave a finite loss.
            last: no other step follows.

        Raises:
            CheckpointError: if the previous save failed.
        """
        if not last and self._config.checkpoint.busy == "skip" and self._engine.on_first(lambda: self._is_busy()):
            return "the checkpoint before it is still being written (checkpoint.busy=skip)"
        self._finish()
        self._prove_start()
        began = time.perf_counter()
        step, state, pieces = progress.step, self._state(progress, is_good), self._pieces()
        best = progress.best_step if self._config.checkpoint.keep_best else None

        def write() -> Location:
            path = save_slices(self._folder.checkpoints, step, pieces, state, self._talk, GROUPS, refuse_unfit)
            if is_good:
                self.confirm(step)
            if self._talk.rank == 0:
                self._drop_old(step, best)
            return path

        settings = self._config.checkpoint
        self._begin(Save(step, write, settings.retries, settings.on_failure == "hold"), began)
        return None

    def copy(self, progress: Progress) -> bool:
        """Begin to copy the state into memory, and return False if a save is running. `ended` returns the outcome."""
        copies = self._copies
        if copies is None:
            return True
        if self._engine.on_first(self._is_busy):
            return False
        self._finish()
        self._prove_start()
        began = time.perf_counter()
        step, state, pieces = progress.step, self._state(progress, False), self._pieces()

        def write() -> Location:
            path = save_slices(copies.root, step, pieces, state, self._talk, GROUPS, refuse_unfit)
            if self._talk.rank == 0:
                copies.keep_only(step)
            return path

        self._begin(Save(step, write, is_copy=True), began)
        return True

    def _begin(self, save: Save, began: float) -> None:
        self._save, self._num_told = save, 0
        if self._background:
            save.start()
        else:
            save.run()
        save.stall_s = time.perf_counter() - began

    def ended(self, wait: bool = False) -> list[SaveEnd]:
        """Return the outcomes of saves since the last call. With `wait`, wait for the running one too.

        If a save failed for good, all ranks are asked to stop. Its CheckpointError is raised once it is waited for.
        """
        save = self._save
        if save is not None and not wait:
            failures = save.failures[self._num_told :]
            self._num_told += len(failures)
            self._ends += [SaveEnd(save.step, note=f"{one} Weft tries again.") for one in failures if not save.error]
            if save.is_over and not save.is_copy and save.error is not None and not isinstance(save.error, UnfitError):
                self._engine.wants_stop = True
            elif save.is_over or (save.is_held and not failures):
                self._finish()
        elif save is not None:
            self._finish()
        return [self._ends.popleft() for _ in range(len(self._ends))]

    def drop_copies(self) -> None:
        """Delete the copies in memory, so that the next start resumes from disk. All ranks call it."""
        if self._copies is not None:
            self._engine.on_first(self._copies.clear)

    def leave(self, error: Exception) -> None:
        """Wait briefly for the running save after an error, because committing needs all ranks."""
        if self._save is not None:
            self._save.leave(error)

    def _stop(self, step: int, problems: list[str]) -> None:
        """Request a stop because the resumed checkpoint is damaged. Runs in a thread of one rank."""
        self._ends += [SaveEnd(step, note=f"step {step}, which the run went on from: {one}")
                       for one in problems]  # fmt: skip
        self._engine.wants_stop = True

    def _prove_start(self) -> None:
        """Verify the resumed checkpoint before the first save. All ranks raise CheckpointError if it is damaged.

        The damaged checkpoint is then set aside. Nothing derived from it was saved.
        """
        digests, self._digests = self._digests, None
        if digests is None:
            return
        with self._engine.pulse.doing("waits for the digests of its checkpoint"):
            found = json.dumps(digests.wait()).encode()
        answers = self._joint_parts.gather(found)
        self._engine.on_first(lambda: self._refuse_start([one for text in answers for one in json.loads(text)]))

    def _refuse_start(self, problems: list[str]) -> None:
        if not problems:
            return
        set_aside(self._folder.checkpoints, lambda one: one.step == self._resumed)
        steps = saved_steps(self._folder)
        goes_on = (
            f"it resumes from step {steps[-1]}"
            if steps
            else ("it starts from the beginning, because no other was saved")
        )
        raise CheckpointError(
            f"checkpoint of step {self._resumed}, which the run went on from: {'; '.join(dict.fromkeys(problems))}. "
            f"It is set aside, and no step since is saved. Run the command again: {goes_on}."
        )

    def _is_busy(self) -> bool:
        return self._save is not None and not self._save.is_over

    def _finish(self) -> None:
        """Wait for the running save and record its outcome."""
        save, self._save = self._save, None
        if save is not None:
            with self._engine.pulse.doing("writes a checkpoint"):
                save.wait()
            self._ends.append(save.end())

    def _pieces(self) -> list[SavedSlice]:
        """Return the slices that this rank writes, as copies if training continues meanwhile."""
        if self._background:
            try:
                return list(self._engine.save(aside=True))
            except CheckpointError as error:
                self._background = False
                self._ends.append(SaveEnd(0, note=f"{error} Meanwhile training waits for each save."))
        return list(self._engine.save())

    def _state(self, progress: Progress, is_good: bool) -> dict[str, object]:
        """Return the checkpoint's state except arrays."""
        position = StepBorders.of(self._engine.batches, self._config.train.global_batch).first(progress.step)
        return {
            "progress": asdict(progress),
            "plan": str(self._engine.plan),
            **self._engine.state(),
            "data": {"next_sample": position, "sources": self._engine.batches.state_at(position)},
            # Random numbers of a step derive from these seeds, so there is no other state.
            "rng": {"seed": self._config.seed, "next_step": progress.step},
            "rate": rate_state(self._config),
            "evaluated": is_good,
        }

    def _drop_old(self, step: int, best: int | None) -> None:
        """Delete checkpoints that retention does not keep, on rank 0 after a save. Failures are only logged."""
        kept = self._config.checkpoint
        good = self._last_good(step)
        spared = set() if good is None else {good}
        if kept.keep_every:
            spared |= {one for one in saved_steps(self._folder) if one % kept.keep_every == 0}
        try:
            prune_checkpoints(self._folder.checkpoints, kept.keep, best, spared=spared, whole=step)
        except CheckpointError as error:
            self._ends.append(SaveEnd(step, note=str(error)))

    def _last_good(self, newest: int) -> int | None:
        """Return the newest saved step whose weights gave a finite loss, or else the second newest."""
        limit = max(self._good_step, self._resumed)
        steps = [step for step in saved_steps(self._folder) if step <= newest]
        return max((step for step in steps if step <= limit), default=max(steps[:-1], default=None))

    def confirm(self, step: int) -> None:
        """Record that the weights after `step` steps gave a finite loss."""
        self._good_step = max(self._good_step, step)

    def halted(self, first_bad: int) -> str:
        """Describe the checkpoint from which the same command resumes after a stop at `first_bad`. All ranks call it.

        The checkpoint just before the first bad step may already be damaged. It is set aside if an older one exists and
        no
        evaluation of it gave a finite loss.
        """
        return self._engine.on_first(lambda: self._halt_message(first_bad))

    def _halt_message(self, first_bad: int) -> str:
        if self._copies is not None:
            self._copies.clear()
        doubtful = self._set_doubtful_aside(first_bad)
        steps = saved_steps(self._folder)
        if not steps:
            return "it starts over, because nothing was saved"
        *older, newest = steps
        if newest >= first_bad - 1 and not self._was_evaluated(newest):
            return (
                f"it resumes from step {newest}, the only checkpoint. If it fails the same way, that checkpoint's "
                "weights are damaged: start over with another run.name"
            )
        text = f"it resumes from step {newest}, the last good checkpoint"
        if doubtful:
            text += f" (step {first_bad - 1} may be damaged and was set aside: checkpoints/step_*.aside)"
        return text + (f"; for an older one add resume.step={older[-1]}" if older else "")

    def _set_doubtful_aside(self, first_bad: int) -> list[Location]:
        steps = saved_steps(self._folder)
        doubtful = {step for step in steps if step >= first_bad - 1 and not self._was_evaluated(step)}
        if not steps or doubtful >= {*steps}:
            return []
        return set_aside(self._folder.checkpoints, lambda one: one.committed and one.step in doubtful)

    def _was_evaluated(self, step: int) -> bool:
        return bool(load_checkpoint(self._folder.checkpoint(step), lazily=True).state.get("evaluated"))


def saved_steps(folder: RunFolder) -> list[int]:
    """Return the steps of the committed checkpoints in ascending order."""
    return [step for path in list_checkpoints(folder.checkpoints) if (step := step_in_name(path.name)) is not None]


def _check_saved(folder: RunFolder, step: int) -> None:
    """Raise CheckpointError if no checkpoint of that step exists."""
    saved = saved_steps(folder)
    if step not in saved:
        known = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(f"resume.step={step}: there is no checkpoint of that step. Use one of: {known}.")


def go_back(folder: RunFolder, step: int, problems: Sequence[str]) -> list[str]:
    """Set all checkpoints after `step` aside and return lines for the log.

    Raises:
        CheckpointError: if `problems` is not empty.
    """
    if problems:
        others = ", ".join(str(one) for one in saved_steps(folder) if one != step) or "none"
        raise CheckpointError(f"resume.step={step}: {'; '.join(problems)}. Use another one: {others}.")
    moved = set_aside(folder.checkpoints, lambda one: one.step > step)
    if not moved:
        return []
    names = ", ".join(path.name for path in moved)
    return [
        f"resume.step={step}: newer checkpoints are set aside as {names}",
        "        leave resume.step out of the next command, or the run goes back again",
    ]


def _set_skipped_aside(folder: RunFolder, found: Found) -> list[str]:
    """Set damaged checkpoints aside, so that `checkpoint.keep` does not count them, and return lines for the log."""
    skipped = found.passed_over
    paths = {one.path for one in skipped}
    moved = set_aside(folder.checkpoints, lambda one: one.committed and one.path in paths) if paths else []
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


def refuse_unfit(group: str, values: RawArray) -> None:
    """Raise UnfitError if values make a checkpoint useless for training."""
    if group not in GROUPS:
        return
    largest = values.largest()
    if not math.isfinite(largest):
        raise UnfitError("a weight is not finite" if group == "model" else "a state of the optimizer is not finite")
    if group == "model" and largest > _LARGEST_WEIGHT:
        raise UnfitError(f"a weight exceeds {_LARGEST_WEIGHT:g}")


# Background verification of the resumed checkpoint. Each rank verifies its share.

#: A share of up to this size is verified before the first step, which takes a second or less.
_AT_ONCE = 256 * 2**20


class DigestsBehind:
    """Verifies a rank's share of a checkpoint in a thread. `problems` is complete after `wait`.

    Args:
        path: path of the checkpoint.
        rank: this rank's share.
        number: number of shares.
        found: called in the thread with the problems, if there are any.
    """

    def __init__(self, path: Location, rank: int, number: int, found: Callable[[list[str]], None]):
        self.path, self.problems, self._found = path, list[str](), found
        # The thread must not communicate, so each rank verifies its share alone.
        self._share = RankGroup(rank, number)
        self._thread = threading.Thread(target=self._run, name="weft-digests", daemon=True)
        self._thread.start()

    @staticmethod
    def are_quick(path: Location, number: int) -> bool:
        """Return True if `number` ranks verify a checkpoint in about a second."""
        return sum(load_checkpoint(path, lazily=True).files.values()) <= _AT_ONCE * number

    def _run(self) -> None:
        self.problems = verify_checkpoint(self.path, together=self._share)
        if self.problems:
            self._found(self.problems)

    def wait(self) -> list[str]:
        """Wait for the digests, and return the problems in this rank's share."""
        self._thread.join()
        return self.problems
