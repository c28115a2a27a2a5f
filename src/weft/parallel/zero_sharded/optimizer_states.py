"""Optimizers under zero=3. An elementwise update runs on shards; otherwise one rank updates each full parameter.

Elementwise optimizers get plain tensors that share the shards' memory, because the dispatch of many small DTensor
operations would cost more than the update. With other optimizers (Muon, Adafactor), each rank updates some of the
parameters. Their weights and gradients are gathered for a step, and the new weights are copied to the shards
afterwards.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.read import OwnershipMap, assign_evenly
from weft.comm.collectives import broadcast
from weft.comm.mesh import Axis
from weft.comm.wire.coder import Coder, Coders
from weft.comm.wire.low_rank import Matrix, matrices_of
from weft.errors import CommError
from weft.parallel.state.flat_slices import (
    FlatSlice,
    PlacedPart,
    StateSource,
    filled,
    flat_of,
    read_full,
    register_param_locations,
    single_rank_slice,
)
from weft.parallel.state.placement import Axes, AxisMap
from weft.parallel.zero.engine import fill_group, is_elementwise, not_of_model
from weft.parallel.zero.states import not_joinable, read_residual, replicas_in, untrained
from weft.parallel.zero_sharded.shards import HostedShards, Shard, local_part


@dataclass(slots=True)
class OptimizerShards:
    """Sharded parameters of one optimizer.

    Attributes:
        local: names of parameters that it updates on shards.
        hosted: names, from `local` and `whole`, of parameters whose optimizer is on the host.
        whole: names of parameters that it updates in full, each with the rank of the shard axis that updates it.
        mine: full parameters that this rank updates, by name. On the device, they have no elements between steps.
    """

    local: list[str] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)
    whole: dict[str, int] = field(default_factory=dict)
    mine: dict[str, nn.Parameter] = field(default_factory=dict)


class ShardAdoption:
    """Replaces parameters in optimizers with shards. The optimizer may be built before or after sharding."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        originals: Mapping[str, nn.Parameter],
        axis: Axis,
        hosted: HostedShards | None = None,
    ):
        self._shards, self._hosted, self._axis = shards, hosted, axis
        # Weak references, because an original is freed with its optimizer, and another tensor may then reuse its id.
        self._originals = {id(param): (weakref.ref(param), name) for name, param in originals.items()}
        self._names = {id(shard.param): shard.name for shard in shards.values()}
        self._held: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerShards] = weakref.WeakKeyDictionary()

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._held

    def name_of(self, param: torch.Tensor) -> str | None:
        """Return the name of a model parameter, given its original or its sharded form; None for any other tensor."""
        reference, name = self._originals.get(id(param), (lambda: None, None))
        return name if reference() is param else self._names.get(id(param))

    def put(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of all groups by shards, or by full parameters of which each rank updates some.

        Existing optimizer states are sharded or gathered to fit, so all ranks must call it. Raises ModelError for a
        trainable parameter that the model does not have.
        """
        held, load = OptimizerShards(), [0] * self._axis.size
        groups: list[list[nn.Parameter | None]] = []
        for group in optimizer.param_groups:
            elementwise = is_elementwise(optimizer, group)
            kept = [self._replacement(param, elementwise, held, load) for param in group["params"]]
            groups.append(kept)
            for old, new in zip(group["params"], kept, strict=True):
                if old is not new:
                    self._move_state(optimizer, old, new)
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            fill_group(group, kept, group.get("param_names"))
        self._held[optimizer] = held

    def _replacement(
        self, param: nn.Parameter, elementwise: bool, held: OptimizerShards, load: list[int]
    ) -> nn.Parameter | None:
        """Return the replacement of `param` in this rank's optimizer, or None if another rank updates it.

        The name is added to `held`, and the size of a full parameter to the `load` of the rank that updates it. Raises
        ModelError for a trainable parameter that the model does not have.
        """
        name = self.name_of(param)
        if name is None and param.requires_grad:
            raise not_of_model(param)
        if name is None or name not in self._shards:
            return param  # not sharded: every rank stores it in full
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
            whole = self._hosted.take_full(name, mine)
        else:
            whole = nn.Parameter(torch.empty(0, dtype=shard.local.dtype, device=shard.local.device)) if mine else None
        if whole is not None:
            held.mine[name] = whole
        return whole

    def _param(self, name: str) -> nn.Parameter:
        hosted = self._hosted.params.get(name) if self._hosted is not None else None
        return self._shards[name].local if hosted is None else hosted

    def _move_state(self, optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter | None) -> None:
        shard = self._shards[self.name_of(old) or ""]
        state = optimizer.state.pop(old, {})
        cut = new is self._param(shard.name)
        fitted = {key: _fit(shard, value, cut) for key, value in state.items()}  # on all ranks, because it may gather
        if new is not None and fitted:
            optimizer.state[new] = fitted
        if not isinstance(old, DTensor):
            # The weights are in the shards now, so remaining references to the old tensor should not keep its memory
            # alive.
            old.data = torch.empty(0, dtype=old.dtype, device=old.device)

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gather weights and gradients of the parameters that the optimizer updates in full. All ranks must call it.

        For an optimizer on the host, also wait for the copies of gradients there.
        """
        held = self._held[optimizer]
        if self._hosted is not None:
            self._hosted.before_step(name for name in held.hosted if name not in held.whole)
        for name in held.whole:
            shard = self._shards[name]
            weight = shard.gather(shard.local)
            grad = None if shard.local.grad is None else shard.gather(shard.local.grad)
            if (param := held.mine.get(name)) is None:
                continue
            if self._hosted is not None and name in held.hosted:
                self._hosted.send_full(name, param, weight, grad)
            else:
                param.data, param.grad = weight, grad

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy updated weights from full parameters, or from the host, to the shards. All ranks must call it."""
        held = self._held[optimizer]
        if self._hosted is not None:
            self._hosted.after_step(name for name in held.hosted if name not in held.whole)
        for name, owner in held.whole.items():
            shard, param = self._shards[name], held.mine.get(name)
            on_host = self._hosted is not None and name in held.hosted
            weight = param.detach() if param is not None and not on_host else shard.local.new_empty(shard.param.shape)
            if self._hosted is not None and on_host and param is not None:
                self._hosted.bring_full(name, weight)
            shard.local.copy_(shard.part(broadcast(weight, self._axis, owner)))
            if param is not None:
                param.grad = None
                if not on_host:
                    param.data = shard.local.new_empty(0)

    def full_parameters(self, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, nn.Parameter]]:
        """Return the full parameters that this rank's optimizer updates, by name."""
        return self._held[optimizer].mine.items()

    def local_params(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter | None, bool]]:
        """Yield (name, parameter, is_full) of the optimizer. The parameter is None if another rank updates it."""
        held = self._held[optimizer]
        yield from ((name, self._param(name), False) for name in held.local)
        yield from ((name, held.mine.get(name), True) for name in held.whole)


def _fit(shard: Shard, value: Any, cut: bool) -> Any:
    """Convert a parameter's state: to this rank's rows if `cut`, else to the full parameter's state."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        part = local_part(value)
        value = part if cut or value.shape != shard.param.shape else shard.gather(part)
    elif cut and value.ndim > 0 and value.shape == shard.param.shape:
        value = shard.part(value)
    return value.clone()


# This rank's flat slices of sharded parameters and their optimizer states, for checkpoints.


class ShardSlices:
    """Flat slices of all sharded parameters of a module."""

    def __init__(self, shards: Mapping[str, Shard], kinds: Mapping[str, Axes], axes: AxisMap):
        self._shards, self._kinds, self._axes = shards, kinds, axes

    def of(self, name: str) -> FlatSlice | None:
        """Return this rank's rows of a parameter, or None if it has no rows."""
        found = self.like(name, self._shards[name].local)
        return found if found.flat.numel() or not found.part.numel else None

    def register_locations(
        self, optimizer: torch.optim.Optimizer, adoption: ShardAdoption, plain: Mapping[str, nn.Parameter]
    ) -> None:
        """Register the positions of the optimizer's parameters in full parameters, if the optimizer needs them."""
        found: list[tuple[nn.Parameter, PlacedPart]] = []
        for name, param, is_whole in adoption.local_params(optimizer):
            if param is None:
                continue
            shard = self._shards[name]
            whole = torch.empty(shard.param.shape, device="meta")
            rows = 0 if is_whole else shard.axis.rank * shard.rows
            start = min(rows * math.prod(shard.param.shape[1:]), whole.numel())
            part = self._axes.part_of(name, whole)
            found.append((param, PlacedPart(self._axes.saved_name(name), part, start, param.device)))
        for name, param in plain.items():
            part = self._axes.part_of(name, param)
            found.append((param, PlacedPart(self._axes.saved_name(name), part, 0, param.device)))
        register_param_locations(optimizer, found)

    def like(self, name: str, local: torch.Tensor) -> FlatSlice:
        """Return the flat slice for a tensor with the shape of this rank's rows of a parameter."""
        shard, kind = self._shards[name], self._kinds[name]
        whole = torch.empty(shard.param.shape, device="meta")
        length = shard.rows * math.prod(shard.param.shape[1:])
        near = [rank - self._axes.mesh.rank for rank in kind.holders]
        ranks = tuple(rank + step for rank in shard.axis.ranks for step in near)
        deal = assign_evenly(ranks, length, len(near), turn=self._axes.turn(name))
        start = min(shard.axis.rank * length, whole.numel())
        part, flat = self._axes.part_of(name, whole), local.detach().contiguous().view(-1)
        return FlatSlice(self._axes.saved_name(name), part, deal, start, flat)

    def _undivided(self, name: str, value: torch.Tensor) -> FlatSlice:
        """Return the flat slice for a tensor with the parameter's shape that only this rank and its replicas store."""
        holders, numel = self._kinds[name].holders, value.numel()
        deal = assign_evenly(holders, numel, len(holders), turn=self._axes.turn(name))
        part = self._axes.part_of(name, torch.empty(value.shape, device="meta"))
        return FlatSlice(self._axes.saved_name(name), part, deal, 0, flat_of(value.contiguous()))

    def states(self, optimizer: torch.optim.Optimizer, adoption: ShardAdoption) -> Iterator[FlatSlice]:
        """Yield this rank's states of an optimizer as flat slices.

        Raises CheckpointError for a state whose shape does not fit its parameter.
        """
        for name, param, is_whole in adoption.local_params(optimizer):
            shard = self._shards[name]
            first = self._kinds[name].holders[0] if is_whole else self.like(name, shard.local).deal.holder(0)
            for key, value in optimizer.state.get(param, {}).items() if param is not None else ():
                if not isinstance(value, torch.Tensor):
                    continue
                full_name = f"{self._axes.saved_name(name)}/{key}"
                if value.ndim and value.shape == (shard.param if is_whole else shard.local).shape:
                    found = self._undivided(name, value) if is_whole else self.like(name, value)
                    if found.flat.numel() or not found.part.numel:
                        yield replace(found, name=full_name)
                elif value.ndim and not is_whole:
                    raise not_joinable(full_name, value.shape)
                else:
                    yield single_rank_slice(full_name, value, first)

    def take_states(
        self,
        optimizer: torch.optim.Optimizer,
        adoption: ShardAdoption,
        plain: Mapping[str, nn.Parameter],
        source: StateSource,
    ) -> None:
        """Load an optimizer's states on this rank.

        Without pipeline stages, raises CheckpointError for a state of a parameter that the optimizer does not train.
        """
        ours: dict[str, list[tuple[str, nn.Parameter | None, bool]]] = {}
        for name, param, is_whole in adoption.local_params(optimizer):
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
                    like = self._axes.slice_of(name, param)
                else:
                    shard = self._shards[name]
                    target = torch.empty(shard.param.shape, device="meta") if is_whole else shard.local
                    like = self._undivided(name, target) if is_whole else self.like(name, target)
                if saved.shape and tuple(saved.shape) == like.part.shape:
                    shape = self._shards[name].param.shape if is_whole and name not in plain else None
                    piece = param if shape is None else torch.empty(shape, device=param.device)
                    optimizer.state[param][key] = filled(full_name, like, piece, source)
                else:
                    optimizer.state[param][key] = read_full(source, full_name).to(param.device)


def plain_states(
    params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, axes: AxisMap
) -> Iterator[FlatSlice]:
    """Yield the states of parameters that every rank stores in full."""
    for name, param in params.items():
        found = axes.slice_of(name, param)
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                full_name = f"{found.name}/{key}"
                if value.ndim and value.shape == param.shape:
                    yield replace(axes.slice_of(name, value), name=full_name)
                else:
                    yield single_rank_slice(full_name, value, found.deal.holder(0))


# Error feedback of replicas under zero=3: residuals of each unit's sums over its shard ranks.


@dataclass(slots=True)
class UnitWithErrorFeedback:
    """A unit whose sums over replicas store their rounding errors as residuals.

    unit: its index. shards: its trained parameters, in the order of their sums. axis: the replicas.
    """

    unit: int
    coders: Coders
    coder: Coder
    shards: Sequence[Shard]
    axis: Axis

    def sending(self, numel: int) -> Coder:
        """Return the coder for the unit's sums. Raises CommError if they do not cover all its parameters."""
        if numel != self.numel:
            raise CommError(
                f"compress={self.coder.wire.spec.name}: unit {self.unit} sums {numel} of its {self.numel} values: a "
                "forward left parameters out. Use compress=int8, which has no error feedback."
            )
        self.coder.matrices = () if self.coders.is_exact else self.matrices()
        return self.coder

    @property
    def numel(self) -> int:
        """Number of elements of the unit's gradient sums on a rank."""
        return sum(_length(shard) for shard in self.shards)

    def matrices(self) -> list[Matrix]:
        """Return the positions of this rank's rows of matrices in the unit's sums, for a low-rank wire format."""
        rank, found = self.coder.wire.spec.rank, list[Matrix]()
        for shard, at in self.shard_offsets() if rank else ():
            found += matrices_of(tuple(shard.local.shape), 0, shard.local.numel(), at, rank)
        return found

    def shard_offsets(self) -> Iterator[tuple[Shard, int]]:
        """Yield each parameter's shard, and the index of its first element in the sums."""
        at = 0
        for shard in self.shards:
            yield shard, at
            at += _length(shard)

    @property
    def key(self) -> str:
        """Name of the unit's residual in the coder's state."""
        return f"summands-1x{self.numel}/residual"


class ShardErrorFeedback:
    """Error feedback of sharded parameters."""

    def __init__(
        self,
        placed: ShardSlices,
        shards: Mapping[str, Shard],
        plain: Mapping[str, nn.Parameter],
        axes: AxisMap,
        coders: Coders,
    ):
        self._placed, self._shards, self._plain, self._axes, self._coders = placed, shards, plain, axes, coders
        #: Units with error feedback. Empty if the wire format over replicas does not use it.
        self.units: list[UnitWithErrorFeedback] = []

    def sending(self, unit: int, params: Sequence[nn.Parameter], axis: Axis, coder: Coder) -> Callable[[int], Coder]:
        """Return a function that maps a number of elements to the coder of a unit's sums over replicas.

        If the wire format uses error feedback and there are several replicas, the unit is added to `units`. params:
        parameters of fully_shard, in the order of its reduction.
        """
        if not coder.wire.feeds_back or axis.size == 1:
            return lambda numel: coder
        of = {id(shard.param): shard for shard in self._shards.values()}
        found = UnitWithErrorFeedback(
            unit, self._coders, coder, [of[id(one)] for one in params if one.requires_grad], axis
        )
        self.units.append(found)
        return found.sending

    def residual_slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's residuals, without copies. Local; no communication."""
        for unit in self.units:
            if (flat := dict(unit.coder.states()).get(unit.key)) is not None:
                yield from self._of(unit, flat.view(-1))

    @torch.no_grad()
    def take(self, source: StateSource) -> list[str]:
        """Load residuals from a checkpoint of any plan. Return a log line if the number of replicas differs, else [].

        If this plan cannot store a residual, it is added to the gradients of the first step, with a log line instead.
        """
        saved = replicas_in(source)
        if not saved:
            return []
        owing = {shard.name for unit in self.units for shard in unit.shards}
        # The residuals of parameters outside these units are added to the sums of the first step.
        params = {name: shard.local for name, shard in self._shards.items()} | dict(self._plain)
        for name, param in params.items():
            if param.requires_grad and name not in owing:
                total = torch.zeros_like(param.detach())
                found = self._axes.slice_of(name, total) if name in self._plain else self._placed.like(name, total)
                read_residual(replace(found, name=f"{found.name}/residual."), source)
                if not self.units or total.any():
                    self._coders.owed[name] = total
        number = self.units[0].axis.size if self.units else 0
        for unit in self.units:
            local = unit.shards[0].local
            debt = torch.zeros(unit.numel, dtype=local.dtype, device=local.device)
            whose = (str(unit.axis.rank),) if saved == number else ()
            for like in self._of(unit, debt):
                read_residual(like, source, whose)
            if saved != number:
                debt /= number
            rest = {name: tensor for name, tensor in unit.coder.states() if not name.endswith("/residual")}
            unit.coder.load({**rest, unit.key: debt[None]})
        if self._coders.owed:
            return ["the earlier compression error is added to the gradients of the first step"]
        return [] if saved == number else [f"what {saved} replicas' compression error is shared by {number} now"]

    def add(self) -> None:
        """Add the loaded residuals of parameters outside `units` to their gradient sums of this step."""
        for name, total in self._coders.owed.items():
            grad = self._shards[name].local.grad if name in self._shards else self._plain[name].grad
            if grad is not None:
                grad.add_(total, alpha=self._coders.unit)

    def _of(self, unit: UnitWithErrorFeedback, flat: torch.Tensor) -> Iterator[FlatSlice]:
        """Yield flat slices of this replica's residual, one for each of a unit's parameters."""
        for shard, at in unit.shard_offsets():
            numel = shard.local.numel()
            like = self._placed.like(shard.name, shard.local)
            # Error feedback does not support tp, pp and ep, so no other rank has the same residual.
            deal = OwnershipMap(shard.axis.ranks, max(_length(shard), 1))
            if numel:
                name = f"{like.name}/residual.{unit.axis.rank}"
                yield FlatSlice(name, like.part, deal, like.start, flat[at : at + numel])


def _length(shard: Shard) -> int:
    """Return the number of communicated elements of a shard, which is equal on all ranks."""
    return shard.rows * shard.param.shape[1:].numel()
