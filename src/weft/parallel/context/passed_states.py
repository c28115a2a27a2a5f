"""Short convolutions over sequences that context parallelism shards: a rank starts from the previous rank's last tokens.

transformers' layers continue from a cache in generation. Here the cache is an object that receives the convolution's
inputs of the previous rank, and backward sends their gradient back. If a rank has fewer tokens than the kernel, it
waits for the rank before it. The object also passes recurrent states, which `passes_state` does not enable.

B sequences, T tokens of this rank, C channels and W previous tokens that a convolution reads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.comm.mesh import Axis
from weft.comm.peer import shift, start_receive, start_send
from weft.parallel.layers.state_mixers import MIXERS, mixer_name
from weft.private_torch import Function


def passes_state(module: nn.Module) -> bool:
    """Return True if a module continues from the state of the previous rank: short convolutions.

    Recurrent states are not passed. A rank waits for the next rank's gradient in the middle of backward, and with some
    bucket sizes the next rank then waits for this rank's part of a gradient reduction.
    """
    return MIXERS.get(mixer_name(module)) == ()


class PassedStates:
    """The states between ranks in one call of a mixer, with the interface of transformers' caches.

    axis: ranks that share the sequences. mixer: module of `passes_state`. hidden_BTD: its input.
    """

    def __init__(self, axis: Axis, mixer: nn.Module, hidden_BTD: Tensor):
        self._axis = axis
        self._has_gradient = torch.is_grad_enabled() and (
            hidden_BTD.requires_grad or any(parameter.requires_grad for parameter in mixer.parameters())
        )
        self._sent: list[Tensor] = []
        conv = next(module for module in mixer.modules() if isinstance(module, nn.Conv1d))
        tail_shape = (hidden_BTD.shape[0], conv.in_channels, conv.kernel_size[0] - 1)
        sizes = MIXERS[mixer_name(mixer)] or ()
        self._tail_BCW, self._state = None, None
        #: A convolution alone needs no other rank's result, unless the kernel is longer than this rank's tokens.
        self._is_chain = bool(sizes) or hidden_BTD.shape[1] < tail_shape[-1]
        if self._is_chain and axis.rank:
            state_shape = (hidden_BTD.shape[0], *(getattr(mixer, size) for size in sizes))
            shapes = [tail_shape, state_shape] if sizes else [tail_shape]
            # The type of scans: float32, unless float64 replaces it.
            like = hidden_BTD.new_empty(0).float()
            received = _Receive.apply(self._anchor(like), axis, sum(map(math.prod, shapes)), like)
            tail, *state = received.split([math.prod(shape) for shape in shapes])
            self._tail_BCW = tail.view(shapes[0])
            self._state = state[0].view(shapes[1]) if state else None

    def _anchor(self, like: Tensor) -> Tensor:
        return like.new_zeros(()).requires_grad_(self._has_gradient)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: the previous tokens come from `update_conv_state`."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state before this rank's first token, or None on the first rank."""
        return self._state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        """Return the inputs of the convolution, from the previous W tokens on, (B, C, W + T)."""
        width = kwargs["conv_kernel_size"] - 1
        if not self._is_chain:
            tail_BCW = _Shift.apply(conv_states[..., -width:], self._axis)
            return torch.cat([tail_BCW, conv_states], -1)
        if self._tail_BCW is None:
            inputs = F.pad(conv_states, (width, 0))
        else:
            inputs = torch.cat([self._tail_BCW.to(conv_states.dtype), conv_states], -1)
        self._sent.append(inputs[..., -width:])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **kwargs: Any) -> None:
        """Take the state after this rank's last token."""
        self._sent.append(recurrent_states)

    def send(self, output: Tensor) -> Tensor:
        """Send the final states to the next rank, and return the mixer's output."""
        if not self._is_chain or self._axis.rank == self._axis.size - 1:
            return output
        like = output.new_empty(0).float()
        message = torch.cat([sent.to(like.dtype).flatten() for sent in self._sent])
        return _Send.apply(output, message, self._anchor(like), self._axis)


class _Receive(Function):
    """Receive the previous rank's message; backward sends its gradient.

    The anchor requires a gradient if the sender waits for one.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, axis: Axis, size: int, like: Tensor) -> Tensor:
        ctx.axis = axis
        return start_receive(like.new_empty(size), axis, axis.rank - 1).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        start_send(grads[0].contiguous(), ctx.axis, ctx.axis.rank - 1).wait()
        return None, None, None, None


class _Send(Function):
    """Send a message to the next rank, and return the output; backward receives the message's gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, message: Tensor, anchor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(message)
        start_send(message.contiguous(), axis, axis.rank + 1).wait()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # Reading the message runs a recomputed block again, and the next rank's block needs that before it can answer.
        (message,) = ctx.saved_tensors
        return grads[0], start_receive(torch.empty_like(message), ctx.axis, ctx.axis.rank + 1).wait(), None, None


class _Shift(Function):
    """Return the previous rank's tensor, and zeros on the first rank."""

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
