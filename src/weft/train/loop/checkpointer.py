"""Saving checkpoints of a run or a script: one save at a time, optionally in the background; and deleting old ones."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection

from weft.checkpoint.folders import RankGroup, folder_name, step_in_name
from weft.checkpoint.load import Found, list_checkpoints, load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.object_store import Location
from weft.checkpoint.prune import prune_checkpoints, set_aside
from weft.checkpoint.safetensors_files import RawArray
from weft.config.run_config import CheckpointSection
from weft.errors import CheckpointError, CommError, UnfitError
from weft.train.engine import GROUPS
from weft.train.hooks import SaveEnd

#: Seconds before a failed save is retried: the first pause and the longest pause.
_PAUSE_S = (1.0, 30.0)
#: Seconds that a rank with an error waits for a running save: normally, and if another rank is gone.
_LAST_WAIT_S, _LAST_WAIT_ALONE_S = 30.0, 0.5


class Save:
    """One save on one rank. All ranks raise the same errors, so all retry together.

    Args:
        step: optimizer steps done.
        act: function that writes and commits the checkpoint with all ranks, and returns its path.
        retries: number of retries after a CheckpointError.
        holds: keep retrying after that, and make training wait.
        is_copy: the checkpoint is written to memory. If that fails, training continues without it.
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
        #: Error messages of failed attempts.
        self.failures: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Write the checkpoint in this thread. An error is raised later, by `end`."""
        try:
            self._path = self._tried()
        except Exception as error:
            self.error = error
        finally:
            self._durable_s = time.perf_counter() - self._began
            self._over.set()

    def start(self) -> None:
        """Write the checkpoint in a daemon thread. If the process ends early, the checkpoint is not committed."""
        threading.Thread(target=self.run, name="weft-save", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True if the save has ended, with or without success."""
        return self._over.is_set()

    @property
    def blocks_training(self) -> bool:
        """True if all retries have failed, and training must wait until the save succeeds (`holds`)."""
        return self._holds and not self.is_over and len(self.failures) > self._retries

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the save has ended. The waiting time counts as `stall_s`."""
        began = time.perf_counter()
        self._over.wait(seconds)
        self.stall_s += time.perf_counter() - began

    def leave(self, error: BaseException) -> None:
        """Stop retrying, and wait up to 30 s for the save before an error ends this rank: committing needs all ranks.

        The limit is 0.5 s if another rank is gone or does not answer.
        """
        self._given_up.set()
        is_alone = isinstance(error, CommError) and not error.peer_ends
        self.wait(_LAST_WAIT_ALONE_S if is_alone else _LAST_WAIT_S)

    def end(self) -> SaveEnd:
        """Return the outcome of the save. Raise its error, unless it is UnfitError or the save is an in-memory copy."""
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


class Checkpointer:
    """Saves and finds checkpoints of one model, on all ranks together. At most one save is in flight.

    Args:
        ranks: group of all ranks, with the collectives of training, for finding checkpoints.
    """

    def __init__(self, ranks: RankGroup):
        self.ranks = ranks
        self.save: Save | None = None

    @property
    def is_busy(self) -> bool:
        """True while a save is running."""
        return self.save is not None and not self.save.is_over

    def begin(self, save: Save, *, in_background: bool) -> None:
        """Run a save, or start it in a thread. The previous save must be finished. `finish` raises the save's error."""
        self.save = save
        if in_background:
            save.start()
        else:
            save.run()

    def finish(self) -> SaveEnd | None:
        """Wait for the running save and return its outcome, or None without one. If it failed, raise its error once."""
        save, self.save = self.save, None
        if save is None:
            return None
        save.wait()
        return save.end()

    def leave(self, error: BaseException) -> None:
        """Wait briefly for the running save after an error, because committing needs all ranks."""
        if self.save is not None:
            self.save.leave(error)

    def find(self, root: Location, step: int | None = None) -> Found | None:
        """Return the checkpoint of a step, or the newest valid one, with the newer ones that were skipped.

        All ranks call it, and each verifies its share. Returns None if `step` is None and nothing was saved.

        Raises:
            CheckpointError: if the checkpoint of `step` is missing or damaged, or, without `step`, if all are damaged.
        """
        if step is None:
            return newest_checkpoint(root, together=self.ranks)
        path = root / folder_name(step)
        if problems := verify_checkpoint(path, together=self.ranks):
            raise CheckpointError(f"{path}: {'; '.join(problems)}. Use another checkpoint.")
        return Found(path, step)


# Retention: which checkpoints of a run are kept, and which ones it can resume from.


class Retention:
    """Deletes old checkpoints according to the run's settings, and renames damaged ones. One rank calls it.

    It never deletes the newest checkpoint whose weights are known to be good.
    """

    def __init__(self, root: Location, settings: CheckpointSection):
        self.root, self._settings = root, settings
        #: The newest step whose weights gave a finite loss.
        self.good_step = 0

    def confirm(self, step: int) -> None:
        """Record that the weights after `step` steps gave a finite loss."""
        self.good_step = max(self.good_step, step)

    def prune(self, step: int, best: int | None, keeps: Callable[[int], bool] = lambda step: False) -> None:
        """Delete old checkpoints after the save of `step`, except those that `keeps` returns True for.

        Raises:
            CheckpointError: if one cannot be deleted.
        """
        kept = self._settings
        saved = steps_in(self.root)
        before = [one for one in saved if one <= step]
        # The newest checkpoint with good weights, or else the second newest checkpoint.
        good = max((one for one in before if one <= self.good_step), default=max(before[:-1], default=None))
        spared = {*filter(keeps, saved), *([] if good is None else [good])}
        if kept.keep_every:
            spared |= {one for one in saved if one % kept.keep_every == 0}
        prune_checkpoints(self.root, kept.keep, best, spared=spared, whole=step)

    def halted(self, first_bad: int) -> str:
        """Describe the checkpoint from which the same command resumes after a stop at `first_bad`.

        Checkpoints of step first_bad - 1 and later may have damaged weights. Those without an evaluation that gave a
        finite loss are set aside (renamed), unless no other checkpoint exists.
        """
        steps = steps_in(self.root)
        doubtful = {step for step in steps if step >= first_bad - 1 and not self._was_evaluated(step)}
        are_aside: list[Location] = []
        if steps and not doubtful >= {*steps}:
            are_aside = set_aside(self.root, lambda one: one.committed and one.step in doubtful)
            steps = steps_in(self.root)
        if not steps:
            return "it starts over, because nothing was saved"
        *older, newest = steps
        if newest >= first_bad - 1 and not self._was_evaluated(newest):
            return (
                f"it resumes from step {newest}, the only checkpoint. If it fails the same way, that checkpoint's "
                "weights are damaged: start over with another run.name"
            )
        text = f"it resumes from step {newest}, the last good checkpoint"
        if are_aside:
            text += f" (step {first_bad - 1} may be damaged and was set aside: checkpoints/step_*.aside)"
        return text + (f"; for an older one add resume.step={older[-1]}" if older else "")

    def _was_evaluated(self, step: int) -> bool:
        path = next(path for path in list_checkpoints(self.root) if step_in_name(path.name) == step)
        return bool(load_checkpoint(path, lazily=True).state.get("evaluated"))


def steps_in(root: Location) -> list[int]:
    """Return the steps of the committed checkpoints in ascending order."""
    return [step for path in list_checkpoints(root) if (step := step_in_name(path.name)) is not None]


#: Larger weights are unusable, because their squares overflow fp32 in norms.
_LARGEST_WEIGHT = 1e18


def refuse_unfit(buffers: Collection[str], group: str, name: str, values: RawArray) -> None:
    """Raise UnfitError if a weight or an optimizer state is not finite, or if a weight's magnitude exceeds 1e18.

    Values of groups that are not in `GROUPS` are not checked. `buffers` may be infinite, as limits and masks are.
    """
    if group not in GROUPS:
        return
    largest = values.largest()
    if group == "model" and name in buffers:
        if math.isnan(largest):
            raise UnfitError("a buffer is not a number")
        return
    if not math.isfinite(largest):
        raise UnfitError("a weight is not finite" if group == "model" else "a state of the optimizer is not finite")
    if group == "model" and largest > _LARGEST_WEIGHT:
        raise UnfitError(f"a weight exceeds {_LARGEST_WEIGHT:g}")
