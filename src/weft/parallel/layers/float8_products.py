"""Float8 matmuls of linear layers: rounding and multiplication.

        output             x rounded per token, the weight per output feature; sums over input features
        x's gradient       the output's gradient rounded per token, the weight per tensor; sums over output features
        weight's gradient  not rounded, in the compute dtype

This is the recipe "rowwise". Under "tensorwise" x, the output's gradient and the weight have one scale each, for all
tokens of a microbatch on a rank. torchao reports faster matmuls with it, but a token's rounding then depends on the
other tokens.

Values round to e4m3 (4 exponent bits, 3 mantissa bits). Gradients under one scale round to e5m2, which has a wider
range. A scale is the largest power of two that keeps the largest magnitude within the format. So scaling itself rounds
nothing, and the rounded values are exact in bf16. With per-row scales a token's result depends only on that token and
the weights: every split of a batch over ranks, microbatches and stages rounds identically. If tensor parallelism
shards the features that a scale covers, ranks first all-reduce the largest magnitude.

Method: Micikevicius et al. 2022, arXiv 2209.05433 (the formats). The choice of scales is torchao's recipe
"rowwise_with_gw_hp". Devices without float8 matmuls multiply the rounded values in the compute dtype.

R rows (tokens), I features in, O features out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.comm.autograd import max_over
from weft.comm.mesh import Axis
from weft.comm.wire.codes import power_scale
from weft.parallel.private_torch import base_of_its_own, multiplies_float8, own_view, scaled_product

#: Scale recipes.
RECIPES = ("rowwise", "tensorwise")
FORMAT, WIDER = torch.float8_e4m3fn, torch.float8_e5m2
#: Largest finite value of each format.
LARGEST = {FORMAT: 448.0, WIDER: 57344.0}
#: Float8 kernels of GPUs need matrix dims that are multiples of this.
MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Float8:
    """Float8 multiplication of one layer.

    `inner` is the axis that shards the input features, and `outer` the axis that shards the output features; None if
    they are not sharded. Ranks of these axes call each method together. `recipe` is one of RECIPES.
    """

    inner: Axis | None = None
    outer: Axis | None = None
    recipe: str = RECIPES[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8:
        return self  # a copy of the layer runs on the same ranks

    def product(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the matmul of (..., I) and (O, I), which is (..., O), without autograd."""
        x_RI = x.reshape(-1, x.shape[-1])
        if self.recipe == "tensorwise":
            of_x, of_weight = _agreed(self.inner, _max_magnitude(x_RI), _max_magnitude(weight_OI))
            [of_weight] = _agreed(self.outer, of_weight)
            out_RO = _multiply(x_RI, weight_OI, _scale(of_x)[:, None], _scale(of_weight)[:, None])
            return own_view(out_RO, (*x.shape[:-1], weight_OI.shape[0]))
        by_row, by_feature = _agreed(self.inner, _largest(x_RI), _largest(weight_OI))
        out_RO = _multiply(x_RI, weight_OI, _scale(by_row)[:, None], _scale(by_feature)[:, None])
        return own_view(out_RO, (*x.shape[:-1], weight_OI.shape[0]))

    def input_gradients(self, grads: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        """Return the input gradient, (R, I), of each of several layers with the same input.

        `grads` are (R, O) each, and `weights` are (O, I) each.
        """
        if self.recipe == "tensorwise":
            return [self._input_gradient(grad, weight) for grad, weight in zip(grads, weights, strict=True)]
        largest = [
            of for grad, weight in zip(grads, weights, strict=True) for of in (_largest(grad), _max_magnitude(weight))
        ]
        scales = [_scale(one) for one in _agreed(self.outer, *largest)]
        return [
            _multiply(grad, weight.t(), scales[2 * at][:, None], scales[2 * at + 1].expand(weight.shape[1])[:, None])
            for at, (grad, weight) in enumerate(zip(grads, weights, strict=True))
        ]

    def _input_gradient(self, grad_RO: Tensor, weight_OI: Tensor) -> Tensor:
        of_grad, of_weight = _agreed(self.outer, _max_magnitude(grad_RO), _max_magnitude(weight_OI))
        [of_weight] = _agreed(self.inner, of_weight)
        scale = _scale(of_grad, WIDER)[:, None]
        return _multiply(grad_RO, weight_OI.t(), scale, _scale(of_weight)[:, None], WIDER)


def product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, form: Float8 | None) -> Tensor:
    """Compute `torch.nn.functional.linear` without autograd, in float8 if `form` is set.

    Args:
        x: (..., I).
        weight_OI: (O, I).
        bias_O: (O,) or None.
        form: float8 multiplication; None for the operands' dtype.
    """
    if form is None:
        # autograd refuses writes to a view from a custom function
        return base_of_its_own(F.linear(x, weight_OI, bias_O))
    out = form.product(x, weight_OI)
    return out if bias_O is None else out + bias_O


def round_to(x: Tensor, scale: Tensor, form: torch.dtype = FORMAT) -> Tensor:
    """Return x times scale in the float8 dtype `form`. `scale` is float32 and holds powers of two."""
    return (x * scale.to(x.dtype)).to(form)


def _multiply(a_RK: Tensor, b_CK: Tensor, scale_a: Tensor, scale_b: Tensor, form_a: torch.dtype = FORMAT) -> Tensor:
    """Return a b^T with both operands rounded. `scale_a` is (R, 1) and `scale_b` (C, 1), or both are (1, 1)."""
    small_a, small_b = round_to(a_RK, scale_a, form_a), round_to(b_CK, scale_b)
    back_a, back_b = scale_a.reciprocal(), scale_b.reciprocal()
    if multiplies_float8(a_RK) and a_RK.shape[0] and not any(side % MULTIPLE for side in b_CK.shape):
        return scaled_product(small_a.contiguous(), small_b.contiguous(), back_a, back_b, a_RK.dtype)
    dtype = a_RK.dtype
    return (small_a.to(dtype) * back_a.to(dtype)) @ (small_b.to(dtype) * back_b.to(dtype)).t()


def _largest(x_RK: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_RK, ord=torch.inf, dim=-1)


def _max_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of the tensor, (1,), or 0 if it is empty."""
    if x.numel() == 0:
        return x.new_zeros(1)
    return torch.linalg.vector_norm(x, ord=torch.inf).view(1)


def _agreed(axis: Axis | None, *largest: Tensor) -> list[Tensor]:
    """Return the elementwise maximum of each tensor over the ranks of an axis, with one collective for all tensors."""
    if axis is None or axis.size == 1:
        return list(largest)
    return list(max_over(torch.cat(largest), axis).split([len(one) for one in largest]))


def _scale(largest: Tensor, form: torch.dtype = FORMAT) -> Tensor:
    """Return the scale for values whose largest magnitude is `largest`: a power of two in float32."""
    return power_scale(largest, LARGEST[form])
