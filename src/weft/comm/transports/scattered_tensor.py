"""A flat tensor that lies in many places: gradients travel from where autograd put them, without a copy before."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import torch

from weft.comm.private_torch import foreach_copy


class Parts:
    """A flat tensor of which each part holds some elements; they do not overlap.

    Elements that no part holds count as zero; where the result is written, they are left as they are.

    Args:
        parts: (first element, 1-D tensor) of each.
        numel: elements of the flat tensor.
        dtype: of the flat tensor, where parts may be of others; by default that of the first part.
    """

    def __init__(self, parts: Sequence[tuple[int, torch.Tensor]], numel: int, dtype: torch.dtype | None = None):
        parts = sorted(((start, part) for start, part in parts if part.numel()), key=lambda pair: pair[0])
        self._starts = [start for start, _ in parts]
        self._tensors = [part.detach() for _, part in parts]
        self._numel = numel
        self.dtype, self.device = dtype or self._tensors[0].dtype, self._tensors[0].device
        self.itemsize = self.dtype.itemsize
        self.nbytes = numel * self.itemsize

    def numel(self) -> int:
        """Return the number of elements of the flat tensor."""
        return self._numel

    def cut(self, first: int, last: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield what lies in [first, last): where from `first` on, and the elements (n,) in the flat tensor's dtype."""
        return ((place, piece.to(self.dtype)) for place, piece in self._split_part(first, last))

    def _split_part(self, first: int, last: int) -> Iterator[tuple[slice, torch.Tensor]]:
        index = max(bisect.bisect_right(self._starts, first) - 1, 0)
        for start, tensor in zip(self._starts[index:], self._tensors[index:], strict=True):
            if start >= last:
                return
            low, high = max(start, first), min(start + tensor.numel(), last)
            if low < high:
                whole = high - low == tensor.numel()
                yield slice(low - first, high - first), tensor if whole else tensor[low - start : high - start]

    def copy_to(self, flat: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Write what lies from `first` on into a flat tensor (n,) of any dtype, zeros between, and return it."""
        pieces = list(self._split_part(first, first + flat.numel()))
        if sum(piece.numel() for _, piece in pieces) < flat.numel():
            flat.zero_()
        for dtype in dict.fromkeys(piece.dtype for _, piece in pieces):  # a kernel on a GPU takes one format
            alike = [(flat[place], piece) for place, piece in pieces if piece.dtype == dtype]
            foreach_copy([place for place, _ in alike], [piece for _, piece in alike])
        return flat

    @property
    def common_dtype(self) -> torch.dtype | None:
        """The format that all parts lie in, which may be another than the flat tensor's; None where they differ."""
        found = {tensor.dtype for tensor in self._tensors}
        return found.pop() if len(found) == 1 else None

    @property
    def whole(self) -> torch.Tensor | None:
        """The one part that is all of the flat tensor, (numel,) in its own dtype; None where there is none such."""
        first = self._tensors[0]
        return first if first.numel() == self._numel and first.is_contiguous() else None

    def joined(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one new flat tensor of all, (numel,) of a dtype, by default `self.dtype`."""
        return self.copy_to(torch.empty(self._numel, dtype=dtype or self.dtype, device=self.device))
