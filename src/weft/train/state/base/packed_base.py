"""Weights of a folder as the bytes that a model keeps of them: read in slices, packed, and let go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from weft.checkpoint.arrays import torch_formats
from weft.checkpoint.parts import Part
from weft.models.adapters import BASE_FORMATS, BaseFormat, adapted
from weft.parallel.local_tensors import SavedTensor, StateSource

#: Blocks of one read: 8 million weights.
_AT_ONCE = 2**17


@dataclass(frozen=True, slots=True)
class _Packed:
    """What a packed weight is, as an entry of a source."""

    shape: tuple[int, ...]
    dtype: str = "U8"


class PackedSource:
    """A source some of whose matrices are packed as they are read.

    Args:
        source: of the weights as they are stored.
        names: of the matrices.
        kept: how they are packed.
    """

    def __init__(self, source: StateSource, names: list[str], kept: BaseFormat):
        self._source, self._kept = source, kept
        shapes = {name: source.entries[name].shape for name in names if name in source.entries}
        self._packed = {name: _Packed((rows, kept.row_bytes(width))) for name, (rows, width) in shapes.items()}

    @property
    def entries(self) -> Mapping[str, SavedTensor]:
        """What there is, by name."""
        return {**self._source.entries, **self._packed}

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a part's line: bytes, where the tensor is packed.

        Args:
            name: of the tensor.
            part: which elements of the whole tensor, as it is kept.
            start: place in its line where reading begins.
            out: filled to its end.
        """
        if name not in self._packed:
            self._source.read(name, part, start, out)
            return
        rows, width = self._source.entries[name].shape
        line = part.local_shape[1]  # bytes of a row here
        at, end, per = start, start + len(out), self._kept.block_bytes
        numbers = self._numbers(part, rows, width)
        # Whole rows, cut at both ends: stretches of a rank begin at rows but for the last ones.
        step = max(1, _AT_ONCE * per // line)
        while at < end:
            first = at // line
            last = min(first + step, -(-end // line))
            some = self._rows(name, numbers, first, last)
            low, high = at - first * line, min(end, last * line) - first * line
            out[at - start : at - start + high - low] = some[low:high].numpy().data
            at += high - low

    def _numbers(self, part: Part, rows: int, width: int) -> Part:
        """The part of the weight that a part of its bytes stands for."""
        if part.rows is None or part.dim == 0:
            return Part((rows, width), part.dim, part.rows)
        per = self._kept.block_bytes
        return Part((rows, width), 1, tuple((low // per * 64, min(high // per * 64, width)) for low, high in part.rows))

    def _rows(self, name: str, numbers: Part, first: int, last: int) -> torch.Tensor:
        width = numbers.local_shape[1]
        kind = torch_formats()[self._source.entries[name].dtype]
        stored = torch.empty((last - first) * width, dtype=kind)
        self._source.read(name, numbers, first * width, stored.view(torch.uint8).numpy().data)
        return self._kept.pack(stored.view(last - first, width)).view(-1)


def packed_source(model: nn.Module, source: StateSource) -> StateSource:
    """Return where a model with an adapter reads its base from: packed, where the adapter's base is.

    Args:
        model: whole, with an adapter or not.
        source: its weights as they are stored.
    """
    record = adapted(model)
    if record is None or not record.packed:
        return source
    return PackedSource(source, [f"{path}.weight" for path in record.packed], BASE_FORMATS[record.base])
