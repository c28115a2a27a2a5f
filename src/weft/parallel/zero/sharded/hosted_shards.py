"""zero=3 with the optimizer on the host: shards stay on the device, what the optimizer works on lies beside it.

    device             host (pinned)              host (ordinary)
    shards, gradients  copies of both, in fp32    states that the optimizer makes

For a step gradients travel down, and the new weights up. A gradient begins to travel as soon as its unit is reduced,
while backward goes on, where nothing is added to it afterwards: not over replicas, nor over tp. The copy of a shard
that somebody wrote to follows it first. What an optimizer must see whole (Muon) lies whole on the host of the rank that
updates it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from weft.memory import Host, HostPart, choose
from weft.parallel.zero.sharded.param_shards import Shard, local_part
from weft.private_torch import version_of
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
    """Shards whose optimizer is on the host. `params`: what it gets in their place, by name.

    is_last: whether gradients that arrive now are the step's, to which no later microbatch adds.
    """

    def __init__(self, host: Host, shards: Mapping[str, Shard], names: Iterable[str]):
        self.is_last = False
        self._host = host
        self._shards = {name: shard for name, shard in shards.items() if name in set(names)}
        self._parts = {
            name: HostPart(host, shard.local.numel(), shard.local.dtype) for name, shard in self._shards.items()
        }
        self.params = {name: self._param(name) for name in self._parts}
        self._versions = dict.fromkeys(self._parts, -1)

    def _param(self, name: str) -> nn.Parameter:
        return nn.Parameter(self._parts[name].master.view(self._shards[name].local.shape))

    def watch(self, names: Iterable[str]) -> None:
        """Let the gradients of these travel as soon as fully_shard has reduced them."""
        for name in names:
            if name in self._parts and self._parts[name].is_early:
                # torch's collector does not see these hooks, so they hold nothing.
                hook = functools.partial(_reduced, weakref.ref(self), name)
                self._shards[name].param.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def send(self, name: str, grad: torch.Tensor) -> None:
        """Let a gradient travel to the host; one that was sent before it in the same step is old."""
        self._parts[name].forget()
        self._parts[name].send(grad.reshape(-1))

    def forget(self) -> None:
        """A new step: what was sent is old."""
        for part in self._parts.values():
            part.forget()

    def scale(self, factor: float) -> None:
        """Multiply the gradients that were sent."""
        for part in self._parts.values():
            if part.is_sent:
                part.scale(factor)

    def see_whole(self, name: str, mine: bool) -> nn.Parameter | None:
        """The optimizer must see this one whole: what it gets on the rank that updates it."""
        self._parts.pop(name).release()
        del self.params[name], self._versions[name]
        if not mine:
            return None
        shard = self._shards[name]
        part = self._parts[name] = HostPart(self._host, shard.param.numel(), shard.local.dtype)
        return nn.Parameter(part.master.view(shard.param.shape))

    def send_whole(self, name: str, param: nn.Parameter, weight: torch.Tensor, grad: torch.Tensor | None) -> None:
        """A whole weight and its gradient are on the host."""
        part = self._parts[name]
        part.arrive()
        part.master.copy_(weight.reshape(-1))
        if grad is not None:
            self.send(name, grad)
            part.arrive()
        param.grad = None if grad is None else part.grad.view(param.shape)

    def bring_whole(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The new weight, in a tensor of the device."""
        self._parts[name].bring(weight.view(-1)).wait()
        return weight

    @torch.no_grad()
    def before_step(self, names: Iterable[str]) -> None:
        """Gradients are on the host, and weights that were written to."""
        chosen = list(names)
        for name in chosen:
            grad = self._shards[name].local.grad
            if grad is not None and not self._parts[name].is_sent:
                self.send(name, grad)
        for name in chosen:
            shard, part = self._shards[name], self._parts[name]
            part.arrive()
            if version_of(shard.local) != self._versions[name]:
                part.master.copy_(shard.local.reshape(-1))
            has_grad = shard.local.grad is not None
            self.params[name].grad = part.grad.view(shard.local.shape) if has_grad else None

    @torch.no_grad()
    def after_step(self, names: Iterable[str]) -> None:
        """The shards have the new weights."""
        chosen = list(names)
        pending = [self._parts[name].bring(self._shards[name].local.view(-1)) for name in chosen]
        for name, copy in zip(chosen, pending, strict=True):
            copy.wait()
            self._parts[name].forget()
            self._versions[name] = version_of(self._shards[name].local)


def _reduced(hosted: Callable[[], HostedShards | None], name: str, param: nn.Parameter) -> None:
    found = hosted()
    if found is not None and found.is_last and name in found.params and param.grad is not None:
        found.send(name, local_part(param.grad))
