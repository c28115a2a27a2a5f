"""`weft drill`: inject faults into short runs of a config, and check that each run recovers."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weft import env
from weft.checkpoint.load import list_checkpoints
from weft.cli.console import print_line, split_words, table
from weft.cli.launch.launch import count_ranks, usable_cores, visible_devices
from weft.config.files import load_config
from weft.errors import ConfigError, LaunchError, did_you_mean
from weft.monitor.events import read_events
from weft.train.folder import RunFolder

#: Description in the report of each kind of fault.
KINDS: dict[str, str] = {
    "kill_rank": "a rank is killed (SIGKILL), as by the kernel when memory is short",
    "kill_in_save": "a rank is killed while a checkpoint is written",
    "segfault": "a rank crashes in compiled code (SIGSEGV)",
    "abort": "a rank aborts (SIGABRT)",
    "leave": "a rank exits with an exit code and no message",
    "exception": "a step raises an exception",
    "memory": "a rank raises MemoryError",
    "loader": "the data loader raises an exception",
    "nan_gradient": "the loss and its gradients are NaN on one rank",
    "nan_weight": "the weights of a parameter turn into NaN on one rank",
    "stop_rank": "a rank is stopped (SIGSTOP) and does not continue",
    "hang": "a rank never comes to its next collective",
    "slow_rank": "a rank is slow for some seconds",
    "cut_link": "all TCP connections of a rank break",
    "full_disk": "the disk is full: a limit on file sizes (RLIMIT_FSIZE) until the next start",
    "read_only": "the checkpoint folder is read-only for two tries: mkdir raises EROFS",
    "flip_byte": "a byte of the newest checkpoint changes, then a rank is killed",
    "truncate": "a file of the newest checkpoint is truncated to half, then a rank is killed",
    "lose_file": "a file of the newest checkpoint is deleted, then a rank is killed",
    "lose_manifest": "the manifest of the newest checkpoint is deleted, then a rank is killed",
    "lose_commit": "COMMIT of the newest checkpoint is deleted, then a rank is killed",
    "kill_launcher": "the launcher, with torch's agent in it, is killed; the command is typed again",
    "stop_launcher": "the launcher is stopped (SIGSTOP) for two seconds",
    "terminate": "a scheduler ends the command (SIGTERM); it is typed again",
    "terminate_rank": "one rank gets SIGTERM; the command is typed again",
    "clock_forward": "the clock of a rank jumps one hour forward",
    "clock_back": "the clock of a rank jumps one hour back",
    "port_taken": "port 29500 is taken by another program",
    "two_runs": "the same command is typed a second time while the first runs",
    "lose_rank": "a rank dies at every start: the run continues with fewer",
}  # fmt: skip

#: Kinds of fault that need a second rank, or lose a rank permanently.
NEED_TWO_RANKS = frozenset({"stop_rank", "cut_link", "lose_rank", "hang"})


def chosen(words: str, num_ranks: int) -> list[str]:
    """Return the kinds of fault of --faults, or by default all that work with this number of ranks.

    Raises:
        ConfigError: for an unknown fault, or one that needs two ranks if there is only one.
    """
    if not words:
        return [kind for kind in KINDS if num_ranks > 1 or kind not in NEED_TWO_RANKS]
    names = [word.strip() for word in words.split(",") if word.strip()]
    for name in names:
        if name not in KINDS:
            hint = did_you_mean(name, KINDS) or f" Known: {', '.join(KINDS)}."
            raise ConfigError(f"--faults {name}: there is no such fault.{hint}")
        if num_ranks < 2 and name in NEED_TWO_RANKS:
            raise ConfigError(f"--faults {name}: it needs two ranks, and the plan has one. Leave it out.")
    return names


# One fault in one run: start the command as a user does, watch its events, and start it again.

_LOOK_S = 0.05
#: Maximum number of starts: the first one, and those after faults that end the command.
_MOST_STARTS = 3
_STOPPED_S = 2.0
#: Tolerance of the last loss if fewer ranks finish the run, because their sums have another order.
_OTHER_PLAN = 1e-3


@dataclass
class DrillRow:
    """Result of one fault. Times are in seconds since the fault, or None if the event did not occur.

    Attributes:
        detected_s: time until the run reported the fault, or the command failed.
        back_s: time until the first step that was not done before the fault.
        steps_lost: steps that were done twice.
        state: begins with "equal" if the last checkpoint equals the undisturbed run's, else the difference.
        left: number of processes that the run left behind.
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
        """True if the run ended as expected and left only its folder."""
        return not self.error and not self.left and self.state.startswith("equal")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "survived": self.survived}


@dataclass
class Trial:
    """A run with one fault: its folders and settings. `words` are the arguments of `weft train`."""

    words: list[str]
    place: Path
    kind: str
    step: int
    rank: int
    world_size: int
    limit_s: float
    _starts: int = 0

    def run(self, sound: RunFolder) -> DrillRow:
        """Run `weft train` with the fault, and return the result. `sound` is the folder of the undisturbed run."""
        row = DrillRow(self.kind, rank=self.rank)
        folder = RunFolder(self.place / self.kind)
        try:
            with socket.socket() as taken:
                if self.kind == "port_taken":
                    with contextlib.suppress(OSError):  # it may exist; nothing to do
                        taken.bind(("", 29500))
                        taken.listen()
                self._to_the_end(row, folder)
        except (subprocess.TimeoutExpired, RuntimeError) as error:
            row.error = str(error)
        row.left = end_all(folder.path)
        told = _FailureSummary.of(folder)
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
            events = read_events(folder.events)
            if process.returncode == 0 and events and events[-1].get("reason") == "finished":
                break
        else:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            last = next((line for line in reversed(lines) if line.startswith("error")), lines[-1] if lines else "")
            raise RuntimeError(f"the command ended with exit code {process.returncode}: {last}")
        if not happened:
            raise RuntimeError("the fault did not happen: the run has too few steps for it")

    def _start(self, out: Any) -> subprocess.Popen[bytes]:
        fault = {"kind": self.kind, "step": self.step, "rank": self.rank, "mark": str(self._mark)}
        text = json.dumps({**fault, "world_size": self.world_size})
        command = [sys.executable, "-m", "weft", "train", *self.words, f"run.name={self.kind}"]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env.child_env(WEFT_DRILL=text))

    def _watch(self, process: subprocess.Popen[bytes], row: DrillRow, folder: RunFolder, end: float) -> bool:
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
        told = _FailureSummary.of(folder)
        if told.starts != self._starts:
            # Other ranks may have been a step ahead of the fault, so count only steps of the new start.
            self._starts, row.back_s = told.starts, None
        passed = time.time() - self._mark.stat().st_mtime
        if row.detected_s is None and (told.failures or told.warnings or ended):
            row.detected_s = passed
        if row.back_s is None and told.last > (row.step or 0):
            row.back_s = passed

    def _act(self, process: subprocess.Popen[bytes], row: DrillRow) -> None:
        """Once the rank has reached the step, do the part of a fault that the rank cannot do."""
        if self.kind == "stop_launcher":
            time.sleep(_STOPPED_S)
            process.send_signal(signal.SIGCONT)
        if self.kind == "two_runs":
            with (self.place / "two_runs.second.txt").open("w") as out:
                second = self._start(out)
                code = second.wait(self.limit_s)
            Path(f"{self._mark}.over").touch()  # the rank continues
            if code != 2:
                row.error = f"the second command ended with exit code {code} instead of 2"
            row.detected_s = time.time() - self._mark.stat().st_mtime


@dataclass
class _FailureSummary:
    """Summary of a run's events: number of failures, last step, and repeated steps."""

    failures: int = 0
    warnings: int = 0
    starts: int = 0
    last: int = 0
    lost: int = 0

    @classmethod
    def of(cls, folder: RunFolder) -> _FailureSummary:
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
    """Compare the last checkpoint with the undisturbed run's by digests, and return the result as text.

    If they differ, the text compares the last losses.
    """
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
    """Wait 5 s for the run's remaining processes to end, kill those that did not, and return their number."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder) in words and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    # Killed processes need a moment to end.
    _, alive = psutil.wait_procs(found, timeout=5.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(alive)


def _newest(folder: RunFolder) -> Path:
    return Path(str(list_checkpoints(folder.checkpoints)[-1]))


# `weft drill`.

#: Minimum number of steps: two checkpoints before the fault, and a step after it.
_FEWEST_STEPS = 10
#: File in the folder of the runs, with one line of JSON per finished fault.
ROWS_NAME = "drill.jsonl"


def drill(
    words: Annotated[
        list[str], typer.Argument(metavar="CONFIG.toml [key=value ...]", help="The run's config file, and settings.")
    ],
    faults: Annotated[str, typer.Option(help="Kinds, with commas between; without it, all.", show_default=False)] = "",
    steps: Annotated[int, typer.Option(min=_FEWEST_STEPS, help="Steps of each run.")] = 12,
    every: Annotated[int, typer.Option(min=1, help="Steps between its checkpoints.")] = 3,
    seed: Annotated[int, typer.Option(help="Chooses the steps and ranks of the faults.")] = 0,
    timeout: Annotated[int, typer.Option(min=2, help="Seconds after which a waiting rank ends.")] = 20,
    limit: Annotated[int, typer.Option(min=10, help="Seconds for one fault, all starts included.")] = 600,
    keep: Annotated[
        Path | None, typer.Option(help="A new folder for the runs, which stays.", show_default="a temporary one")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Inject faults one by one into runs of a config on this machine, and check whether each recovers and how fast.

    Each fault gets a separate run of a few steps, whose last checkpoint is compared with an undisturbed run's. Exit
    code 0 if the run survived all faults, else 1. The config's own run is not touched.
    """
    path, overrides = split_words(words)
    config = load_config(path, overrides).config
    if config.launch.replicas_apart:
        raise ConfigError(
            "launch.replicas_apart=true: a drill tries faults on the ranks of one world. Leave it out of the drill."
        )
    num_ranks = count_ranks(config, visible_devices(config.launch.device), usable_cores())
    kinds = chosen(faults, num_ranks)
    if config.train.epochs is not None:
        raise ConfigError("train.epochs: a drill counts steps. Use a config without train.epochs.")
    if keep is not None and keep.exists():
        raise ConfigError(f"--keep {keep}: it is there already. Give a folder that is not there yet.")
    place = Path(tempfile.mkdtemp(prefix="weft-drill-")) if keep is None else keep.resolve()
    place.mkdir(parents=True, exist_ok=True)
    given = [
        *words, f"run.dir={place}", f"train.steps={steps}", f"checkpoint.every={every}", "checkpoint.keep=3",
        "train.max_bad_steps=0", "train.on_bad=restart", "launch.restarts=3", "launch.restart_pause=1s",
        "launch.min_ranks=1", f"launch.timeout={timeout}s", f"launch.warn_after={max(1, timeout // 4)}s",
        "sample.prompt=",
    ]  # fmt: skip
    if config.checkpoint.dir is not None:  # do not write to the user's checkpoint folder
        given.append(f"checkpoint.dir={place / 'kept'}")
    try:
        sound = _undisturbed(given, place, limit)
        rows = []
        for kind in kinds:
            chance = random.Random(f"{seed} {kind}")
            step, rank = chance.randint(2 * every + 1, steps - 2), chance.randrange(num_ranks)
            row = Trial(given, place, kind, step, rank, num_ranks, limit).run(sound)
            rows.append(row)
            with (place / ROWS_NAME).open("a") as out:  # a drill takes long, so write each result
                out.write(json.dumps({**row.as_json(), "seed": seed}) + "\n")
            result = "survived" if row.survived else row.error or row.state
            print_line(f"{len(rows)} of {len(kinds)}: {kind}: {result}, back in {_seconds(row.back_s)}")
    finally:
        if keep is None:
            shutil.rmtree(place, ignore_errors=True)
    print(json.dumps([row.as_json() for row in rows], indent=1) if as_json else "\n".join(report(rows)))
    raise typer.Exit(int(not all(row.survived for row in rows)))


def report(rows: list[DrillRow]) -> list[str]:
    """Return the table of results and the number of survived faults, as lines."""
    head = ("fault", "at step", "detected in", "back in", "steps lost", "starts", "final state", "")
    cells = [
        (
            row.kind,
            "-" if row.step is None else str(row.step),
            _seconds(row.detected_s),
            _seconds(row.back_s),
            str(row.steps_lost),
            str(row.starts),
            row.state,
            "survived" if row.survived else f"NOT SURVIVED {row.error}{f' {row.left} processes left' * bool(row.left)}",
        )
        for row in rows
    ]
    good = sum(row.survived for row in rows)
    return [*table([head, *cells], right=(1, 2, 3, 4, 5)), "", f"{good} of {len(rows)} faults survived"]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _undisturbed(words: list[str], place: Path, limit_s: float) -> RunFolder:
    """Run the config without faults for comparison. Raise LaunchError if it fails."""
    print_line(f"the undisturbed run, then {len(KINDS)} kinds of fault at most; the runs are in {place}")
    command = [sys.executable, "-m", "weft", "train", *words, "run.name=undisturbed"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=env.child_env())
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"--limit {limit_s:g}: the run without a fault takes longer. Use a larger limit.") from error
    if done.returncode:
        raise LaunchError(f"without a fault the run fails too: {done.stderr.strip()[-500:]} Mend it, then drill.")
    return RunFolder(place / "undisturbed")
