"""A safetensors file of which ranges are read, wherever it lies: what is cut off is an error, and nothing is mapped."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import dataclass

from weft.checkpoint.manifest import DTYPE_BYTES
from weft.checkpoint.targets import Location, target_at
from weft.errors import CheckpointError

_MOST_HEADER = 2**28


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
        if not 2 <= length <= min(size - 8, _MOST_HEADER):
            raise ValueError("its header has no length")
        raw = json.loads(self._bytes(length, 8))
        raw.pop("__metadata__", None)
        found: dict[str, StoredTensor] = {}
        for name, entry in raw.items():
            start, end = entry["data_offsets"]
            num_bytes = math.prod(entry["shape"]) * DTYPE_BYTES[entry["dtype"]]
            if type(start) is not int or not 0 <= start <= end <= size - 8 - length or num_bytes != end - start:
                raise ValueError(f"tensor {name[:200]!r} does not fit")
            found[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + length + start, num_bytes)
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
