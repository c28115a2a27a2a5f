"""Which number format each part of a step uses, and how a module is brought to it.

One policy for every stage. Weights of forward and backward are in the compute format, so that activations, gathers
and memory are too. Master weights, gradients and optimizer states are fp32 (fp64 under "fp64"), and the masters start
from the weights as they were before rounding. Gradients travel between ranks in that format too, or as the wire that
the plan's `reduce` names: encoded for the collective alone. Batch norms stay in the master format: their running
statistics move by less than a step of bf16. Buffers keep their format under bf16 and fp16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.comm.wire.wire_format import Wire, find_wire
from weft.config.plan import Plan
from weft.errors import ModelError, PlanError
from weft.models.initialize import BATCH_NORMS
from weft.private_torch import tree_map

# Of several names for one format the last gives it its name: with the others, products alone are narrower.
_COMPUTE = {"tf32": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "fp64": torch.float64}
_COMPUTE |= {"fp8": torch.bfloat16, "bf16": torch.bfloat16}
_HALVES = (torch.bfloat16, torch.float16)
#: Formats of products where they are narrower than the rest, and which products these are.
_PRODUCTS = {"fp8": "products of linear layers in blocks in fp8", "tf32": "products and convolutions rounded to TF32"}


@dataclass(frozen=True, slots=True)
class Precision:
    """compute: of weights in forward and backward, and of activations. master: of all that is added up or kept.

    wire: what travels in place of gradients between ranks. outer_wire: the same over the outermost data axis alone;
    None: as over the others. sync: when replicas meet, as the plan says it. products: "fp8" of linear layers in blocks,
    "tf32" of all, where these are narrower than the rest.
    """

    compute: torch.dtype
    master: torch.dtype
    wire: Wire
    outer_wire: Wire | None = None
    sync: str = "step"
    products: str = ""

    @classmethod
    def of(cls, plan: Plan) -> Precision:
        """Return the formats that the plan's `precision`, `reduce` and `compress` stand for.

        Raises:
            PlanError: where they do not go together.
        """
        compute = _COMPUTE[plan.precision]
        master = torch.float64 if compute == torch.float64 else torch.float32
        wire = find_wire(plan.reduce)
        outer = find_wire(plan.compress) if plan.compress != "none" else None
        for name, one in (("reduce", wire), ("compress", outer)):
            if one is not None and one.spec.state_bytes and not one.feeds_back and compute == torch.float16:
                raise PlanError(
                    f"{name}={one.spec.name}: it keeps what it rounded off for the next step, and the loss scale of "
                    f"precision=fp16 changes in between. Use precision=bf16, or {name}=bf16."
                )
        return cls(compute, master, wire, outer, plan.sync, plan.precision if plan.precision in _PRODUCTS else "")

    @property
    def scales_loss(self) -> bool:
        """fp16 gradients underflow without loss scaling; the other formats have the range of fp32."""
        return self.compute == torch.float16

    def refuse_error_feedback(self) -> None:
        """Refuse a user's own loop where what is rounded off is owed to the next step, or replicas meet rarely.

        Raises:
            ModelError: nothing here says by what gradients are multiplied, or when a step is taken.
        """
        if self.sync != "step":
            raise ModelError(
                f"sync={self.sync}: backward() came outside of a train step, which alone counts the steps until "
                "replicas meet. Use run.train_step, or sync=step."
            )
        for name, wire in (("reduce", self.wire), ("compress", self.outer_wire)):
            if wire is not None and wire.feeds_back:
                raise ModelError(
                    f"{name}={wire.spec.name}: backward() came outside of a train step, which alone knows what is owed "
                    f"once gradients are clipped. Use run.train_step, or compress=int8, which owes nothing."
                )

    def refuse_unscaled(self, what: str) -> None:
        """Refuse a user's own loop where the loss must be scaled.

        what: it did, in words: "backward() came".

        Raises:
            ModelError: under fp16.
        """
        if self.scales_loss:
            raise ModelError(
                f"precision=fp16: its loss must be scaled, and {what} outside of a train step. "
                f"Use run.train_step, or precision=bf16."
            )

    @property
    def is_mixed(self) -> bool:
        """Whether weights are rounded for forward and backward."""
        return self.compute != self.master

    def __str__(self) -> str:
        short = {value: key for key, value in _COMPUTE.items()}
        narrow = not self.wire.spec.exact
        apart = f", gradients travel in {self.wire.spec.name}" if narrow else ""
        if self.outer_wire is not None:
            apart += f", over the outermost data axis in {self.outer_wire.spec.name} (lossy)"
        if self.products:
            apart += f", {_PRODUCTS[self.products]}"
        if self.sync != "step":
            apart += f", replicas meet as sync={self.sync} says"
        if not self.is_mixed:
            return f"all {short[self.compute]}{apart}"
        kept = (
            "master weights, gradients and optimizer"
            if narrow
            else "master weights, gradients, reduction and optimizer"
        )
        return f"forward and backward {short[self.compute]}; {kept} {short[self.master]}{apart}"


def formats(model: nn.Module, precision: Precision) -> dict[nn.Parameter, torch.dtype]:
    """Return the format of each parameter in forward and backward. Those that are not floating keep theirs."""
    chosen: dict[nn.Parameter, torch.dtype] = {}
    for module in model.modules():
        wanted = precision.master if isinstance(module, BATCH_NORMS) else precision.compute
        for param in module.parameters(recurse=False):
            chosen.setdefault(param, wanted if param.is_floating_point() else param.dtype)
    return chosen


def cast_inputs(model: nn.Module, precision: Precision) -> None:
    """Make modules take floating inputs of any format, and give back what the rest of the model computes in.

    The model itself and each module that owns parameters bring their inputs to the format of their weights. Buffers
    become the master's format where it is also that of the weights.
    """
    if not precision.is_mixed:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(precision.master))
        if precision.master == torch.float64:  # pictures and sound come in float32
            model.register_forward_pre_hook(functools.partial(_cast_inputs, precision.master), with_kwargs=True)
        if not any(param.dtype in _HALVES for param in model.parameters()):
            return
        # The model was built in half precision, so its code and its batches may be as well.
    for module in model.modules():
        owns = any(param.is_floating_point() for param in module.parameters(recurse=False))
        if isinstance(module, BATCH_NORMS):
            module.register_forward_pre_hook(functools.partial(_cast_inputs, precision.master), with_kwargs=True)
            module.register_forward_hook(functools.partial(_cast_output, precision.compute))
        elif module is model or (owns and not isinstance(module, nn.Embedding)):
            module.register_forward_pre_hook(functools.partial(_cast_inputs, precision.compute), with_kwargs=True)


# Hooks that a module keeps must go into copies and pickles of it, so they are no closures.


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del module
    if not kwargs and all(isinstance(arg, torch.Tensor) and arg.dtype == dtype for arg in args):
        return None
    cast = functools.partial(_to, dtype)
    return tree_map(cast, args), tree_map(cast, kwargs)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    del module, args
    return output.to(dtype)


def _to(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
