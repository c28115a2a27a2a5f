"""Data parallel in its plainest right form: gradients live in a few flat buckets that are summed over the ranks.

Every world size takes the same path, one rank too, so a parameter that no sample used has a zero gradient
under every plan.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weft.comm.collectives import start_all_reduce
from weft.mesh import Axis

#: Large enough to amortise a collective's latency, small enough that several are under way at once.
BUCKET_BYTES = 32 * 2**20


class FlatGradients:
    """Gradients of the trainable parameters as views into flat buckets of one dtype and device each."""

    def __init__(self, params: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES):
        self._params = [param for param in params if param.requires_grad]
        self._views: list[torch.Tensor] = []
        self.buckets: list[torch.Tensor] = []
        for bucket_params in _buckets(self._params, bucket_bytes):
            first = bucket_params[0]
            flat = torch.zeros(sum(p.numel() for p in bucket_params), dtype=first.dtype, device=first.device)
            self.buckets.append(flat)
            offset = 0
            for param in bucket_params:
                self._views.append(flat[offset : offset + param.numel()].view_as(param))
                offset += param.numel()

    def zero(self) -> None:
        """Set all gradients to zero, in the buckets, also after somebody set `.grad` to None."""
        if self.buckets:
            torch._foreach_zero_(self.buckets)
        for param, view in zip(self._params, self._views, strict=True):
            param.grad = view

    def reduce(self, axis: Axis) -> None:
        """Sum all gradients over the ranks of the axis."""
        for pending in [start_all_reduce(bucket, axis) for bucket in self.buckets]:
            pending.wait()

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        if factor != 1.0 and self.buckets:
            torch._foreach_mul_(self.buckets, factor)


def _buckets(params: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Params of one dtype and device, in order, cut where a bucket is full. Buckets follow the order of params."""
    groups: list[list[nn.Parameter]] = []
    size_bytes = 0
    for param in params:
        fits = groups and size_bytes + param.nbytes <= bucket_bytes
        if not fits or (groups[-1][0].dtype, groups[-1][0].device) != (param.dtype, param.device):
            groups.append([])
            size_bytes = 0
        groups[-1].append(param)
        size_bytes += param.nbytes
    return groups
