"""What saving, loading and pruning ask of the place that keeps checkpoints.

One checkpoint is a folder in it, and exists from the moment that its COMMIT is there. Files are named by their
location; what the place cannot do raises OSError, whose strerror says why in words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from weft.checkpoint.folders import StepFolder
from weft.checkpoint.targets.store_path import Location


class Sink(Protocol):
    """A new file that is being written."""

    def write(self, data: bytes | memoryview) -> object:
        """Add bytes."""

    def finish(self) -> None:
        """Make all of it durable."""

    def close(self) -> None:
        """Let go of it. What was not finished is no file of a checkpoint."""


class RangeReader(Protocol):
    """A file that is open for reading. num_bytes: its size. chunk_bytes: how much to ask for when all is read."""

    num_bytes: int
    chunk_bytes: int

    def into(self, out: memoryview, offset: int) -> int:
        """Fill the beginning of `out` with bytes from `offset` on; how many they are, 0 at the end of the file."""
        ...

    def close(self) -> None:
        """Let go of it."""


class Target(Protocol):
    """One place that holds the checkpoints of a run. setting: how errors name it. remedy: what helps a failed save."""

    setting: str
    remedy: str

    def step_folders(self) -> list[StepFolder]:
        """List all folders named as checkpoints, complete or not, oldest step first."""
        ...

    def hold(self, held: contextlib.ExitStack) -> None:
        """Keep other writers out until `held` closes, where the place has locks."""

    def prepare(self, held: contextlib.ExitStack) -> None:
        """Make the place, hold it, and clear what killed writers left where no reader looks."""

    def clear_debris(self) -> None:
        """Delete what killed writers left where no reader looks, unless another process is saving."""

    def free_bytes(self) -> int | None:
        """Return how much it has room for; None where that is unknown. OSError where nothing can be written at all."""
        ...

    def begin(self, step: int) -> Location:
        """Make an empty folder for the files of a save; no reader takes what lies there for a checkpoint."""
        ...

    def settle(self, step: int, place: Location) -> Location:
        """Put the folder of a save, durable but for COMMIT, where readers look, and return where it is."""
        ...

    def commit(self, place: Location, text: bytes) -> None:
        """Write COMMIT in one act: from its end on the checkpoint exists."""

    def replace(self, again: Location, final: Location) -> Location:
        """Put a committed second save of a step in the place of those before, and return where it is now."""
        ...

    def sync(self, place: Location) -> None:
        """Make the names in a folder durable."""

    def discard(self, place: Location) -> None:
        """Delete the folder of a save that failed."""

    def remove(self, places: Collection[Location]) -> None:
        """Delete checkpoints; each stops being one in a single act. What remains goes with the next call."""

    def set_aside(self, place: Location) -> Location:
        """Take a checkpoint out of resuming and pruning, and keep its files; its name from now on."""
        ...

    def set_unfinished_aside(self, place: Location) -> Location | None:
        """Take a folder without COMMIT aside; None where it is left as it is, for the next pruning."""
        ...

    def reading(self, place: Location) -> Callable[[], None] | None:
        """Keep a checkpoint from being pruned until the result is called; None where the place cannot."""
        ...

    def is_being_read(self, place: Location) -> bool:
        """Return whether some process is known to read it."""
        ...

    def create(self, file: Location) -> Sink:
        """Begin a new file."""
        ...

    def size(self, file: Location) -> int:
        """Return its bytes. FileNotFoundError where it is missing, CheckpointError where it is no plain file."""
        ...

    def open(self, file: Location) -> RangeReader:
        """Open a file for reading; never follows a link."""
        ...

    def file_sizes(self, place: Location) -> dict[str, int]:
        """Return the size of each file of a folder, by name."""
        ...

    def take(self, files: Collection[Location]) -> Mapping[Location, bytes]:
        """Read small files whole, and delete them."""
        ...
