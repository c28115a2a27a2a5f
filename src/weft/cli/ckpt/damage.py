"""`weft ckpt verify`: every byte of every checkpoint against its digest; which files and tensors are damaged."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.checkpoint import load_checkpoint, step_in_name, verify_checkpoint
from weft.checkpoint.targets import Location, target_at
from weft.cli.console import progress_report
from weft.errors import CheckpointError

#: Most tensors of a damaged file that are named.
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """One problem, the file that it concerns, and the tensors that are lost with it."""

    problem: str
    file: str
    tensors: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For people."""
        if not self.tensors:
            return [self.problem]
        named, rest = ", ".join(self.tensors[:_MOST_NAMED]), len(self.tensors) - _MOST_NAMED
        return [self.problem, f"  holds {named}{f' and {rest} more' if rest > 0 else ''}"]


@dataclass(frozen=True, slots=True)
class CheckedCheckpoint:
    """What was found of one checkpoint."""

    path: Location
    step: int
    finished: bool
    damages: tuple[DamagedFile, ...] = ()

    @property
    def word(self) -> str:
        """In one word."""
        return "unfinished" if not self.finished else "damaged" if self.damages else "whole"


@dataclass
class Inspection:
    """Verdicts, oldest step first."""

    verdicts: list[CheckedCheckpoint] = field(default_factory=list)

    @property
    def newest_whole(self) -> CheckedCheckpoint | None:
        """What a run would resume from."""
        return next((one for one in reversed(self.verdicts) if one.word == "whole"), None)

    @property
    def exit_code(self) -> int:
        """0: all that are finished are whole. 1: some are damaged, or none is whole."""
        return int(any(one.word == "damaged" for one in self.verdicts) or self.newest_whole is None)

    def lines(self) -> list[str]:
        """For people."""
        told = []
        for one in self.verdicts:
            why = ": it has no COMMIT file, so its save never completed" if one.word == "unfinished" else ""
            told.append(f"{one.path.name}  {one.word}{why}")
            told += [f"  {line}" for damage in one.damages for line in damage.lines()]
        newest = self.newest_whole
        told.append(f"newest whole checkpoint: step {newest.step}, {newest.path}" if newest else "no whole checkpoint")
        return told

    def as_json(self) -> str:
        """For --json."""
        newest = self.newest_whole
        checkpoints = [
            {
                "step": one.step,
                "path": str(one.path),
                "state": one.word,
                "damages": [{"problem": d.problem, "file": d.file, "tensors": list(d.tensors)} for d in one.damages],
            }
            for one in self.verdicts
        ]
        return json.dumps({"checkpoints": checkpoints, "newest_whole": newest.step if newest else None}, indent=1)


def inspect(paths: list[Location], *, digests: bool = True) -> Inspection:
    """Verify checkpoints one after the other, with a bar on stderr."""
    found = Inspection()
    with progress_report(sys.stderr) as report:
        for path in paths:
            finished = (path / "COMMIT").exists()
            step = step_in_name(path.name)
            problems = verify_checkpoint(path, digests=digests, report=_bar(path, report)) if finished else []
            damages = tuple(damage_of(path, problem) for problem in problems)
            found.verdicts.append(CheckedCheckpoint(path, -1 if step is None else step, finished, damages))
    return found


def damage_of(path: Location, problem: str) -> DamagedFile:
    """A problem in words, with the tensors of its file; of a file that was cut off, those beyond its end."""
    file = problem.split(" ", 1)[0].removesuffix(":")
    try:
        opened = load_checkpoint(path, lazily=True)
    except CheckpointError:
        return DamagedFile(problem, file)
    if file not in opened.files:
        return DamagedFile(problem, file)
    tensors, whole = opened.tensors_in(file), _before_the_cut(path / file, opened.files[file])
    group = {one.partition("/")[2]: one for one in tensors}
    return DamagedFile(problem, file, tuple(full for name, full in group.items() if name not in whole))


def _before_the_cut(file: Location, num_bytes: int) -> set[str]:
    """Names of tensors whose bytes a shortened file still has all of."""
    try:
        size = file.lstat().st_size
        if size >= num_bytes:
            return set()
        with contextlib.closing(target_at(file.parent).open(file)) as opened:
            lead = memoryview(bytearray(8))
            opened.into(lead, 0)
            length = int.from_bytes(lead, "little")
            text = memoryview(bytearray(min(length, size)))
            opened.into(text, 8)
            header = json.loads(bytes(text).rstrip(b"\0"))
        return {name for name, one in header.items() if "dtype" in one and 8 + length + one["data_offsets"][1] <= size}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return set()


def _bar(path: Location, report: Callable[[str, int, int], None]) -> Callable[[int], None]:
    """A report of bytes, from several threads, as a stage of the progress bar."""
    try:
        total = sum(load_checkpoint(path, lazily=True).files.values())
    except CheckpointError:
        total = 0
    lock, done = threading.Lock(), [0]

    def add(num_bytes: int) -> None:
        with lock:
            done[0] += num_bytes
            report(path.name, done[0], total)

    return add
