"""Start and end of a run that is one of several replicas in separate process groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from weft.checkpoint.load import list_checkpoints, load_checkpoint, newest_checkpoint
from weft.checkpoint.object_store import Location, located
from weft.config.run_config import RunConfig
from weft.train.engine import Engine
from weft.train.folder import RunFolder
from weft.train.hooks import Progress
from weft.train.loop.callbacks import Stop, StopReason
from weft.train.loop.run_checkpoints import RunCheckpoints
from weft.train.loop.signals import stop_on_signal
from weft.train.loop.trainer import Trainer


class ReplicaCoordinator:
    """Coordinates a replica's run with the others, through its engine and their folders. All ranks call it together.

    `is_unsaved` is True if no checkpoint of this replica has its initial weights.

    Args:
        folder: folder of this replica.
        config: the run's config.
        engine: engine of this replica. If it has no other replicas, the methods do nothing.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, engine: Engine):
        self.is_unsaved, self._others = False, engine.replicas
        self._folder, self._config, self._engine = folder, config, engine

    def elsewhere(self, own: int | None) -> Location | None:
        """Return the checkpoint of another replica to resume from, or None to resume from this replica's own.

        Sets `is_unsaved`.

        Args:
            own: step of this replica's newest checkpoint, or None without one.
        """
        if self._others is None or self._config.resume.step:
            return None
        path = self._newest(self._engine.ranks.on_first(lambda: newest_of_others(self._folder, own)))
        self.is_unsaved = path is not None
        return path

    def rejoin(self, checkpoints: RunCheckpoints, progress: Progress) -> bool:
        """Join the other replicas before the first step. Return False if a stop was requested while waiting.

        Args:
            progress: its step is set to the step to continue from.
        """
        if self._others is None:
            return True
        saved = self._engine.state.values()
        with stop_on_signal(self._engine):
            step = self._others.rejoin(progress.step)
        if step is None:
            return False
        self.is_unsaved = self.is_unsaved or self._engine.state.values() != saved
        if step != progress.step:
            checkpoints.moved(progress.step, step)
            progress.step = step
        return True

    def end(self, checkpoints: RunCheckpoints, trainer: Trainer, stop: Stop) -> str:
        """End this replica: notify the others, or load their model if they have ended. Return the stop reason.

        They are not notified if a stop or another action was requested, because this replica may then continue later.

        Args:
            checkpoints: this replica's checkpoints.
            trainer: a trainer that has ended and saved.
            stop: why it ended.
        """
        reason = str(stop)
        if self._others is None:
            return reason
        over = self._others.over
        if over is None:
            if stop.reason is not StopReason.REQUESTED and trainer.parting is None:
                self._others.end()
            return reason
        if not self._take_over(over, checkpoints, trainer.progress):
            return f"{reason} at step {over['step']}; the machine of replica {over['replica']} has their model"
        return f"{reason}; their model, of step {over['step']}, was taken over"

    def _take_over(self, over: Mapping[str, Any], checkpoints: RunCheckpoints, progress: Progress) -> bool:
        engine, where = self._engine, RunFolder(Path(over["where"]))
        path = self._newest(engine.ranks.on_first(lambda: _checkpoints_of(where, int(over["token"]))))
        if path is None:
            return False
        checkpoints.ended(True)
        with engine.pulse.doing("reads a checkpoint"):
            checkpoint = load_checkpoint(path, lazily=True)
            engine.state.load(checkpoint)
        taken = Progress(**checkpoint.state["progress"])
        checkpoints.moved(taken.step + 1, taken.step)
        for one in fields(taken):
            setattr(progress, one.name, getattr(taken, one.name))
        checkpoints.save(progress, True, last=True)
        checkpoints.ended(True)
        return True

    def _newest(self, root: str | None) -> Location | None:
        found = None if root is None else newest_checkpoint(located(root), together=self._engine.ranks)
        return None if found is None else found.path


def newest_of_others(folder: RunFolder, own: int | None) -> str | None:
    """Return the checkpoints folder of another replica to resume from, or None to use the replica's own.

    Args:
        own: step of this replica's newest checkpoint, or None.
    """
    newest: list[tuple[int, str]] = []
    for other in folder.other_replicas():
        if saved := list_checkpoints(other.checkpoints):
            checkpoint = load_checkpoint(saved[-1], lazily=True)
            by_one = checkpoint.state.get("replica")
            # A checkpoint that a replica saved alone is a last resort for the others: replicas share only the anchor,
            # which before the first outer step is the common initial model.
            if (own is None or checkpoint.step > own) if by_one is None else (own is None and by_one["meetings"] > 0):
                newest.append((checkpoint.step, str(other.checkpoints)))
    return max(newest)[1] if newest else None


def _checkpoints_of(folder: RunFolder, token: int) -> str | None:
    """Return the checkpoints folder of an ended replica if `token` identifies its newest checkpoint, else None."""
    if not (folder.path / "config.toml").is_file() or not (saved := list_checkpoints(folder.checkpoints)):
        return None
    of_replica = load_checkpoint(saved[-1], lazily=True).state.get("replica") or {}
    return str(folder.checkpoints) if of_replica.get("token") == token else None
