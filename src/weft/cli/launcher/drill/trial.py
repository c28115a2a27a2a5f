"""One fault in one run: the command is started as a user does, watched through its events, and started again."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft import env
from weft.checkpoint import list_checkpoints
from weft.monitor import read_events
from weft.train import RunFolder

_LOOK_S = 0.05
#: Starts of the command: the first, and those that a user types after a fault that ends it.
_MOST_STARTS = 3
_STOPPED_S = 2.0
#: How far the last loss may lie from the undisturbed one where fewer ranks end the run: sums come in another order.
_OTHER_PLAN = 1e-3


@dataclass
class DrillRow:
    """What a fault did. Times in s from the fault on; None: it never came to it.

    detected_s: until the run told. back_s: until the first new step after it. steps_lost: done, and done again.
    state: "equal" to the undisturbed run's bytes, or what differs. left: processes that were left behind.
    """

    kind: str
    step: int | None = None
    rank: int = 0
    detected_s: float | None = None
    back_s: float | None = None
    steps_lost: int = 0
    starts: int = 1
    state: str = ""
    left: int = 0
    error: str = ""

    @property
    def survived(self) -> bool:
        """Whether the run ended as it should have, and nothing is left of it but its folder."""
        return not self.error and not self.left and self.state.startswith("equal")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "survived": self.survived}


@dataclass
class Trial:
    """A fault, and where and with what the command runs. words: of `weft train`."""

    words: list[str]
    place: Path
    kind: str
    step: int
    rank: int
    world_size: int
    limit_s: float
    _starts: int = 0

    def run(self, sound: RunFolder) -> DrillRow:
        """Have it happen. sound: the folder of the undisturbed run."""
        row = DrillRow(self.kind, rank=self.rank)
        folder = RunFolder(self.place / self.kind)
        try:
            with _port_taken(self.kind == "port_taken"):
                self._to_the_end(row, folder)
        except (subprocess.TimeoutExpired, RuntimeError) as error:
            row.error = str(error)
        row.left = end_all(folder.path)
        told = _Told.of(folder)
        row.steps_lost = told.lost
        row.state = state_of(folder, sound, self.kind)
        return row

    @property
    def _mark(self) -> Path:
        return self.place / f"{self.kind}.mark"

    def _to_the_end(self, row: DrillRow, folder: RunFolder) -> None:
        end, happened = time.monotonic() + self.limit_s, self.kind == "port_taken"
        log = self.place / f"{self.kind}.txt"
        for row.starts in range(1, _MOST_STARTS + 1):
            with log.open("a") as out:
                process = self._start(out)
                try:
                    happened = self._watch(process, row, folder, end) or happened
                finally:
                    process.kill()
                    process.wait()
            if process.returncode == 0 and _is_done(folder):
                break
        else:
            raise RuntimeError(f"the command ended with exit code {process.returncode}: {_last_line(log)}")
        if not happened:
            raise RuntimeError("the fault did not happen: the run has too few steps for it")

    def _start(self, out: Any) -> subprocess.Popen[bytes]:
        fault = {"kind": self.kind, "step": self.step, "rank": self.rank, "mark": str(self._mark)}
        text = json.dumps({**fault, "world_size": self.world_size})
        command = [sys.executable, "-m", "weft", "train", *self.words, f"run.name={self.kind}"]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env.child_env(WEFT_DRILL=text))

    def _watch(self, process: subprocess.Popen[bytes], row: DrillRow, folder: RunFolder, end: float) -> bool:
        """Until the process ends; notes when the run told of the fault and when it was back. Whether it happened."""
        acted = False
        while True:
            over = process.poll() is not None
            if self._mark.exists() and row.step is None:
                mark = json.loads(self._mark.read_text())
                row.step = mark["step"]
            if row.step is not None:
                if not acted and not over:
                    acted = True
                    self._act(process, row)
                self._note(row, folder, over and process.returncode != 0)
            if over:
                return row.step is not None
            if time.monotonic() > end:
                raise RuntimeError(f"not over after {self.limit_s:g} s")
            time.sleep(_LOOK_S)

    def _note(self, row: DrillRow, folder: RunFolder, ended: bool) -> None:
        told = _Told.of(folder)
        if told.starts != self._starts:
            # The other ranks were a step ahead of the fault: only steps of the new start count.
            self._starts, row.back_s = told.starts, None
        passed = time.time() - self._mark.stat().st_mtime
        if row.detected_s is None and (told.failures or told.warnings or ended):
            row.detected_s = passed
        if row.back_s is None and told.last > (row.step or 0):
            row.back_s = passed

    def _act(self, process: subprocess.Popen[bytes], row: DrillRow) -> None:
        """What happens from outside once the rank has come to the step."""
        if self.kind == "stop_launcher":
            time.sleep(_STOPPED_S)
            process.send_signal(signal.SIGCONT)
        if self.kind == "two_runs":
            with (self.place / "two_runs.second.txt").open("w") as out:
                second = self._start(out)
                code = second.wait(self.limit_s)
            Path(f"{self._mark}.over").touch()  # the rank goes on
            if code != 2:
                row.error = f"the second command ended with exit code {code} in place of 2"
            row.detected_s = time.time() - self._mark.stat().st_mtime


@dataclass
class _Told:
    """What the events of a run say of its failures: their number, the last step, steps that were done again."""

    failures: int = 0
    warnings: int = 0
    starts: int = 0
    last: int = 0
    lost: int = 0

    @classmethod
    def of(cls, folder: RunFolder) -> _Told:
        told = cls()
        for event in read_events(folder.events):
            kind = event.get("event")
            told.failures += kind == "failure"
            told.warnings += kind == "warning"
            if kind == "step":
                told.last = int(event["step"])
            elif kind == "start":
                told.starts += 1
                told.lost += max(0, told.last - int(event["step"]))
                told.last = int(event["step"])
        return told


def state_of(folder: RunFolder, sound: RunFolder, kind: str) -> str:
    """The last checkpoint beside that of the undisturbed run, byte for byte; the loss where the plan is another."""
    try:
        ours, theirs = ((_newest(one) / "manifest.json").read_text() for one in (folder, sound))
    except (OSError, IndexError):
        return "no last checkpoint"
    if json.loads(ours)["files"] == json.loads(theirs)["files"]:
        return "equal"
    losses = [
        [float(event["loss"]) for event in read_events(one.events) if event.get("event") == "step"][-1]
        for one in (folder, sound)
    ]
    gap = abs(losses[0] - losses[1]) / abs(losses[1])
    if kind == "lose_rank" and gap < _OTHER_PLAN:
        return f"equal in the last loss to {gap:.0e} (other plan)"
    return f"the last loss differs by {gap:.1e}"


def end_all(folder: Path) -> int:
    """Processes of the run that are still there; they are killed."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder) in words and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    # Those that the kernel has been told to end need a moment.
    _, alive = psutil.wait_procs(found, timeout=5.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(alive)


def _newest(folder: RunFolder) -> Path:
    return Path(str(list_checkpoints(folder.checkpoints)[-1]))


def _is_done(folder: RunFolder) -> bool:
    events = read_events(folder.events)
    return bool(events) and events[-1].get("reason") == "finished"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("error")), lines[-1] if lines else "")


@contextlib.contextmanager
def _port_taken(wanted: bool) -> Any:
    with socket.socket() as taken:
        if wanted:
            with contextlib.suppress(OSError):  # someone else has taken it: as good
                taken.bind(("", 29500))
                taken.listen()
        yield
