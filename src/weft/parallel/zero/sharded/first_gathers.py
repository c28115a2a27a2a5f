"""Units that a forward needs before any block, gathered while the optimizer steps the others.

A forward cannot begin before its embedding is there, and nothing computes meanwhile. So its shards are stepped first,
and gathered by a stream of their own from then on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from weft.optim import StepDecision
from weft.parallel.zero.adopt import step_by_decision, steps_in_parts
from weft.parallel.zero.sharded.gather_order import Order
from weft.parallel.zero.sharded.param_shards import Shard
from weft.structure import repeated_blocks


class FirstGathers:
    """Steps an optimizer in two parts, and gathers the first under the second.

    Args:
        modules: the units, by their number; the root last.
        shards: this rank's parts of each one's parameters.
        order: of what all ranks do, which knows what a forward begins with.
        device: of the weights.
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        shards: Sequence[Sequence[Shard]],
        order: Order,
        device: torch.device,
    ):
        self._modules = modules
        self._shards = shards
        # They are gathered under what comes before them anyway.
        self._blocks = {*repeated_blocks(modules[-1]).values()} if isinstance(modules[-1], nn.Module) else set()
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
        params = {id(shard.local) for number in first for shard in self._shards[number]}
        step_by_decision(optimizer, decision, params, functools.partial(self._gather, first, self._stream))

    def hand_over(self) -> None:
        """Leave what was gathered early to the pass that begins: it waits for it and lets it go as usual."""
        self._early = []

    def drop(self) -> None:
        """Forget what was gathered early, between steps: shards may change now, and it would not follow."""
        early, self._early = self._early, []
        for module, handle in early:
            handle.wait()  # nothing where an evaluation has asked for it
            module.reshard()

    def _first(self) -> list[int]:
        """The units that are gathered before any block."""
        return [*itertools.takewhile(lambda one: self._modules[one] not in self._blocks, self._order.first_gathers())]

    def _gather(self, units: Sequence[int], stream: torch.cuda.Stream | None) -> None:
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        # fully_shard gathers on the stream that is current, where it is asked to go on meanwhile.
        with torch.cuda.stream(stream):
            for module in (self._modules[number] for number in units):
                if (handle := module.unshard(async_op=True)) is not None:
                    self._early.append((module, handle))
