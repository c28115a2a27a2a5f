"""Readers of pickled checkpoints, which run in a child process.

They write safetensors files, and a table that maps tensors to files.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: Maximum bytes of tensors in memory before a file is written.
_SHARD_BYTES = 2**30
TABLE = "taken.json"
#: Maximum output as a multiple of the source's bytes, and in addition to it: tensors with several names are stored
#: once.
_MOST_TIMES, _MOST_MORE = 8, 2**28
#: First bytes of a zip archive, which torch.save has written since torch 1.6.
_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(r"(?:GLOBAL|global|class|type)[: ]+`?([A-Za-z_][\w.]*\.[\w.]+)`?")


class NotTaken(Exception):
    """Raised with a one-sentence reason if files are rejected."""


def most_bytes(source_bytes: int) -> int:
    """Return the maximum bytes of tensors that a source of `source_bytes` may contain."""
    return _MOST_TIMES * source_bytes + _MOST_MORE


class Taken:
    """Collects tensors by their path in the saved dicts, such as ("model", "embed.weight"), and writes files.

    out: folder for the files. max_bytes: limit for all tensors together, because a tensor with strides of 0 is small in
    its file but large when copied.
    """

    def __init__(self, out: Path, max_bytes: int):
        self._out, self._bytes_left = out, max_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_bytes = self._num_files = self._num_tensors = 0
        self._table: list[dict[str, Any]] = []
        self._values: list[list[Any]] = []
        self._left_out: list[str] = []

    def reserve(self, name: object, num_bytes: int) -> None:
        """Check that a tensor of `num_bytes` fits into the rest of the limit.

        Raises:
            NotTaken: if it does not.
        """
        if num_bytes > self._bytes_left:
            raise NotTaken(f"{str(name)[:200]}: it expands to {num_bytes} bytes, far more than the files have")

    def tensor(self, place: Sequence[Any], tensor: torch.Tensor) -> None:
        """Add one full tensor, or list it as left out if it is quantized, sparse or complex128.

        Raises NotTaken if all tensors together exceed the limit.
        """
        if tensor.is_quantized or tensor.layout != torch.strided or tensor.dtype == torch.complex128:
            self._left_out.append(f"{'.'.join(map(str, place))} ({tensor.dtype}, {tensor.layout})")
            return
        num_bytes = tensor.numel() * tensor.element_size()
        self.reserve(".".join(map(str, place)), num_bytes)
        self._bytes_left -= num_bytes
        # Name tensors by index in these files, because names from the checkpoint are untrusted.
        number = f"t{self._num_tensors}"
        self._num_tensors += 1
        self._tensors[number] = tensor.detach().contiguous().clone()
        self._num_bytes += num_bytes
        self._table.append({"place": [*place], "file": self._num_files, "name": number})
        if self._num_bytes >= _SHARD_BYTES:
            self._write()

    def value(self, place: Sequence[Any], value: Any) -> None:
        """Add one plain value, or list it as left out if JSON cannot represent it."""
        try:
            plain = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            self._left_out.append(".".join(map(str, place)))
        else:
            self._values.append([[*place], plain])

    def leave_out(self, name: str) -> None:
        """Record an entry that is neither a tensor nor a value of a checkpoint."""
        self._left_out.append(name)

    def close(self) -> None:
        """Write the remaining tensors and the table."""
        self._write()
        said = {"tensors": self._table, "values": self._values, "left_out": self._left_out}
        (self._out / TABLE).write_text(json.dumps(said))

    def _write(self) -> None:
        if self._tensors:
            save_file(self._tensors, str(self._out / f"{self._num_files}.safetensors"))
            self._tensors, self._num_bytes, self._num_files = {}, 0, self._num_files + 1


def load_weights(source: Path | bytes, name: str, *, mapped: bool = False) -> Any:
    """Load a torch.save file that contains only tensors and plain values.

    Args:
        source: the file, or its bytes.
        name: name for error messages.
        mapped: map the file instead of reading it.

    Raises:
        NotTaken: for damaged files, other formats, and any other content. The message names it.
    """
    if _first_bytes(source) != _ZIP:
        raise NotTaken(
            f"{name}: it is not in the format of torch.save since torch 1.6. If you trust it, read it with "
            "torch.load(FILE, weights_only=True) and write it again with torch.save"
        )
    try:
        stream: Any = io.BytesIO(source) if isinstance(source, bytes) else str(source)
        return torch.load(stream, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged or hostile file may raise anything
        raise NotTaken(f"{name}: {reason_of(error)}") from error


def _first_bytes(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source[: len(_ZIP)]
    with source.open("rb") as file:
        return file.read(len(_ZIP))


def reason_of(error: Exception) -> str:
    """Return the reason why a file cannot be read, as a clause."""
    found = _GLOBAL.search(str(error))
    if found:
        return f"it holds {found[1]}, which is not a weight; Weft ran and loaded nothing from it"
    first = str(error).strip().split("\n")[0][:160]
    if isinstance(error, MemoryError) or "allocate memory" in first:
        return "reading it needs far more memory than its files have bytes"
    return f"it cannot be read as weights ({type(error).__name__}: {first})"


def within(folder: Path, name: Any) -> Path:
    """Return the path of a regular file in a folder.

    Raises:
        NotTaken: if the name leads outside the folder, is a link, or does not exist.
    """
    if not isinstance(name, str) or not name or name != Path(name).name or name in (".", ".."):
        raise NotTaken(f"{str(name)[:80]!r} names a file outside the checkpoint's folder")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise NotTaken(f"{name} is missing or is not a plain file")
    return path


def numel(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)


# Checkpoints of DeepSpeed, ZeRO stages 1 to 3: flat fp32 partitions of each rank, and tables of names and shapes.

_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class _Plain:
    """Replacement for DeepSpeed's classes that only stores its arguments."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments


_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@dataclass(frozen=True, slots=True)
class _Lines:
    """One kind of value (weights, exp_avg, ...) of all ranks: per rank, a flat tensor per parameter group."""

    stage: int
    groups: list[list[torch.Tensor]]


def read_zero(source: Path, taken: Taken) -> None:
    """Read a DeepSpeed checkpoint of ZeRO stage 1, 2 or 3, and add full weights, moments and counters to `taken`.

    Raises:
        NotTaken: if the files are damaged or of another format.
    """
    torch.serialization.add_safe_globals([argparse.Namespace, *((_Plain, name) for name in _DEEPSPEED)])
    folder = _tag_folder(source)
    ranks = [_load(path) for path in _files(folder, _STATES)]
    models = [_load(path) for path in _files(folder, _MODEL)]
    states = [_table(rank, "optimizer_state_dict") for rank in ranks]
    first = models[0]
    stage = _stage(states[0])
    world_size = _world_size(states[0])
    if world_size != len(states):
        raise NotTaken(f"{len(states)} files of optimizer states of {world_size} are there")
    shapes = _shapes(first.get("param_shapes"))
    paddings = states[0].get("param_alignment_paddings") if stage < 3 else None
    weights = _Lines(stage, [_flat(one, stage) for one in states])
    for name, tensor in _tensors(weights, shapes, paddings):
        taken.tensor(("model", name), tensor)
    _moments(states, stage, shapes, paddings, taken)
    _others(models, shapes, stage, taken)
    for key in ("global_steps", "global_samples", "skipped_steps"):
        taken.value((key,), first.get(key))


def _tag_folder(source: Path) -> Path:
    if not (source / "latest").is_file():
        return source
    tag = within(source, "latest").read_text(errors="replace").strip()
    folder = source / tag
    if tag != Path(tag).name or tag in (".", "..") or folder.is_symlink() or not folder.is_dir():
        raise NotTaken(f"`latest` names {tag[:80]!r}, and the checkpoint has no such folder")
    return folder


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise NotTaken(f"{path.name}: it was saved with tensor or pipeline parallelism, which Weft does not import")
        found[int(match[1] or 0)] = within(folder, path.name)
    if sorted(found) != list(range(len(found))) or not found:
        kind = "optimizer states" if pattern is _STATES else "model states"
        raise NotTaken(f"files of {kind} are missing: found only files of ranks {sorted(found)}")
    return [found[rank] for rank in sorted(found)]


def _load(path: Path) -> dict[str, Any]:
    found = load_weights(path, path.name, mapped=True)
    if not isinstance(found, dict):
        raise NotTaken(f"{path.name} has no table")
    return found


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(table.get(key), dict):
        raise NotTaken(f"it has no {key}")
    return table[key]


def _stage(states: dict[str, Any]) -> int:
    found = states.get("zero_stage")
    value: Any = found.arguments[0] if isinstance(found, _Plain) and found.arguments else found
    if value not in (1, 2, 3):
        raise NotTaken(f"zero_stage is {value!r}; Weft imports stages 1, 2 and 3")
    return value


def _world_size(states: dict[str, Any]) -> int:
    found = states.get("partition_count")
    found = max(found) if isinstance(found, list) and found else found
    if type(found) is not int:
        raise NotTaken("partition_count is not a number")
    return found


def _shapes(found: Any) -> list[dict[str, tuple[int, ...]]]:
    groups = found if isinstance(found, list) else [found]
    if not groups or not all(isinstance(group, dict) for group in groups):
        raise NotTaken("param_shapes is not a list of tables")
    return [{str(name): tuple(shape) for name, shape in group.items()} for group in groups]


def _flat(states: dict[str, Any], stage: int) -> list[torch.Tensor]:
    found = states.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(found, list) or not all(isinstance(one, torch.Tensor) for one in found):
        raise NotTaken("the fp32 partitions are missing: it was saved without optimizer states")
    return [one.reshape(-1) for one in found]


def _tensors(
    lines: _Lines, shapes: Sequence[dict[str, tuple[int, ...]]], paddings: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    if lines.stage == 3:
        yield from _equal_chunks(lines, {name: shape for group in shapes for name, shape in group.items()})
        return
    if len(lines.groups[0]) != len(shapes):
        raise NotTaken(f"{len(lines.groups[0])} partitions for {len(shapes)} groups of parameters")
    for number, group in enumerate(shapes):
        line = torch.cat([rank[number] for rank in lines.groups])
        gaps = paddings[number] if isinstance(paddings, list) and number < len(paddings) else [0] * len(group)
        start = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            yield name, _slice(line, name, start, shape)
            start += numel(shape) + int(gap)


def _equal_chunks(lines: _Lines, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    ranks = [torch.cat(groups) for groups in lines.groups]
    start = 0
    for name, shape in shapes.items():
        each = -(-numel(shape) // len(ranks))
        if any(start + each > rank.numel() for rank in ranks):
            raise NotTaken(f"{name}: the partitions end before this parameter")
        line = torch.cat([rank[start : start + each] for rank in ranks])
        yield name, _slice(line, name, 0, shape)
        start += each


def _slice(line: torch.Tensor, name: str, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    if start + numel(shape) > line.numel():
        raise NotTaken(f"{name}: the partitions end before this parameter")
    return line[start : start + numel(shape)].view(shape)


def _moments(
    states: list[dict[str, Any]], stage: int, shapes: list[dict[str, tuple[int, ...]]], paddings: Any, taken: Taken
) -> None:
    """Collect optimizer states.

    Flat states have the layout of the weights. Other states have one value per parameter group.
    """
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    base = [one.get(key) for one in states]
    if not all(isinstance(one, dict) and isinstance(one.get("state"), dict) for one in base):
        raise NotTaken(f"{key} has no states; save it again with elastic checkpoints off")
    by_rank: list[list[dict[str, Any]]] = [
        list(_table(one or {}, "state").values()) for one in base
    ]  # a group, or a part of one under stage 3
    if not by_rank[0]:
        return
    for kind, sample in by_rank[0][0].items():
        place = ("optimizer", "state")
        if isinstance(sample, torch.Tensor) and sample.dim() == 1:
            flat = _Lines(stage, [[group[kind].reshape(-1) for group in rank] for rank in by_rank])
            for name, tensor in _tensors(flat, shapes, paddings):
                taken.tensor((*place, name, kind), tensor)
        else:
            value = sample if isinstance(sample, torch.Tensor) else torch.tensor(float(sample))
            for name in (name for group in shapes for name in group):
                taken.tensor((*place, name, kind), value.to(torch.float32))


def _others(models: list[dict[str, Any]], shapes: list[dict[str, tuple[int, ...]]], stage: int, taken: Taken) -> None:
    first = models[0]
    module = _table(first, "module")
    trained = {name for group in shapes for name in group}
    frozen: dict[str, Any] = first.get("frozen_param_shapes") or {}
    for name, shape in frozen.items():
        pieces = [(one.get("frozen_param_fragments") or {})[name].reshape(-1) for one in models]
        line = torch.cat(pieces) if stage == 3 else pieces[0]
        taken.tensor(("model", name), _slice(line, name, 0, tuple(shape)))
    for name in first.get("buffer_names") or []:
        if name in module and name not in trained:
            taken.tensor(("model", name), module[name])
    taken.value(("shared",), {str(a): str(b) for a, b in dict(first.get("shared_params") or {}).items()})


# Folders of torch.distributed.checkpoint: `.metadata`, a pickle of tables, and the .distcp files that it refers to.

_METADATA = "torch.distributed.checkpoint.metadata"
_MOST_DIMS = 32


class _Record:
    """Replacement for torch's classes in `.metadata` that only stores its arguments."""

    def __init__(self, *arguments: Any):
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, position: int = -1) -> Any:
        """Return a field by name or, if the state is a tuple, by position; None if it is missing."""
        if isinstance(self.state, Mapping):
            return self.state.get(name)
        return self.state[position] if isinstance(self.state, tuple) and 0 <= position < len(self.state) else None


class _Tensor(_Record):
    """Replacement for TensorStorageMetadata."""


class _Stored(_Record):
    """Replacement for _StorageInfo."""


class _Index(_Record):
    """Replacement for MetadataIndex."""


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


def _nothing(*_: Any) -> None:
    """Replacement for functions that make layouts and memory formats."""


_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Record,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Record,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _nothing,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Stored,
    ("torch.serialization", "_get_layout"): _nothing,
    ("torch", "Size"): _size,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib", "PurePosixPath"): _Record,
    ("collections", "OrderedDict"): OrderedDict,
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that allows only the classes above and torch's dtypes."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a replacement class or a dtype. Raise UnpicklingError for any other name."""
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"global {module}.{name}")
        return found


def read_dcp(source: Path, taken: Taken) -> None:
    """Read a torch.distributed.checkpoint folder, and add all full tensors and plain values to `taken`.

    Raises:
        NotTaken: if the files are damaged or of another format.
    """
    with within(source, ".metadata").open("rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # a damaged or hostile file may raise anything
            raise NotTaken(f".metadata: {reason_of(error)}") from error
    if not isinstance(metadata, _Record) or not isinstance(metadata.get("state_dict_metadata"), dict):
        raise NotTaken(".metadata does not describe a checkpoint")
    places = metadata.get("planner_data")
    stored: dict[Any, list[tuple[_Index, _Stored]]] = defaultdict(list)
    for index, info in (metadata.get("storage_data") or {}).items():
        if isinstance(index, _Index) and isinstance(info, _Stored):
            stored[index.get("fqn")].append((index, info))
    for name, entry in metadata.get("state_dict_metadata").items():
        place = places.get(name, (name,)) if isinstance(places, dict) else (name,)
        if not isinstance(name, str) or not all(isinstance(one, str | int) for one in place):
            raise NotTaken(f".metadata: {str(name)[:80]!r} is not a tensor name")
        if isinstance(entry, _Tensor):
            taken.tensor(place, _join(source, name, entry, stored[name], taken))
        else:
            _value(source, name, place, stored[name], taken)


def _value(source: Path, name: str, place: Any, stored: list[tuple[_Index, _Stored]], taken: Taken) -> None:
    for _, info in stored:
        value = load_weights(_bytes(source, info), name)
        if isinstance(value, torch.Tensor):
            taken.tensor(place, value)
        else:
            taken.value(place, value)


def _join(source: Path, name: str, entry: _Tensor, stored: list[tuple[_Index, _Stored]], taken: Taken) -> torch.Tensor:
    """Join a tensor from its chunks. Raises NotTaken unless each element is in exactly one chunk."""
    properties, shape = entry.get("properties"), entry.get("size")
    dtype = properties.get("dtype", 0) if isinstance(properties, _Record) else None
    if not isinstance(dtype, torch.dtype) or not _is_shape(shape):
        raise NotTaken(f"{name}: .metadata has no dtype or shape")
    taken.reserve(name, numel(shape) * dtype.itemsize)
    found: torch.Tensor | None = None
    seen = torch.zeros(0, dtype=torch.bool)
    for index, info in stored:
        chunk, offset = load_weights(_bytes(source, info), name), index.get("offset")
        if not isinstance(chunk, torch.Tensor) or chunk.dtype != dtype or not _is_shape(offset):
            raise NotTaken(f"{name}: one of its parts is not a tensor of {dtype}")
        ends = [low + size for low, size in zip(offset, chunk.shape, strict=False)]
        if len(offset) != len(shape) or chunk.dim() != len(shape) or any(map(int.__gt__, ends, shape)):
            raise NotTaken(f"{name}: one of its parts is outside the shape {list(shape)}")
        if tuple(chunk.shape) == tuple(shape) and len(stored) == 1:
            return chunk
        if found is None:
            found, seen = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        box = tuple(slice(low, end) for low, end in zip(offset, ends, strict=True))
        if bool(seen[box].any()):
            raise NotTaken(f"{name}: two of its parts overlap")
        found[box], seen[box] = chunk, True
    if found is None or not bool(seen.all()):
        raise NotTaken(f"{name}: some of its parts are missing")
    return found


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= _MOST_DIMS and all(type(one) is int and one >= 0 for one in value)


def _bytes(source: Path, info: _Stored) -> bytes:
    if info.get("transform_descriptors"):
        raise NotTaken("its files are compressed. Load it and save it again without compression")
    offset, length = info.get("offset"), info.get("length")
    path = within(source, info.get("relative_path"))
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise NotTaken(f"{path.name}: .metadata has no byte range in it")
    if offset + length > path.stat().st_size:
        raise NotTaken(f"{path.name} is shorter than .metadata records: it was truncated")
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


# Pickled weights of a Hugging Face folder: one file, or several with an index.

_SINGLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: Files that trainers write next to the weights, and that contain no weights.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states")
#: Keys under which trainers store the weights in a larger dict.
_TABLES = ("state_dict", "model_state_dict", "model", "module")


def read_pickled(source: Path, taken: Taken) -> None:
    """Read pickled weights, and add each tensor to `taken` by its name.

    Raises:
        NotTaken: if the files have no tensors or any content except tensors and plain values, or if two files have the
            same tensor.
    """
    seen: set[str] = set()
    for name in _pickle_files(source):
        table = load_weights(within(source, name), name, mapped=True)
        weights, others = _weights(table, name)
        for key in others:
            taken.leave_out(f"{name}: {str(key)[:200]}")
        for key, tensor in weights.items():
            if isinstance(key, str) and isinstance(tensor, torch.Tensor):
                if key in seen:
                    raise NotTaken(f"{name}: tensor {key[:200]!r} is in another file too")
                seen.add(key)
                taken.tensor((key,), tensor)
            else:
                taken.leave_out(f"{name}: {str(key)[:200]}")
    if not seen:
        raise NotTaken("its files have no tensors")


def _pickle_files(source: Path) -> list[str]:
    if (source / _INDEX).is_file():
        try:
            return sorted(set(json.loads(within(source, _INDEX).read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise NotTaken(f"{_INDEX} cannot be read ({error})") from error
    if (source / _SINGLE).is_file():
        return [_SINGLE]
    found = sorted(file.name for pattern in PATTERNS for file in source.glob(pattern))
    found = [name for name in found if not name.startswith(_NO_WEIGHTS)]
    if not found:
        raise NotTaken(f"it has neither {_SINGLE} nor {_INDEX}, nor another pickle of weights")
    return found


def _weights(table: Any, name: str) -> tuple[Mapping[Any, Any], list[Any]]:
    """Return the dict of weights of a file, and the keys of the other entries around it."""
    if not isinstance(table, Mapping):
        raise NotTaken(f"{name}: it holds a {type(table).__name__}, no table of tensors")
    own = next((key for key in _TABLES if isinstance(table.get(key), Mapping)), None)
    return (table, []) if own is None else (table[own], [key for key in table if key != own])
