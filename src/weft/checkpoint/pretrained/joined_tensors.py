"""Tensors put together from others, such as the stacked weights of experts from one matrix each; read in place.

Nothing is put together in memory: a stretch that is asked for is looked up in the tensors that its elements come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.checkpoint.manifest import DTYPE_BYTES, TensorEntry
from weft.checkpoint.parts import Box, BoxView, Part, meet
from weft.checkpoint.pretrained.weights_folder import StoredWeights
from weft.checkpoint.read import StretchReader
from weft.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stored tensor in the whole. corner: where its first element lies; dims: which dim of the whole each is."""

    name: str
    shape: tuple[int, ...]
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
        return cls(entry.shape, entry.dtype, (_Piece(name, entry.shape, (0,) * rank, tuple(range(rank))),))

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


class JoinedTensors:
    """Tensors by a model's names, of which any stretch is read from the files of a folder.

    Args:
        stored: what the folder has.
        entries: what each of the model's tensors is made of.
    """

    def __init__(self, stored: StoredWeights, entries: Mapping[str, Joined]):
        self.entries = entries
        self._stored = stored
        self._reader = StretchReader(stored.folder, stored.files)

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
            CheckpointError: where bytes are missing or cannot be read.
        """
        joined = self.entries[name]
        width = DTYPE_BYTES[joined.dtype]
        target = np.frombuffer(out, {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[width])
        if part.is_padded:
            target[:] = 0
        boxes = [(piece, piece.box()) for piece in joined.pieces]
        try:
            for view in part.views(start, start + len(target)):
                for piece, box in boxes:
                    common = meet(view.box, box)
                    if common is not None:
                        self._copy(target, view, piece, common)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"model.path={self._stored.folder}: {error}. Download the folder again.") from error

    def _copy(self, target: np.ndarray, view: BoxView, piece: _Piece, common: Box) -> None:
        there = tuple((common[dim][0] - piece.corner[dim], common[dim][1] - piece.corner[dim]) for dim in piece.dims)
        strides = tuple(view.strides[dim] for dim in piece.dims)
        want = BoxView(there, view.at(common), strides)
        self._reader.read_box(piece.name, self._stored.entries[piece.name], target, want)


def _expect_equal(kinds: Sequence[object]) -> None:
    if len(set(kinds)) != 1:
        raise ValueError(f"its parts differ: {kinds[0]} and {next(one for one in kinds if one != kinds[0])}")
