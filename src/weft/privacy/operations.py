"""Autograd functions of layers that hand the factors of weight gradients to a recorder instead of autograd.

Each takes the parameter as a detached leaf, so that backward reaches neither the parameter nor its hooks. `put`
receives the `Use`. B samples, T tokens of a sample, I inputs, O outputs, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ModelError
from weft.privacy.factors import Direct, EmbeddingRows, ExpertRows, Product, Use, rows_of_samples
from weft.private_torch import Function, tree_leaves

Put = Callable[[Use], None]


class Linear(Function):
    """x W^T + b for a weight (O, I), or x W + b if `transposed`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, puts: tuple[Put, Put | None], samples: int,
        transposed: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.puts, ctx.samples, ctx.is_transposed = puts, samples, transposed
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        put_weight, put_bias = ctx.puts
        grad = grads[0]
        grad_BTO = rows_of_samples(grad, ctx.samples, "a linear layer")
        put_weight(Product(rows_of_samples(x, ctx.samples, "a linear layer"), grad_BTO, ctx.is_transposed))
        if put_bias is not None:
            put_bias(Direct(grad_BTO.sum(1)))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = F.linear(grad, weight) if ctx.is_transposed else grad @ weight
        return grad_x, None, None, None, None, None


class Embedding(Function):
    """Rows (B, T, D) of a table by ids (B, T)."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, put: Put, samples: int, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.put, ctx.samples, ctx.padding, ctx.num_rows = put, samples, padding, len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        [ids] = ctx.saved_tensors
        grad_BTD = rows_of_samples(grads[0], ctx.samples, "an embedding")
        ids_BT = ids.reshape(ctx.samples, -1)
        if ctx.padding is not None:
            grad_BTD = grad_BTD.masked_fill((ids_BT == ctx.padding)[..., None], 0.0)
        ctx.put(EmbeddingRows(ids_BT, grad_BTD, ctx.num_rows))
        return None, None, None, None, None


class Expand(Function):
    """A parameter repeated for each sample, (B, *shape). Its gradient has one entry for each sample."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, put: Put, samples: int) -> Tensor:
        ctx.put = put
        return param.expand(samples, *param.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.put(Direct(grads[0]))
        return None, None, None


class Grouped(Function):
    """`models.experts.grouped_linear`: x W[e]^T for rows sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, weight_EOI: Tensor, put: Put, sample_R: Tensor, ends: Sequence[int], samples: int
    ) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, sample_R)
        ctx.put, ctx.ends, ctx.samples = put, ends, samples
        sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        parts = [torch.mm(rows, weight.t()) for rows, weight in zip(x_RI.split(sizes), weight_EOI, strict=True)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EOI, sample_R = ctx.saved_tensors
        grad_RO = grads[0]
        ctx.put(ExpertRows(x_RI, grad_RO, sample_R, ctx.ends, ctx.samples))
        grad_x = torch.empty_like(x_RI)
        start = 0
        for expert, end in enumerate(ctx.ends):
            torch.mm(grad_RO[start:end], weight_EOI[expert], out=grad_x[start:end])
            start = end
        return grad_x, None, None, None, None, None


class Convolution(Function):
    """A 1-D or 2-D convolution without bias. how: stride, padding and dilation by dim, and the number of groups."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, put: Put, samples: int, how: tuple[Any, ...]) -> Tensor:
        if x.dim() != weight.dim() or x.shape[0] != samples:
            raise ModelError(
                f"privacy: a convolution reads a tensor of shape {tuple(x.shape)} in a microbatch of {samples} "
                f"samples. Put samples first: ({samples}, channels, ...)."
            )
        ctx.save_for_backward(x, weight)
        ctx.put, ctx.how = put, how
        stride, padding, dilation, groups = how
        return torch.convolution(x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.how
        grad = grads[0]
        grad_x = None
        if ctx.needs_input_grad[0]:
            mask, none = [True, False, False], [0] * len(stride)
            grad_x = torch.ops.aten.convolution_backward(
                grad, x, weight, None, stride, padding, dilation, False, none, groups, mask
            )[0]
        ctx.put(_ConvolutionUse.of(x, grad, weight, ctx.how))
        return grad_x, None, None, None, None


class _ConvolutionUse:
    """Makes the `Use` of a convolution's weight from its patches."""

    @staticmethod
    def of(x: Tensor, grad: Tensor, weight: Tensor, how: tuple[Any, ...]) -> Use:
        stride, padding, dilation, groups = how
        kernel = tuple(weight.shape[2:])
        if len(kernel) == 1:
            x, grad = x[:, :, None], grad[:, :, None]
            kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
        patches_BIP = F.unfold(x, kernel, dilation, padding, stride)
        grad_BOP = grad.flatten(2)
        if groups == 1:
            return _Reshaped(Product(patches_BIP.mT, grad_BOP.mT), tuple(weight.shape))
        count = len(x)
        inputs = patches_BIP.view(count, groups, -1, patches_BIP.shape[-1])
        outputs = grad_BOP.view(count, groups, -1, grad_BOP.shape[-1])
        return Direct((outputs @ inputs.mT).reshape(count, *weight.shape))


@dataclass(slots=True)
class _Reshaped:
    """Use of a weight whose matrix form another use describes."""

    use: Use
    shape: tuple[int, ...]

    def norms(self) -> Tensor:
        return self.use.norms()

    def weighted(self, weights_B: Tensor | None) -> Tensor:
        return self.use.weighted(weights_B).view(self.shape)

    def without(self, left_out_B: Tensor) -> Use:
        return _Reshaped(self.use.without(left_out_B), self.shape)

    def per_sample(self) -> Tensor:
        found = self.use.per_sample()
        return found.view(len(found), *self.shape)

    def joined(self, count: int) -> _Reshaped:
        return _Reshaped(self.use.joined(count), self.shape)


class VmapModule(Function):
    """A module whose per-sample gradients torch computes by vmap.

    call(inputs, parameters) runs the module on a batch. `tensors` are the inputs and then the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., Tensor], puts: Sequence[Put], samples: int, path: str, *tensors: Tensor
    ) -> Tensor:
        count = len(tensors) - len(puts)
        ctx.save_for_backward(*tensors)
        ctx.call, ctx.puts, ctx.count, ctx.path = call, puts, count, path
        with torch.enable_grad():
            found = call([one.detach() for one in tensors[:count]], [one.detach() for one in tensors[count:]])
        if isinstance(found, Tensor) and found.requires_grad:
            raise ModelError(
                f"privacy: {path} reads a tensor that is not an argument of its forward, and its gradients are "
                "computed sample by sample from arguments. Pass the tensor as one."
            )
        is_by_row = isinstance(found, Tensor) and all(
            one.dim() and one.shape[0] == samples for one in (found, *tensors[:count])
        )
        if not is_by_row:
            raise ModelError(
                f"privacy: {path} must read tensors with one row for each of the {samples} samples, and return one "
                "such tensor, for its gradients to be computed sample by sample. Freeze it, or build it from linear "
                "layers, embeddings, convolutions and norms."
            )
        ctx.found = found.detach()
        return found.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, params = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        traced = [index for index, one in enumerate(inputs) if one.is_floating_point()]

        def of_sample(rows: tuple[Tensor, ...], grad: Tensor) -> Any:
            def run(some: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Tensor:
                every = list(rows)
                for index, one in zip(traced, some, strict=True):
                    every[index] = one
                return ctx.call(tuple(one[None] for one in every), values)[0]

            pulled: Any = torch.func.vjp(run, tuple(rows[index] for index in traced), tuple(params))
            return pulled[0], *pulled[1](grad)

        try:
            again, found, of_params = torch.func.vmap(of_sample)(tuple(inputs), grads[0])
        except RuntimeError as error:
            raise ModelError(
                f"privacy: the gradients of {ctx.path} cannot be computed sample by sample: {error}. Freeze it, or "
                "build it from linear layers, embeddings, convolutions and norms."
            ) from error
        _expect_same(ctx.found, again, ctx.path)
        for put, grad in zip(ctx.puts, of_params, strict=True):
            put(Direct(grad))
        by_input: list[Tensor | None] = [None] * ctx.count
        for index, grad in zip(traced, found, strict=True):
            by_input[index] = grad
        return None, None, None, None, *by_input, *[None] * len(params)


def _expect_same(found: Tensor, again: Tensor, path: str) -> None:
    """Raise ModelError if a module returned other values for single samples than for the microbatch."""
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-3}.get(found.dtype, 5e-2)
    size = float(found.nan_to_num(0.0, 0.0, 0.0).abs().max()) if found.numel() else 0.0
    if not torch.allclose(found, again, rtol=tolerance, atol=tolerance * size, equal_nan=True):
        raise ModelError(
            f"privacy: {path} returns other values for a sample alone than beside others, because it mixes samples, "
            "draws random numbers, or reads a tensor that is not an argument. Freeze it, or build it from linear "
            "layers, embeddings, convolutions and norms."
        )


def run_alone(
    module: nn.Module, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    begin: Callable[[nn.Parameter], tuple[Tensor, Put]], samples: int,
) -> Tensor:  # fmt: skip
    """Run a module such that its per-sample gradients are computed by vmap.

    Args:
        path: path of the module in the model, for errors.
        forward: the module's own forward.
        begin: returns a parameter's detached leaf and the receiver of its gradients.
        samples: number of samples of the microbatch.
    """
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    begun = [begin(param) for _, param in named]
    places = [index for index, one in enumerate(args) if isinstance(one, Tensor)]
    others = [one for one in args if not isinstance(one, Tensor)]
    if any(isinstance(one, Tensor) for one in tree_leaves((others, kwargs))):
        raise ModelError(
            f"privacy: {path} reads tensors by keyword or in lists, and its gradients are computed sample by sample "
            "from positional arguments. Pass each by position."
        )

    def call(inputs: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
        every = list(args)
        for index, one in zip(places, inputs, strict=True):
            every[index] = one
        values = {name: param for (name, _), param in zip(named, params, strict=True)}
        return torch.func.functional_call(_Own(module, forward), {f"inner.{n}": p for n, p in values.items()},
                                          tuple(every), kwargs)  # fmt: skip

    leaves, puts = [leaf for leaf, _ in begun], [put for _, put in begun]
    return VmapModule.apply(call, puts, samples, path, *[args[index] for index in places], *leaves)


class _Own(nn.Module):
    """Calls a module's own forward."""

    def __init__(self, inner: nn.Module, forward: Callable[..., Any]):
        super().__init__()
        self.inner, self._run = inner, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)
