"""What placements ask of zero=3: experts are units of their own, and partial sums are added up once in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from weft.comm import all_reduce, broadcast
from weft.comm.wire import Coders
from weft.errors import ModelError
from weft.mesh import Axis, join_group
from weft.optim import global_norm
from weft.parallel.local_tensors import Precision
from weft.parallel.placement import Axes, AxisMap
from weft.parallel.zero.sharded.fsdp_units import Unit
from weft.parallel.zero.sharded.param_shards import Shard

_MIXED = (
    "module {0}: it holds parameters that are cut over ep and others, and zero=3 divides them over different ranks. "
    "Keep experts in a module of their own."
)


def with_experts(units: Sequence[Unit], model: nn.Module, axes: AxisMap) -> tuple[Unit, ...]:
    """The units, each after those of experts inside of it. ModelError where experts share a module with others.

    A unit is divided over one axis, and experts are divided over another one than the rest.
    """
    own = {id(unit.module) for unit in units}
    names = {id(module): name for name, module in model.named_modules()}
    kinds = {id(param): axes.is_expert(name) for name, param in model.named_parameters()}
    found: list[Unit] = []
    seen: set[int] = set()
    for unit in units:
        for module in _deepest_first(unit.module):
            direct = {kinds[id(param)] for param in module.parameters(recurse=False)}
            if len(direct) > 1:
                raise ModelError(_MIXED.format(names[id(module)]))
            if True in direct and id(module) not in own | seen:
                found.append(Unit(names[id(module)], module))
                seen.add(id(module))
        found.append(unit)
    return tuple(found)


def own_params(units: Sequence[Unit]) -> list[list[nn.Parameter]]:
    """The parameters of each unit that no unit before it has."""
    taken: set[int] = set()
    found: list[list[nn.Parameter]] = []
    for unit in units:
        found.append([param for param in unit.module.parameters() if id(param) not in taken])
        taken |= {id(param) for param in found[-1]}
    return found


def kinds_of(units: Sequence[Unit], axes: AxisMap) -> list[Axes]:
    """The axes of each unit, which are those of all its parameters but for partial sums."""
    names = {id(param): name for name, param in units[-1].module.named_parameters()}
    found: list[Axes] = []
    for unit, rest in zip(units, own_params(units), strict=True):
        kinds = {axes.is_expert(names[id(param)]) for param in rest}
        if len(kinds) > 1:
            raise ModelError(_MIXED.format(unit))
        found.append(axes.of(names[id(rest[0])], rest[0].shape) if True in kinds else axes.plain)
    return found


def group_of(axis: Axis) -> dist.ProcessGroup:
    """The axis's group; where nothing is divided, one of this rank alone, which fully_shard asks for."""
    return axis.group if axis.group is not None else join_group(axis.ranks, "rank")


def settle(
    model: nn.Module, chosen: Mapping[nn.Parameter, torch.dtype], precision: Precision, axes: AxisMap
) -> dict[str, torch.Tensor]:
    """Parameters and buffers become the first rank's; what is trained, in the master's format.

    Returns the buffers that checkpoints hold; training may move them.
    """
    for name, param in model.named_parameters():
        dtype = precision.master if param.requires_grad and param.is_floating_point() else chosen[param]
        settled = param.data.to(dtype).contiguous()
        param.data = settled if param.is_meta else broadcast(settled, axes.of(name, param.shape).same)
    for name, buffer in model.named_buffers():
        settled = broadcast(buffer.detach().contiguous(), axes.settling(name, buffer))
        if settled.data_ptr() != buffer.data_ptr():
            buffer.copy_(settled)
    lasting = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in lasting}


class PartialSums:
    """Gradients that are sums over their units' ranks, and still partial over others, such as those of tp."""

    def __init__(self, axes: AxisMap, precision: Precision, device: torch.device):
        self._axes = axes
        self._precision = precision
        self.coders = Coders(precision.wire, precision.outer_wire)
        self._device = device

    @torch.no_grad()
    def add(self, grads: Iterable[tuple[Axis, torch.Tensor]]) -> None:
        """Add each gradient up over its axis, in place; one collective for each axis."""
        groups: dict[tuple[int, ...], tuple[Axis, list[torch.Tensor]]] = {}
        for axis, grad in grads:
            if axis.size > 1:
                groups.setdefault(axis.ranks, (axis, []))[1].append(grad)
        for axis, parts in groups.values():
            flat = torch.cat([part.reshape(-1).to(self._device, self._precision.master) for part in parts])
            all_reduce(flat, axis, wire=self.coders[f"partial {axis.name}"])
            for part, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(total.view_as(part))

    @torch.no_grad()
    def level(self, shards: Mapping[str, Shard]) -> None:
        """Let the ranks of tp have equal gradients of what they all hold: the first one's.

        What a wire rounds depends on what lies beside it in a unit, which is another part of a cut weight on each.
        """
        tp, wires = self._axes.mesh["tp"], (self.coders.wire, self.coders.outer_wire)
        if tp.size == 1 or all(wire.added_in(self._precision.master) is not None for wire in wires):
            return
        whole = [
            shard.local.grad
            for name, shard in shards.items()
            if not set(self._axes.placement(name).cut) & {"tp", "ep"} and shard.local.grad is not None
        ]
        if whole:
            flat = broadcast(torch.cat([grad.reshape(-1).to(self._device) for grad in whole]), tp)
            for grad, part in zip(whole, flat.split([grad.numel() for grad in whole]), strict=True):
                grad.copy_(part.view_as(grad))

    def square(self, grads: Iterator[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """This rank's share of the norm's square: gradients, each with the number of ranks that count it too."""
        groups: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        for grad, number in grads:
            groups.setdefault((number, grad.device), []).append(grad)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for (number, device), parts in groups.items():
            square = global_norm(parts).double().square()
            # A number of the host goes along with the addition; as a tensor it would be a copy that blocks.
            total += (float(square) if device.type == "cpu" else square) / number
        return total


def _deepest_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _deepest_first(child)
    yield module
