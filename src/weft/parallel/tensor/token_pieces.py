"""Products of cut layers in pieces of the sequence: one piece travels over tp while another one multiplies.

Piece k holds the same stretch of every rank's tokens, so a sequence is cut as `sequence.py` cuts it. The last piece is
shorter where the pieces do not come out even. Two pieces are there at a time: nothing keeps all tokens for longer than
the products that need them.

Method: Wang et al. 2023 (ASPLOS), "Overlap communication with dependent computation via decomposition".

B sequences, T tokens, S = T / tp tokens of this rank, R ranks, L tokens of a piece, D features that go in, F that come
out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm import Pending, start_all_gather, start_reduce_scatter
from weft.mesh import Axis
from weft.private_torch import is_watched


def cuts(tokens: int, pieces: int) -> list[slice]:
    """Where the pieces of a rank's tokens lie: at most so many, and none of them empty."""
    size = max(1, -(-tokens // pieces))
    return [slice(at, min(at + size, tokens)) for at in range(0, tokens, size)]


def gather_multiply(
    x_BSD: Tensor, weights: Sequence[Tensor], axis: Axis, pieces: int, whole_ND: Tensor | None = None
) -> list[Tensor]:
    """All tokens' products with each weight (F, D), (B, T, F).

    whole_ND: gets all tokens, in the order of `by_pieces`.
    """
    batch, tokens, width = x_BSD.shape
    stretches = cuts(tokens, pieces)
    made = [x_BSD.new_empty((batch, axis.size, tokens, len(weight))) for weight in weights]

    def start(index: int) -> Pending:
        part_BLD = x_BSD[:, stretches[index]]
        shape = (axis.size, batch, part_BLD.shape[1], width)
        if whole_ND is None:
            return start_all_gather(part_BLD.contiguous(), axis, out=x_BSD.new_empty(shape))
        rows = slice(*(axis.size * batch * at for at in (stretches[index].start, stretches[index].stop)))
        return start_all_gather(part_BLD.contiguous(), axis, out=whole_ND[rows].view(shape))

    arriving = start(0) if stretches else None
    for index, stretch in enumerate(stretches):
        assert arriving is not None
        part_RBLD = arriving.wait()
        arriving = start(index + 1) if index + 1 < len(stretches) else None
        for out, weight in zip(made, weights, strict=True):
            _multiply_into(out[:, :, stretch].transpose(0, 1), part_RBLD, weight)
    return [out.flatten(1, 2) for out in made]


def multiply_scatter(x_BTD: Tensor, weight_FD: Tensor, axis: Axis, pieces: int) -> Tensor:
    """This rank's tokens of the sum over the ranks of their products, (B, S, F)."""
    batch, tokens = x_BTD.shape[0], x_BTD.shape[1] // axis.size
    x_BRSD = x_BTD.unflatten(1, (axis.size, tokens))
    found = x_BTD.new_empty((batch, tokens, len(weight_FD)))
    under_way: tuple[Pending, slice] | None = None
    for stretch in cuts(tokens, pieces):
        part_RBLD = x_BRSD[:, :, stretch].transpose(0, 1)
        made = x_BTD.new_empty((*part_RBLD.shape[:3], len(weight_FD)))
        _multiply_into(made, part_RBLD, weight_FD)
        if under_way is not None:
            _place(found, *under_way)
        out = found[:, stretch] if batch == 1 else made.new_empty(made.shape[1:])
        under_way = start_reduce_scatter(made, axis, out=out), stretch
    if under_way is not None:
        _place(found, *under_way)
    return found


def column_gradients(
    x_BSD: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor], axis: Axis, *, of_x: bool, of_weights: bool
) -> list[Tensor]:
    """Of `gather_multiply`: the gradient of x, where it is wanted, and then those of the weights.

    Their input is gathered beside the product for x, whose gradient is added up beside the products for the weights.
    """
    gathering = start_all_gather(x_BSD.contiguous(), axis, out=_by_ranks(x_BSD, axis)) if of_weights else None
    flat = [grad.flatten(0, -2) for grad in grads]
    summing: Pending | None = None
    if of_x:
        total_ND = flat[0].mm(weights[0])
        for grad_NF, weight in zip(flat[1:], weights[1:], strict=True):
            total_ND.addmm_(grad_NF, weight)
        ranks = total_ND.view(len(x_BSD), axis.size, *x_BSD.shape[1:]).transpose(0, 1).contiguous()
        summing = start_reduce_scatter(ranks, axis, out=torch.empty_like(x_BSD, memory_format=torch.contiguous_format))
    found: list[Tensor] = []
    if gathering is not None:
        whole_ND = gathering.wait().transpose(0, 1).reshape(-1, x_BSD.shape[-1])
        found = [grad_NF.t().mm(whole_ND) for grad_NF in flat]
    return found if summing is None else [summing.wait(), *found]


def row_factors(grad_BSF: Tensor, weight_FD: Tensor, axis: Axis, pieces: int) -> tuple[Tensor, Tensor]:
    """Of `multiply_scatter`: the gradient of x, (B, T, D), and that of the product, in the order of `by_pieces`."""
    batch, tokens, width = grad_BSF.shape
    whole_NF = grad_BSF.new_empty((batch * axis.size * tokens, width))
    [grad_BTD] = gather_multiply(grad_BSF, [weight_FD.t()], axis, pieces, whole_NF)
    return grad_BTD, whole_NF


def by_pieces(x_BTD: Tensor, axis: Axis, pieces: int) -> Tensor:
    """The same tokens as rows in the order in which pieces travel: by piece, rank and sequence."""
    x_RBSD = x_BTD.unflatten(1, (axis.size, x_BTD.shape[1] // axis.size)).transpose(0, 1)
    parts = [x_RBSD[:, :, stretch].reshape(-1, x_BTD.shape[-1]) for stretch in cuts(x_RBSD.shape[2], pieces)]
    return torch.cat(parts)


def _by_ranks(x_BSD: Tensor, axis: Axis) -> Tensor:
    return x_BSD.new_empty((axis.size, *x_BSD.shape))


def _place(found_BSF: Tensor, summing: Pending, stretch: slice) -> None:
    part_BLF = summing.wait()
    if len(found_BSF) > 1:  # else it was made there
        found_BSF[:, stretch] = part_BLF


def _multiply_into(out_RBLF: Tensor, x_RBLD: Tensor, weight_FD: Tensor) -> None:
    """x W^T, where it belongs. No tokens are copied: the ranks' parts are a batch of products."""
    if is_watched():  # selective recompute keeps what a product gave, and cannot keep a part of something
        out_RBLF.copy_(F.linear(x_RBLD, weight_FD))
        return
    weight_RDF = weight_FD.t().expand(len(x_RBLD), -1, -1)
    for sequence in range(x_RBLD.shape[1]):
        torch.bmm(x_RBLD[:, sequence], weight_RDF, out=out_RBLF[:, sequence])
