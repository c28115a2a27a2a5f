"""Read byte ranges of a safetensors file in any target. Nothing is mapped, so a file that is cut off is an error.

Headers are held to the rules of the safetensors package, which itself reads files of a file system only.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from weft.checkpoint import strict_json
from weft.checkpoint.manifest import DTYPE_BYTES
from weft.checkpoint.targets import Location, target_at
from weft.errors import CheckpointError

#: The limit of the safetensors package.
_MAX_HEADER_BYTES = 100_000_000
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes begin in its file, and how many there are."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def get_dtype(self) -> str:
        """As the safetensors package asks for it."""
        return self.dtype

    def get_shape(self) -> tuple[int, ...]:
        """As the safetensors package asks for it."""
        return self.shape


class RangedTensors:
    """One open safetensors file, and where its tensors lie. Closed with the last reference to it, or before.

    Raises:
        CheckpointError: where the file is not of the format or has another size.
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
        """Fill `target` from there on.

        Raises:
            CheckpointError: where the file ends before.
        """
        while len(target):
            number = self._file.into(target, offset)
            if not number:
                raise CheckpointError(f"{self.name} ended while it was read: it was cut off")
            target, offset = target[number:], offset + number


def _stored(name: str, entry: Any, data_start: int) -> StoredTensor:
    """Check one entry of a header. ValueError for anything that the format does not allow."""
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
