"""Products of linear layers in float8: how numbers are rounded, and who multiplies them.

    output        x rounded by token, the weight by output feature        over the features that go in
    x's gradient  the output's gradient rounded by token, the weight as a whole    over the features that come out
    weight's gradient    not rounded, in the compute format

That is the recipe "rowwise". Under "tensorwise" x, the output's gradient and the weight have one scale each, for all
tokens of a microbatch on a rank: torchao reports faster products so. What a token becomes depends on the others then.

Numbers round to e4m3 (4 exponent bits, 3 of mantissa), gradients under one scale to e5m2, of a wider range. A scale is
the largest power of two that keeps the largest magnitude of its numbers within the format, so that scaling itself
rounds nothing, and the rounded numbers are numbers of bf16 too. By rows, what a token becomes depends on that token and
the weights alone: any division of a batch over ranks, microbatches and stages rounds alike. Where tensor parallelism
divides the features that a scale spans, ranks agree on the largest first.

Method: Micikevicius et al. 2022, arXiv 2209.05433 (the formats); the choice of scales is torchao's recipe
"rowwise_with_gw_hp". Devices without such products multiply the rounded numbers in the compute format.

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
from weft.parallel.private_torch import multiplies_float8, own_view, scaled_product

#: How scales are chosen.
RECIPES = ("rowwise", "tensorwise")
FORMAT, WIDER = torch.float8_e4m3fn, torch.float8_e5m2
#: The largest number of each format.
LARGEST = {FORMAT: 448.0, WIDER: 57344.0}
#: Sides of matrices that products of devices take.
MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Float8:
    """How one layer multiplies.

    inner: the ranks that share the features that go in; outer: those that come out. None: all of them are here.
    recipe: one of RECIPES.
    """

    inner: Axis | None = None
    outer: Axis | None = None
    recipe: str = RECIPES[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8:
        return self  # a copy of the layer runs on the same ranks

    def product(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the product without autograd: (..., I) and (O, I) give (..., O)."""
        x_RI = x.reshape(-1, x.shape[-1])
        if self.recipe == "tensorwise":
            of_x, of_weight = _agreed(self.inner, _whole(x_RI), _whole(weight_OI))
            [of_weight] = _agreed(self.outer, of_weight)
            out_RO = _multiply(x_RI, weight_OI, _scale(of_x)[:, None], _scale(of_weight)[:, None])
            return own_view(out_RO, (*x.shape[:-1], weight_OI.shape[0]))
        by_row, by_feature = _agreed(self.inner, _largest(x_RI), _largest(weight_OI))
        out_RO = _multiply(x_RI, weight_OI, _scale(by_row)[:, None], _scale(by_feature)[:, None])
        return own_view(out_RO, (*x.shape[:-1], weight_OI.shape[0]))

    def input_gradients(self, grads: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        """Return the gradient of their input, (R, I), that each of some products adds.

        grads: (R, O) each. weights: (O, I) each.
        """
        if self.recipe == "tensorwise":
            return [self._input_gradient(grad, weight) for grad, weight in zip(grads, weights, strict=True)]
        largest = [of for grad, weight in zip(grads, weights, strict=True) for of in (_largest(grad), _whole(weight))]
        scales = [_scale(one) for one in _agreed(self.outer, *largest)]
        return [
            _multiply(grad, weight.t(), scales[2 * at][:, None], scales[2 * at + 1].expand(weight.shape[1])[:, None])
            for at, (grad, weight) in enumerate(zip(grads, weights, strict=True))
        ]

    def _input_gradient(self, grad_RO: Tensor, weight_OI: Tensor) -> Tensor:
        """One of those under one scale for all tokens."""
        of_grad, of_weight = _agreed(self.outer, _whole(grad_RO), _whole(weight_OI))
        [of_weight] = _agreed(self.inner, of_weight)
        scale = _scale(of_grad, WIDER)[:, None]
        return _multiply(grad_RO, weight_OI.t(), scale, _scale(of_weight)[:, None], WIDER)


def product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, form: Float8 | None) -> Tensor:
    """Compute `torch.nn.functional.linear`, in float8 where the layer has a form, without autograd.

    Args:
        x: (..., I).
        weight_OI: (O, I).
        bias_O: (O,) or None.
        form: how the layer multiplies; None: in the format of its operands.
    """
    if form is None:
        return F.linear(x, weight_OI, bias_O)
    out = form.product(x, weight_OI)
    return out if bias_O is None else out + bias_O


def round_to(x: Tensor, scale: Tensor, form: torch.dtype = FORMAT) -> Tensor:
    """The scaled numbers, in the format. scale: of float32, a power of two each."""
    return (x * scale.to(x.dtype)).to(form)


def _multiply(a_RK: Tensor, b_CK: Tensor, scale_a: Tensor, scale_b: Tensor, form_a: torch.dtype = FORMAT) -> Tensor:
    """a b^T, both rounded. scale_a: (R, 1). scale_b: (C, 1). Or both (1, 1)."""
    small_a, small_b = round_to(a_RK, scale_a, form_a), round_to(b_CK, scale_b)
    back_a, back_b = scale_a.reciprocal(), scale_b.reciprocal()
    if multiplies_float8(a_RK) and a_RK.shape[0] and not any(side % MULTIPLE for side in b_CK.shape):
        return scaled_product(small_a.contiguous(), small_b.contiguous(), back_a, back_b, a_RK.dtype)
    dtype = a_RK.dtype
    return (small_a.to(dtype) * back_a.to(dtype)) @ (small_b.to(dtype) * back_b.to(dtype)).t()


def _largest(x_RK: Tensor) -> Tensor:
    """The largest magnitude of each row, (R,)."""
    return torch.linalg.vector_norm(x_RK, ord=torch.inf, dim=-1)


def _whole(x: Tensor) -> Tensor:
    """The largest magnitude of all, (1,); 0 where there is nothing."""
    if x.numel() == 0:
        return x.new_zeros(1)
    return torch.linalg.vector_norm(x, ord=torch.inf).view(1)


def _agreed(axis: Axis | None, *largest: Tensor) -> list[Tensor]:
    """The same magnitudes over all ranks of an axis: one small collective."""
    if axis is None or axis.size == 1:
        return list(largest)
    return list(max_over(torch.cat(largest), axis).split([len(one) for one in largest]))


def _scale(largest: Tensor, form: torch.dtype = FORMAT) -> Tensor:
    """What numbers of such a magnitude are multiplied by: a power of two in float32."""
    return power_scale(largest, LARGEST[form])
