"""Units that a forward needs before any block, gathered while the optimizer steps the others.

A forward cannot begin before its embedding is there, and nothing computes meanwhile. So its shards are stepped first,
and gathered by a stream of their own from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from weft.optim import StepDecision
from weft.parallel.zero.adopt import step_by_decision, steps_in_parts
from weft.parallel.zero.sharded.gather_order import Order


class FirstGathers:
    """Steps an optimizer in two parts, and gathers the first under the second.

    Args:
        units: by their number, what fully_shard made of them, and this rank's part of each one's parameters.
        blocks: those that are repeated blocks of the model: they are gathered under what comes before them anyway.
        order: of what all ranks do, which knows what a forward begins with.
        device: of the weights.
    """

    def __init__(
        self,
        units: Sequence[tuple[FSDPModule, Sequence[nn.Parameter]]],
        blocks: Collection[nn.Module],
        order: Order,
        device: torch.device,
    ):
        self._units = units
        self._blocks = blocks
        self._order = order
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._early: list[tuple[FSDPModule, UnshardHandle]] = []

    def switch_on(self) -> None:
        """Gather early from here: who steps the optimizer knows that weights may travel between steps."""
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)

    def step(self, optimizer: torch.optim.Optimizer, decision: StepDecision) -> None:
        """Step the optimizer, and begin to gather what the next forward begins with."""
        self.drop()
        first = self._first() if self._stream is not None and steps_in_parts(optimizer) else []
        params = {id(param) for _, params in first for param in params}
        between = functools.partial(self._gather, [module for module, _ in first], self._stream)
        step_by_decision(optimizer, decision, params, between)

    def drop(self) -> None:
        """Forget what was gathered early and not used: shards are about to change, and it would not follow."""
        early, self._early = self._early, []
        for module, handle in early:
            handle.wait()  # nothing where a forward has asked for it
            module.reshard()

    def _first(self) -> list[tuple[FSDPModule, Sequence[nn.Parameter]]]:
        """The units that are gathered before any block."""
        found: list[tuple[FSDPModule, Sequence[nn.Parameter]]] = []
        for number in self._order.first_gathers():
            if self._units[number][0] in self._blocks:
                break
            found.append(self._units[number])
        return found

    def _gather(self, modules: Sequence[FSDPModule], stream: torch.cuda.Stream | None) -> None:
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        # fully_shard gathers on the stream that is current, where it is asked to go on meanwhile.
        with torch.cuda.stream(stream):
            for module in modules:
                if (handle := module.unshard(async_op=True)) is not None:
                    self._early.append((module, handle))
