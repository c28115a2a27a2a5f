"""Products with one matrix per expert, and the order of rows by expert.

M tokens, K experts that a token visits, E experts, R rows that are worked on: one for each token and expert of it;
D and F: widths in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Numbers of rows up to each expert: on the device (int32), or as the host knows them.
Ends = Tensor | Sequence[int]
#: What torch's grouped kernel takes, by device. Others go expert by expert: float64 is refused by it everywhere, and
#: on a GPU all but bfloat16 would be a loop inside of it, with the host waiting just the same.
_KERNEL_TYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
#: Compute capability from which on a GPU has the kernel, and the alignment of rows that it asks for.
_LEAST_CAPABILITY, _ALIGNMENT_BYTES = (8, 0), 16


class ByExpert(NamedTuple):
    """Rows in order of their expert; those of one expert in order of their tokens.

    source_R: index of each row among the M*K pairs of token and place. place_MK: row of each pair; R where it has no
    expert. ends_E: number of rows of all experts up to each (int32). top_k: K.
    """

    source_R: Tensor
    place_MK: Tensor
    ends_E: Tensor
    top_k: int


def sort_by_expert(ids_MK: Tensor, num_experts: int, drops: bool) -> ByExpert:
    """Order pairs of token and expert by expert.

    Args:
        ids_MK: the experts of each token.
        num_experts: E.
        drops: some ids may be `num_experts`, which is none: they get no row. The host waits for the number of rows
            then.
    """
    flat = ids_MK.reshape(-1)
    sorted_ids, source = flat.sort(stable=True)
    experts = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    place = torch.empty_like(source)
    place[source] = torch.arange(source.numel(), device=flat.device)
    if drops:
        num_rows = int(ends[-1])
        source, place = source[:num_rows], place.clamp_(max=num_rows)
    return ByExpert(source, place.view(ids_MK.shape), ends, ids_MK.shape[1])


def spread_rows(x_MD: Tensor, order: ByExpert) -> Tensor:
    """Return each row's token, (R, D). Backward adds up a token's rows in a fixed order."""
    return _Spread.apply(x_MD, order)


def combine_rows(y_RD: Tensor, weights_MK: Tensor, order: ByExpert) -> Tensor:
    """Sum each token's rows times their weights, (M, D); what has no row counts as zero.

    Args:
        y_RD: rows, by expert.
        weights_MK: of each token's rows.
        order: from `sort_by_expert`.
    """
    return _Combine.apply(y_RD, weights_MK.to(y_RD.dtype), order)


def permute_rows(x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return x[index] for an index that is a permutation, so that backward gathers too and adds up nothing.

    Args:
        x_RD: rows.
        index_R: the permutation.
        inverse_R: its inverse, for backward.
    """
    return _Permute.apply(x_RD, index_R, inverse_R)


def grouped_way(dtype: torch.dtype, device: torch.device, *widths: int) -> str:
    """How the products of all experts are made: "kernel", torch's grouped one, or "loop", expert by expert."""
    if dtype not in _KERNEL_TYPES.get(device.type, ()):
        return "loop"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "loop"
    aligned = all(width * dtype.itemsize % _ALIGNMENT_BYTES == 0 for width in widths)
    return "kernel" if aligned and hasattr(torch.nn.functional, "grouped_mm") else "loop"


def told_ends(ends_E: Tensor, *stacks: Tensor) -> Ends:
    """Return what `grouped_linear` takes as `ends_E` of all these stacks: on the host where they need it there, once.

    Args:
        ends_E: number of rows up to each expert.
        stacks: matrices for each expert.
    """
    return ends_E.tolist() if all(_way(weights) == "loop" for weights in stacks) else ends_E


def grouped_linear(x_RD: Tensor, weights_EFD: Tensor, ends_E: Ends) -> Tensor:
    """Compute x @ w[e].T for the rows of each expert e; (R, F).

    Args:
        x_RD: rows, by expert.
        weights_EFD: a matrix for each expert.
        ends_E: number of rows up to each expert, the last is R.
    """
    way = _way(weights_EFD)
    if torch.is_autocast_enabled(x_RD.device.type):
        dtype = torch.get_autocast_dtype(x_RD.device.type)
        x_RD, weights_EFD = x_RD.to(dtype), weights_EFD.to(dtype)
    if way == "loop":
        return _Loop.apply(x_RD, weights_EFD, ends_E.tolist() if isinstance(ends_E, Tensor) else ends_E)
    assert isinstance(ends_E, Tensor), "ends were told for stacks that all go expert by expert"
    return torch.nn.functional.grouped_mm(x_RD, weights_EFD.transpose(1, 2), offs=ends_E)


def _way(weights_EFD: Tensor) -> str:
    device, (_, dim_out, dim_in) = weights_EFD.device, weights_EFD.shape
    autocasts = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocasts else weights_EFD.dtype
    return grouped_way(dtype, device, dim_in, dim_out)


def _pairs(rows_RD: Tensor, order: ByExpert) -> Tensor:
    """The row of each pair of token and place, (M, K, D); zeros where it has none."""
    num_rows, dim = rows_RD.shape
    if num_rows < order.place_MK.numel():
        rows_RD = torch.cat((rows_RD, rows_RD.new_zeros(1, dim)))
    return rows_RD.index_select(0, order.place_MK.view(-1)).view(*order.place_MK.shape, dim)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order: ByExpert) -> Tensor:
        ctx.order = order
        return x_MD.index_select(0, order.source_R // order.top_k)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return _pairs(grad_RD, ctx.order).sum(1), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_MK: Tensor, order: ByExpert) -> Tensor:
        ctx.save_for_backward(y_RD, weights_MK)
        ctx.order = order
        return torch.bmm(weights_MK[:, None], _pairs(y_RD, order))[:, 0]

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RD, weights_MK = ctx.saved_tensors
        order: ByExpert = ctx.order
        shares_R = weights_MK.reshape(-1).index_select(0, order.source_R)
        grad_y_RD = grad_MD.index_select(0, order.source_R // order.top_k) * shares_R[:, None]
        grad_w_MK = torch.bmm(_pairs(y_RD, order), grad_MD[:, :, None])[:, :, 0]
        return grad_y_RD, grad_w_MK, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.inverse = inverse_R
        return x_RD.index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return grad_RD.index_select(0, ctx.inverse), None, None


class _Loop(torch.autograd.Function):
    """One product for each expert.

    In forward also for those without rows, and each into memory of its own: selective recompute keeps products by
    their number, and must find them unchanged.
    """

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weights_EFD: Tensor, ends: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x_RD, weights_EFD)
        ctx.sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        parts = x_RD.split(ctx.sizes)
        return torch.cat([torch.mm(part, weights.t()) for part, weights in zip(parts, weights_EFD, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RD, weights_EFD = ctx.saved_tensors
        grad_x = torch.empty_like(x_RD) if ctx.needs_input_grad[0] else None
        grad_w = torch.empty_like(weights_EFD) if ctx.needs_input_grad[1] else None
        start = 0
        for expert, size in enumerate(ctx.sizes):
            rows = slice(start, start := start + size)
            if grad_x is not None and size:
                torch.mm(grad_RF[rows], weights_EFD[expert], out=grad_x[rows])
            if grad_w is not None:
                torch.mm(grad_RF[rows].t(), x_RD[rows], out=grad_w[expert])
        return grad_x, grad_w, None
