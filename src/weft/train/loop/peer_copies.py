"""Checkpoints in the memory of a run's hosts (checkpoint.peer_every), used if they are newer than those on disk.

They are written, committed, verified and read like checkpoints in an object store; see
docs/adr/0029-copies-in-memory.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import newest_checkpoint
from weft.checkpoint.object_store import Location, StorePath
from weft.checkpoint.peer_copies import CopyHome, copies_at
from weft.checkpoint.targets import target_at
from weft.devices.host_memory import free_host_bytes
from weft.errors import CheckpointError, ConfigError
from weft.units import format_bytes

#: A host keeps the newest complete copy while the next one is written.
_GENERATIONS = 2


class Copies:
    """In-memory copies of one run's checkpoints, under `root`. All ranks create it with `open`."""

    def __init__(self, root: StorePath, together: RankGroup):
        self.root, self._ranks = root, together

    def newest(self, saved: int | None) -> tuple[Location | None, list[str]]:
        """Return the newest valid copy that is newer than step `saved`, or None, and messages about damaged copies.

        If no such copy exists, all copies are deleted and the checkpoint on disk is used. All ranks call it.
        """
        steps = self._ranks.on_first(lambda: self._steps())
        notes: list[str] = []
        if steps and steps[-1] > (saved or 0):
            try:
                found = newest_checkpoint(self.root, together=self._ranks)
            except CheckpointError as error:
                found, notes = None, [f"copies in memory are not used: {error}"]
            if found is not None and found.step > (saved or 0):
                return found.path, [f"skipped copy in memory: {one}" for one in found.passed_over if steps]
        self._ranks.on_first(self.clear)
        return None, notes

    def keep_only(self, step: int) -> None:
        """Delete the copies of all other steps. One rank calls it."""
        target = target_at(self.root)
        target.remove([one.path for one in target.step_folders() if one.step != step])

    def clear(self) -> None:
        """Delete all copies, so that the run does not resume from them. One rank calls it."""
        target_at(self.root).remove([self.root])

    def _steps(self) -> list[int]:
        return [one.step for one in target_at(self.root).step_folders() if one.committed]

    @staticmethod
    def open(
        home: CopyHome | None, together: RankGroup, every: int, num_bytes: Callable[[], int]
    ) -> tuple[Copies | None, list[str]]:
        """Open the copies across the hosts of all ranks.

        Returns None and the reason if a host has no process that keeps copies when its ranks end. All ranks call it.

        Args:
            home: server of copies on this host, or None.
            together: group of all ranks whose `gather` returns the result on every rank.
            every: checkpoint.peer_every, in steps.
            num_bytes: function that returns the size of a checkpoint of all ranks.

        Raises:
            ConfigError: on all ranks, if a host has too little memory for the copies.
        """
        answers = [json.loads(one) for one in together.gather(json.dumps(home and asdict(home)).encode())]
        if home is None or None in answers:
            return None, [
                f"checkpoint.peer_every={every} has no effect: nothing starts these ranks again. Set launch.restarts, "
                "or start them with torchrun --max-restarts."
            ]
        homes = [*dict.fromkeys(CopyHome(**one) for one in answers)]
        root = copies_at(homes, homes.index(home))
        # Existing copies already own their memory, so only the first start needs more.
        needed = together.on_first(lambda: 0 if root.exists() else num_bytes())
        here, free = _GENERATIONS * min(2, len(homes)) * needed // len(homes), free_host_bytes()
        short = [json.loads(one) for one in together.gather(json.dumps([here, free]).encode())]
        for here, free in short:
            if here > free:
                raise ConfigError(
                    f"checkpoint.peer_every={every}: the copies take {format_bytes(here)} of each machine's memory, "
                    f"and one has {format_bytes(free)} free. Use checkpoint.peer_every=0 and a smaller "
                    "checkpoint.every."
                )
        return Copies(root, together), []
