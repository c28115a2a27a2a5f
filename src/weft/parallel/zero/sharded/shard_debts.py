"""What replicas owed of rounded gradients under another plan, added to the first sums of zero=3, which owes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from weft.comm.wire import Coders
from weft.parallel.local_tensors import StateSource, Stretch
from weft.parallel.placement import AxisMap
from weft.parallel.zero.owed import read_owed, replicas_in
from weft.parallel.zero.sharded.param_shards import Shard
from weft.parallel.zero.sharded.shard_stretches import ShardStretches


class ShardDebts:
    """Debts of sharded parameters.

    Args:
        placed: stretches of the shards.
        shards: by name.
        plain: parameters that are whole on each rank.
        axes: of the module.
        coders: keep what is owed until the first step is taken.
    """

    def __init__(
        self,
        placed: ShardStretches,
        shards: Mapping[str, Shard],
        plain: Mapping[str, nn.Parameter],
        axes: AxisMap,
        coders: Coders,
    ):
        self._placed, self._shards, self._plain, self._axes, self._coders = placed, shards, plain, axes, coders

    def stretches(self) -> Iterator[Stretch]:
        """Yield nothing: no wire of zero=3 owes anything."""
        return iter(())

    @torch.no_grad()
    def take(self, source: StateSource) -> list[str]:
        """Take over what any plan owed. Returns lines for people."""
        if not replicas_in(source):
            return []
        held = {name: shard.local for name, shard in self._shards.items()} | dict(self._plain)
        for name, param in held.items():
            if not param.requires_grad:
                continue
            total = torch.zeros_like(param.detach())
            found = self._axes.stretch(name, total) if name in self._plain else self._placed.like(name, total)
            read_owed(replace(found, name=f"{found.name}/residual."), source)
            self._coders.owed[name] = total
        return ["what compress rounded off before and still owes goes with the gradients of the first step"]

    def add(self) -> None:
        """Add what is owed to the sums of this step."""
        for name, total in self._coders.owed.items():
            grad = self._shards[name].local.grad if name in self._shards else self._plain[name].grad
            if grad is not None:
                grad.add_(total, alpha=self._coders.unit)
