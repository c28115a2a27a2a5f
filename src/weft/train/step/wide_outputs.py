"""Outputs of half-precision models as loss functions get them: in float32, as torch.autocast computes losses.

A sum of losses in bfloat16 has three significant digits. Weft's own loss functions are left out: they convert a few
tokens at a time, or convert the outputs themselves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from weft.data.batch import map_tensors, tensors_in
from weft.spec.plan import Plan

_HALVES = (torch.bfloat16, torch.float16)


def in_float32(output: Any) -> Any:
    """Return a model's output with its bfloat16 and float16 tensors in float32.

    Tuples, lists, mappings, dataclasses and Hugging Face's outputs are searched; other objects stay as they are.
    """
    if any(one.dtype in _HALVES for one in tensors_in(output)):
        return map_tensors(lambda one: one.float() if one.dtype in _HALVES else one, output)
    return output


def needs_float32(loss_fn: Any, plan: Plan) -> bool:
    """Return whether a loss function gets converted outputs: under a half precision, and if it is not Weft's own."""
    if plan.precision not in ("bf16", "fp16", "fp8"):
        return False
    compared = getattr(loss_fn, "compare", None)  # the function in a loss over groups
    found = loss_fn if compared is None else compared
    while isinstance(found, functools.partial):
        found = found.func
    home = getattr(found, "__module__", None) or type(found).__module__
    return home.partition(".")[0] != "weft"


def give_float32(model: nn.Module) -> None:
    """Let a model that computes in half precision return float32, for losses in a loop that calls no train step."""
    model.register_forward_hook(_convert_output)


def _convert_output(model: nn.Module, args: Any, output: Any) -> Any:
    del model, args
    return in_float32(output)
