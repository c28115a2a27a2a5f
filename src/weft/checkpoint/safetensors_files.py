"""Arrays as bytes with a dtype and a shape, and files in the safetensors format, without torch if possible."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.checkpoint import strict_json
from weft.checkpoint.manifest import DTYPE_BYTES, FileEntry, TensorEntry
from weft.checkpoint.object_store import Location
from weft.checkpoint.targets import target_at
from weft.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: numpy's dtypes by safetensors dtype name. Other dtypes are handled as unsigned integers of the same width.
_NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "C64": np.complex64, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "BOOL": np.bool_, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32,
    "U64": np.uint64,
}  # fmt: skip
_OF_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_NAMES = {np.dtype(kind): name for name, kind in _NUMPY.items()}


@dataclass(frozen=True, slots=True, eq=False)
class RawArray:
    """An array as bytes.

    Attributes:
        dtype: name of the dtype in the safetensors format, such as "F32" or "BF16".
        shape: its shape.
        data: its bytes, row-major and contiguous.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, array: np.ndarray) -> RawArray:
        """Return a RawArray of a numpy array, without a copy if it is contiguous."""
        whole = np.ascontiguousarray(array)
        return cls(_NAMES[array.dtype], tuple(array.shape), whole.reshape(-1).view(np.uint8).data)

    def array(self) -> np.ndarray:
        """Return a numpy view of the memory.

        Dtypes that numpy lacks (BF16, F8) become unsigned integers of equal width.
        """
        kind = _NUMPY.get(self.dtype, _OF_WIDTH[DTYPE_BYTES[self.dtype]])
        return np.frombuffer(self.data, kind).reshape(self.shape)

    def values(self) -> np.ndarray:
        """Return the values as a numpy array. BF16 is widened to float32, and F8 becomes unsigned integers."""
        values = self.array()
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32) if self.dtype == "BF16" else values

    def largest(self) -> float:
        """Return the largest magnitude, or nan if a value is nan.

        Return 0 for empty arrays, and for dtypes other than F64, F32, F16 and BF16.
        """
        if self.dtype not in ("F64", "F32", "F16", "BF16") or not math.prod(self.shape):
            return 0.0
        values = self.values()
        with np.errstate(invalid="ignore"):
            low, high = float(values.min()), float(values.max())  # nan wins in both
        return math.nan if math.isnan(low) else max(-low, high)


# Reads of byte ranges of a safetensors file in any target. Nothing is mapped, so a truncated file is an error.

#: Maximum header size, as in the safetensors package.
_MAX_HEADER_BYTES = 100_000_000
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor in its file: dtype, shape, offset and number of bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def get_dtype(self) -> str:
        """Return the dtype. Same method as in the safetensors package."""
        return self.dtype

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape. Same method as in the safetensors package."""
        return self.shape


class RangedTensors:
    """An open safetensors file, and the locations of its tensors.

    It is closed by `close` or when it is garbage-collected. Raises CheckpointError if the file is not in the format or
    has an unexpected size.
    """

    def __init__(self, path: Location, expected_bytes: int | None = None):
        self._file = target_at(path.parent).open(path)
        self.close = weakref.finalize(self, self._file.close)
        try:
            size = self._file.num_bytes
            if size < 0 or (expected_bytes is not None and size != expected_bytes):
                raise CheckpointError(f"{path.name} has {size} bytes instead of {expected_bytes}")
            self.name = path.name
            self.tensors = self._header(size)
        except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            if isinstance(error, CheckpointError | OSError):
                raise
            raise CheckpointError(f"{path.name}: not a safetensors file ({error})") from error

    def _header(self, size: int) -> dict[str, StoredTensor]:
        length = int.from_bytes(self._bytes(8, 0), "little")
        if not 2 <= length <= size - 8:
            raise ValueError("its header has no length")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes, more than {_MAX_HEADER_BYTES}")
        text = self._bytes(length, 8)
        raw = strict_json.decode(text, f"{self.name}: its header")
        if not text.startswith(b"{") or not isinstance(raw, dict):
            raise ValueError("its header is not an object of JSON")
        metadata = raw.pop("__metadata__", None)
        if metadata is not None and not _is_text_table(metadata):
            raise ValueError("its __metadata__ is not a table of text")
        found = {name: _stored(name, entry, 8 + length) for name, entry in raw.items()}
        end = 8 + length
        for name, one in sorted(found.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if one.offset != end:
                raise ValueError(f"tensor {name[:200]!r} overlaps another one, or leaves a gap")
            end += one.num_bytes
            if end > size:
                raise ValueError(f"tensor {name[:200]!r} does not fit")
        if end != size:
            raise ValueError(f"its tensors end at byte {end}, and the file has {size}")
        return found

    def _bytes(self, size: int, offset: int) -> bytes:
        data = bytearray(size)
        self.into(memoryview(data), offset)
        return bytes(data)

    def into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with bytes from `offset` on. Raises CheckpointError if the file is too short."""
        while len(target):
            number = self._file.into(target, offset)
            if not number:
                raise CheckpointError(f"{self.name} ended while it was read: it is truncated")
            target, offset = target[number:], offset + number


def _stored(name: str, entry: Any, data_start: int) -> StoredTensor:
    """Check and return one entry of a header. Raise ValueError if the format does not allow it."""
    shown = name[:200]
    name.encode()  # fails for half of a surrogate pair
    if not isinstance(entry, dict) or not set(entry) >= _FIELDS:
        raise ValueError(f"tensor {shown!r} does not have all of {', '.join(sorted(_FIELDS))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"tensor {shown!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {shown!r} has a shape or offsets that are not whole numbers")
    num_bytes = DTYPE_BYTES[dtype]
    for size in shape:
        num_bytes *= size
        if num_bytes >= 2**63:
            raise ValueError(f"tensor {shown!r} is too large")
    if offsets[1] - offsets[0] != num_bytes:
        raise ValueError(f"tensor {shown!r} needs {num_bytes} bytes, and has {offsets[1] - offsets[0]}")
    return StoredTensor(dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(one) is int and 0 <= one < 2**63 for one in values)


def _is_text_table(values: Any) -> bool:
    if not isinstance(values, dict) or not all(isinstance(one, str) for one in values.values()):
        return False
    for one in (*values, *values.values()):
        one.encode()  # fails for half of a surrogate pair
    return True


# Tensors in safetensors files. Writing streams one tensor at a time and computes the digest meanwhile.

#: Bytes per chunk: large enough to be worth a thread, small enough to stay in the cache between digest and write.
_CHUNK_BYTES = 4 * 2**20


@functools.cache
def _dtype_names() -> dict[torch.dtype, str]:
    import torch

    return {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.complex64: "C64", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
        torch.bool: "BOOL", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    }  # fmt: skip


@functools.cache
def torch_formats() -> dict[str, torch.dtype]:
    """Return torch's dtypes by safetensors dtype name."""
    return {name: dtype for dtype, name in _dtype_names().items()}


def dtype_name(name: str, tensor: Tensor | RawArray) -> str:
    """Return the safetensors dtype name of a tensor.

    Raises CheckpointError if the tensor cannot be stored. `name` is for the message.
    """
    if isinstance(tensor, RawArray):
        return tensor.dtype
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{name}: a {type(tensor).__name__} is not a tensor. Put plain values in `state`.")
    kind = type(tensor.detach())
    if kind is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
        what = kind.__name__ if kind is not torch.Tensor else f"{tensor.layout} on {tensor.device}"
        raise CheckpointError(f"{name}: a {what} has no storage. Gather it to a plain tensor first.")
    if tensor.dtype not in _dtype_names():
        raise CheckpointError(f"{name}: dtype {tensor.dtype} cannot be stored. Convert it, for example to float32.")
    return _dtype_names()[tensor.dtype]


def block_of(tensor: Tensor) -> RawArray:
    """Return the bytes of a tensor, without a copy if it is contiguous on the CPU."""
    return RawArray(dtype_name("tensor", tensor), tuple(tensor.shape), _bytes_of(tensor))


def tensor_of(block: RawArray) -> Tensor:
    """Return a tensor that shares the block's memory, which must be writable."""
    import torch

    dtype = torch_formats()[block.dtype]
    if not block.data.nbytes:
        return torch.empty(block.shape, dtype=dtype)
    return torch.frombuffer(block.data, dtype=dtype).view(block.shape)


class _RangedTensors(RangedTensors):
    """Replacement for the safetensors package's file handle. Tensors are read on access."""

    def keys(self) -> list[str]:
        return [*self.tensors]

    def get_slice(self, name: str) -> StoredTensor:
        return self.tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        found = self.tensors[name]
        data = memoryview(bytearray(found.num_bytes))
        self.into(data, found.offset)
        return tensor_of(RawArray(found.dtype, found.shape, data))


class DigestingFile:
    """A new file with a SHA-256 that is computed during writing. `close` flushes it to disk and returns its entry."""

    def __init__(self, path: Location):
        self._file = target_at(path.parent).create(path)
        self._digest = hashlib.sha256()
        # hashlib and write both release the GIL, so a chunk is digested while it is written.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digest")
        self._num_bytes = 0

    def write(self, data: bytes | memoryview, look: Callable[[bytes | memoryview], None] | None = None) -> None:
        """Write and digest bytes. look: called with each chunk while it is in the CPU cache; it may raise an error."""
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            if len(chunk) < _CHUNK_BYTES // 4:
                self._digest.update(chunk)
                self._file.write(chunk)
                if look:
                    look(chunk)
            else:
                job = self._thread.submit(self._digest.update, chunk)
                try:
                    self._file.write(chunk)
                    if look:
                        look(chunk)
                finally:
                    job.result()
        self._num_bytes += len(data)

    def close(self) -> FileEntry:
        """Flush the file to the disk, close it, and return its size and digest."""
        self._file.finish()
        return FileEntry(self._num_bytes, self._digest.hexdigest())

    def __enter__(self) -> DigestingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._file.close()


def write_file(path: Location, data: bytes) -> FileEntry:
    with DigestingFile(path) as file:
        file.write(data)
        return file.close()


def file_order(names_and_entries: Iterable[tuple[str, TensorEntry]]) -> list[str]:
    """Return names in file order: wide dtypes first, so that each tensor is aligned to its element size."""
    return [name for name, _ in sorted(names_and_entries, key=lambda item: (-DTYPE_BYTES[item[1].dtype], item[0]))]


def write_tensors(
    path: Location,
    tensors: Mapping[str, Tensor | RawArray],
    entries: Mapping[str, TensorEntry],
    look: Callable[[str, RawArray], None] | None = None,
) -> FileEntry:
    """Write one safetensors file and flush it to disk. One tensor at a time is copied to the CPU.

    entries: dtype and shape by name. look: called with each tensor's name and values, some MiB at a time, as they are
    written; its exception aborts the write.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    order = file_order((name, entries[name]) for name in tensors)
    end = 0
    for name in order:
        start, end = end, end + entries[name].num_bytes
        shape = list(entries[name].shape)
        header[name] = {"dtype": entries[name].dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with DigestingFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_bytes_of(tensors[name]), look and _in_slices(look, name, entries[name].dtype))
        return file.close()


def write_blocks(path: Location, blocks: Mapping[str, RawArray]) -> FileEntry:
    """Write full arrays into a new safetensors file, by name."""
    return write_tensors(path, blocks, {name: TensorEntry("", one.dtype, one.shape) for name, one in blocks.items()})


def _in_slices(look: Callable[[str, RawArray], None], name: str, dtype: str) -> Callable[[bytes | memoryview], None]:
    width = DTYPE_BYTES[dtype]
    return lambda chunk: look(name, RawArray(dtype, (len(chunk) // width,), memoryview(chunk)))


def _bytes_of(tensor: Tensor | RawArray) -> memoryview:
    if isinstance(tensor, RawArray):
        return tensor.data
    import torch

    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def open_tensors(path: Location, framework: str = "pt") -> Any:
    """Return an open file with the methods of `safe_open`. A local file is memory-mapped; an object is read by ranges.

    Raises CheckpointError if the file is not in the format, or cannot be opened.
    """
    if not isinstance(path, Path):
        return _RangedTensors(path)
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name}: not a safetensors file ({error})") from error


def header_problems(path: Location, entries: Mapping[str, TensorEntry]) -> list[str]:
    """Return the differences between a file's header and the manifest, or [] if they agree.

    If the tensor names differ, only the first name is reported; else all dtypes and shapes that differ. If the header
    cannot be read, return the reason.
    """
    try:
        handle = open_tensors(path, "numpy")  # only for names and shapes
    except CheckpointError as error:
        return [str(error)]
    present, expected = set(handle.keys()), set(entries)
    if present != expected:
        odd = sorted(present ^ expected)[0]
        where = "the file but not in the manifest" if odd in present else "the manifest but not in the file"
        return [f"{path.name}: tensor {odd[:200]!r} is in {where}"]
    problems = []
    for name, entry in entries.items():
        part = handle.get_slice(name)
        dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
        if (dtype, shape) != (entry.dtype, entry.shape):
            wanted = f"{entry.dtype} {list(entry.shape)}"
            problems.append(f"{path.name}: tensor {name[:200]!r} is {dtype} {list(shape)}; the manifest says {wanted}")
    return problems


def missing_slices(path: Location, wanted: Mapping[str, tuple[str, int]]) -> list[str]:
    """Return the first problem of a rank's file as a list: a slice that is missing or differs from the manifest.

    `wanted` has dtype and number of elements by name.
    """
    try:
        handle = open_tensors(path, "numpy")
    except CheckpointError as error:
        return [str(error)]
    present = set(handle.keys())
    for name, (dtype, numel) in wanted.items():
        if name not in present:
            return [f"{path.name}: tensor {name[:200]!r} is in the manifest but not in the file"]
        part = handle.get_slice(name)
        if (str(part.get_dtype()), math.prod(part.get_shape())) != (dtype, numel):
            found = f"{part.get_dtype()} {list(part.get_shape())}"
            return [f"{path.name}: tensor {name[:200]!r} is {found}; the manifest says {numel} elements of {dtype}"]
    return []


def unheard(num_bytes: int) -> None:
    """Ignore a report of digested bytes."""


def sha256_of(path: Location, report: Callable[[int], None] = unheard) -> str:
    """Return the SHA-256 of a file in hexadecimal. `report` is called with the number of bytes of each chunk."""
    digest, offset = hashlib.sha256(), 0
    with contextlib.closing(target_at(path.parent).open(path)) as file:
        piece = memoryview(bytearray(file.chunk_bytes))
        while size := file.into(piece, offset):
            digest.update(piece[:size])
            offset += size
            report(size)
    return digest.hexdigest()
