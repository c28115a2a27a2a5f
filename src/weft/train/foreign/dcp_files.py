"""Folders of torch.distributed.checkpoint: `.metadata`, a pickle of tables, and .distcp files that it points into."""

from __future__ import annotations

import pickle  # noqa: TID251, in the confined process, and with no class but those named below
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weft.train.foreign.taken import NotTaken, Taken, load_weights, numel, reason_of, within

_METADATA = "torch.distributed.checkpoint.metadata"
_MOST_DIMS = 32


class _Record:
    """Stands for each class of torch in `.metadata`: it keeps what it is given, and does nothing."""

    def __init__(self, *arguments: Any):
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, position: int = -1) -> Any:
        """A field; of a tuple, the one at that position."""
        if isinstance(self.state, Mapping):
            return self.state.get(name)
        return self.state[position] if isinstance(self.state, tuple) and 0 <= position < len(self.state) else None


class _Tensor(_Record):
    """TensorStorageMetadata."""


class _Stored(_Record):
    """_StorageInfo."""


class _Index(_Record):
    """MetadataIndex."""


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


def _nothing(*_: Any) -> None:
    """Stands for layouts and encodings of memory formats."""


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
    """Allows the classes above and torch's dtypes, no other names."""

    def find_class(self, module: str, name: str, /) -> Any:
        """A stand-in, a dtype, or UnpicklingError."""
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"global {module}.{name}")
        return found


def read_dcp(source: Path, taken: Taken) -> None:
    """Hand over every tensor, whole, and every plain value. Raises NotTaken."""
    with within(source, ".metadata").open("rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # whatever a damaged or hostile file brings about
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
            taken.tensor(place, _whole(source, name, entry, stored[name], taken))
        else:
            _value(source, name, place, stored[name], taken)


def _value(source: Path, name: str, place: Any, stored: list[tuple[_Index, _Stored]], taken: Taken) -> None:
    for _, info in stored:
        value = load_weights(_bytes(source, info), name)
        if isinstance(value, torch.Tensor):
            taken.tensor(place, value)
        else:
            taken.value(place, value)


def _whole(source: Path, name: str, entry: _Tensor, stored: list[tuple[_Index, _Stored]], taken: Taken) -> torch.Tensor:
    """Join a tensor from its chunks, each element from one of them."""
    properties, shape = entry.get("properties"), entry.get("size")
    dtype = properties.get("dtype", 0) if isinstance(properties, _Record) else None
    if not isinstance(dtype, torch.dtype) or not _is_shape(shape):
        raise NotTaken(f"{name}: .metadata gives no dtype or shape")
    taken.reserve(name, numel(shape) * dtype.itemsize)
    found: torch.Tensor | None = None
    seen = torch.zeros(0, dtype=torch.bool)
    for index, info in stored:
        chunk, offset = load_weights(_bytes(source, info), name), index.get("offset")
        if not isinstance(chunk, torch.Tensor) or chunk.dtype != dtype or not _is_shape(offset):
            raise NotTaken(f"{name}: one of its pieces is not a tensor of {dtype}")
        ends = [low + size for low, size in zip(offset, chunk.shape, strict=False)]
        if len(offset) != len(shape) or chunk.dim() != len(shape) or any(map(int.__gt__, ends, shape)):
            raise NotTaken(f"{name}: one of its pieces lies outside of the shape {list(shape)}")
        if tuple(chunk.shape) == tuple(shape) and len(stored) == 1:
            return chunk
        if found is None:
            found, seen = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        box = tuple(slice(low, end) for low, end in zip(offset, ends, strict=True))
        if bool(seen[box].any()):
            raise NotTaken(f"{name}: two of its pieces overlap")
        found[box], seen[box] = chunk, True
    if found is None or not bool(seen.all()):
        raise NotTaken(f"{name}: some of its pieces are missing")
    return found


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= _MOST_DIMS and all(type(one) is int and one >= 0 for one in value)


def _bytes(source: Path, info: _Stored) -> bytes:
    """The saved bytes of one piece."""
    if info.get("transform_descriptors"):
        raise NotTaken("its files are compressed. Load it and save it again without compression")
    offset, length = info.get("offset"), info.get("length")
    path = within(source, info.get("relative_path"))
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise NotTaken(f"{path.name}: .metadata gives no byte range in it")
    if offset + length > path.stat().st_size:
        raise NotTaken(f"{path.name} is shorter than .metadata says: it was truncated")
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)
