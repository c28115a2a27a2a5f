"""What a rank holds of sharded parameters and their optimizer states, as stretches for checkpoints.

Rows of dim 0 are a run of the flattened parameter, or of the part of it that another technique left here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from weft.checkpoint.parts import deal_out
from weft.parallel.local_tensors import (
    PlacedPart,
    StateSource,
    Stretch,
    alone,
    filled,
    flat_of,
    read_whole,
    tell_places,
)
from weft.parallel.placement import Axes, AxisMap
from weft.parallel.zero.sharded.param_shards import Shard
from weft.parallel.zero.sharded.shard_adoption import ShardAdoption
from weft.parallel.zero.states import not_joinable, untrained


class ShardStretches:
    """Stretches of all sharded parameters of a module."""

    def __init__(self, shards: Mapping[str, Shard], kinds: Mapping[str, Axes], axes: AxisMap):
        self._shards, self._kinds, self._axes = shards, kinds, axes

    def of(self, name: str) -> Stretch | None:
        """This rank's rows of a parameter; None: there are none."""
        found = self._layout(name, self._shards[name].local)
        return found if found.flat.numel() or not found.part.numel else None

    def tell(
        self, optimizer: torch.optim.Optimizer, adoption: ShardAdoption, plain: Mapping[str, nn.Parameter]
    ) -> None:
        """Tell an optimizer that asks where its parts lie in whole parameters."""
        tell_places(optimizer, self._placed(optimizer, adoption, plain))

    def _placed(
        self, optimizer: torch.optim.Optimizer, adoption: ShardAdoption, plain: Mapping[str, nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, PlacedPart]]:
        for name, param, is_whole in adoption.held_params(optimizer):
            if param is None:
                continue
            shard = self._shards[name]
            whole = torch.empty(shard.param.shape, device="meta")
            rows = 0 if is_whole else shard.axis.rank * shard.rows
            start = min(rows * math.prod(shard.param.shape[1:]), whole.numel())
            part = self._axes.part_of(name, whole)
            yield param, PlacedPart(self._axes.saved_name(name), part, start, param.device)
        for name, param in plain.items():
            yield param, PlacedPart(self._axes.saved_name(name), self._axes.part_of(name, param), 0, param.device)

    def like(self, name: str, local: torch.Tensor) -> Stretch:
        """Return the stretch of something shaped as this rank's rows."""
        return self._layout(name, local)

    def _layout(self, name: str, local: torch.Tensor) -> Stretch:
        """The same for something shaped as this rank's rows."""
        shard, kind = self._shards[name], self._kinds[name]
        whole = torch.empty(shard.param.shape, device="meta")
        length = shard.rows * math.prod(shard.param.shape[1:])
        near = [rank - self._axes.mesh.rank for rank in kind.holders]
        ranks = tuple(rank + step for rank in shard.axis.ranks for step in near)
        deal = deal_out(ranks, length, len(near), turn=self._axes.turn(name))
        start = min(shard.axis.rank * length, whole.numel())
        part, flat = self._axes.part_of(name, whole), local.detach().contiguous().view(-1)
        return Stretch(self._axes.saved_name(name), part, deal, start, flat)

    def _undivided(self, name: str, value: torch.Tensor) -> Stretch:
        """Something shaped as the parameter, whole on this rank and its replicas alone."""
        holders, numel = self._kinds[name].holders, value.numel()
        deal = deal_out(holders, numel, len(holders), turn=self._axes.turn(name))
        part = self._axes.part_of(name, torch.empty(value.shape, device="meta"))
        return Stretch(self._axes.saved_name(name), part, deal, 0, flat_of(value.contiguous()))

    def states(self, optimizer: torch.optim.Optimizer, adoption: ShardAdoption) -> Iterator[Stretch]:
        """An optimizer's states. CheckpointError for one that fits no part of its parameter."""
        for name, param, is_whole in adoption.held_params(optimizer):
            shard = self._shards[name]
            first = self._kinds[name].holders[0] if is_whole else self._layout(name, shard.local).deal.holder(0)
            for key, value in optimizer.state.get(param, {}).items() if param is not None else ():
                if not isinstance(value, torch.Tensor):
                    continue
                full_name = f"{self._axes.saved_name(name)}/{key}"
                if value.ndim and value.shape == (shard.param if is_whole else shard.local).shape:
                    found = self._undivided(name, value) if is_whole else self._layout(name, value)
                    if found.flat.numel() or not found.part.numel:
                        yield replace(found, name=full_name)
                elif value.ndim and not is_whole:
                    raise not_joinable(full_name, value.shape)
                else:
                    yield alone(full_name, value, first)

    def take_states(
        self,
        optimizer: torch.optim.Optimizer,
        adoption: ShardAdoption,
        plain: Mapping[str, nn.Parameter],
        source: StateSource,
    ) -> None:
        """Give an optimizer its states. CheckpointError for one of a parameter that it does not train."""
        ours: dict[str, list[tuple[str, nn.Parameter | None, bool]]] = {}
        for name, param, is_whole in adoption.held_params(optimizer):
            ours.setdefault(self._axes.saved_name(name), []).append((name, param, is_whole))
        for name, param in plain.items():
            ours.setdefault(self._axes.saved_name(name), []).append((name, param, True))
        for full_name, saved in source.entries.items():
            saved_name, _, key = full_name.rpartition("/")
            if saved_name not in ours and self._axes.stages.size == 1:
                raise untrained(full_name)
            for name, param, is_whole in ours.get(saved_name, []):
                if param is None:
                    continue
                if name in plain:
                    like = self._axes.stretch(name, param)
                else:
                    shard = self._shards[name]
                    target = torch.empty(shard.param.shape, device="meta") if is_whole else shard.local
                    like = self._undivided(name, target) if is_whole else self._layout(name, target)
                if saved.shape and tuple(saved.shape) == like.part.shape:
                    shape = self._shards[name].param.shape if is_whole and name not in plain else None
                    piece = param if shape is None else torch.empty(shape, device=param.device)
                    optimizer.state[param][key] = filled(full_name, like, piece, source)
                else:
                    optimizer.state[param][key] = read_whole(source, full_name).to(param.device)


def plain_states(
    params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, axes: AxisMap
) -> Iterator[Stretch]:
    """States of parameters that every rank has whole."""
    for name, param in params.items():
        found = axes.stretch(name, param)
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                full_name = f"{found.name}/{key}"
                if value.ndim and value.shape == param.shape:
                    yield replace(axes.stretch(name, value), name=full_name)
                else:
                    yield alone(full_name, value, found.deal.holder(0))
