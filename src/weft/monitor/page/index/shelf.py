"""All runs below a folder, and the thread that keeps reading them."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import traceback
from pathlib import Path

from weft.errors import ConfigError
from weft.monitor.page.index.run_index import RunIndex
from weft.monitor.page.index.timed_calls import Late, TimedCalls

#: Seconds between two looks for runs, and between two looks into their logs.
_SCAN_S, _LOOK_S = 5.0, 0.4
#: How long (s) a look into one folder may take.
_LIMIT_S = 2.0
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
        self._calls = TimedCalls(_LIMIT_S)
        try:
            self.is_one = self._calls.call("root", (self.root / "events.jsonl").is_file)
        except Late:
            raise ConfigError(
                f"{str(root)!r}: this folder does not answer within {_LIMIT_S:.0f} s. Check its file system."
            ) from None
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
        """Look for runs. A folder that does not answer keeps the runs that are known of it."""
        if self.is_one:
            found = {self.root.resolve().name or "run": self.root}
        else:
            try:
                folders = self._calls.call("the root", functools.partial(_folders, self.root))
            except (Late, OSError):
                return
            logs = [log for folder in folders for log in self._logs_in(folder)]
            newest = sorted(logs, reverse=True, key=lambda one: one[0])[:_MOST_RUNS]
            found = {path.relative_to(self.root).as_posix(): path for _, path in newest}
        self._runs = {name: self._runs.get(name) or RunIndex(path, name) for name, path in found.items()}

    def _logs_in(self, folder: Path) -> list[tuple[float, Path]]:
        try:
            return self._calls.call(f"logs in {folder}", functools.partial(_logs, folder))
        except OSError:
            return []
        except Late:
            known = (run.folder for run in self._runs.values())
            return [(math.inf, one) for one in known if folder in (one, *one.parents)]

    def refresh(self) -> bool:
        """Read a piece of each run's log, of the wanted one first, and return True if there was anything new."""
        runs = dict(self._runs)
        wanted = runs.pop(self._wanted or "", None)
        changed = False
        while wanted is not None and not self._end.is_set() and self._refresh(wanted):
            changed = True
            if wanted.read_share >= 1:
                break
        for run in runs.values():
            changed = self._refresh(run) or changed
        return changed

    def _refresh(self, run: RunIndex) -> bool:
        """Read a piece of one run's log, unless its file system hangs."""
        try:
            found = self._calls.call(run.name, run.fetch)
        except Late:
            run.set_trouble(f"its file system does not answer within {_LIMIT_S:.0f} s")
            return False
        if found is None:
            run.set_trouble(run.tail.trouble)
            return False
        return run.take(found)

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
        self._calls.close()

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


def _folders(root: Path) -> list[Path]:
    """Return the folders in a folder; links count as what they lead to once they are looked into."""
    with os.scandir(root) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False) or entry.is_symlink()]


def _logs(folder: Path) -> list[tuple[float, Path]]:
    """Return the run folders in `folder`, itself included: when each log was last written, and the run's path."""
    found: list[tuple[float, Path]] = []
    for run in (folder, *_folders(folder)):
        with contextlib.suppress(OSError):
            found.append(((run / "events.jsonl").stat().st_mtime, run))
    return found
