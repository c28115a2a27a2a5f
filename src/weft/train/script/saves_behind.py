"""Saves of a script behind its training: one at a time, from a copy; what goes wrong is raised at the next call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from weft.checkpoint import SavedPiece, Together
from weft.checkpoint.targets import Location
from weft.comm import StoreTalk
from weft.errors import CheckpointError, WeftWarning
from weft.memory import HostCopies
from weft.mesh import Mesh
from weft.train.run import Save
from weft.train.state import copied


class SavesBehind:
    """What one rank keeps for them: memory for a copy of its part, and a way to the other ranks. All ranks make one."""

    def __init__(self, mesh: Mesh):
        self._copies = HostCopies(mesh.device)
        self._together = Together()
        if mesh.world_size > 1:
            talk = StoreTalk(mesh.rank, mesh.world_size)
            self._together = Together(mesh.rank, mesh.world_size, talk.on_first, talk.gather)
        self._save: Save | None = None

    def begin(
        self, step: int, own: Iterable[SavedPiece], write: Callable[[Iterable[SavedPiece], Together], Location]
    ) -> None:
        """Copy what this rank writes, and write it in a thread; without room for a copy, write it now and say so."""
        found = list(own)
        try:
            found, has_room = copied(found, self._copies), True
        except CheckpointError as error:
            has_room = False
            said = str(error).replace("checkpoint.background=true", "background=True").partition(". Use")[0]
            warnings.warn(f"{said}. This rank waits until it has written its part.", WeftWarning, stacklevel=3)
        self._save = Save(step, lambda: write(found, self._together))
        if has_room:
            self._save.start()
        else:
            self._save.run()

    def wait(self) -> Location | None:
        """Until the save under way is over; where it is. Raises what it failed on, once."""
        save, self._save = self._save, None
        if save is None:
            return None
        save.wait()
        return save.end().path

    def leave(self, error: BaseException) -> None:
        """After an error of the script: the others may never write their part."""
        if self._save is not None:
            self._save.leave(error)
