"""Products with cut matrices and their collectives.

`columns` is one step of autograd, written by hand and not put together from the functions of `comm.autograd`, for two
reasons. Under sequence parallelism the gathered input is not kept for backward: the rank's own part is kept, and
gathered again beside the product that makes the input's gradient. And the input's gradient travels beside the product
that makes the weight's. `row_sum` stands alone after a plain product: what replays a block's forward stops in front of
its last product, and so makes neither that nor its collective again.

Method: Shoeybi et al. 2019, arXiv 1909.08053 (columns, rows); Korthikanti et al. 2022, arXiv 2205.05198 (sequence).

B sequences, T tokens, S tokens of this rank (T / tp under sequence parallelism, else T), N all tokens of a rank,
D features that go in, F features of this rank that come out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.comm import Pending, all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from weft.comm.autograd import scatter_sum, sum_over
from weft.errors import PlanError
from weft.mesh import Axis
from weft.parallel.layers import Float8, HeldGradients, HeldProduct, product
from weft.parallel.tensor.token_pieces import gather_multiply
from weft.private_torch import Function, current_mode

#: Where the tokens are in activations: (batch, tokens, features).
TOKENS = 1


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """The ranks that share a layer's matrices.

    cuts_tokens: between such layers each has 1/size of the tokens. pieces: of those, that travel one by one.
    """

    axis: Axis
    cuts_tokens: bool = False
    pieces: int = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedLayer:
        return self  # a copy of the module runs on the same ranks

    def start_gather(self, x_BSD: torch.Tensor) -> Gathering:
        """Begin to bring together all tokens."""
        parts = x_BSD.new_empty((self.axis.size, *x_BSD.shape))
        return Gathering(start_all_gather(x_BSD.contiguous(), self.axis, out=parts))

    def start_sum(self, x_BTD: torch.Tensor) -> Pending:
        """Begin to add up the ranks' tensors: this rank's tokens of the sum where tokens are cut, else all of it.

        x_BTD itself becomes the sum, or is free after `wait()`.
        """
        if not self.cuts_tokens:
            return start_all_reduce(x_BTD.contiguous(), self.axis)
        size = token_share(x_BTD.shape, self.axis)
        shape = (x_BTD.shape[0], size, *x_BTD.shape[2:])
        parts = (
            x_BTD.reshape(self.axis.size, *shape) if shape[0] == 1 else torch.stack(x_BTD.split(size, TOKENS))
        )  # with one sequence the ranks' parts lie one after another
        return start_reduce_scatter(parts, self.axis, out=x_BTD.new_empty(shape))


class Column(NamedTuple):
    """The parameters of one layer: weight (F, D), or (D, F) where transposed; and its form, where it has float8."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_transposed: bool
    form: Float8 | None = None


class Gathering:
    """All tokens on their way here."""

    def __init__(self, pending: Pending):
        self._pending = pending

    def wait(self) -> torch.Tensor:
        """(B, T, D)."""
        parts = self._pending.wait()
        if parts.shape[1] == 1:
            return parts.reshape(1, -1, *parts.shape[3:])
        return torch.cat(parts.unbind(0), TOKENS)


def token_share(shape: torch.Size | tuple[int, ...], axis: Axis) -> int:
    """How many tokens each rank has; PlanError where they are not shared out evenly."""
    size, rest = divmod(shape[TOKENS], axis.size) if len(shape) > 2 else (0, 1)
    if rest:
        raise PlanError(
            f"sp=on: the ranks of tp={axis.size} share the tokens of each sequence evenly, and the shape "
            f"{tuple(shape)} does not allow it. Use (batch, tokens, features) with a multiple of {axis.size} tokens, "
            f"or sp=off."
        )
    return size


def with_sequences(x: torch.Tensor, sequences: int, axis: Axis) -> torch.Tensor:
    """(B, S, D) of tokens that a model flattened to (B * S, D); PlanError where the sequences are not to be told."""
    if x.dim() != 2 or not sequences or x.shape[0] % sequences:
        token_share(x.shape[-2:], axis)
    return x.view(sequences, -1, x.shape[-1])


def columns(
    x: torch.Tensor, whole: torch.Tensor | None, line: SharedLayer, members: list[Column], held: HeldGradients | None
) -> tuple[torch.Tensor, ...]:
    """Each member's product with the same input, whose gradient is added up over the line.

    x: this rank's tokens, (B, S, D); the gradient goes to it. whole: the same with all tokens; None: they are brought
    together in pieces while these multiply. held: what the gradients
    of the weights may wait in; under sequence parallelism the gathered input then waits with them.
    """
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
        waiting: tuple[HeldGradients | None, list[Column]],
        *params: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        count = len(waiting[1])
        weights, biases = [weight for weight in params[:count] if weight is not None], params[count:]
        # Gradients of weights need the input; where all weights are frozen nobody does.
        keeps_input = any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(x_BSD if keeps_input else None, *weights)
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
        gathering = line.start_gather(x_BSD) if line.cuts_tokens and x_BSD is not None else None
        flat = {index: grad.flatten(0, -2) for index, grad in enumerate(grads) if grad is not None}
        # A rank that used none of the products still takes part, with zeros: others wait for it.
        forms = [member.form for member in members]
        sum_x = line.start_sum(_input_gradient(ctx.shape, line, flat, weights, forms)) if needs_x else None
        whole = gathering.wait() if gathering else x_BSD
        whole_ND: Any = None if whole is None else whole.flatten(0, -2)
        found: list[torch.Tensor | None] = []
        for index, member in enumerate(members):
            wanted = index in flat and needs_params[index]
            weight = member.weight
            if wanted and held is not None and held.is_open and isinstance(weight, nn.Parameter):
                held.hold(HeldProduct(weight, whole_ND, flat[index], member.is_transposed))
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
    """Gradient of all tokens from this rank's features. part: the shape of this rank's tokens."""
    shape = list(part)
    if line.cuts_tokens:
        shape[TOKENS] *= line.axis.size
    total: torch.Tensor | None = None
    flat, narrow = dict(flat), [index for index, form in enumerate(forms) if form is not None]
    if narrow:  # one collective for what all of them agree on; every rank takes part, with zeros where it has none
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
    """The sum over the line of each rank's product; this rank's tokens of it where tokens are cut.

    The product is used up: the sum may be made in its place. is_compiled: by steps that the compiler can follow.
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
            # Selective recompute keeps this product and takes it again: the sum must not be made in its place.
            return line.start_sum(product_BTD.clone(memory_format=torch.contiguous_format)).wait()
        ctx.mark_dirty(product_BTD)
        line.start_sum(product_BTD).wait()
        return product_BTD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad_BSD = grads[0]
        return (ctx.line.start_gather(grad_BSD).wait() if ctx.line.cuts_tokens else grad_BSD), None


def summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`all_reduce` of a fresh tensor, for numbers that need no gradient."""
    return all_reduce(x.contiguous(), axis)
