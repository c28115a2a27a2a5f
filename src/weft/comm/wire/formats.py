"""Wires that are number formats, which links can add: as it is, and bf16."""

from __future__ import annotations

import torch

from weft.comm.wire.wire import State, Wire


class AsIs(Wire):
    """The tensor itself."""

    ops = ("sum", "max", "min")

    def added_in(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        return x_RN.contiguous().view(torch.uint8), None

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return codes_RC.view(dtype).clone()


class Bf16(Wire):
    """Rounded to bfloat16, the result too; sums are made in float32 on the CPU."""

    ops = ("sum", "max", "min")

    def added_in(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        return x_RN.to(torch.bfloat16).contiguous().view(torch.uint8), None

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return codes_RC.view(torch.bfloat16).to(dtype)
