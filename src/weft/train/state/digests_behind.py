"""Digests of the checkpoint that a run went on from, taken behind its training; each rank takes those of its share."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weft.checkpoint import Together, load_checkpoint, verify_checkpoint
from weft.checkpoint.targets import Location

#: A rank's share of so many bytes is digested before the first step: that takes a second or less.
_AT_ONCE = 256 * 2**20


class DigestsBehind:
    """Digest a rank's share of a checkpoint in a thread. problems: what is wrong, once `wait` returned.

    Args:
        path: of the checkpoint.
        rank: this rank's share.
        number: of shares.
        found: called in the thread with what is wrong, when something is.
    """

    def __init__(self, path: Location, rank: int, number: int, found: Callable[[list[str]], None]):
        self.path, self.problems, self._found = path, list[str](), found
        # Nothing is asked of the other ranks in the thread: each looks at its share.
        self._share = Together(rank, number)
        self._thread = threading.Thread(target=self._run, name="weft-digests", daemon=True)
        self._thread.start()

    @staticmethod
    def are_quick(path: Location, number: int) -> bool:
        """Return whether a checkpoint is digested at once by so many ranks."""
        return sum(load_checkpoint(path, lazily=True).files.values()) <= _AT_ONCE * number

    def _run(self) -> None:
        self.problems = verify_checkpoint(self.path, together=self._share)
        if self.problems:
            self._found(self.problems)

    def wait(self) -> list[str]:
        """Wait for the digests, and return what is wrong with this rank's share."""
        self._thread.join()
        return self.problems
