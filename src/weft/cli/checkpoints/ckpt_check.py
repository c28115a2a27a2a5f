"""`weft ckpt verify`: check every byte of every checkpoint against its digest, and name damaged files and tensors."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.checkpoint.folders import step_in_name
from weft.checkpoint.load import Checkpoint, load_checkpoint, verify_checkpoint
from weft.checkpoint.object_store import Location
from weft.checkpoint.targets import target_at
from weft.cli.console import progress_report, table
from weft.errors import CheckpointError
from weft.units import counted

if TYPE_CHECKING:
    import numpy as np

#: Maximum number of tensors to name per damaged file.
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A damaged file: the problem, and the tensors that are lost."""

    problem: str
    file: str
    tensors: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the problem, and the names of the lost tensors."""
        if not self.tensors:
            return [self.problem]
        named, rest = ", ".join(self.tensors[:_MOST_NAMED]), len(self.tensors) - _MOST_NAMED
        return [self.problem, f"  holds {named}{f' and {rest} more' if rest > 0 else ''}"]


@dataclass(frozen=True, slots=True)
class CheckedCheckpoint:
    """Result of checking one checkpoint."""

    path: Location
    step: int
    finished: bool
    damages: tuple[DamagedFile, ...] = ()

    @property
    def verdict(self) -> str:
        """Verdict: "unfinished", "damaged" or "whole" (valid)."""
        return "unfinished" if not self.finished else "damaged" if self.damages else "whole"


@dataclass
class Inspection:
    """Results of checking several checkpoints, oldest step first."""

    verdicts: list[CheckedCheckpoint] = field(default_factory=list)

    @property
    def newest_complete(self) -> CheckedCheckpoint | None:
        """The newest valid checkpoint, from which a run would resume, or None."""
        return next((one for one in reversed(self.verdicts) if one.verdict == "whole"), None)

    @property
    def exit_code(self) -> int:
        """0 if all finished checkpoints are valid; 1 if some are damaged, or none is valid."""
        return int(any(one.verdict == "damaged" for one in self.verdicts) or self.newest_complete is None)

    def lines(self) -> list[str]:
        """Return the report: each checkpoint with its verdict and damage, and the newest intact checkpoint."""
        told = []
        for one in self.verdicts:
            why = ": it has no COMMIT file, so its save never completed" if one.verdict == "unfinished" else ""
            told.append(f"{one.path.name}  {one.verdict}{why}")
            told += [f"  {line}" for damage in one.damages for line in damage.lines()]
        newest = self.newest_complete
        intact = f"newest intact checkpoint: step {newest.step}, {newest.path}" if newest else "no intact checkpoint"
        return [*told, intact]

    def as_json(self) -> str:
        """Return the result for --json."""
        newest = self.newest_complete
        checkpoints = [
            {
                "step": one.step,
                "path": str(one.path),
                "state": one.verdict,
                "damages": [{"problem": d.problem, "file": d.file, "tensors": list(d.tensors)} for d in one.damages],
            }
            for one in self.verdicts
        ]
        return json.dumps({"checkpoints": checkpoints, "newest_whole": newest.step if newest else None}, indent=1)


def inspect(paths: list[Location], *, digests: bool = True) -> Inspection:
    """Check checkpoints one after the other, with a progress bar on stderr."""
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
    """Return a problem with the lost tensors: all of its file, or the ones beyond the end of a truncated file.

    It names no tensors if the checkpoint cannot be opened.
    """
    file = problem.split(" ", 1)[0].removesuffix(":")
    try:
        opened = load_checkpoint(path, lazily=True)
    except CheckpointError:
        return DamagedFile(problem, file)
    if file not in opened.files:
        return DamagedFile(problem, file)
    tensors, whole = opened.tensors_in(file), _complete_tensors(path / file, opened.files[file])
    group = {one.partition("/")[2]: one for one in tensors}
    return DamagedFile(problem, file, tuple(full for name, full in group.items() if name not in whole))


def _complete_tensors(file: Location, num_bytes: int) -> set[str]:
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


# `weft ckpt diff`: differences between two checkpoints in tensors, their values, and settings.

#: Number of elements to compare at a time. Two buffers of them in float64 are 64 MiB.
_AT_ONCE = 2**22
_MOST_LINES = 20
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class NumbersDiffer:
    """Difference between the values of a tensor.

    `largest` is the maximum of |a - b|, or nan if only one of a and b is a number. `scale` is the maximum of |a|.
    """

    name: str
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        """`largest` divided by `scale`; inf if `scale` is 0."""
        return self.largest / self.scale if self.scale else math.inf

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key: weights first, then nan, then the largest relative difference."""
        difference = (-math.inf, -math.inf) if math.isnan(self.largest) else (-self.relative, -self.largest)
        return not self.name.startswith("model/"), *difference


@dataclass
class Differences:
    """All differences between two checkpoints.

    Attributes:
        only_left, only_right: names of tensors in one checkpoint.
        layout: name of each tensor whose dtype or shape differs, with both dtypes and shapes.
        settings: key, left value, right value.
    """

    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    layout: list[tuple[str, str, str]] = field(default_factory=list)
    numbers: list[NumbersDiffer] = field(default_factory=list)
    settings: list[tuple[str, str, str]] = field(default_factory=list)
    num_equal: int = 0

    @property
    def exit_code(self) -> int:
        """0 if the checkpoints are equal, else 1."""
        return int(bool(self.only_left or self.only_right or self.layout or self.numbers or self.settings))

    def lines(self, left: str, right: str, *, everything: bool = False) -> list[str]:
        """Return the differences by kind, at most 20 each unless `everything`, and the number of equal tensors."""
        most = None if everything else _MOST_LINES
        told: list[str] = []
        for title, heading, rows in (
            (f"only in {left}", (), [(name,) for name in self.only_left]),
            (f"only in {right}", (), [(name,) for name in self.only_right]),
            ("different dtype or shape", ("tensor", left, right), list(self.layout)),
            ("different numbers", ("tensor", "relative", "largest |A-B|", "largest |A|"), [
                (one.name, f"{one.relative:.2g}", f"{one.largest:.4g}", f"{one.scale:.4g}")
                for one in sorted(self.numbers, key=lambda one: one.rank)
            ]),
            ("different settings", ("setting", left, right), list(self.settings)),
        ):  # fmt: skip
            if rows:
                shown = [heading] if heading else []
                told += [f"{title} ({len(rows)}):", *(f"  {line}" for line in table([*shown, *rows[:most]]))]
                if most is not None and len(rows) > most:
                    told.append(f"  ... and {len(rows) - most} more; --all lists them")
        return [*told, f"identical: {counted(self.num_equal, 'tensor')}"]

    def as_json(self) -> dict[str, object]:
        """Return the result for --json. Non-finite differences are text, because JSON has no such numbers."""
        largest = {one.name: one.largest if math.isfinite(one.largest) else str(one.largest) for one in self.numbers}
        numbers = [{"name": name, "largest": value} for name, value in largest.items()]
        return {**asdict(self), "numbers": numbers}


def differences(left: Checkpoint, right: Checkpoint) -> Differences:
    """Compare all tensors and settings, with two full tensors in memory at a time."""
    found = Differences()
    ours, theirs = _names(left), _names(right)
    found.only_left = [name for name in ours if name not in theirs]
    found.only_right = [name for name in theirs if name not in ours]
    for name in (name for name in ours if name in theirs):
        (dtype, shape), (other_dtype, other_shape) = ours[name], theirs[name]
        if (dtype, shape) != (other_dtype, other_shape):
            found.layout.append((name, f"{dtype} {list(shape)}", f"{other_dtype} {list(other_shape)}"))
        if shape != other_shape:
            continue
        number = _numbers(name, left.block(name).values(), right.block(name).values())
        if number is not None:
            found.numbers.append(number)
        elif dtype == other_dtype:
            found.num_equal += 1
    found.settings = list(changed_values(_settings(left), _settings(right)))
    return found


def _names(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        f"{group}/{name}": (entry.dtype, entry.shape)
        for group in checkpoint.groups
        for name, entry in checkpoint.entries(group).items()
    }


def _numbers(name: str, left: np.ndarray, right: np.ndarray) -> NumbersDiffer | None:
    """Return the difference between two tensors, or None if they are equal. nan counts as equal to nan."""
    import numpy as np

    largest = scale = 0.0
    ours, theirs = left.reshape(-1), right.reshape(-1)
    wide = np.complex128 if "c" in (left.dtype.kind, right.dtype.kind) else np.float64
    for start in range(0, ours.size, _AT_ONCE):
        a, b = ours[start : start + _AT_ONCE].astype(wide), theirs[start : start + _AT_ONCE].astype(wide)
        differ = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        scale = max(scale, float(np.nanmax(np.abs(a), initial=0.0)))
        if differ.any():
            with np.errstate(invalid="ignore"):
                here = float(np.max(np.abs(a[differ] - b[differ])))
            largest = math.nan if math.isnan(here) or math.isnan(largest) else max(largest, here)
    return NumbersDiffer(name, largest, scale) if largest else None


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's settings as flat keys.

    They are the saved state without its tensors, the versions of libraries that wrote it, and the run's config if it is
    next to the checkpoint.
    """
    found = {f"state.{key}": value for key, value in flat(checkpoint.state).items()}
    found |= {f"written_by.{key}": value for key, value in checkpoint.written_by.items()}
    config = checkpoint.path.parent.parent / "config.toml"
    if checkpoint.path.parent.name == "checkpoints" and isinstance(config, Path) and config.is_file():
        with contextlib.suppress(OSError, ValueError):
            found |= flat(tomllib.loads(config.read_text()))
    return found


def flat(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested tables into one with dotted keys."""
    found: dict[str, Any] = {}
    for key, one in value.items():
        found |= flat(one, f"{above}{key}.") if isinstance(one, Mapping) and one else {f"{above}{key}": one}
    return found


def changed_values(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, left, right) of flat tables for each difference; "-" for a missing key."""
    for key in dict.fromkeys((*left, *right)):
        ours, theirs = left.get(key, _ABSENT), right.get(key, _ABSENT)
        if ours != theirs and not (ours != ours and theirs != theirs):
            yield key, _short(ours), _short(theirs)


def _short(value: Any) -> str:
    text = "-" if value is _ABSENT else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
