"""Dtypes of weights, gradients and optimizer states in a step, and conversion of a module to them.

All ZeRO stages use the same dtypes. Weights in forward and backward have the compute dtype, so activations and
all-gathers have it too. Master weights, gradients and optimizer states are fp32 (fp64 under "fp64"). Master weights
start from the weights before rounding. Gradients are communicated in the master dtype, or in the wire format of the
plan's `reduce`, which encodes them only for the collective. Batch norms stay in the master dtype: their running
statistics change by less than a bf16 step. Buffers keep their dtype under bf16 and fp16.
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

# If several precisions share a dtype, the last one names it. Under the others only matmuls have fewer bits.
_COMPUTE = {"tf32": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "fp64": torch.float64}
_COMPUTE |= {"fp8": torch.bfloat16, "bf16": torch.bfloat16}
_HALVES = (torch.bfloat16, torch.float16)
#: Precisions under which only matmuls have fewer bits, with a description.
_PRODUCTS = {"fp8": "products of linear layers in blocks in fp8", "tf32": "products and convolutions rounded to TF32"}


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a step.

    Attributes:
        compute: dtype of weights in forward and backward and of activations.
        master: dtype of sums and stored values.
        wire: wire format of gradients.
        outer_wire: wire format over the outermost data axis, or None for `wire`.
        sync: the plan's synchronization of replicas.
        products: "fp8" for linear layers in blocks, "tf32" for all matmuls, or "" if matmuls use the compute dtype.
    """

    compute: torch.dtype
    master: torch.dtype
    wire: Wire
    outer_wire: Wire | None = None
    sync: str = "step"
    products: str = ""

    @classmethod
    def of(cls, plan: Plan) -> Precision:
        """Return the dtypes and formats for the plan's `precision`, `reduce` and `compress`.

        Raises PlanError if they cannot be combined.
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
        """True under fp16, whose gradients underflow without loss scaling. Other dtypes have the range of fp32."""
        return self.compute == torch.float16

    def refuse_error_feedback(self) -> None:
        """Raise ModelError in a custom training loop if gradients use error feedback, or replicas use local SGD.

        A custom training loop provides neither the gradient factor nor the step boundaries that these need.
        """
        if self.sync != "step":
            raise ModelError(
                f"sync={self.sync}: backward() came outside a train step, and only a train step counts the steps "
                "until replicas synchronize. Use run.train_step, or sync=step."
            )
        for name, wire in (("reduce", self.wire), ("compress", self.outer_wire)):
            if wire is not None and wire.feeds_back:
                raise ModelError(
                    f"{name}={wire.spec.name}: backward() came outside a train step, and only a train step "
                    "computes the residual of clipped gradients. Use run.train_step, or compress=int8, which has no "
                    "residual."
                )

    def refuse_unscaled(self, what: str) -> None:
        """Raise ModelError in a custom training loop under fp16, which needs loss scaling.

        `what` describes the event, such as "backward() came".
        """
        if self.scales_loss:
            raise ModelError(
                f"precision=fp16: its loss must be scaled, and {what} outside a train step. "
                f"Use run.train_step, or precision=bf16."
            )

    @property
    def is_mixed(self) -> bool:
        """True if weights are rounded for forward and backward."""
        return self.compute != self.master

    def __str__(self) -> str:
        short = {value: key for key, value in _COMPUTE.items()}
        narrow = not self.wire.spec.exact
        apart = f", gradients are sent in {self.wire.spec.name}" if narrow else ""
        if self.outer_wire is not None:
            apart += f", over the outermost data axis in {self.outer_wire.spec.name} (lossy)"
        if self.products:
            apart += f", {_PRODUCTS[self.products]}"
        if self.sync != "step":
            apart += f", replicas synchronize by sync={self.sync}"
        if not self.is_mixed:
            return f"all {short[self.compute]}{apart}"
        kept = (
            "master weights, gradients and optimizer"
            if narrow
            else "master weights, gradients, reduction and optimizer"
        )
        return f"forward and backward {short[self.compute]}; {kept} {short[self.master]}{apart}"


def formats(model: nn.Module, precision: Precision) -> dict[nn.Parameter, torch.dtype]:
    """Return the dtype of each parameter in forward and backward. Integer parameters keep their dtype."""
    chosen: dict[nn.Parameter, torch.dtype] = {}
    for module in model.modules():
        wanted = precision.master if isinstance(module, BATCH_NORMS) else precision.compute
        for param in module.parameters(recurse=False):
            chosen.setdefault(param, wanted if param.is_floating_point() else param.dtype)
    return chosen


def cast_inputs(model: nn.Module, precision: Precision) -> None:
    """Make modules cast their floating-point inputs to the dtype of their weights.

    If precision is mixed, or the model has bf16 or fp16 parameters, this applies to the model and to each module that
    owns floating-point parameters, except embeddings. Batch norms also cast their output to the compute dtype.

    If precision is not mixed, floating-point buffers are cast to the master dtype here. Under fp64, the model casts its
    inputs in any case.
    """
    if not precision.is_mixed:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(precision.master))
        if precision.master == torch.float64:  # images and audio are loaded in float32
            model.register_forward_pre_hook(functools.partial(_cast_inputs, precision.master), with_kwargs=True)
        if not any(param.dtype in _HALVES for param in model.parameters()):
            return
        # The model was built in half precision, so its code and its batches may use half precision too.
    for module in model.modules():
        owns = any(param.is_floating_point() for param in module.parameters(recurse=False))
        if isinstance(module, BATCH_NORMS):
            module.register_forward_pre_hook(functools.partial(_cast_inputs, precision.master), with_kwargs=True)
            module.register_forward_hook(functools.partial(_cast_output, precision.compute))
        elif module is model or (owns and not isinstance(module, nn.Embedding)):
            module.register_forward_pre_hook(functools.partial(_cast_inputs, precision.compute), with_kwargs=True)


# Hooks of a module are copied and pickled with it, so they are not closures.


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
