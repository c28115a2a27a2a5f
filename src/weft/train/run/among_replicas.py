"""A run that is one replica of several, each a world of its own: where it begins, and how it ends among the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from weft.checkpoint import Together, list_checkpoints, load_checkpoint, newest_checkpoint
from weft.checkpoint.targets import Location, located
from weft.spec import RunConfig
from weft.train.engine import Engine
from weft.train.folder import RunFolder
from weft.train.loop import ASKED_TO_STOP, Progress, Trainer
from weft.train.run.keeping import Keeper
from weft.train.run.signals import stop_on_signal


class AmongReplicas:
    """What a replica's run asks of the others, through its engine and through their folders; all ranks together.

    is_unsaved: whether no checkpoint of this replica has the weights that it begins with. Of a run that has no others
    nothing is asked.

    Args:
        folder: of this replica.
        config: of the run.
        engine: of this replica.
        is_alone: there are no others.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, engine: Engine, *, is_alone: bool = False):
        self.is_unsaved, self._is_alone = False, is_alone
        self._folder, self._config, self._engine = folder, config, engine
        self._together = Together(engine.rank, engine.plan.world_size, engine.on_first, engine.gather)

    def elsewhere(self, own: int | None) -> Location | None:
        """Return the checkpoint to go on from in the place of this replica's own; None: from its own.

        Args:
            own: step of its newest one, where it has one.
        """
        if self._is_alone or self._config.resume.step:
            return None
        path = self._newest(self._engine.on_first(lambda: newest_of_others(self._folder, own)))
        self.is_unsaved = path is not None
        return path

    def rejoin(self, keeper: Keeper, progress: Progress) -> bool:
        """Before the first step, join replicas that are further; False where this one was asked to stop meanwhile.

        Args:
            keeper: of this replica's checkpoints.
            progress: is set to the step to go on from.
        """
        if self._is_alone:
            return True
        saved = self._engine.state()
        with stop_on_signal(self._engine):
            step = self._engine.rejoin(progress.step)
        if step is None:
            return False
        self.is_unsaved = self.is_unsaved or self._engine.state() != saved
        if step != progress.step:
            keeper.moved(progress.step, step)
            progress.step = step
        return True

    def end(self, keeper: Keeper, trainer: Trainer, reason: str) -> str:
        """Tell the others that this replica has ended, or take over their model where they have; why training ended.

        Args:
            keeper: of this replica's checkpoints.
            trainer: has ended, and saved.
            reason: why it has.
        """
        if self._is_alone:
            return reason
        over = self._engine.over
        if over is None:
            if reason != ASKED_TO_STOP and trainer.parting is None:
                self._engine.end()
            return reason
        if not self._take_over(over, keeper, trainer.progress):
            return f"{reason} at step {over['step']}; the machine of replica {over['replica']} has their model"
        return f"{reason}; their model, of step {over['step']}, was taken over"

    def _take_over(self, over: Mapping[str, Any], keeper: Keeper, progress: Progress) -> bool:
        """Take the model of replicas that have ended, and save it here, where this machine sees it."""
        engine, where = self._engine, RunFolder(Path(over["where"]))
        path = self._newest(engine.on_first(lambda: _checkpoints_of(where, int(over["token"]))))
        if path is None:
            return False
        keeper.ended(True)
        with engine.pulse.doing("reads a checkpoint"):
            checkpoint = load_checkpoint(path, lazily=True)
            engine.load(checkpoint)
        taken = Progress(**checkpoint.state["progress"])
        keeper.moved(taken.step + 1, taken.step)
        for one in fields(taken):
            setattr(progress, one.name, getattr(taken, one.name))
        keeper.save(progress, True, last=True)
        keeper.ended(True)
        return True

    def _newest(self, root: str | None) -> Location | None:
        found = None if root is None else newest_checkpoint(located(root), together=self._together)
        return None if found is None else found.path


def newest_of_others(folder: RunFolder, own: int | None) -> str | None:
    """Return where checkpoints lie that a replica goes on from in the place of its own; None: from its own.

    Args:
        folder: of the replica.
        own: step of its newest checkpoint, where there is one.
    """
    newest: list[tuple[int, str]] = []
    for other in folder.other_replicas():
        if saved := list_checkpoints(other.checkpoints):
            checkpoint = load_checkpoint(saved[-1], lazily=True)
            by_one = checkpoint.state.get("replica")
            # What a replica saved for itself is taken by another one only in need: it has the anchor alone in common,
            # and before the first meeting that is what all begin with.
            if (own is None or checkpoint.step > own) if by_one is None else (own is None and by_one["meetings"] > 0):
                newest.append((checkpoint.step, str(other.checkpoints)))
    return max(newest)[1] if newest else None


def _checkpoints_of(folder: RunFolder, token: int) -> str | None:
    """Where the checkpoints of a replica that has ended lie, if the newest one has the anchor of that token."""
    if not (folder.path / "config.toml").is_file() or not (saved := list_checkpoints(folder.checkpoints)):
        return None
    of_replica = load_checkpoint(saved[-1], lazily=True).state.get("replica") or {}
    return str(folder.checkpoints) if of_replica.get("token") == token else None
