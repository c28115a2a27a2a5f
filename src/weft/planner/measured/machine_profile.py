"""Profile of a machine: the measurements of `weft calibrate`, as a readable JSON file.

    {"weft_profile": 2, "machine": {...}, "hash": "...", "made": "2026-01-31T12:00:00", "took_s": 61.0,
     "samples": [{"op": "linear_f", "dtype": "fp32", "ranks": 2, "group": 1, "size": [512, 768, 256], "seconds": ...,
                  "spread": 0.03}, ...],
     "learned": []}

Times are in seconds, sizes in values or bytes as described for each operation in docs/how-to/calibrate.md. `hash` is
the hash of `machine`: a profile is valid for one machine with one version of its software.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from weft import env
from weft.errors import ConfigError, Problem

VERSION = 2
_TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str}
_Row = TypeVar("_Row")
_File = TypeVar("_File")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine and software of a measurement, for which a profile is valid.

    Attributes:
        kind: "cpu" or "cuda".
        device: name of the device.
        count: number of devices of the node (1 for a CPU).
        cores: number of cores that ranks may use.
        threads: number of threads of one rank.
        memory_bytes: memory of the machine, or of one GPU.
        transports: transports of collectives between ranks, such as "shared memory".
    """

    kind: str
    device: str
    count: int
    cores: int
    threads: int
    memory_bytes: int
    torch: str
    transports: tuple[str, ...]

    @property
    def hash(self) -> str:
        """12 hex characters of a hash of all fields except memory, whose last digits change at every boot."""
        import hashlib  # slow to load, and most plans need no profile

        told = {name: value for name, value in asdict(self).items() if name != "memory_bytes"}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    def differences(self, other: Machine) -> list[str]:
        """Return the differences except in memory as text, such as 'torch 2.12.0, here 2.13.0'."""
        names = [each.name for each in fields(self) if each.name != "memory_bytes"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} {_shown(mine)}, here {_shown(theirs)}" for name, mine, theirs in pairs if mine != theirs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measurement.

    Attributes:
        size: as described for each `op` in docs/how-to/calibrate.md.
        seconds: time of one call on one rank.
        ranks: ranks that made the same call at the same time.
        group: ranks of the collective, 1 for compute.
        spread: relative spread of the timing windows around their median.
    """

    op: str
    size: tuple[int, ...]
    seconds: float
    dtype: str = "fp32"
    ranks: int = 1
    group: int = 1
    spread: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Correction from a run: ratio of measured to predicted time, by part of the step.

    Attributes:
        run: absolute path of the run's folder.
        plan, model: plan and model of the run.
        ratios: (part, ratio) of each significant part.
    """

    run: str
    plan: str
    model: str
    steps: int
    ratios: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements of one machine.

    Attributes:
        made, took_s: time at which it was created, and duration (s) of the measurements.
        learned: corrections from runs.
        path: the file that it was read from, for error messages.
    """

    machine: Machine
    samples: tuple[Measurement, ...]
    made: str
    took_s: float
    learned: tuple[Lesson, ...] = ()
    path: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Measured numbers of active ranks."""
        return tuple(sorted({sample.ranks for sample in self.samples}))

    def ranks_near(self, num_ranks: int) -> int:
        """Return the smallest number of active ranks, at least `num_ranks`, with measured matmuls, or else the largest.

        Return 1 if no matmul was measured.
        """
        counts = sorted({sample.ranks for sample in self.samples if sample.op == "linear_f"}) or [1]
        return next((count for count in counts if count >= num_ranks), counts[-1])

    def formats(self, num_ranks: int) -> frozenset[str]:
        """Return the number formats in which matmuls were measured with `ranks_near(num_ranks)` active ranks."""
        ranks = self.ranks_near(num_ranks)
        return frozenset(one.dtype for one in self.samples if one.op == "linear_f" and one.ranks == ranks)

    def __hash__(self) -> int:
        # The hash uses few fields: tables are cached by profile and requested often, and there are hundreds of samples.
        return hash((self.machine, self.made, len(self.samples), self.learned))

    def to_text(self) -> str:
        """Return the file's text, with one sample per line."""
        head = {"weft_profile": VERSION, "machine": asdict(self.machine), "hash": self.machine.hash, "made": self.made,
                "took_s": round(self.took_s, 1)}  # fmt: skip
        return file_text(head, samples=self.samples, learned=self.learned)

    def save(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            ConfigError: if it cannot be written.
        """
        write_atomic(path, self.to_text())

    def with_lesson(self, lesson: Lesson) -> Profile:
        """Return the profile with one more correction, which replaces an older one of the same run."""
        kept = tuple(each for each in self.learned if each.run != lesson.run)
        return replace(self, learned=(*kept, lesson))


def write_atomic(path: Path, text: str) -> None:
    """Write a file atomically. Create a missing folder.

    Raises:
        ConfigError: if it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        rule = f"cannot be written ({error.strerror}). Name a file in a folder that you can write to."
        raise ConfigError([Problem("profile", f"out={path}: {rule}")]) from None


def default_path() -> Path:
    """Return the default path of this machine's profile."""
    return env.cache_dir() / "profile.json"


def load_profile(path: Path | str) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: if the file is unreadable or invalid; the message names the file and the first error.
    """
    remedy = f"Create it again with: weft calibrate --out {path}"
    return read_file(path, "profile", f"profile={path}", lambda table: _read(table, str(path)), remedy)


def _read(table: Mapping[str, Any], path: str) -> Profile:
    expect_keys(table, "weft_profile", VERSION, {"machine", "hash", "made", "took_s", "samples", "learned"})
    machine = read_row(Machine, table["machine"])
    if table["hash"] != machine.hash:
        raise ValueError(
            f"hash={table['hash']} does not match its machine ({machine.hash}): the file was changed by hand"
        )
    samples = tuple(read_row(Measurement, each) for each in table["samples"])
    if bad := next((each for each in samples if not 0 < each.seconds < 1e6), None):
        raise ValueError(f"sample {bad.op} {list(bad.size)}: seconds={bad.seconds} is not a time")
    learned = tuple(read_row(Lesson, each) for each in table["learned"])
    return Profile(machine=machine, samples=samples, made=str(table["made"]), took_s=float(table["took_s"]),
                   learned=learned, path=path)  # fmt: skip


def file_text(head: Mapping[str, Any], **rows: Sequence[Any]) -> str:
    """Return the JSON text of a file of measurements, with one row (a dataclass) per line."""
    lines = json.dumps(head, indent=1)[:-2]
    for name, each in rows.items():
        body = ",\n  ".join(json.dumps(asdict(row)) for row in each)
        lines += f',\n "{name}": [\n  {body}\n ]' if each else f',\n "{name}": []'
    return lines + "\n}\n"


def read_file(
    path: Path | str, field: str, name: str, read: Callable[[Mapping[str, Any]], _File], remedy: str
) -> _File:
    """Read a JSON file of measurements with `read`, which raises KeyError, TypeError or ValueError for wrong contents.

    Raises:
        ConfigError: for an unreadable file or wrong contents, with `name`, the first error and `remedy`.
    """
    try:
        table: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        return read(cast(dict[str, Any], table) if isinstance(table, dict) else {})
    except OSError as error:
        rule = f"the file cannot be read ({error.strerror})"
    except json.JSONDecodeError as error:
        rule = f"not JSON text ({error})"
    except (KeyError, TypeError, ValueError) as error:
        rule = str(error.args[0]) if error.args else type(error).__name__
    raise ConfigError([Problem(field, f"{name}: {rule}. {remedy}")])


def expect_keys(table: Mapping[str, Any], kind: str, version: int, known: set[str]) -> None:
    """Check the version of a file, which is its value of `kind`, and its keys.

    Raises:
        ValueError: for any other version, or an unknown or missing key.
    """
    if table.get(kind) != version:
        raise ValueError(f"{kind}={table.get(kind)}: this Weft reads version {version}")
    if wrong := sorted(set(table) ^ {kind, *known}):
        raise ValueError(f"{'unknown key' if wrong[0] in table else 'there is no key'} {wrong[0]!r}")


def read_row(kind: type[_Row], read: Any) -> _Row:
    """Return an instance of a dataclass from JSON data, with lists converted to tuples.

    Raises:
        ValueError: for an unknown key, a value of the wrong type, or data that is not a dict.
        TypeError: for a missing key.
    """
    names = [each.name for each in fields(cast(Any, kind))]
    if not isinstance(read, dict):
        raise ValueError(f"{kind.__name__.lower()}: unknown key {read!r}")
    table = cast(dict[str, Any], read)
    if unknown := set(table) - set(names):
        raise ValueError(f"{kind.__name__.lower()}: unknown key {min(unknown)!r}")
    values = {name: _tuples(value) for name, value in table.items()}
    for each in fields(cast(Any, kind)):
        wanted = _TYPES.get(str(each.type), tuple)
        value = values.get(each.name)
        if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
            raise ValueError(f"{kind.__name__.lower()}: {each.name}={value!r} is no {each.type}")
    return kind(**values)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, cast(list[Any], value))) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return ", ".join(cast(tuple[str, ...], value)) if isinstance(value, tuple) else str(value)
