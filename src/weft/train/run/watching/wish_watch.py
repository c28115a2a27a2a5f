"""A thread of the first rank that hears what the run is asked for, and has all ranks look after the next step."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from pathlib import Path

from weft.monitor.alerts import Wish, WishBox
from weft.train.engine import Engine

_LOOK_S = 0.25


class WishWatch(threading.Thread):
    """Looks for wishes four times a second; `take` gives them to the loop.

    Args:
        folder: of the run.
        since: when the command began, in s since 1970.
        engine: not kept alive: model and groups must be gone before the ranks part.
    """

    def __init__(self, folder: Path, since: float, engine: Engine):
        super().__init__(name="weft-wishes", daemon=True)
        self._box, self._engine = WishBox(folder, since), weakref.ref(engine)
        self._heard: deque[Wish] = deque()
        self._end = threading.Event()

    def take(self) -> list[Wish]:
        """Return what was asked since the last call."""
        return [self._heard.popleft() for _ in range(len(self._heard))]

    def look(self) -> None:
        """Look once."""
        found, engine = self._box.new(), self._engine()
        self._heard.extend(found)
        if found and engine is not None:
            engine.asks = True

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if self.is_alive():
            self.join(5.0)

    def run(self) -> None:
        """Look until `close`: the thread's own function."""
        while not self._end.wait(_LOOK_S):
            self.look()
