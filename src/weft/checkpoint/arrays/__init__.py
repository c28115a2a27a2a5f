"""Arrays and tensors as bytes, and the safetensors files that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "RangedTensors",
    "RawArray",
    "block_of",
    "dtype_name",
    "header_problems",
    "missing_slices",
    "open_tensors",
    "sha256_of",
    "tensor_of",
    "torch_formats",
    "unheard",
    "write_blocks",
    "write_file",
    "write_tensors",
]

if TYPE_CHECKING:
    from weft.checkpoint.arrays.ranged_tensors import RangedTensors
    from weft.checkpoint.arrays.raw_array import RawArray
    from weft.checkpoint.arrays.tensor_file import (
        block_of,
        dtype_name,
        header_problems,
        missing_slices,
        open_tensors,
        sha256_of,
        tensor_of,
        torch_formats,
        unheard,
        write_blocks,
        write_file,
        write_tensors,
    )

__getattr__ = loads(
    __name__,
    {
        "RangedTensors": ".ranged_tensors",
        "RawArray": ".raw_array",
        "block_of": ".tensor_file",
        "dtype_name": ".tensor_file",
        "header_problems": ".tensor_file",
        "missing_slices": ".tensor_file",
        "open_tensors": ".tensor_file",
        "sha256_of": ".tensor_file",
        "tensor_of": ".tensor_file",
        "torch_formats": ".tensor_file",
        "unheard": ".tensor_file",
        "write_blocks": ".tensor_file",
        "write_file": ".tensor_file",
        "write_tensors": ".tensor_file",
    },
)
