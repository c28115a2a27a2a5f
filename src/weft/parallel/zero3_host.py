"""zero=3 with the optimizer on the host: shards stay on the device, what the optimizer works on lies beside it.

    device             host (pinned)              host (ordinary)
    shards, gradients  copies of both, in fp32    states that the optimizer makes

For a step gradients travel down, and the new weights up. The copy of a shard that somebody wrote to follows it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from weft.memory.offload import Host, HostPart, choose
from weft.parallel.zero3_shards import Shard
from weft.spec.plan import Plan


def choose_hosted(shards: Mapping[str, Shard], on_host: Iterable[str], plan: Plan) -> frozenset[str]:
    """Names of the shards whose optimizer the plan puts on the host alone.

    on_host: those that are there with all they have; they count towards the share.
    """
    there = set(on_host)
    trained = [(name, shard.local.numel()) for name, shard in shards.items() if shard.param.requires_grad]
    trained.sort(key=lambda pair: pair[0] not in there)
    return choose(trained, plan.offload_share("optimizer")) - there


class HostedShards:
    """Shards whose optimizer is on the host. `params`: what it gets in their place, by name."""

    def __init__(self, host: Host, shards: Mapping[str, Shard], names: Iterable[str]):
        self._shards = {name: shard for name, shard in shards.items() if name in set(names)}
        self._parts = {
            name: HostPart(host, shard.local.numel(), shard.local.dtype) for name, shard in self._shards.items()
        }
        self.params = {name: self._param(name) for name in self._parts}
        self._versions = dict.fromkeys(self._parts, -1)

    def _param(self, name: str) -> nn.Parameter:
        return nn.Parameter(self._parts[name].master.view(self._shards[name].local.shape))

    @torch.no_grad()
    def before_step(self, names: Iterable[str]) -> None:
        """Gradients are on the host, and weights that were written to."""
        chosen = [name for name in names if name in self._parts]
        for name in chosen:
            shard, part = self._shards[name], self._parts[name]
            part.forget()
            if shard.local.grad is not None:
                part.send(shard.local.grad.reshape(-1))
        for name in chosen:
            shard, part = self._shards[name], self._parts[name]
            part.arrive()
            if shard.local._version != self._versions[name]:
                part.master.copy_(shard.local.reshape(-1))
            has_grad = shard.local.grad is not None
            self.params[name].grad = part.grad.view(shard.local.shape) if has_grad else None

    @torch.no_grad()
    def after_step(self, names: Iterable[str]) -> None:
        """The shards have the new weights."""
        chosen = [name for name in names if name in self._parts]
        pending = [self._parts[name].bring(self._shards[name].local.view(-1)) for name in chosen]
        for name, copy in zip(chosen, pending, strict=True):
            copy.wait()
            self._versions[name] = self._shards[name].local._version
