"""Matmuls of sharded layers and their collectives over tp.

With tp_chunks > 1, matmuls run in chunks of the sequence, to overlap communication with computation. Chunk k holds the
same range of every rank's tokens, so a rank's tokens are the same as without chunks. The last chunk is shorter if the
chunks do not divide evenly. At most two chunks exist at a time, so the gathered tokens are kept only for the matmuls
that need them.

Method: Wang et al. 2023 (ASPLOS), "Overlap communication with dependent computation via decomposition".

B sequences, T tokens, S = T / tp tokens of this rank, R ranks, L tokens per chunk, D input features, F output features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from weft.comm.autograd import operator_of, prepare_operators, scatter_sum, sum_over
from weft.comm.collectives import all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from weft.comm.mesh import Axis
from weft.comm.pending import Pending
from weft.errors import PlanError
from weft.parallel.layers.deferred_gradients import DeferredProduct, DeferredWeightGrad
from weft.parallel.layers.float8_products import Float8, product
from weft.parallel.random.streams import ShardPosition
from weft.private_torch import Function, current_mode, is_watched


def cuts(tokens: int, pieces: int) -> list[slice]:
    """Return the token ranges of the chunks within a rank's tokens: at most `pieces` chunks, and no empty ones."""
    size = max(1, -(-tokens // pieces))
    return [slice(at, min(at + size, tokens)) for at in range(0, tokens, size)]


def gather_multiply(
    x_BSD: Tensor, weights: Sequence[Tensor], axis: Axis, pieces: int, whole_ND: Tensor | None = None
) -> list[Tensor]:
    """Gather x from all ranks and return x W^T, (B, T, F), for each weight W, (F, D).

    whole_ND: buffer that receives all tokens, in the order of `by_chunks`.
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
    """Return this rank's tokens of the sum over ranks of x W^T, (B, S, F)."""
    batch, tokens = x_BTD.shape[0], x_BTD.shape[1] // axis.size
    x_BRSD = x_BTD.unflatten(1, (axis.size, tokens))
    found = x_BTD.new_empty((batch, tokens, len(weight_FD)))
    under_way: tuple[Pending, slice] | None = None
    for stretch in cuts(tokens, pieces):
        part_RBLD = x_BRSD[:, :, stretch].transpose(0, 1)
        made = x_BTD.new_empty((*part_RBLD.shape[:3], len(weight_FD)))
        _multiply_into(made, part_RBLD, weight_FD)
        if under_way is not None:
            _write_part(found, *under_way)
        out = found[:, stretch] if batch == 1 else made.new_empty(made.shape[1:])
        under_way = start_reduce_scatter(made, axis, out=out), stretch
    if under_way is not None:
        _write_part(found, *under_way)
    return found


def column_gradients(
    x_BSD: Tensor, grads: Sequence[Tensor], weights: Sequence[Tensor], axis: Axis, *, of_x: bool, of_weights: bool
) -> list[Tensor]:
    """Compute the gradients of `gather_multiply`: x's gradient if requested, then the weights' gradients.

    The all-gather of the input overlaps with the matmul for x's gradient, and the reduction of x's gradient with the
    weights' matmuls.
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
    """Return the gradients of x, (B, T, D), and of x W^T, (B * T, F), for `multiply_scatter`.

    The rows of the second gradient are in the order of `by_chunks`.
    """
    batch, tokens, width = grad_BSF.shape
    whole_NF = grad_BSF.new_empty((batch * axis.size * tokens, width))
    [grad_BTD] = gather_multiply(grad_BSF, [weight_FD.t()], axis, pieces, whole_NF)
    return grad_BTD, whole_NF


def by_chunks(x_BTD: Tensor, axis: Axis, pieces: int) -> Tensor:
    """Return the tokens as rows in the order of communication: by chunk, then rank, then sequence."""
    x_RBSD = x_BTD.unflatten(1, (axis.size, x_BTD.shape[1] // axis.size)).transpose(0, 1)
    parts = [x_RBSD[:, :, stretch].reshape(-1, x_BTD.shape[-1]) for stretch in cuts(x_RBSD.shape[2], pieces)]
    return torch.cat(parts)


def _by_ranks(x_BSD: Tensor, axis: Axis) -> Tensor:
    return x_BSD.new_empty((axis.size, *x_BSD.shape))


def _write_part(found_BSF: Tensor, summing: Pending, stretch: slice) -> None:
    part_BLF = summing.wait()
    if len(found_BSF) > 1:  # else it was written directly
        found_BSF[:, stretch] = part_BLF


def _multiply_into(out_RBLF: Tensor, x_RBLD: Tensor, weight_FD: Tensor) -> None:
    """Compute x W^T into `out_RBLF`, as a matmul batched over ranks for each sequence."""
    if is_watched():  # selective recompute saves outputs, not views of them
        out_RBLF.copy_(F.linear(x_RBLD, weight_FD))
        return
    weight_RDF = weight_FD.t().expand(len(x_RBLD), -1, -1)
    for sequence in range(x_RBLD.shape[1]):
        torch.bmm(x_RBLD[:, sequence], weight_RDF, out=out_RBLF[:, sequence])


# Matmuls with sharded weights, and their collectives.

#: Index of the token dim in activations: (batch, tokens, features).
TOKENS = 1


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """The ranks over which a layer's weights are sharded.

    cuts_tokens: True if each rank has 1/size of the tokens between sharded layers. pieces: number of chunks in which
    tokens are communicated. saves_share: True if each rank saves only 1/size of an unsharded input for backward.
    """

    axis: Axis
    cuts_tokens: bool = False
    pieces: int = 1
    saves_share: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedLayer:
        return self  # a copy of the module runs on the same ranks

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of x that this rank saves for backward.

        If `saves_share` is True and the rows of x divide evenly, this is a copy of this rank's rows,
        (1, rows / size, D), which `start_gather` gathers again. Else it is x.
        """
        rows = x.reshape(1, -1, x.shape[-1])
        if not self.saves_share or not rows.shape[1] or rows.shape[1] % self.axis.size:
            return x
        return rows.chunk(self.axis.size, TOKENS)[self.axis.rank].clone()

    def start_gather(self, x_BSD: torch.Tensor) -> Gathering:
        """Start the all-gather of all ranks' tokens."""
        parts = x_BSD.new_empty((self.axis.size, *x_BSD.shape))
        return Gathering(start_all_gather(x_BSD.contiguous(), self.axis, out=parts))

    def start_sum(self, x_BTD: torch.Tensor) -> Pending:
        """Start the sum of the ranks' tensors.

        The result is this rank's tokens of the sum if tokens are sharded, else the full sum. x_BTD may be overwritten
        by the sum; it can be reused or freed after `wait()`.
        """
        if not self.cuts_tokens:
            return start_all_reduce(x_BTD.contiguous(), self.axis)
        size = token_share(x_BTD.shape, self.axis)
        shape = (x_BTD.shape[0], size, *x_BTD.shape[2:])
        parts = (
            x_BTD.reshape(self.axis.size, *shape) if shape[0] == 1 else torch.stack(x_BTD.split(size, TOKENS))
        )  # with one sequence, the ranks' parts are contiguous
        return start_reduce_scatter(parts, self.axis, out=x_BTD.new_empty(shape))


class Column(NamedTuple):
    """Parameters of one linear layer: weight (F, D), or (D, F) if transposed, and its float8 settings, if any."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_transposed: bool
    form: Float8 | None = None


class Gathering:
    """Pending all-gather of the tokens."""

    def __init__(self, pending: Pending):
        self._pending = pending

    def wait(self) -> torch.Tensor:
        """Return all tokens, (B, T, D)."""
        parts = self._pending.wait()
        if parts.shape[1] == 1:
            return parts.reshape(1, -1, *parts.shape[3:])
        return torch.cat(parts.unbind(0), TOKENS)


def token_share(shape: torch.Size | tuple[int, ...], axis: Axis) -> int:
    """Return the number of tokens per rank.

    Raises PlanError if the tokens do not divide evenly, or if the shape has fewer than three dims.
    """
    size, rest = divmod(shape[TOKENS], axis.size) if len(shape) > 2 else (0, 1)
    if rest:
        raise PlanError(
            f"sp=on: the ranks of tp={axis.size} share the tokens of each sequence evenly, and the shape "
            f"{tuple(shape)} does not allow it. Use (batch, tokens, features) with a multiple of {axis.size} tokens, "
            f"or sp=off."
        )
    return size


def with_padding(x: torch.Tensor, part: ShardPosition, dim: int = TOKENS) -> torch.Tensor:
    """Return x with `part.padding` detached copies of its last token appended."""
    if not part.padding:
        return x
    last = x.detach().narrow(dim, x.shape[dim] - 1, 1)
    return torch.cat((x, *[last] * part.padding), dim)


def without_padding(x: torch.Tensor, part: ShardPosition, dim: int = TOKENS) -> torch.Tensor:
    """Return x without the tokens that `with_padding` added."""
    return x.narrow(dim, 0, x.shape[dim] - part.padding) if part.padding else x


def with_sequences(x: torch.Tensor, sequences: int, axis: Axis) -> torch.Tensor:
    """Restore (B, S, D) for tokens that a model flattened to (B * S, D).

    Raises PlanError if the number of sequences is unknown or does not fit.
    """
    if x.dim() != 2 or not sequences or x.shape[0] % sequences:
        token_share(x.shape[-2:], axis)
    return x.view(sequences, -1, x.shape[-1])


def columns(
    x: torch.Tensor,
    whole: torch.Tensor | None,
    line: SharedLayer,
    members: list[Column],
    held: DeferredWeightGrad | None,
) -> tuple[torch.Tensor, ...]:
    """Return the output of each linear layer in `members` for one input.

    The input's gradient is summed over the ranks of `line`.

    Args:
        x: this rank's tokens, (B, S, D), or all tokens if they are not sharded. It receives the gradient.
        whole: all tokens of x, or None to gather them in chunks during the matmuls.
        held: stores the factors of weight gradients while it is open; None to defer nothing.
    """
    if has_torch_function((x,)):  # per-sample gradients replace this function
        return handle_torch_function(columns, (x,), x, whole, line, members, held)
    weights = [one.weight.t() if one.is_transposed else one.weight for one in members]
    biases = [one.bias for one in members]
    return _Columns.apply(x, None if whole is None else whole.detach(), line, (held, members), *weights, *biases)


class _Columns(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: torch.Tensor,
        whole_BTD: torch.Tensor | None,
        line: SharedLayer,
        waiting: tuple[DeferredWeightGrad | None, list[Column]],
        *params: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        count = len(waiting[1])
        weights, biases = [weight for weight in params[:count] if weight is not None], params[count:]
        # Weight gradients need the input. It is not saved if all weights are frozen.
        keeps_input = any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(line.share(x_BSD) if keeps_input else None, *weights)
        ctx.line, ctx.waiting, ctx.shape = line, waiting, tuple(x_BSD.shape)
        ctx.set_materialize_grads(False)
        if whole_BTD is None:
            made = gather_multiply(x_BSD, weights, line.axis, line.pieces)
            return tuple(out if bias is None else out.add_(bias) for out, bias in zip(made, biases, strict=True))
        forms = [member.form for member in waiting[1]]
        return tuple(product(whole_BTD, *of) for of in zip(weights, biases, forms, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x_BSD, *weights = ctx.saved_tensors
        line: SharedLayer = ctx.line
        held, members = ctx.waiting
        needs_x, needs_params = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        gathering = None
        if x_BSD is not None and (line.cuts_tokens or tuple(x_BSD.shape) != ctx.shape):
            gathering = line.start_gather(x_BSD)
        flat = {index: grad.flatten(0, -2) for index, grad in enumerate(grads) if grad is not None}
        # A rank that used none of the outputs still joins the collective with zeros, because other ranks wait for it.
        forms = [member.form for member in members]
        sum_x = line.start_sum(_input_gradient(ctx.shape, line, flat, weights, forms)) if needs_x else None
        whole = gathering.wait() if gathering else x_BSD
        whole_ND: Any = None if whole is None else whole.flatten(0, -2)
        found: list[torch.Tensor | None] = []
        for index, member in enumerate(members):
            wanted = index in flat and needs_params[index]
            weight = member.weight
            if wanted and held is not None and held.is_open and isinstance(weight, nn.Parameter):
                held.store(DeferredProduct(weight, whole_ND, flat[index], member.is_transposed))
                wanted = False
            found.append(flat[index].t() @ whole_ND if wanted else None)
        for index, member in enumerate(members):
            wanted = member.bias is not None and index in flat and needs_params[len(members) + index]
            found.append(flat[index].sum(0) if wanted else None)
        return (sum_x.wait() if sum_x else None, None, None, None, *found)


def _input_gradient(
    part: tuple[int, ...],
    line: SharedLayer,
    flat: dict[int, torch.Tensor],
    weights: list[torch.Tensor],
    forms: list[Float8 | None],
) -> torch.Tensor:
    """Compute this rank's summand of the gradient of all tokens. part: shape of this rank's tokens.

    In float8, this is a collective if ranks share scales.
    """
    shape = list(part)
    if line.cuts_tokens:
        shape[TOKENS] *= line.axis.size
    total: torch.Tensor | None = None
    flat, narrow = dict(flat), [index for index, form in enumerate(forms) if form is not None]
    if narrow:  # one collective for shared scales; ranks without gradients join with zeros
        rows = math.prod(shape[:-1])
        grads = [
            flat.pop(index) if index in flat else weights[index].new_zeros(rows, len(weights[index]))
            for index in narrow
        ]
        form = forms[narrow[0]]
        assert form is not None
        for made in form.input_gradients(grads, [weights[index] for index in narrow]):
            total = made if total is None else total.add_(made)
    for index, grad_NF in flat.items():
        total = grad_NF @ weights[index] if total is None else total.addmm_(grad_NF, weights[index])
    return weights[0].new_zeros(shape) if total is None else total.view(shape)


def row_sum(product_BTD: torch.Tensor, line: SharedLayer, *, is_compiled: bool = False) -> torch.Tensor:
    """Return the sum of `product_BTD` over the ranks of `line`, or this rank's tokens of it if tokens are sharded.

    The sum may overwrite the input. is_compiled: True to use operations that the compiler can trace.
    """
    if is_compiled:
        if line.cuts_tokens:
            return scatter_sum(product_BTD, line.axis, TOKENS)
        return sum_over(product_BTD, line.axis)
    return _RowSum.apply(product_BTD, line)


class _RowSum(Function):
    @staticmethod
    def forward(ctx: Any, product_BTD: torch.Tensor, line: SharedLayer) -> torch.Tensor:
        ctx.line = line
        if line.cuts_tokens:
            return line.start_sum(product_BTD).wait()
        if not product_BTD.is_contiguous() or current_mode() is not None:
            # Selective recompute saves this tensor and reuses it, so the sum must not overwrite it.
            return line.start_sum(product_BTD.clone(memory_format=torch.contiguous_format)).wait()
        ctx.mark_dirty(product_BTD)
        line.start_sum(product_BTD).wait()
        return product_BTD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad_BSD = grads[0]
        return (ctx.line.start_gather(grad_BSD).wait() if ctx.line.cuts_tokens else grad_BSD), None


def summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum of a tensor over the ranks of an axis, without autograd. A contiguous tensor is overwritten."""
    return all_reduce(x.contiguous(), axis)


# Autograd functions for matmuls in chunks, for eager and compiled blocks.

_SCHEMAS = {
    "gather_multiply": "(Tensor x, Tensor[] weights, int pieces) -> Tensor[]",
    "multiply_scatter": "(Tensor x, Tensor weight, int pieces) -> Tensor",
    "column_gradients": "(Tensor x, Tensor[] grads, Tensor[] weights, bool of_x, bool of_weights) -> Tensor[]",
    "row_gradients": "(Tensor grad, Tensor x, Tensor weight, int pieces, bool of_weight) -> Tensor[]",
}


def prepare_chunk_operators(axis: Axis) -> None:
    """Build the operators that compiled graphs use for matmuls in chunks.

    Call it before compiling code that uses the axis.
    """
    real: dict[str, Callable[..., Any]] = {
        "gather_multiply": lambda axis, x, weights, count: gather_multiply(x, weights, axis, count),
        "multiply_scatter": lambda axis, x, weight, count: multiply_scatter(x, weight, axis, count),
        "column_gradients": _column_gradients,
        "row_gradients": _row_gradients,
    }
    size = axis.size
    fake: dict[str, Callable[..., Any]] = {
        "gather_multiply": partial(_gathered_like, size),
        "multiply_scatter": partial(_scattered_like, size),
        "column_gradients": _column_gradients_like,
        "row_gradients": partial(_row_gradients_like, size),
    }
    prepare_operators(axis, {name: (_SCHEMAS[name], real[name], fake[name]) for name in _SCHEMAS})


def compiled_columns(x_BSD: Tensor, line: SharedLayer, weights: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the results of `gather_multiply`, with autograd, inside a compiled graph."""
    return _CompiledColumns.apply(x_BSD, line, *weights)


def compiled_row(x_BTD: Tensor, line: SharedLayer, weight_FD: Tensor) -> Tensor:
    """Return the result of `multiply_scatter`, with autograd, inside a compiled graph."""
    return _CompiledRow.apply(x_BTD, line, weight_FD)


def row(
    x_BTD: Tensor, weight: Tensor, line: SharedLayer, held: DeferredWeightGrad | None, *, transposed: bool
) -> Tensor:
    """Return the result of `multiply_scatter`, with autograd, outside compiled graphs.

    weight: (F, D), or (D, F) if `transposed`. held: stores the factors of the weight's gradient while it is open; None
    to defer nothing.
    """
    travel, weight_FD = _ReduceHandoff(), weight.t() if transposed else weight
    there = _RowFactors.apply(x_BTD, weight_FD, (weight, held, transposed), line, travel)
    return _ChunkedRowSum.apply(there, x_BTD.detach(), weight_FD.detach(), line, travel)


class _CompiledColumns(Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, line: SharedLayer, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_BSD, *weights)
        ctx.line = line
        return tuple(operator_of(line.axis, "gather_multiply")(x_BSD, list(weights), line.pieces))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, *weights = ctx.saved_tensors
        of_x, of_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        gradients = operator_of(ctx.line.axis, "column_gradients")
        found = list(gradients(x_BSD, list(grads), weights, of_x, of_weights))
        grad_x = found.pop(0) if of_x else None
        return grad_x, None, *(found if of_weights else [None] * len(weights))


class _CompiledRow(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, line: SharedLayer, weight_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTD, weight_FD)
        ctx.line = line
        return operator_of(line.axis, "multiply_scatter")(x_BTD, weight_FD, line.pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, weight_FD = ctx.saved_tensors
        of_weight = ctx.needs_input_grad[2]
        gradients = operator_of(ctx.line.axis, "row_gradients")
        found = gradients(grads[0], x_BTD, weight_FD, ctx.line.pieces, of_weight)
        return found[0], None, found[1] if of_weight else None


class _ReduceHandoff:
    """Passes a gradient from the backward of `_ChunkedRowSum` to the backward of `_RowFactors`, outside autograd."""

    grad_BSF: Tensor | None = None


class _RowFactors(Function):
    """Computes the gradients of the matmul in `_ChunkedRowSum`. Its forward returns a placeholder without data.

    layer: (weight, object that stores its deferred gradient, True if the weight is transposed).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        weight_FD: Tensor,
        layer: tuple[Tensor, DeferredWeightGrad | None, bool],
        line: SharedLayer,
        travel: _ReduceHandoff,
    ) -> Tensor:
        ctx.save_for_backward(x_BTD if ctx.needs_input_grad[1] else None, weight_FD)
        ctx.layer, ctx.line, ctx.transfer_s = layer, line, travel
        return x_BTD.new_empty(1).expand(*x_BTD.shape[:2], len(weight_FD))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        del grads  # see `_ReduceHandoff`
        x_BTD, weight_FD = ctx.saved_tensors
        grad_BSF, ctx.transfer_s.grad_BSF = ctx.transfer_s.grad_BSF, None
        assert grad_BSF is not None
        axis, count = ctx.line.axis, ctx.line.pieces
        grad_BTD, whole_NF = row_factors(grad_BSF, weight_FD, axis, count)
        grad_weight: Tensor | None = None
        if x_BTD is not None:
            weight, held, transposed = ctx.layer
            product = DeferredProduct(weight, by_chunks(x_BTD, axis, count), whole_NF, transposed)
            if held is not None and held.is_open and isinstance(weight, nn.Parameter):
                held.store(product)
            else:
                grad_weight = whole_NF.t().mm(product.x_RI)  # gradient of the weight in (F, D)
        return grad_BTD, grad_weight, None, None, None


class _ChunkedRowSum(Function):
    @staticmethod
    def forward(
        ctx: Any, there_BTF: Tensor, x_BTD: Tensor, weight_FD: Tensor, line: SharedLayer, travel: _ReduceHandoff
    ) -> Tensor:
        ctx.shape, ctx.transfer_s = there_BTF.shape, travel
        return multiply_scatter(x_BTD, weight_FD, line.axis, line.pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transfer_s.grad_BSF = grads[0]
        return grads[0].new_zeros(1).expand(ctx.shape), None, None, None, None


def _gathered_like(size: int, x: Tensor, weights: list[Tensor], count: int) -> list[Tensor]:
    del count
    return [x.new_empty((x.shape[0], x.shape[1] * size, weight.shape[0])) for weight in weights]


def _scattered_like(size: int, x: Tensor, weight: Tensor, count: int) -> Tensor:
    del count
    return x.new_empty((x.shape[0], x.shape[1] // size, weight.shape[0]))


def _column_gradients(
    axis: Axis, x: Tensor, grads: list[Tensor], weights: list[Tensor], of_x: bool, of_weights: bool
) -> list[Tensor]:
    return column_gradients(x, grads, weights, axis, of_x=of_x, of_weights=of_weights)


def _column_gradients_like(
    x: Tensor, grads: list[Tensor], weights: list[Tensor], of_x: bool, of_weights: bool
) -> list[Tensor]:
    del grads
    found = [x.new_empty(x.shape)] if of_x else []
    return found + ([weight.new_empty(weight.shape) for weight in weights] if of_weights else [])


def _row_gradients(axis: Axis, grad: Tensor, x: Tensor, weight: Tensor, count: int, of_weight: bool) -> list[Tensor]:
    grad_BTD, whole_NF = row_factors(grad, weight, axis, count)
    return [grad_BTD, whole_NF.t().mm(by_chunks(x, axis, count))] if of_weight else [grad_BTD]


def _row_gradients_like(
    size: int, grad: Tensor, x: Tensor, weight: Tensor, count: int, of_weight: bool
) -> list[Tensor]:
    del size, grad, count
    return [x.new_empty(x.shape), *([weight.new_empty(weight.shape)] if of_weight else [])]
