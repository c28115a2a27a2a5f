"""Draws loss.png while a run goes on, in a process of its own with the lowest priority.

`python -m weft.monitor.screen.artist EVENTS PNG TITLE` draws once and ends. Loading matplotlib and drawing take one
to three seconds of a core: on the run's own thread each picture would be a pause.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from weft.monitor.screen.plot import unfinished_picture

#: Seconds after the start before which nothing is drawn: short runs are drawn at their end.
FIRST_S = 5.0
#: Between two pictures, at least; and how many times as long as a picture took: it then costs 2 % of a core at most.
BETWEEN_S, REST = 20.0, 50.0
#: A picture is never older than this while steps go on.
LATE_S = 180.0


class Artist:
    """Has a run's picture drawn now and then; every call returns at once but for `close`.

    Args:
        events: the log that is drawn.
        png: the picture, replaced each time.
        title: above the picture.
    """

    def __init__(self, events: Path, png: Path, title: str):
        self._png = png
        self._command = [sys.executable, "-m", "weft.monitor.screen.artist", str(events), str(png), title]
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._free_at = time.monotonic()
        self._free_at += FIRST_S

    def draw_soon(self) -> None:
        """Draw, for there is something new to see, unless a picture is fresh or being drawn."""
        now = time.monotonic()
        if self._is_busy(now) or now < self._free_at:
            return
        self._began = now
        self._free_at = now + BETWEEN_S
        # A machine that cannot start another process trains on; the end of the run draws.
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def draw_when_late(self) -> None:
        """Draw where the last picture is old. Called at every step."""
        if time.monotonic() - self._began > LATE_S:
            self.draw_soon()

    def close(self) -> None:
        """End the process of a picture that is being drawn. May be called more than once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            unfinished_picture(self._png, self._process.pid).unlink(missing_ok=True)
            self._process = None

    def _is_busy(self, now: float) -> bool:
        if self._process is None:
            return False
        if self._process.poll() is None:
            return True
        self._process = None
        self._free_at = max(self._free_at, now + min(LATE_S, REST * (now - self._began)))
        return now < self._free_at


def main() -> None:
    """Draw once."""
    from weft.monitor.events import read_events
    from weft.monitor.screen.plot import plot_loss

    with contextlib.suppress(OSError):
        os.nice(19)
    events, png, title = sys.argv[1:]
    plot_loss(read_events(Path(events)), Path(png), title=title)


if __name__ == "__main__":
    main()
