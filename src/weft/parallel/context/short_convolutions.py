"""Short convolutions over sequences that context parallelism shards: a rank reads the previous rank's last tokens.

transformers' layers continue from a cache in generation. Here the cache is an object that receives the convolution's
inputs of the previous rank, and backward sends their gradient back.

B sequences, T tokens of this rank, C channels and W previous tokens that a convolution reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.mesh import Axis
from weft.comm.peer import shift
from weft.parallel.layers.state_mixers import CONVOLUTIONS, mixer_name
from weft.private_torch import Function


def num_previous_tokens(module: nn.Module) -> int:
    """Return the number of previous tokens that a short convolution reads, or 0 for another module."""
    if mixer_name(module) not in CONVOLUTIONS:
        return 0
    return next(one.kernel_size[0] for one in module.modules() if isinstance(one, nn.Conv1d)) - 1


class PreviousTokens:
    """Cache of one call of a short convolution, with the interface of transformers' caches."""

    def __init__(self, axis: Axis):
        self._axis = axis

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: the previous tokens come from `update_conv_state`."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        """Return the inputs of the convolution after the previous rank's last W tokens, (B, C, W + T).

        On the first rank, zeros precede them. conv_states: inputs on this rank, (B, C, T).
        """
        tail_BCW = _Shift.apply(conv_states[..., 1 - kwargs["conv_kernel_size"] :], self._axis)
        return torch.cat([tail_BCW, conv_states], -1)


class _Shift(Function):
    """Autograd function that returns the previous rank's tensor, and zeros on the first rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        received = shift(x.contiguous(), axis)
        return received if axis.rank else torch.zeros_like(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        axis = ctx.axis
        received = shift(grads[0].contiguous(), axis, -1)
        return received if axis.rank < axis.size - 1 else torch.zeros_like(received), None
