"""Read any flat slice of any tensor of a checkpoint: only the requested bytes, whichever plan wrote them.

Files are read and not mapped, so a truncated or unreadable file is an error and does not kill the process.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.checkpoint.manifest import DTYPE_BYTES, FileEntry, Slice, TensorEntry, shard_name
from weft.checkpoint.object_store import Location
from weft.checkpoint.read import Box, BoxView, OwnershipMap, Part, intersect_boxes
from weft.checkpoint.safetensors_files import RangedTensors, RawArray, open_tensors, tensor_of
from weft.checkpoint.targets import target_at
from weft.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_OF_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
#: Maximum number of open files.
_MOST_OPEN = 32
#: Shorter runs of bytes are read together with the bytes between them. This is a page, the least that a disk reads.
_LONG_RUN = 4 * 2**10
#: Bytes per read if runs are short.
_WINDOW = 4 * 2**20


def copy_part(full: np.ndarray, part: Part, start: int, out: memoryview) -> None:
    """Fill `out` with the elements of a flattened part of an array in memory, from index `start` on.

    Padding becomes zero.
    """
    np.frombuffer(out, np.uint8)[:] = 0
    target = np.frombuffer(out, full.dtype)
    for view in part.views(start, start + len(target)):
        steps = tuple(stride * target.itemsize for stride in view.strides)
        sizes = tuple(high - low for low, high in view.box)
        there = np.lib.stride_tricks.as_strided(target[view.offset :], sizes, steps)
        there[...] = full[tuple(slice(low, high) for low, high in view.box)]


class SliceReader:
    """Reads flat slices of one checkpoint's tensors. `num_bytes` counts the bytes of tensors that were read.

    While the reader exists, pruning does not delete the checkpoint, if its target supports that.
    """

    def __init__(self, folder: Location, files: Mapping[str, FileEntry]):
        self._folder, self._files = folder, files
        let_go = target_at(folder.parent).reading(folder)
        if let_go is not None:
            weakref.finalize(self, let_go)
        self._open: OrderedDict[str, RangedTensors] = OrderedDict()
        self.num_bytes = 0

    def read(self, group: str, name: str, entry: TensorEntry, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with the elements of the flattened part from index `start` on. Padding becomes zero.

        Raises CheckpointError if the shape differs, or bytes are missing or cannot be read. The message names the file.
        """
        if tuple(part.shape) != entry.shape:
            raise CheckpointError(f"tensor {name!r}: {entry.shape} in the checkpoint, {part.shape} in the model")
        width = DTYPE_BYTES[entry.dtype]
        target = np.frombuffer(out, _OF_WIDTH[width])
        end = start + len(target)
        if part.is_padded:
            target[:] = 0
        try:
            for one in entry.slices or (Slice(Part(entry.shape), OwnershipMap.to_one(0, math.prod(entry.shape))),):
                source = _Source(self, group, entry.same_as or name, entry, one)
                if one.part == part:
                    source.copy_line(target, start, end)
                else:
                    for view in part.views(start, end):
                        source.copy_view(target, view)
        except OSError as error:
            raise CheckpointError(f"{self._folder.name}: {error.filename or name}: {error.strerror}") from error

    def read_box(self, name: str, entry: TensorEntry, target: np.ndarray, want: BoxView) -> None:
        """Copy a box of a tensor that is in one file into `target`, at the position and strides of `want`."""
        whole_line = Slice(Part(entry.shape), OwnershipMap.to_one(0, math.prod(entry.shape)))
        _Source(self, "", name, entry, whole_line).copy_view(target, want)

    def file(self, name: str) -> RangedTensors:
        """Return an open file. The most recently used files stay open.

        Raises CheckpointError if the file is missing or cannot be read.
        """
        if name not in self._open:
            if name not in self._files:
                raise CheckpointError(f"{name} is missing in the manifest")
            if len(self._open) >= _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            try:
                self._open[name] = RangedTensors(self._folder / name, self._files[name].num_bytes)
            except FileNotFoundError:
                raise CheckpointError(f"{name} is missing") from None
            except OSError as error:
                raise CheckpointError(f"{name} cannot be read ({error.strerror})") from error
        self._open.move_to_end(name)
        return self._open[name]


class _Source:
    """One slice of one tensor in the files of its ranks."""

    def __init__(self, reader: SliceReader, group: str, name: str, entry: TensorEntry, one: Slice):
        self._reader, self._group, self._name, self._entry = reader, group, name, entry
        self._part, self._ownership, self._numel = one.part, one.deal, one.part.numel
        self._width = DTYPE_BYTES[entry.dtype]

    def copy_line(self, target: np.ndarray, start: int, end: int) -> None:
        """Copy elements `start` to `end` of the stored part into `target`. The requested part must be the same part."""
        for rank, low, high in self._ownership.runs(start, end, self._numel):
            first, last = max(low, start), min(high, end)
            file, offset = self._locate(rank, high - low)
            self._fill(target[first - start : last - start], file, offset + (first - low) * self._width)

    def copy_view(self, target: np.ndarray, want: BoxView) -> None:
        """Copy the elements of this slice that are in a box of the full array, if any."""
        span = self._part.span(want.box)
        if span is None:
            return
        for rank, low, high in self._ownership.runs(*span, self._numel):
            start = max(low, span[0])
            file, offset = self._locate(rank, high - low)
            for have in self._part.views(start, min(high, span[1])):
                box = intersect_boxes(have.box, want.box)
                if box is not None:
                    there = offset + (start - low + have.at(box)) * self._width
                    self._copy_box(target[want.at(box) :], want.strides, file, there, have.strides, box)

    def _locate(self, rank: int, numel: int) -> tuple[RangedTensors, int]:
        name = self._entry.file or shard_name(self._group, rank)
        file = self._reader.file(name)
        stored = file.tensors.get(self._name)
        if stored is None or stored.dtype != self._entry.dtype or stored.num_bytes != numel * self._width:
            raise CheckpointError(f"{name}: tensor {self._name[:200]!r} differs from the manifest")
        return file, stored.offset

    def _fill(self, target: np.ndarray, file: RangedTensors, offset: int) -> None:
        self._reader.num_bytes += target.nbytes
        file.into(target.view(np.uint8).data, offset)

    def _copy_box(
        self,
        target: np.ndarray,
        strides: tuple[int, ...],
        file: RangedTensors,
        offset: int,
        from_: tuple[int, ...],
        box: Box,
    ) -> None:
        """Copy a box from a file into memory. `strides` (memory) and `from_` (file) are in elements."""
        width = self._width
        order = sorted(range(len(box)), key=lambda dim: -from_[dim])
        sizes = [box[dim][1] - box[dim][0] for dim in order]
        reach = [from_[dim] for dim in order]
        out = np.lib.stride_tricks.as_strided(target, sizes, [strides[dim] * width for dim in order])
        run, inner = 1, len(sizes)
        while inner and reach[inner - 1] == run:  # dims that are contiguous in the file
            run *= sizes[inner - 1]
            inner -= 1
        outer = sizes[:inner]
        if not outer or run * width >= _LONG_RUN:
            for place in np.ndindex(*outer):
                there = offset + sum(one * step for one, step in zip(place, reach, strict=False)) * width
                values = out[(*place, ...)]  # `...` gives a view of an array without dims too
                if values.flags.c_contiguous and values.size:
                    self._fill(values.reshape(-1), file, there)
                else:
                    window = np.empty(run, values.dtype)
                    self._fill(window, file, there)
                    values[...] = window.reshape(values.shape)
            return
        step, rows = reach[inner - 1], outer[-1]
        at_once = max(1, _WINDOW // (step * width))
        for place in np.ndindex(*outer[:-1]):
            there = offset + sum(one * by for one, by in zip(place, reach, strict=False)) * width
            for first in range(0, rows, at_once):
                number = min(at_once, rows - first)
                window = np.empty((number - 1) * step + run, out.dtype)
                self._fill(window, file, there + first * step * width)
                shape = (number, *sizes[inner:])
                close = [by * width for by in (step, *reach[inner:])]
                out[place][first : first + number] = np.lib.stride_tricks.as_strided(window, shape, close)


def read_bytes(entry: TensorEntry, read: Callable[[Part, memoryview], None]) -> memoryview:
    """Return all bytes of a tensor, row-major. `read` fills a buffer with the elements of a part."""
    data = bytearray(math.prod(entry.shape) * DTYPE_BYTES[entry.dtype])
    if data:
        read(Part(entry.shape), memoryview(data))
    return memoryview(data)


class TensorGroup(Mapping[str, "Tensor"]):
    """Tensors of one group, read on access. They are on the CPU and private to this process.

    A tensor that is in one local file is memory-mapped: writing to it never changes the file, but a second access of
    the name returns the changed values, and names that shared memory when saved share it again. Other tensors are read
    again on each access.
    """

    def __init__(self, folder: Location, group: str, entries: Mapping[str, TensorEntry], reader: SliceReader):
        self._folder = folder
        self._group, self._reader = group, reader
        self._entries = entries
        self._handles: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        if entry.slices:
            data = read_bytes(entry, lambda part, out: self._reader.read(self._group, name, entry, part, 0, out))
            return tensor_of(RawArray(entry.dtype, entry.shape, data))
        if entry.file not in self._handles:
            self._handles[entry.file] = open_tensors(self._folder / entry.file)
        return self._handles[entry.file].get_tensor(entry.same_as or name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
