"""What is known of blocks before any runs: names of their arguments, and whether they give one tensor or several.

A stand-in for a block must give what the block gives: a model that unpacks (hidden states, position bias) fails on a
tensor. The block's class is asked once, by a call on the meta device of a copy that no technique has changed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weft.private_torch import tree_map
from weft.structure import Chain, class_before

#: What a convolution is called with beside its input.
_CONVOLUTIONS = {nn.Conv1d: nn.functional.conv1d, nn.Conv2d: nn.functional.conv2d, nn.Conv3d: nn.functional.conv3d}


class Probes:
    """Of the blocks of a chain, by path, as they came."""

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._names = {path: _names(module) for path, module in modules.items()}
        self._copies: dict[type, nn.Module] = {}
        self._lengths: dict[type, int] = {}  # of the tuple that a block gives; 0: a tensor
        for module in modules.values():
            kind = class_before(module)
            if kind not in self._copies and _may_give_several(module):
                self._copies[kind] = _copy_on_meta(module)

    @classmethod
    def of(cls, chain: Chain) -> Probes:
        """Those of a chain of a model that is not cut yet."""
        return cls({site.path: site.module for site in chain.blocks})

    def parameters(self, path: str) -> dict[str, int]:
        """By name, the place of each parameter of a block's forward."""
        return self._names.get(path, {})

    def name(self, path: str, slot: int) -> str:
        """The parameter at a place."""
        return next(name for name, place in self.parameters(path).items() if place == slot)

    def as_given_by(self, module: nn.Module, given: torch.Tensor, args: Any, kwargs: Any) -> Any:
        """A tensor in the form in which a module gives its output: alone, or first in a tuple of as many."""
        convolve = _CONVOLUTIONS.get(type(module))  # pyright: ignore[reportArgumentType] - any class may be asked for
        if convolve is not None:
            return _convolved(module, convolve, given, args)
        kind = class_before(module)
        if kind not in self._copies:
            return given
        if kind not in self._lengths:
            self._lengths[kind] = _length(self._copies[kind], args, kwargs)
        length = self._lengths[kind]
        return (given, *[None] * (length - 1)) if length else given


def _names(module: nn.Module) -> dict[str, int]:
    takes = inspect.signature(module.forward).parameters.values()
    named = [each.name for each in takes if each.kind in (each.POSITIONAL_OR_KEYWORD, each.POSITIONAL_ONLY)]
    return {name: place for place, name in enumerate(named)}


def _may_give_several(module: nn.Module) -> bool:
    said = inspect.signature(module.forward).return_annotation
    return said is not torch.Tensor and str(said) not in ("Tensor", "torch.Tensor")


def _copy_on_meta(module: nn.Module) -> nn.Module:
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        if isinstance(each, nn.Parameter)
        else torch.empty_like(each, device="meta")
        for each in tensors
    }
    return copy.deepcopy(module, memo).float().eval()


def _length(module: nn.Module, args: Any, kwargs: Any) -> int:
    """Of the tuple that a block gives; 0 for a tensor, and where the block cannot be asked.

    All in fp32: the block was copied before its weights got the formats of the run, and in fp16 some look at values.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to("meta", torch.float32 if leaf.is_floating_point() else leaf.dtype)
        return leaf if isinstance(leaf, bool | int | float | str) else None  # no cache may see the call

    try:
        with torch.no_grad(), torch.device("meta"):
            made = module(*tree_map(moved, args), **tree_map(moved, kwargs))
    except Exception:  # the model's own code, called with what it may not expect
        return 0
    return len(made) if isinstance(made, tuple) else 0  # pyright: ignore[reportUnknownArgumentType] - the model's own


def _convolved(module: Any, convolve: Any, given: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    """Zeros of the shape that a convolution would give: what follows may ask for that, and nothing more counts."""
    if not args or not isinstance(args[0], torch.Tensor) or module.padding_mode != "zeros":
        return given
    x, weight = torch.empty(args[0].shape, device="meta"), torch.empty(module.weight.shape, device="meta")
    try:
        shape = convolve(x, weight, None, module.stride, module.padding, module.dilation, module.groups).shape
    except RuntimeError:
        return given
    return given.flatten()[:1].mul(0).view([1] * len(shape)).expand(shape)
