"""Manifest of a checkpoint: its files, and the slices of tensors in the ranks' files."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.checkpoint import strict_json
from weft.checkpoint.read import OwnershipMap, Part
from weft.errors import CheckpointError

_NUMBERS = ("length", "start", "times", "each", "turn")
_MOST = 2**48


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a tensor, and in `deal` the ranks that have its elements. All slices of a tensor together cover it."""

    part: Part
    deal: OwnershipMap

    def to_json(self, tables: RankLists) -> dict[str, object]:
        """Return JSON values for the manifest. Default values are omitted."""
        deal, part = self.deal, self.part
        said: dict[str, object] = {"ranks": tables.index(deal.ranks)}
        said |= {name: getattr(deal, name) for name in _NUMBERS if getattr(deal, name) != _USUAL[name]}
        if part.rows is not None:
            said |= {"dim": part.dim, "rows": [list(one) for one in part.rows]}
        return said | ({"order": list(part.order)} if part.order else {})


_USUAL = {"length": -1, "start": 0, "times": 1, "each": 0, "turn": 0}


@dataclass(slots=True)
class RankLists:
    """Lists of ranks, which slices refer to by index."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    _known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def index(self, ranks: tuple[int, ...]) -> int:
        """Return the index of a list of ranks, which is added if it is new."""
        if ranks not in self._known:
            self._known[ranks] = len(self.rows)
            self.rows.append(ranks)
        return self._known[ranks]


def read_slices(said: Any, shape: tuple[int, ...], tables: RankLists) -> tuple[Slice, ...]:
    """Parse and check slices from untrusted JSON. Raises ValueError, TypeError or KeyError if they are not valid."""
    if not isinstance(said, list) or not said:
        raise ValueError("not a list of slices")
    return tuple(_read(one, shape, tables) for one in said)


def _read(said: Any, shape: tuple[int, ...], tables: RankLists) -> Slice:
    if not isinstance(said, dict):
        raise TypeError("a slice is not a table")
    order, rows, dim = said.get("order", []), said.get("rows"), said.get("dim", 0)
    if order and sorted(map(_integer, order)) != list(range(len(shape))):
        raise ValueError("order does not name each dim once")
    if rows is not None:
        if not isinstance(rows, list) or not 0 <= _integer(dim) < len(shape):
            raise ValueError("rows or dim do not fit the tensor")
        rows = tuple((_integer(low), _integer(high)) for low, high in rows)
        if any(low >= high for low, high in rows):
            raise ValueError("a range of rows is empty")
    part = Part(shape, dim if rows is not None else 0, rows, tuple(order))
    row = _integer(said["ranks"])
    if row >= len(tables.rows):
        raise ValueError("ranks names a list that is not there")
    deal = OwnershipMap(tables.rows[row], **{name: _integer(said.get(name, _USUAL[name])) for name in _NUMBERS})
    if not deal.length or not deal.times or len(deal.ranks) % deal.times or deal.turn >= deal.times:
        raise ValueError("the ranks do not share equal lengths")
    if (deal.times > 1 or deal.each) and len({*deal.ranks}) < len(deal.ranks):
        raise ValueError("a rank owns several chunks that are divided")
    if deal.share * deal.times < deal.length or deal.start + part.numel > len(deal.ranks) // deal.times * deal.length:
        raise ValueError("the files are too short for all elements")
    return Slice(part, deal)


def check_cover(slices: Sequence[Slice], shape: tuple[int, ...]) -> None:
    """Check that the slices cover the tensor, each element once. Raises ValueError if they do not."""
    if any(one.part.rows is None for one in slices):
        if len(slices) > 1:
            raise ValueError("the full tensor and parts of it")
        return
    dims = {one.part.dim for one in slices}
    if len(dims) > 1:
        raise ValueError("parts are sharded along several dims")
    size = shape[dims.pop()]
    rows = sorted((low, min(high, size)) for one in slices for low, high in one.part.rows or () if low < size)
    ends = [0, *(high for _, high in rows)]
    if ends[-1] != size or [low for low, _ in rows] != ends[:-1]:
        raise ValueError("parts do not join to the tensor")


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("a value is not a whole number from 0 to 2**48")
    return value


def shard_name(group: str, rank: int) -> str:
    """Return the name of a rank's file of a group: ("model", 3) -> "model-00003.safetensors"."""
    return f"{group}-{rank:05d}.safetensors"


def rank_of(file: str) -> int:
    """Return the rank in the name of a rank's file, or 0 for a name without a rank."""
    number = file.removesuffix(".safetensors").rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


# The manifest: files of a checkpoint, their sizes and digests, and the location of each tensor.

FORMAT = "weft-checkpoint"
#: Format versions: each tensor in one file, and slices of tensors in the files of several ranks.
VERSION, SHARDED_VERSION = 1, 2
MANIFEST_NAME = "manifest.json"
COMMIT_NAME = "COMMIT"
STATE_NAME = "state.json"

#: Bytes of one element, by the dtype's name in the safetensors format.
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
GROUP_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_COUNT = 2**48
_MAX_DIMS = 32
_MAX_RANKS = 2**24


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of one tensor: a file, or, if `file` is "", slices in the files of several ranks.

    `same_as`: name of another tensor of the group that shares its memory.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    same_as: str | None = None
    slices: tuple[Slice, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of one checkpoint. `written_by` has the versions of weft and torch."""

    step: int
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, Mapping[str, TensorEntry]]
    written_by: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        def tensor_json(entry: TensorEntry) -> dict[str, object]:
            if entry.slices:
                return {
                    "dtype": entry.dtype,
                    "shape": list(entry.shape),
                    "slices": [one.to_json(tables) for one in entry.slices],
                }
            place = {"same_as": entry.same_as} if entry.same_as is not None else {}
            return {"file": entry.file, "dtype": entry.dtype, "shape": list(entry.shape), **place}

        tables = RankLists()
        tensors = {
            group: {name: tensor_json(entry) for name, entry in entries.items()}
            for group, entries in self.tensors.items()
        }
        sharded = {"ranks": tables.rows} if tables.rows else {}
        return strict_json.encode(
            {
                "format": FORMAT,
                "version": SHARDED_VERSION if sharded else VERSION,
                "step": self.step,
                "written_by": dict(self.written_by),
                "digest": "sha256",
                "files": {
                    name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in self.files.items()
                },
                **sharded,
                "tensors": tensors,
            },
            MANIFEST_NAME,
        )


def commit_text(manifest: bytes) -> bytes:
    """Return the content of COMMIT: the digest of the manifest, in hexadecimal, and a newline."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def parse_manifest(text: bytes) -> Manifest:
    """Parse a manifest from untrusted bytes. Raises CheckpointError if it is not valid."""
    raw = strict_json.decode(text, MANIFEST_NAME)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise _bad(f"format is not '{FORMAT}'")
    if raw.get("version") not in (VERSION, SHARDED_VERSION) or type(raw["version"]) is not int:
        raise _bad(f"version={raw.get('version')!r}: this weft reads versions {VERSION} and {SHARDED_VERSION}")
    if raw.get("digest") != "sha256":
        raise _bad(f"digest={raw.get('digest')!r}: this weft reads sha256")
    files = {_file_name(name): _file(name, entry) for name, entry in _table(raw, "files").items()}
    if STATE_NAME not in files:
        raise _bad(f"files has no {STATE_NAME}")
    tables = _tables(raw)
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for group, entries in _table(raw, "tensors").items():
        if not GROUP_NAME.fullmatch(group):
            raise _bad(f"tensors has a group named {group[:60]!r}")
        if not isinstance(entries, dict):
            raise _bad(f"tensors.{group} is not a table")
        tensors[group] = {name: _tensor(f"{group}.{name}", entry, files, tables) for name, entry in entries.items()}
        _check_shared(group, tensors[group])
    written_by = {key: str(value) for key, value in _table(raw, "written_by").items()}
    return Manifest(_count(raw.get("step"), "step"), files, tensors, written_by)


def _bad(problem: str) -> CheckpointError:
    return CheckpointError(f"{MANIFEST_NAME}: {problem}")


def _table(raw: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(raw.get(key), dict):
        raise _bad(f"{key} is not a table")
    return raw[key]


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise _bad(f"{name} is not a whole number from 0 to 2**48")
    return value


def _file_name(name: str) -> str:
    # A plain name: no folder, no '..', not absolute, not hidden, and not a reserved name.
    if not _FILE_NAME.fullmatch(name) or name in (MANIFEST_NAME, COMMIT_NAME):
        raise _bad(f"{name[:120]!r} is not a legal file name")
    return name


def _file(name: str, entry: Any) -> FileEntry:
    if not isinstance(entry, dict):
        raise _bad(f"files.{name} is not a table")
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise _bad(f"files.{name}.sha256 is not a SHA-256 in hexadecimal")
    return FileEntry(_count(entry.get("bytes"), f"files.{name}.bytes"), digest)


def _tables(raw: dict[str, Any]) -> RankLists:
    rows = raw.get("ranks", [])
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise _bad("ranks is not a list of lists")
    for row in rows:
        if (
            not row
            or any(type(rank) is not int or not 0 <= rank < _MAX_RANKS for rank in row)
            or len({*row}) < sum(1 for _ in itertools.groupby(row))
        ):
            raise _bad(f"ranks has a row that is not a list of ranks below {_MAX_RANKS}, with repetitions side by side")
    return RankLists([tuple(row) for row in rows])


def _tensor(name: str, entry: Any, files: Mapping[str, FileEntry], tables: RankLists) -> TensorEntry:
    name = name[:200]
    if not isinstance(entry, dict):
        raise _bad(f"tensors.{name} is not a table")
    dtype, shape, file, same_as = (entry.get(key) for key in ("dtype", "shape", "file", "same_as"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _bad(f"tensors.{name}.dtype={str(dtype)[:40]!r} is not a known dtype")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS:
        raise _bad(f"tensors.{name}.shape is not a list of at most {_MAX_DIMS} sizes")
    sizes = tuple(_count(size, f"tensors.{name}.shape") for size in shape)
    if "slices" in entry:
        try:
            slices = read_slices(entry["slices"], sizes, tables)
            check_cover(slices, sizes)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise _bad(f"tensors.{name}.slices: {error}") from error
        return TensorEntry("", dtype, sizes, None, slices)
    if not isinstance(file, str) or file not in files or not file.endswith(".safetensors"):
        raise _bad(f"tensors.{name}.file={str(file)[:120]!r} is not among the files")
    if same_as is not None and not isinstance(same_as, str):
        raise _bad(f"tensors.{name}.same_as is not a name")
    result = TensorEntry(file, dtype, sizes, same_as)
    if result.num_bytes > files[file].num_bytes:
        raise _bad(f"tensors.{name} has {result.num_bytes} bytes and its file {file} only {files[file].num_bytes}")
    return result


def _check_shared(group: str, entries: Mapping[str, TensorEntry]) -> None:
    for name, entry in entries.items():
        if entry.same_as is None:
            continue
        target = entries.get(entry.same_as)
        if target is None or target.same_as is not None or TensorEntry(entry.file, entry.dtype, entry.shape) != target:
            raise _bad(
                f"tensors.{group}.{name[:200]} shares memory with a tensor that is missing or differs in "
                "file, dtype or shape"
            )


def runs_in(file: str, manifest: Manifest) -> dict[str, tuple[str, int]]:
    """Return (dtype, number of elements) by name for the tensors with elements in a rank's file; {} for other files."""
    group, rank = file.rpartition("-")[0], rank_of(file)
    entries = manifest.tensors.get(group)
    if entries is None or file != shard_name(group, rank):
        return {}
    wanted: dict[str, tuple[str, int]] = {}
    for name, entry in entries.items():
        for one in entry.slices:
            run = one.deal.run_of(rank, 0, one.part.numel, one.part.numel)
            if run is not None:
                wanted[name] = entry.dtype, run[1] - run[0]
    return wanted
