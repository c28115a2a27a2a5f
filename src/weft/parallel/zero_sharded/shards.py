"""This rank's shards of a module's parameters under fully_shard, and full tensors built from them.

A parameter of shape (n, ...) is sharded along dim 0 into parts of ceil(n / size) rows. The last ranks have fewer rows,
or none. fully_shard stores it as a DTensor; all code here works on the local tensor inside.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.comm.collectives import all_gather
from weft.comm.mesh import Axis
from weft.config.plan import Plan
from weft.memory.offload import Host, HostPart, choose
from weft.private_torch import version_of


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One parameter's shard on this rank. param: fully_shard's DTensor; local: plain parameter with the same memory."""

    name: str
    param: nn.Parameter
    local: nn.Parameter
    axis: Axis

    @property
    def rows(self) -> int:
        """Number of rows of the full parameter on each rank except the last ones."""
        return -(-self.param.shape[0] // self.axis.size)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a full tensor, as a view."""
        start = min(self.axis.rank * self.rows, tensor.shape[0])
        return tensor[start : start + self.local.shape[0]]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Gather a full tensor from each rank's rows, of `local`'s shape. Collective over the shard axis."""
        shape = self.param.shape
        padded = local
        if local.shape[0] != self.rows:
            padded = local.new_zeros(self.rows, *shape[1:])
            padded[: local.shape[0]] = local
        return all_gather(padded.reshape(-1), self.axis)[: shape.numel()].view(shape)

    def link(self) -> None:
        """Set the gradient of `local` to the local tensor of the gradient of `param`, in the same memory.

        If no rank used the parameter, the gradients of both become zeros.
        """
        if self.param.grad is None:
            self.param.grad = torch.zeros_like(self.param)
        self.local.grad = local_part(self.param.grad)


def find_shards(model: nn.Module, names: list[str], axis_of: Callable[[str], Axis]) -> dict[str, Shard]:
    """Return the shards, by name, of the parameters that fully_shard manages."""
    params = dict(model.named_parameters())
    found: dict[str, Shard] = {}
    for name in names:
        param = params[name]
        if isinstance(param, DTensor):
            local = nn.Parameter(local_part(param), requires_grad=param.requires_grad)
            found[name] = Shard(name, param, local, axis_of(name))
    return found


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# zero=3 with the optimizer on the host: shards stay on the device, and the optimizer's copies are on the host.


def choose_hosted(shards: Mapping[str, Shard], on_host: Iterable[str], plan: Plan) -> frozenset[str]:
    """Choose the shards of which the plan puts only the optimizer on the host.

    on_host: names of the shards that are entirely on the host; they count towards the plan's share.
    """
    there = set(on_host)
    trained = [(name, shard.local.numel()) for name, shard in shards.items() if shard.param.requires_grad]
    trained.sort(key=lambda pair: pair[0] not in there)
    return choose(trained, plan.offload_share("optimizer")) - there


class HostedShards:
    """Shards on the device whose gradients are copied to the host, where the optimizer steps copies of the weights.

    `params`: the optimizer's parameters in host memory, by name. `is_last`: True if new gradients are the step's final
    ones, because no later microbatch follows.
    """

    def __init__(self, host: Host, shards: Mapping[str, Shard], names: Iterable[str]):
        self.is_last = False
        self._host = host
        self._shards = {name: shard for name, shard in shards.items() if name in set(names)}
        self._parts = {
            name: HostPart(host, shard.local.numel(), shard.local.dtype) for name, shard in self._shards.items()
        }
        self.params = {
            name: nn.Parameter(part.master.view(self._shards[name].local.shape)) for name, part in self._parts.items()
        }
        self._versions = dict.fromkeys(self._parts, -1)

    def watch(self, names: Iterable[str]) -> None:
        """Register hooks that copy gradients of these parameters to the host once fully_shard has reduced them."""
        for name in names:
            if name in self._parts and self._parts[name].is_early:
                # A weak reference, because torch's garbage collector cannot reach these hooks.
                hook = functools.partial(_reduced, weakref.ref(self), name)
                self._shards[name].param.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def send(self, name: str, grad: torch.Tensor) -> None:
        """Start to copy a gradient to the host. The copy replaces an earlier one of the same step."""
        self._parts[name].forget()
        self._parts[name].send(grad.reshape(-1))

    def forget(self) -> None:
        """Mark the gradients on the host as outdated, for a new step."""
        for part in self._parts.values():
            part.forget()

    def scale(self, factor: float) -> None:
        for part in self._parts.values():
            if part.is_sent:
                part.scale(factor)

    def take_full(self, name: str, mine: bool) -> nn.Parameter | None:
        """Use the full parameter instead of a shard: release the shard's host memory.

        Return the full parameter in host memory if this rank updates it (`mine`), else None.
        """
        self._parts.pop(name).release()
        del self.params[name], self._versions[name]
        if not mine:
            return None
        shard = self._shards[name]
        part = self._parts[name] = HostPart(self._host, shard.param.numel(), shard.local.dtype)
        return nn.Parameter(part.master.view(shard.param.shape))

    def send_full(self, name: str, param: nn.Parameter, weight: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Copy a full weight and its gradient to the host. `param.grad` becomes the copied gradient, or None."""
        part = self._parts[name]
        part.wait()
        part.master.copy_(weight.reshape(-1))
        if grad is not None:
            self.send(name, grad)
            part.wait()
        param.grad = None if grad is None else part.grad.view(param.shape)

    def bring_full(self, name: str, weight: torch.Tensor) -> None:
        """Copy the new weight from the host into a tensor of the device."""
        self._parts[name].bring(weight.view(-1)).wait()

    @torch.no_grad()
    def before_step(self, names: Iterable[str]) -> None:
        """Set the gradients of `params` once they are on the host, and copy weights there that the user changed."""
        chosen = list(names)
        for name in chosen:
            grad = self._shards[name].local.grad
            if grad is not None and not self._parts[name].is_sent:
                self.send(name, grad)
        for name in chosen:
            shard, part = self._shards[name], self._parts[name]
            part.wait()
            if version_of(shard.local) != self._versions[name]:
                part.master.copy_(shard.local.reshape(-1))
            has_grad = shard.local.grad is not None
            self.params[name].grad = part.grad.view(shard.local.shape) if has_grad else None

    @torch.no_grad()
    def after_step(self, names: Iterable[str]) -> None:
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
