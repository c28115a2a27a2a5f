"""Units of a model: modules whose parameters are gathered, freed and reduced together.

A unit is a repeated block (an entry of a ModuleList or Sequential), or a large layer outside the blocks, such as the
embedding and the head. Other parameters (final norm, small ones) belong to the root, which stays gathered for a full
step. A large layer is therefore a unit, unless its weight is tied across units or read outside its calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from weft.comm.collectives import all_reduce, broadcast
from weft.comm.mesh import Axis, Mesh, join_group
from weft.comm.wire.coder import Coders
from weft.errors import LaunchError, ModelError, PlanError
from weft.memory.offload import Host, choose, shard_offload
from weft.models.inspect import blocks, dry_run, hugging_face, layers
from weft.models.keras_model import KerasVariables
from weft.optim.step_decision import global_norm
from weft.parallel.private_torch import keep_second_shards
from weft.parallel.state.flat_slices import FlatSlice
from weft.parallel.state.materialize import Materialise
from weft.parallel.state.placement import Axes, AxisMap
from weft.parallel.state.precision import Precision, cast_inputs, formats
from weft.parallel.zero.states import broadcast_buffers
from weft.parallel.zero_sharded.hooks import without_views
from weft.parallel.zero_sharded.optimizer_states import ShardAdoption, ShardSlices
from weft.parallel.zero_sharded.shards import HostedShards, Shard, choose_hosted, find_shards

#: Minimum fraction of all parameters with which a layer outside the blocks becomes a unit.
LARGE_SHARE = 1 / 64


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit. name: its path in the model without wrappers; "" is the root."""

    name: str
    module: nn.Module

    def __str__(self) -> str:
        return self.name or "the root module"


def find_units(model: nn.Module) -> list[Unit]:
    """Find the units below the root, in the model's order. Units are not nested.

    A module that is registered and called in several modules is one unit. A module that shares a parameter with a
    module outside it is not a unit: a tied embedding and head stay with the root, and are gathered together. A module
    whose weights are read outside its calls is also not a unit, such as a block of which another module calls a part.
    """
    owners: dict[int, set[nn.Module]] = {}  # parents of each parameter and module, by id
    for module in model.modules():
        for owned in (*module.children(), *module.parameters(recurse=False)):
            owners.setdefault(id(owned), set()).add(module)
    is_known = hugging_face.is_hugging_face(model) or isinstance(model, layers.KnownModel)
    order = None if is_known else dry_run.call_order(model)
    large = LARGE_SHARE * sum(param.numel() for param in model.parameters())

    def is_unit(site: blocks.Site) -> bool:
        module = site.module
        if isinstance(module, KerasVariables):  # read by its layer and never called
            return False
        if not blocks.is_layer(module):
            fits = _is_block(site)
        else:  # torch's attention reads the weights of its output projection without calling it
            called = not isinstance(site.parent, nn.MultiheadAttention)
            fits = called and sum(param.numel() for param in module.parameters()) >= large
        if not fits or (order is not None and order.is_read(module)):
            return False
        # The module must not contain a parameter or module that a module outside it also contains.
        inside = set(module.modules())
        below = (child for child in inside if child is not module and blocks.has_params(child))
        return all(owners[id(owned)] <= inside for owned in (*module.parameters(), *below))

    return [Unit(site.path, site.module) for site in blocks.outermost(model, is_unit)]


def _is_block(site: blocks.Site) -> bool:
    """Return True if an entry of a container is a block: it has a forward, and no repeated modules inside.

    With repeated modules inside, it is a block only if the container has several entries of its class. An
    nn.Sequential is a block only if all its children are layers.
    """
    module = site.module
    if isinstance(module, blocks.LISTS) or not isinstance(site.parent, blocks.CONTAINERS):
        return False
    if type(module) is nn.Sequential and not all(blocks.is_layer(child) for child in module):
        return False
    containers = (part for part in module.modules() if isinstance(part, blocks.CONTAINERS))
    return _num_per_class(site.parent)[type(module)] > 1 or all(
        count == 1 for part in containers for count in _num_per_class(part).values()
    )


def _num_per_class(container: nn.Module) -> Counter[type[nn.Module]]:
    return Counter(type(child) for child in container.children() if not blocks.is_layer(child))


# Placements under zero=3: experts are separate units, and partial sums are added once per step.

_MIXED = (
    "module {0}: it has parameters that are sharded over ep and others, and zero=3 shards them over different "
    "ranks. Put experts into a separate module."
)


def with_experts(units: Sequence[Unit], model: nn.Module, axes: AxisMap) -> tuple[Unit, ...]:
    """Return the units, each after the units of the experts inside it.

    A unit is sharded over one axis, and experts over another axis than the rest. Raises ModelError if experts share a
    module with other parameters.
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
    """Return, for each unit, its parameters that no earlier unit has."""
    taken: set[int] = set()
    found: list[list[nn.Parameter]] = []
    for unit in units:
        found.append([param for param in unit.module.parameters() if id(param) not in taken])
        taken |= {id(param) for param in found[-1]}
    return found


def kinds_of(units: Sequence[Unit], axes: AxisMap) -> list[Axes]:
    """Return the axes of each unit's parameters: the experts' axes, or `axes.plain`.

    Raises ModelError if a unit has experts and other parameters.
    """
    names = {id(param): name for name, param in units[-1].module.named_parameters()}
    found: list[Axes] = []
    for unit, rest in zip(units, own_params(units), strict=True):
        kinds = {axes.is_expert(names[id(param)]) for param in rest}
        if len(kinds) > 1:
            raise ModelError(_MIXED.format(unit))
        found.append(axes.of(names[id(rest[0])], rest[0].shape) if True in kinds else axes.plain)
    return found


def group_of(axis: Axis) -> dist.ProcessGroup:
    """Return the axis's process group, or for size 1 a group of only this rank, which fully_shard requires."""
    return axis.group if axis.group is not None else join_group(axis.ranks, "rank")


def finalize(
    model: nn.Module, chosen: Mapping[nn.Parameter, torch.dtype], precision: Precision, axes: AxisMap
) -> dict[str, torch.Tensor]:
    """Broadcast parameters and buffers from the first of the ranks that hold the same part.

    Trained floating-point parameters get the master dtype before, and others their dtype of `chosen`. Meta parameters
    are not broadcast. Returns the buffers that checkpoints contain; training may update them.
    """
    for name, param in model.named_parameters():
        dtype = precision.master if param.requires_grad and param.is_floating_point() else chosen[param]
        settled = param.data.to(dtype).contiguous()
        param.data = settled if param.is_meta else broadcast(settled, axes.of(name, param.shape).same)
    broadcast_buffers((buffer, axes.settling(name, buffer)) for name, buffer in model.named_buffers())
    lasting = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in lasting}


class PartialSums:
    """Gradients that are summed over their units' ranks, but are still partial sums over other axes, such as tp."""

    def __init__(self, axes: AxisMap, precision: Precision, device: torch.device):
        self._axes, self._precision = axes, precision
        self.coders = Coders(precision.wire, precision.outer_wire)
        self._device = device

    @torch.no_grad()
    def add(self, grads: Iterable[tuple[Axis, torch.Tensor]]) -> None:
        """Sum each gradient over its axis in place, with one collective per axis."""
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
        """Broadcast gradients of replicated parameters from the first tp rank to all, so that they are equal.

        The rounding of a wire format depends on adjacent elements in a unit, which are different shards on each rank.
        Does nothing with tp=1, or if all wires send unrounded values.
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
        """Return this rank's share of the squared norm, 0-d float64.

        grads: (gradient, number of ranks that count the same gradient, including this one).
        """
        groups: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        for grad, number in grads:
            groups.setdefault((number, grad.device), []).append(grad)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for (number, device), parts in groups.items():
            square = global_norm(parts).double().square()
            # A Python number from the host is an argument of the addition. A host tensor would need a blocking copy.
            total += (float(square) if device.type == "cpu" else square) / number
        return total


def _deepest_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _deepest_first(child)
    yield module


# Setup of zero=3: requirements on torch, and fully_shard on each unit.

#: Methods of fully_shard that Weft needs; torch 2.11 has all of them.
NEEDED = (
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_all_reduce_hook",
    "set_unshard_in_backward",
)


def check_torch(mesh: Mesh) -> None:
    """Raise PlanError if the plan leaves nothing for zero=3 to shard, and LaunchError if torch is too old."""
    if mesh.plan.dp_shard * mesh.plan.cp == 1 and not mesh.plan.offload_share("params"):
        raise PlanError("zero=3: it shards over dp_shard, and dp_shard is 1. Use dp_shard=2 or more, or zero=0.")
    missing = [name for name in NEEDED if not hasattr(FSDPModule, name)]
    if missing:
        raise LaunchError(
            f"zero=3: fully_shard of torch {torch.__version__} lacks {', '.join(missing)}. Install torch 2.11 or later."
        )


def _second_mesh(mesh: Mesh) -> DeviceMesh | None:
    """Build the mesh of dp_shard and of the adjacent ranks that keep secondary shards, or None without such shards."""
    if not mesh.plan.second_shards:
        return None
    whole, near = mesh["dp_shard"], mesh[f"dp_shard/{mesh.plan.second_shards}"]
    rows = torch.tensor(whole.ranks).view(-1, near.size)
    # No data is sent over the first dimension, so any group of this rank works.
    groups = [group_of(whole), group_of(near)]
    return DeviceMesh.from_group(groups, mesh.device.type, mesh=rows, mesh_dim_names=("apart", "near"))


def shard_units(
    units: tuple[Unit, ...],
    axes: list[Axis],
    mesh: Mesh,
    precision: Precision,
    plain: set[nn.Parameter],
    materialise: Materialise,
) -> tuple[list[list[str]], list[str]]:
    """Apply fully_shard to each unit over its axis, the root last.

    Returns the names of each unit's parameters, and the names of the parameters on the host. Raises PlanError for a
    trained parameter without elements.
    """
    meshes = {
        axis.ranks: DeviceMesh.from_group(group_of(axis), mesh.device.type, mesh_dim_names=("dp_shard",))
        for axis in dict.fromkeys(axes)
    }
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision.is_mixed:
        policy = MixedPrecisionPolicy(precision.compute, precision.master, cast_forward_inputs=False)
    names = {param: name for name, param in units[-1].module.named_parameters() if param not in plain}
    members: list[list[str]] = []
    owned = [[param for param in own if param in names] for own in own_params(units)]
    if empty := [names[param] for own in owned for param in own if param.requires_grad and not param.numel()]:
        raise PlanError(
            f"zero=3: parameter {empty[0]} has no elements, and fully_shard cannot reduce such a gradient. Use zero=2."
        )
    if scripts := [str(unit) for unit in units if isinstance(unit.module, torch.jit.ScriptModule)]:
        raise PlanError(f"zero=3: {scripts[0]} is compiled by TorchScript, which fully_shard cannot wrap. Use zero=2.")
    sizes = [(str(unit), sum(param.numel() for param in own)) for unit, own in zip(units, owned, strict=True)]
    on_host = choose(sizes, mesh.plan.offload_share("params"))
    reshard, second = mesh.plan.reshard.partition(":")[0], _second_mesh(mesh)
    for index, module in enumerate(unit.module for unit in units):
        members.append([names[param] for param in owned[index]])
        materialise.make(owned[index])  # unsharded only until its unit is sharded
        # Backward of the last unit follows its forward directly, and the root is always in use.
        in_use = index >= len(units) - 2
        embeds = type(module) is nn.Embedding
        lets_go = (reshard == "after_forward" and not in_use) or (reshard == "after_backward" and embeds)
        lets_go = lets_go and mesh.plan.pp == 1  # under pp, other forwards run before the first backward
        settings = {"mp_policy": policy, "ignored_params": plain}
        settings |= shard_offload(mesh.plan, mesh.device, str(units[index]) in on_host)
        unit = fully_shard(module, mesh=meshes[axes[index].ranks], reshard_after_forward=lets_go, **settings)
        if lets_go and second is not None and axes[index].ranks == mesh["dp_shard"].ranks:
            keep_second_shards(unit, second)
        # The gradient of an embedding needs its tokens, not its weights.
        unit.set_unshard_in_backward(not embeds)
        module.register_forward_hook(without_views, prepend=True)
    return members, [name for unit, own in zip(units, members, strict=True) if str(unit) in on_host for name in own]


# Parameters of a model: sharded in units, or replicated.


class ShardedParameters:
    """Units, shards and unsharded tensors of a model. The constructor shards its modules.

    `plain` holds parameters that every rank stores in full: scalars, and those in another dtype than the computation.
    `members` holds the shards of each unit.

    model: model; its parameters may be on the meta device. host: host memory for the plan's share of states, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        axes: AxisMap,
        precision: Precision,
        materialise: Materialise,
        host: Host | None,
    ):
        self._axes = axes
        self.units = with_experts((*find_units(model), Unit("", model)), model, axes)
        self.unit_axes = [kind.shard for kind in kinds_of(self.units, axes)]
        cast_inputs(model, precision)
        dtypes = formats(model, precision)
        self.buffers = finalize(model, dtypes, precision, axes)
        originals = dict(model.named_parameters())
        self.kinds = {name: axes.of(name, param.shape) for name, param in originals.items()}
        self.plain = {
            name: param for name, param in originals.items() if param.ndim == 0 or dtypes[param] != precision.compute
        }
        materialise.make(self.plain.values())
        plain = set(self.plain.values())
        members, on_host = shard_units(self.units, self.unit_axes, mesh, precision, plain, materialise)
        self.shards = find_shards(model, list(originals), lambda name: self.kinds[name].shard)
        self.members = [[self.shards[name] for name in names] for names in members]
        self.modules = [unit.module for unit in self.units if isinstance(unit.module, FSDPModule)]
        self.slices = ShardSlices(self.shards, self.kinds, axes)
        self.hosted: HostedShards | None = None
        names = choose_hosted(self.shards, on_host, mesh.stage_plan)
        if host is not None and names:
            self.hosted = HostedShards(host, self.shards, names)
            if axes.plain.replicate.size == 1:
                kinds = self.kinds
                self.hosted.watch(n for n in names if kinds[n].extra.size == 1 and kinds[n].shard.size > 1)
        self.adoption = ShardAdoption(self.shards, originals, axes.plain.shard, self.hosted)

    def local(self) -> Iterator[tuple[str, nn.Parameter]]:
        return chain(((name, shard.local) for name, shard in self.shards.items()), self.plain.items())

    def counted(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Yield this rank's shards and unsharded parameters, each with the number of ranks that store the same one."""
        yield from ((shard.local, self.kinds[name].share[1]) for name, shard in self.shards.items())
        yield from ((param, self.kinds[name].same.size) for name, param in self.plain.items())

    def full(self, of: Callable[[nn.Parameter], torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors of the parameters for which `of` returns a local tensor. All ranks must call it."""
        for name, shard in self.shards.items():
            if (local := of(shard.local)) is not None:
                yield name, shard.gather(local)
        for name, param in self.plain.items():
            if (tensor := of(param)) is not None:
                yield name, tensor

    def model_slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of parameters and buffers. Local; no communication."""
        yield from (one for name in self.shards if (one := self.slices.of(name)) is not None)
        for name, tensor in (*self.plain.items(), *self.buffers.items()):
            yield self._axes.slice_of(name, tensor)
