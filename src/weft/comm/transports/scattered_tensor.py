"""A flat tensor stored in several parts, so that gradients are communicated without a copy into a bucket first."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import torch

from weft.comm.private_torch import foreach_copy


class Parts:
    """A flat tensor stored in non-overlapping parts.

    Elements that no part stores count as zero. When a result is written, they are left unchanged. parts: (first
    element, 1-D tensor) of each part. dtype: dtype of the flat tensor, which may differ from the parts'. Defaults to
    the first part's.
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

    def overlapping(self, first: int, last: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the parts of [first, last) as pairs.

        A pair is the part's slice relative to `first` and its values (n,) in the flat tensor's dtype.
        """
        return ((place, piece.to(self.dtype)) for place, piece in self._overlaps(first, last))

    def _overlaps(self, first: int, last: int) -> Iterator[tuple[slice, torch.Tensor]]:
        index = max(bisect.bisect_right(self._starts, first) - 1, 0)
        for start, tensor in zip(self._starts[index:], self._tensors[index:], strict=True):
            if start >= last:
                return
            low, high = max(start, first), min(start + tensor.numel(), last)
            if low < high:
                whole = high - low == tensor.numel()
                yield slice(low - first, high - first), tensor if whole else tensor[low - start : high - start]

    def copy_to(self, flat: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Copy the elements from `first` on to a flat tensor (n,) of any dtype, with zeros for gaps, and return it."""
        pieces = list(self._overlaps(first, first + flat.numel()))
        if sum(piece.numel() for _, piece in pieces) < flat.numel():
            flat.zero_()
        for dtype in dict.fromkeys(piece.dtype for _, piece in pieces):  # a kernel on a GPU takes one format
            alike = [(flat[place], piece) for place, piece in pieces if piece.dtype == dtype]
            foreach_copy([place for place, _ in alike], [piece for _, piece in alike])
        return flat

    @property
    def common_dtype(self) -> torch.dtype | None:
        """The dtype of all parts, which may differ from the flat tensor's, or None if the parts differ."""
        found = {tensor.dtype for tensor in self._tensors}
        return found.pop() if len(found) == 1 else None

    @property
    def full_part(self) -> torch.Tensor | None:
        """The part that is the full flat tensor, (numel,) in its stored dtype, or None if there is no such part."""
        first = self._tensors[0]
        return first if first.numel() == self._numel and first.is_contiguous() else None

    def joined(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return all elements in a new flat tensor (numel,). The dtype defaults to `self.dtype`."""
        return self.copy_to(torch.empty(self._numel, dtype=dtype or self.dtype, device=self.device))
