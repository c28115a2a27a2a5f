"""This rank's shards of a module's parameters under fully_shard, and whole tensors made from them.

A parameter of shape (n, ...) is cut along dim 0 into parts of ceil(n / size) rows; the last ranks have fewer rows, or
none. fully_shard keeps it as a DTensor; everything here works on the plain tensor inside.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """One parameter's part on this rank. param: fully_shard's DTensor; local: the same memory as a plain parameter."""

    name: str
    param: nn.Parameter
    local: nn.Parameter
    axis: Axis

    @property
    def rows(self) -> int:
        """Rows of the whole parameter on each rank but the last ones."""
        return -(-self.param.shape[0] // self.axis.size)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor, as a view."""
        start = min(self.axis.rank * self.rows, tensor.shape[0])
        return tensor[start : start + self.local.shape[0]]

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor, from a tensor like `local` on each rank. A collective over the shard axis."""
        shape = self.param.shape
        padded = local
        if local.shape[0] != self.rows:
            padded = local.new_zeros(self.rows, *shape[1:])
            padded[: local.shape[0]] = local
        return all_gather(padded.reshape(-1), self.axis)[: shape.numel()].view(shape)

    def link(self) -> None:
        """Let the plain parameter have the DTensor's gradient; zeros where no rank used the parameter."""
        if self.param.grad is None:
            self.param.grad = torch.zeros_like(self.param)
        self.local.grad = local_part(self.param.grad)


def find_shards(model: nn.Module, names: list[str], axis_of: Callable[[str], Axis]) -> dict[str, Shard]:
    """Shards by name, of those parameters that fully_shard took."""
    params = dict(model.named_parameters())
    found: dict[str, Shard] = {}
    for name in names:
        param = params[name]
        if isinstance(param, DTensor):
            local = nn.Parameter(local_part(param), requires_grad=param.requires_grad)
            found[name] = Shard(name, param, local, axis_of(name))
    return found


def full_tensors(
    shards: Mapping[str, Shard],
    plain: Mapping[str, nn.Parameter],
    of: Callable[[nn.Parameter], torch.Tensor | None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `of` gives of each parameter, by name and whole; what it gives None of is left out. A collective."""
    for name, shard in shards.items():
        if (local := of(shard.local)) is not None:
            yield name, shard.whole(local)
    for name, param in plain.items():
        if (tensor := of(param)) is not None:
            yield name, tensor


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's tensor on this rank; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# zero=3 with the optimizer on the host: shards stay on the device, what the optimizer works on lies beside it.


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

    def take_full(self, name: str, mine: bool) -> nn.Parameter | None:
        """The optimizer must see this one whole: what it gets on the rank that updates it."""
        self._parts.pop(name).release()
        del self.params[name], self._versions[name]
        if not mine:
            return None
        shard = self._shards[name]
        part = self._parts[name] = HostPart(self._host, shard.param.numel(), shard.local.dtype)
        return nn.Parameter(part.master.view(shard.param.shape))

    def send_full(self, name: str, param: nn.Parameter, weight: torch.Tensor, grad: torch.Tensor | None) -> None:
        """A whole weight and its gradient are on the host."""
        part = self._parts[name]
        part.arrive()
        part.master.copy_(weight.reshape(-1))
        if grad is not None:
            self.send(name, grad)
            part.arrive()
        param.grad = None if grad is None else part.grad.view(param.shape)

    def bring_full(self, name: str, weight: torch.Tensor) -> torch.Tensor:
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
