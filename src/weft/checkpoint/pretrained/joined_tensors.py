"""Tensors put together from others, such as the stacked weights of experts from one matrix each; read in place.

Nothing is put together in memory: a stretch that is asked for is looked up in the tensors that its elements come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.checkpoint.arrays import torch_formats
from weft.checkpoint.manifest import DTYPE_BYTES, TensorEntry
from weft.checkpoint.parts import Box, BoxView, Part, meet
from weft.checkpoint.pretrained.weights_folder import StoredWeights
from weft.checkpoint.read import StretchReader
from weft.errors import CheckpointError

#: Bits of the exponent of each float format: all of them are set in values that are not finite.
_EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}
#: Elements that are looked at together, so that they stay in the processor's cache.
_CHECKED_ELEMENTS = 2**16
#: Bytes of tensors that are compared together.
_COMPARED_BYTES = 2**22
#: Whole numbers as wide as an element, by its bytes.
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a stored tensor in the whole.

    shape: of those elements, in the stored order of dims. start: the first of them in the stored tensor. corner: where
    it lies in the whole. dims: which dim of the whole each stored dim is.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    corner: tuple[int, ...]
    dims: tuple[int, ...]

    def box(self) -> Box:
        sizes = [1] * len(self.corner)
        for dim, size in zip(self.dims, self.shape, strict=True):
            sizes[dim] = size
        return tuple((low, low + size) for low, size in zip(self.corner, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Joined:
    """One tensor as pieces of stored ones: its shape, its format as safetensors names it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[_Piece, ...]

    @classmethod
    def of(cls, name: str, entry: TensorEntry) -> Joined:
        """Return a stored tensor as it is."""
        rank = len(entry.shape)
        return cls(entry.shape, entry.dtype, (_Piece(name, entry.shape, (0,) * rank, (0,) * rank, tuple(range(rank))),))

    @classmethod
    def stacked(cls, parts: Sequence[Joined], dim: int) -> Joined:
        """Return tensors of one shape along a new dim.

        Raises:
            ValueError: where shapes or formats differ.
        """
        _expect_equal([(one.shape, one.dtype) for one in parts])
        pieces = [
            replace(
                piece,
                corner=(*piece.corner[:dim], number, *piece.corner[dim:]),
                dims=tuple(one + (one >= dim) for one in piece.dims),
            )
            for number, part in enumerate(parts)
            for piece in part.pieces
        ]
        shape = parts[0].shape
        return cls((*shape[:dim], len(parts), *shape[dim:]), parts[0].dtype, tuple(pieces))

    @classmethod
    def end_to_end(cls, parts: Sequence[Joined], dim: int) -> Joined:
        """Return tensors one after the other along a dim.

        Raises:
            ValueError: where formats, or sizes along the other dims, differ.
        """
        dim %= len(parts[0].shape)
        _expect_equal([((*one.shape[:dim], *one.shape[dim + 1 :]), one.dtype) for one in parts])
        pieces, place = list[_Piece](), 0
        for part in parts:
            for piece in part.pieces:
                corner = list(piece.corner)
                corner[dim] += place
                pieces.append(replace(piece, corner=tuple(corner)))
            place += part.shape[dim]
        shape = parts[0].shape
        return cls((*shape[:dim], place, *shape[dim + 1 :]), parts[0].dtype, tuple(pieces))

    def cut(self, dim: int, low: int, high: int) -> Joined:
        """Return some rows of a dim.

        Args:
            dim: of the whole.
            low: the first row.
            high: the row after the last.
        """
        dim %= len(self.shape)
        wanted = tuple((low, high) if one == dim else (0, size) for one, size in enumerate(self.shape))
        pieces = list[_Piece]()
        for piece in self.pieces:
            common = meet(piece.box(), wanted)
            if common is None:
                continue
            moved = [common[each][0] - piece.corner[each] for each in piece.dims]
            pieces.append(
                replace(
                    piece,
                    shape=tuple(common[each][1] - common[each][0] for each in piece.dims),
                    start=tuple(first + more for first, more in zip(piece.start, moved, strict=True)),
                    corner=tuple(first - (low if one == dim else 0) for one, (first, _) in enumerate(common)),
                )
            )
        return Joined((*self.shape[:dim], high - low, *self.shape[dim + 1 :]), self.dtype, tuple(pieces))

    def turned(self, dim0: int, dim1: int) -> Joined:
        """Return it with two dims exchanged."""
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        pieces = [
            replace(
                piece,
                corner=tuple(piece.corner[one] for one in order),
                dims=tuple(order.index(each) for each in piece.dims),
            )
            for piece in self.pieces
        ]
        return Joined(tuple(self.shape[one] for one in order), self.dtype, tuple(pieces))


@dataclass(frozen=True, slots=True)
class Computed:
    """One tensor that comes out of stored ones by a computation on them whole.

    name: of it in what `make` returns. make: gives tensors by name, from a function that gives a stored tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    name: str
    make: Callable[[Callable[[str], Tensor]], Mapping[str, Tensor]]


class JoinedTensors:
    """Tensors by a model's names, of which any part is read from the files of a folder.

    Args:
        stored: tensors of the folder.
        entries: composition of each of the model's tensors.
        finite: names of tensors whose values must be finite, which is checked as they are read.
    """

    def __init__(
        self, stored: StoredWeights, entries: Mapping[str, Joined | Computed], finite: Collection[str] = frozenset()
    ):
        self.entries, self._finite = entries, finite
        self._stored = stored
        self._reader = StretchReader(stored.folder, stored.files)
        #: What the last computation made: tensors that come from the same ones are read one after the other.
        self._made: tuple[object, Mapping[str, Tensor]] = (None, {})

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        return self._reader.num_bytes

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a part's line.

        Args:
            name: of the tensor.
            part: which elements of the whole tensor.
            start: place in its line where reading begins, in elements.
            out: filled to its end, in the stored dtype.

        Raises:
            CheckpointError: if bytes are missing or cannot be read, or a weight is not finite.
        """
        self._read(name, part, start, out)
        dtype = self.entries[name].dtype
        if name in self._finite and dtype in _EXPONENTS and not _all_finite(out, dtype):
            raise CheckpointError(self._not_finite(name))

    def without(self, names: Collection[str]) -> JoinedTensors:
        """Return the same tensors without some."""
        kept = {name: entry for name, entry in self.entries.items() if name not in names}
        return JoinedTensors(self._stored, kept, self._finite)

    def is_equal(self, first: str, second: str) -> bool:
        """Return whether two tensors have the same shape, format and bytes. Reads both, some megabytes at a time."""
        one, other = self.entries[first], self.entries[second]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        if one == other:  # the same stored tensor
            return True
        width, numel, part = DTYPE_BYTES[one.dtype], math.prod(one.shape), Part(one.shape)
        for start in range(0, numel, _COMPARED_BYTES // width):
            size = min(_COMPARED_BYTES // width, numel - start)
            both = np.empty((2, size * width), np.uint8)
            for row, name in zip(both, (first, second), strict=True):
                self._read(name, part, start, row.data)
            if not np.array_equal(both[0], both[1]):
                return False
        return True

    def _not_finite(self, name: str) -> str:
        joined = self.entries[name]
        pieces = [piece.name for piece in joined.pieces] if isinstance(joined, Joined) else []
        files = sorted({self._stored.entries[piece].file for piece in pieces})
        where = f" of {', '.join(files[:3])}" if files else ""
        return (
            f"model.path={self._stored.folder}: tensor {name!r}{where} holds values that are not finite (NaN or "
            "infinity). Download the folder again, or give weights that were saved before training failed."
        )

    def _read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        joined = self.entries[name]
        width = DTYPE_BYTES[joined.dtype]
        target = np.frombuffer(out, _BITS[width])
        if part.is_padded:
            target[:] = 0
        try:
            if isinstance(joined, Computed):
                made = self._computed(joined)
                for view in part.views(start, start + len(target)):
                    _copy_array(made, target, view)
                return
            boxes = [(piece, piece.box()) for piece in joined.pieces]
            for view in part.views(start, start + len(target)):
                for piece, box in boxes:
                    common = meet(view.box, box)
                    if common is not None:
                        self._copy(target, view, piece, common)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"model.path={self._stored.folder}: {error}. Download the folder again.") from error

    def _copy(self, target: np.ndarray, view: BoxView, piece: _Piece, common: Box) -> None:
        moved = [first - piece.corner[dim] for first, dim in zip(piece.start, piece.dims, strict=True)]
        there = tuple((common[dim][0] + by, common[dim][1] + by) for dim, by in zip(piece.dims, moved, strict=True))
        strides = tuple(view.strides[dim] for dim in piece.dims)
        want = BoxView(there, view.at(common), strides)
        self._reader.read_box(piece.name, self._stored.entries[piece.name], target, want)

    def _computed(self, one: Computed) -> np.ndarray:
        """The bits of a tensor, in its shape."""
        if self._made[0] is not one.make:
            self._made = (one.make, one.make(self._stored_tensor))
        flat = self._made[1][one.name].detach().contiguous().view(-1).view(torch.uint8).numpy()
        return flat.view(_BITS[DTYPE_BYTES[one.dtype]]).reshape(one.shape)

    def _stored_tensor(self, name: str) -> Tensor:
        entry = self._stored.entries[name]
        bits = np.empty(math.prod(entry.shape), _BITS[DTYPE_BYTES[entry.dtype]])
        strides = tuple(math.prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape)))
        whole = BoxView(tuple((0, size) for size in entry.shape), 0, strides)
        if bits.size:
            self._reader.read_box(name, entry, bits, whole)
        return torch.from_numpy(bits.view(np.uint8)).view(torch_formats()[entry.dtype]).view(entry.shape)


def _all_finite(out: memoryview, dtype: str) -> bool:
    """Whether the exponent of each float is below the highest."""
    exponent = _EXPONENTS[dtype]
    bits: Any = np.frombuffer(out, _BITS[DTYPE_BYTES[dtype]])
    for start in range(0, len(bits), _CHECKED_ELEMENTS):
        if ((bits[start : start + _CHECKED_ELEMENTS] & exponent).max(initial=0)) == exponent:
            return False
    return True


def _copy_array(source: np.ndarray, target: np.ndarray, view: BoxView) -> None:
    """Copy a box of an array to where the view says, counted in elements of `target`."""
    inside = source[tuple(slice(low, high) for low, high in view.box)]
    steps = tuple(stride * target.itemsize for stride in view.strides)
    np.lib.stride_tricks.as_strided(target[view.offset :], inside.shape, steps)[...] = inside


def _expect_equal(kinds: Sequence[object]) -> None:
    if len(set(kinds)) != 1:
        raise ValueError(f"its parts differ: {kinds[0]} and {next(one for one in kinds if one != kinds[0])}")
