"""Example of a user-defined wire format: one byte per value, one scale per block, with error feedback."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from weft.comm.wire.wire_format import State, Wire
from weft.config.fields.wire_formats import WireSpec, register

register(WireSpec("block8", "tests.comm.block8:Block8", element_bytes=1, block=64, block_bytes=4, state_bytes=4))


class Block8(Wire):
    """int8 blocks with one float32 scale each, rounded to the nearest of 255 steps, with error feedback."""

    def encode(self, x_RN: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        compensated_RN = x_RN if state is None else x_RN + state["residual"]
        rows, numel = compensated_RN.shape
        blocks = pad(compensated_RN, (0, -numel % self.spec.block)).view(rows, -1, self.spec.block)
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).float()
        steps = (blocks / scales.clamp(min=1e-30)).round().to(torch.int8).view(rows, -1)[:, :numel]
        codes = torch.cat([steps.contiguous().view(torch.uint8), scales.view(rows, -1).view(torch.uint8)], 1)
        return codes, {"residual": compensated_RN - self.decode(codes, numel, compensated_RN.dtype)}

    def decode(self, codes_RC: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        steps = codes_RC[:, :numel].view(torch.int8).to(dtype)
        scales = codes_RC[:, numel:].reshape(-1).clone().view(torch.float32).view(len(steps), -1).to(dtype)
        return steps * scales.repeat_interleave(self.spec.block, 1)[:, :numel]
