"""An array as bytes with a type and a shape: what checkpoints hold, in no framework's own words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from weft.checkpoint.manifest import DTYPE_BYTES

#: numpy's types by the format's names; the others are moved as bytes of their width.
_NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "C64": np.complex64, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "BOOL": np.bool_, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32,
    "U64": np.uint64,
}  # fmt: skip
_OF_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_NAMES = {np.dtype(kind): name for name, kind in _NUMPY.items()}


@dataclass(frozen=True, slots=True, eq=False)
class RawArray:
    """dtype: the name in safetensors files, such as "F32" or "BF16". data: its bytes, row-major and contiguous."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, array: np.ndarray) -> RawArray:
        """Return the same memory as a numpy array, where it is contiguous."""
        whole = np.ascontiguousarray(array)
        return cls(_NAMES[array.dtype], tuple(array.shape), whole.reshape(-1).view(np.uint8).data)

    def array(self) -> np.ndarray:
        """Return the same memory as numpy; types that numpy lacks (BF16, F8) as whole numbers of their width."""
        kind = _NUMPY.get(self.dtype, _OF_WIDTH[DTYPE_BYTES[self.dtype]])
        return np.frombuffer(self.data, kind).reshape(self.shape)

    def values(self) -> np.ndarray:
        """Return the same numbers as numpy: BF16 widened to float32, and F8 as whole numbers of its width."""
        values = self.array()
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32) if self.dtype == "BF16" else values

    def largest(self) -> float:
        """Return the largest magnitude, nan where there is one; 0 for what has no floats."""
        if self.dtype not in ("F64", "F32", "F16", "BF16") or not math.prod(self.shape):
            return 0.0
        values = self.values()
        with np.errstate(invalid="ignore"):
            low, high = float(values.min()), float(values.max())  # nan wins in both
        return math.nan if math.isnan(low) else max(-low, high)
