"""Optimizers under zero=3: on shards where their update is elementwise, else each parameter whole on one rank.

Elementwise optimizers get plain tensors that share the shards' memory; with DTensors the dispatch of their many small
operations would cost more than the update. Of the others (Muon, Adafactor) a rank updates its share of the parameters:
for a step their weights and gradients are gathered, and afterwards the weights go back to the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.comm import broadcast
from weft.mesh import Axis
from weft.parallel.zero.adopt import fill_group, is_elementwise, not_of_model
from weft.parallel.zero.sharded.hosted_shards import HostedShards
from weft.parallel.zero.sharded.param_shards import Shard, local_part


@dataclass(slots=True)
class Held:
    """What one optimizer holds of the sharded parameters.

    local: those it updates on shards. whole: those it sees whole, each with the rank that updates it; mine: of these
    the ones that this rank updates, empty between steps. hosted: of both, those whose optimizer is on the host.
    """

    local: list[str] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)
    whole: dict[str, int] = field(default_factory=dict)
    mine: dict[str, nn.Parameter] = field(default_factory=dict)


class ShardAdoption:
    """Puts shards in the place of parameters in optimizers, whether these were built before or after sharding."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        originals: Mapping[str, nn.Parameter],
        axis: Axis,
        hosted: HostedShards | None = None,
    ):
        self._shards = shards
        self._hosted = hosted
        self._axis = axis
        # An original dies with its optimizer, and its id may then be another tensor's: hence the references.
        self._originals = {id(param): (weakref.ref(param), name) for name, param in originals.items()}
        self._names = {id(shard.param): shard.name for shard in shards.values()}
        self._held: weakref.WeakKeyDictionary[torch.optim.Optimizer, Held] = weakref.WeakKeyDictionary()

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._held

    def name_of(self, param: torch.Tensor) -> str | None:
        """The name of one of the model's parameters, as it was before sharding or is now."""
        reference, name = self._originals.get(id(param), (lambda: None, None))
        return name if reference() is param else self._names.get(id(param))

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of all groups. States that the optimizer has already are cut to fit."""
        held, load = Held(), [0] * self._axis.size
        groups: list[list[nn.Parameter | None]] = []
        for group in optimizer.param_groups:
            elementwise = is_elementwise(optimizer, group)
            kept = [self._place(param, elementwise, held, load) for param in group["params"]]
            groups.append(kept)
            for old, new in zip(group["params"], kept, strict=True):
                if old is not new:
                    self._move_state(optimizer, old, new)
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            fill_group(group, kept, group.get("param_names"))
        self._held[optimizer] = held

    def _place(self, param: nn.Parameter, elementwise: bool, held: Held, load: list[int]) -> nn.Parameter | None:
        """What this rank's optimizer has in the place of `param`; None where another rank updates it."""
        name = self.name_of(param)
        if name is None and param.requires_grad:
            raise not_of_model(param)
        if name is None or name not in self._shards:
            return param  # not sharded: every rank has it whole
        shard = self._shards[name]
        if elementwise or not shard.param.requires_grad:
            held.local.append(name)
            if self._hosted is not None and name in self._hosted.params:
                held.hosted.append(name)
            return self._param(name)
        owner = load.index(min(load))
        load[owner] += shard.param.numel()
        held.whole[name] = owner
        mine = owner == self._axis.rank
        if self._hosted is not None and name in self._hosted.params:
            held.hosted.append(name)
            whole = self._hosted.see_whole(name, mine)
        else:
            whole = nn.Parameter(torch.empty(0, dtype=shard.local.dtype, device=shard.local.device)) if mine else None
        if whole is not None:
            held.mine[name] = whole
        return whole

    def _param(self, name: str) -> nn.Parameter:
        """What an elementwise optimizer has in the place of a sharded parameter."""
        hosted = self._hosted.params.get(name) if self._hosted is not None else None
        return self._shards[name].local if hosted is None else hosted

    def _move_state(self, optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter | None) -> None:
        shard = self._shards[self.name_of(old) or ""]
        state = optimizer.state.pop(old, {})
        cut = new is self._param(shard.name)
        fitted = {key: _fit(shard, value, cut) for key, value in state.items()}  # on all ranks: it may gather
        if new is not None and fitted:
            optimizer.state[new] = fitted
        if not isinstance(old, DTensor):
            # Its weights live in the shards now: whoever still holds it should not hold their memory too.
            old.data = torch.empty(0, dtype=old.dtype, device=old.device)

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gather weights and gradients of what the optimizer sees whole. A collective."""
        held = self._held[optimizer]
        if self._hosted is not None:
            self._hosted.before_step(name for name in held.hosted if name not in held.whole)
        for name in held.whole:
            shard = self._shards[name]
            weight = shard.whole(shard.local)
            grad = None if shard.local.grad is None else shard.whole(shard.local.grad)
            if (param := held.mine.get(name)) is None:
                continue
            if self._hosted is not None and name in held.hosted:
                self._hosted.send_whole(name, param, weight, grad)
            else:
                param.data, param.grad = weight, grad

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring weights that were updated whole back to the shards. A collective."""
        held = self._held[optimizer]
        if self._hosted is not None:
            self._hosted.after_step(name for name in held.hosted if name not in held.whole)
        for name, owner in held.whole.items():
            shard, param = self._shards[name], held.mine.get(name)
            on_host = self._hosted is not None and name in held.hosted
            weight = param.detach() if param is not None and not on_host else shard.local.new_empty(shard.param.shape)
            if self._hosted is not None and on_host and param is not None:
                self._hosted.bring_whole(name, weight)
            shard.local.copy_(shard.part(broadcast(weight, self._axis, owner)))
            if param is not None:
                param.grad = None
                if not on_host:
                    param.data = shard.local.new_empty(0)

    def whole(self, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, nn.Parameter]]:
        """What this rank's optimizer sees whole, by name."""
        return self._held[optimizer].mine.items()

    def held_params(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter | None, bool]]:
        """(name, what the optimizer updates here, whether that is the whole), None where another rank updates it."""
        held = self._held[optimizer]
        yield from ((name, self._param(name), False) for name in held.local)
        yield from ((name, held.mine.get(name), True) for name in held.whole)


def _fit(shard: Shard, value: Any, cut: bool) -> Any:
    """A state of the parameter as the state of this rank's rows where `cut`, else of the whole."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        part = local_part(value)
        value = part if cut or value.shape != shard.param.shape else shard.whole(part)
    elif cut and value.ndim > 0 and value.shape == shard.param.shape:
        value = shard.part(value)
    return value.clone()
