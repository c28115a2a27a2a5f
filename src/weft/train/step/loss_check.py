"""A user's loss function: outputs in float32 for it, and checks of its results, so that mistakes end in one sentence.

A sum of losses in bfloat16 has three significant digits, and torch.autocast computes losses in float32 as well. Weft's
own loss functions convert the outputs themselves, a few tokens at a time.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from weft.data.batch import map_tensors, tensors_in
from weft.errors import ModelError, WeftWarning
from weft.mesh import Mesh
from weft.parallel import is_hugging_face_output, sum_of_hugging_face
from weft.parallel.randomness import SampleNumbers
from weft.spec.plan import Plan
from weft.train.microbatch import LABELS
from weft.train.step.grouped_loss import GroupLoss

#: (output, batch) -> (sum of the losses, number of tokens or samples in the sum).
LossFn = Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor | int]]

_FORM = 'return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])'
_WANTED = "Weft divides once, over all ranks and microbatches, so it needs the sum of the losses and how many there are"
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


class CheckedLoss:
    """A loss function of (output, batch), with what it returns looked at: the sum of the losses, and their number.

    mesh: of the ranks; None: the batch is all there is. warns_of_means: several ranks or microbatches read samples in a
    step, and this rank is to say what that changes.
    """

    def __init__(self, loss_fn: LossFn, mesh: Mesh | None = None, *, warns_of_means: bool):
        self.loss_fn = loss_fn.over(mesh) if isinstance(loss_fn, GroupLoss) and mesh is not None else loss_fn
        self._widens = mesh is not None and needs_float32(loss_fn, mesh.plan)
        self._warns = warns_of_means

    def __call__(
        self, output: Any, batch: Any, samples: SampleNumbers | None = None, index: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Return both for a microbatch, of whose samples only a loss over groups is told.

        Raises:
            ModelError: for anything but a 0-d tensor with a gradient and a count.
        """
        if self._widens:
            output = in_float32(output)
        has_no_loss = is_hugging_face_output(output) and output.get("loss") is None and _has_labels(batch)
        try:
            if isinstance(self.loss_fn, GroupLoss):
                returned = self.loss_fn(output, batch, samples, index)
            else:
                returned = self.loss_fn(output, batch)
        except (AttributeError, TypeError) as error:
            if has_no_loss and "NoneType" in str(error):
                _refuse_none(output)
            raise
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            _refuse(f"it returned {_described(returned)}")
        loss_sum, number = returned
        if loss_sum is None and has_no_loss:
            _refuse_none(output)
        _check_sum(loss_sum)
        if not _is_count(number):
            _refuse(f"the number of losses that it returned is {_described(number)}")
        if self._warns and is_hugging_face_output(output) and loss_sum is output.get("loss"):
            self._warn_of_mean(output)
        return loss_sum, number

    def _warn_of_mean(self, output: Any) -> None:
        self._warns = False  # once is enough
        warnings.warn(
            "loss_fn: it returns output.loss, a mean over the tokens of one rank's microbatch, and Weft expects "
            "their sum. The result equals one device's only if all microbatches have the same number of tokens. "
            f"Write\n{sum_of_hugging_face(output)}",
            WeftWarning,
            stacklevel=6,  # the line that calls the step
        )


def _check_sum(loss_sum: Any) -> None:
    if not isinstance(loss_sum, torch.Tensor):
        _refuse(f"the sum of the losses that it returned is {_described(loss_sum)}")
    if loss_sum.ndim:
        raise ModelError(
            f"loss_fn: the losses that it returned are a tensor of shape {tuple(loss_sum.shape)}, and Weft needs their "
            f"sum. Return losses.sum() and their number."
        )
    if not loss_sum.requires_grad and torch.is_grad_enabled():
        raise ModelError(
            "loss_fn: the sum that it returned has no gradient, because .item(), .detach() or no_grad cut it off, or "
            "it does not depend on the model's trained parameters. Return the sum as the model's output gives it."
        )


def _is_count(number: Any) -> bool:
    if isinstance(number, torch.Tensor):
        return number.ndim == 0
    return isinstance(number, int | float)


def _has_labels(batch: Any) -> bool:
    return isinstance(batch, Mapping) and LABELS in batch


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"one tensor of shape {tuple(value.shape)}" if value.ndim else "one number, like a mean"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _refuse(found: str) -> NoReturn:
    raise ModelError(f"loss_fn: {found}. {_WANTED}. Write e.g.\n    {_FORM}")


def _refuse_none(output: Any) -> NoReturn:
    raise ModelError(
        f"loss_fn: output.loss is None, because a train step keeps the batch's labels from the model: its own loss "
        f"would be a mean over one rank's tokens. {_WANTED}. Write\n{sum_of_hugging_face(output)}"
    )
