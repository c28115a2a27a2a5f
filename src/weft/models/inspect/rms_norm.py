"""Root-mean-square norms, recognized by their results and not by their class, so that their features can be sharded.

Each transformers model has a separate class for the same arithmetic. They differ in two choices: the weight is a factor
or is added to one, and it is applied before or after the cast to the input's dtype.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.private_torch import without_modes

#: Attribute names of epsilon.
_EPS = ("eps", "variance_epsilon", "epsilon")
_ROWS, _FEATURES = 3, 8


@dataclass(frozen=True, slots=True)
class RmsForm:
    """Variant of an RMS norm.

    Attributes:
        eps: added to the mean square.
        from_one: True if the factor is 1 + weight.
        rounds_first: True if the values are cast to the input's dtype before they are multiplied by the weight.
    """

    eps: float
    from_one: bool
    rounds_first: bool

    def scaled(self, x: Tensor, mean_square: Tensor, weight: Tensor) -> Tensor:
        """Return x divided by the root of its mean square, times the weight, in the dtype of x.

        Args:
            x: (..., features).
            mean_square: (..., 1), mean square of the features of x, in float32, or in float64 if x is float64.
            weight: (features,).
        """
        normed = x.to(torch.promote_types(x.dtype, torch.float32)) * torch.rsqrt(mean_square + self.eps)
        if self.rounds_first:
            normed = normed.to(x.dtype)
        factor = 1.0 + weight.to(normed.dtype) if self.from_one else weight
        return (factor * normed).to(x.dtype)


def rms_form(module: nn.Module) -> RmsForm | None:
    """Return the variant of an RMS norm over the last dim with only a weight, or None for any other module.

    The module is called on a few values in bfloat16, and the result is compared bit for bit.
    """
    names = [name for name, _ in module.named_parameters()]
    eps = next((value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None)
    if "norm" not in type(module).__name__.lower() or names != ["weight"] or eps is None or _weight(module).dim() != 1:
        return None
    try:
        with without_modes(), torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about dtypes without a fused kernel
            return _attributes_of(module, eps)
    except Exception:  # a norm of another kind, whose code may raise any exception
        return None


def _attributes_of(module: nn.Module, eps: float) -> RmsForm | None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, _FEATURES, generator=generator).to(torch.bfloat16)
    weight = torch.randn(_FEATURES, generator=generator)
    found = _with_weight(module, weight)(x)
    mean_square = x.float().square().mean(-1, keepdim=True)
    for from_one, rounds_first in itertools.product((False, True), repeat=2):
        form = RmsForm(eps, from_one, rounds_first)
        made = form.scaled(x, mean_square, weight)
        if found.shape == made.shape and torch.equal(found.to(x.dtype), made):
            return form
    return None


def _weight(module: nn.Module) -> Tensor:
    return dict(module.named_parameters())["weight"]


def _with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    other = copy.copy(module)
    other.__dict__ = {**module.__dict__, "_parameters": {"weight": nn.Parameter(weight)}}
    other.__dict__ |= {"_forward_pre_hooks": {}, "_forward_hooks": {}}
    if "normalized_shape" in other.__dict__:
        other.__dict__["normalized_shape"] = tuple(weight.shape)
    return other
