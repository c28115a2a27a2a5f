"""All runs below a folder, and the thread that keeps reading them."""

from __future__ import annotations

import threading
import time
import traceback
from pathlib import Path

from weft.errors import ConfigError
from weft.monitor.page.index.run_index import RunIndex

#: Seconds between two looks for runs, and between two looks into their logs.
_SCAN_S, _LOOK_S = 5.0, 0.4
#: Runs that one page lists: the newest.
_MOST_RUNS = 500


class Shelf:
    """The runs of a folder: the folder itself, or those in it and in its folders.

    Args:
        root: a run folder, or a folder of such.

    Raises:
        ConfigError: where there is no run.
    """

    def __init__(self, root: Path):
        self.root = Path(root)
        self.is_one = (self.root / "events.jsonl").is_file()
        self._runs: dict[str, RunIndex] = {}
        self._wanted: str | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.scan()
        if not self._runs:
            raise ConfigError(
                f"{str(root)!r}: there is no run in it (no events.jsonl). Give a run folder, such as runs/quickstart, "
                f"or the folder of your runs; `weft train` writes both."
            )

    @property
    def runs(self) -> dict[str, RunIndex]:
        """By the path below the folder, newest first."""
        return dict(self._runs)

    def get(self, name: str) -> RunIndex | None:
        """Return one run, and read it before the others; None where none is called so."""
        found = self._runs.get(name)
        if found is not None:
            self._wanted = name
        return found

    def scan(self) -> None:
        """Look for runs."""
        if self.is_one:
            found = {self.root.resolve().name or "run": self.root}
        else:
            logs = [log for depth in ("*", "*/*") for log in self.root.glob(f"{depth}/events.jsonl")]
            newest = sorted(logs, key=_changed_at, reverse=True)[:_MOST_RUNS]
            found = {log.parent.relative_to(self.root).as_posix(): log.parent for log in newest}
        self._runs = {name: self._runs.get(name) or RunIndex(path, name) for name, path in found.items()}

    def refresh(self) -> bool:
        """Read a piece of each run's log, of the wanted one first, and return whether there was anything new."""
        runs = dict(self._runs)
        wanted = runs.pop(self._wanted or "", None)
        changed = False
        while wanted is not None and not self._end.is_set() and wanted.refresh():
            changed = True
            if wanted.read_share >= 1:
                break
        for run in runs.values():
            changed = run.refresh() or changed
        return changed

    def read_all(self) -> None:
        """Read every log to its end."""
        while self.refresh():
            pass

    def start(self) -> None:
        """Keep reading in a thread until `close`."""
        self._thread = threading.Thread(target=self._keep_reading, name="weft-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _keep_reading(self) -> None:
        scanned = time.monotonic()
        while not self._end.is_set():
            try:
                changed = self.refresh()
                if time.monotonic() - scanned > _SCAN_S:
                    self.scan()
                    scanned = time.monotonic()
            except Exception:  # A log that cannot be read must not end the page of the others.
                traceback.print_exc()
                changed = False
            self._end.wait(0.005 if changed else _LOOK_S)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
