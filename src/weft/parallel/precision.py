"""Which number format each part of a step uses. Weights and optimizer states stay fp32 (fp64 under "fp64")."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from weft.spec.plan import Plan

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class Precision:
    """compute: of matrix products and attention. master: of weights, gradients, reduction and optimizer states."""

    compute: torch.dtype
    master: torch.dtype

    @classmethod
    def of(cls, plan: Plan) -> Precision:
        """The formats that the plan's `precision` stands for."""
        compute = _COMPUTE[plan.precision]
        return cls(compute, torch.float64 if compute == torch.float64 else torch.float32)

    @property
    def scales_loss(self) -> bool:
        """fp16 gradients underflow without loss scaling; the other formats have the range of fp32."""
        return self.compute == torch.float16

    def forward_context(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Around the forward pass: autocast where the compute format is not the master's."""
        if self.compute == self.master:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.compute)

    def __str__(self) -> str:
        short = {value: key for key, value in _COMPUTE.items()}
        return f"compute {short[self.compute]}; weights, gradients, reduction and optimizer {short[self.master]}"
