"""zero=3, at the start: what torch must have, and fully_shard on each unit."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from weft.errors import LaunchError, PlanError
from weft.memory import choose, shard_offload
from weft.mesh import Axis, Mesh
from weft.parallel.local_tensors import Precision
from weft.parallel.placement import Materialise
from weft.parallel.private_torch import keep_second_shards
from weft.parallel.zero.sharded.fsdp_hooks import return_no_views
from weft.parallel.zero.sharded.fsdp_units import Unit
from weft.parallel.zero.sharded.placed_units import group_of, own_params

#: What fully_shard must be able to do; torch 2.11 has all of it.
NEEDED = (
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_all_reduce_hook",
    "set_unshard_in_backward",
)


def check_torch(mesh: Mesh) -> None:
    if mesh.plan.dp_shard * mesh.plan.cp == 1 and not mesh.plan.offload_share("params"):
        raise PlanError("zero=3: it shards over dp_shard, and dp_shard is 1. Use dp_shard=2 or more, or zero=0.")
    missing = [name for name in NEEDED if not hasattr(FSDPModule, name)]
    if missing:
        raise LaunchError(
            f"zero=3: fully_shard of torch {torch.__version__} lacks {', '.join(missing)}. Install torch 2.11 or later."
        )


def _second_mesh(mesh: Mesh) -> DeviceMesh | None:
    """Ranks of dp_shard, and among them the neighbours that keep second shards; None where the plan has none."""
    if not mesh.plan.second_shards:
        return None
    whole, near = mesh["dp_shard"], mesh[f"dp_shard/{mesh.plan.second_shards}"]
    rows = torch.tensor(whole.ranks).view(-1, near.size)
    # Nothing is sent over the first dimension: any group of this rank stands for it.
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

    Returns the names of each unit's parameters, and the names of those that are on the host.
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
    sizes = [(str(unit), sum(param.numel() for param in own)) for unit, own in zip(units, owned, strict=True)]
    on_host = choose(sizes, mesh.plan.offload_share("params"))
    reshard, second = mesh.plan.reshard.partition(":")[0], _second_mesh(mesh)
    for index, module in enumerate(unit.module for unit in units):
        members.append([names[param] for param in owned[index]])
        materialise.make(owned[index])  # whole only until its unit is divided
        # The backward of the last unit follows its forward, and the root is in use all along.
        in_use = index >= len(units) - 2
        embeds = type(module) is nn.Embedding
        lets_go = (reshard == "after_forward" and not in_use) or (reshard == "after_backward" and embeds)
        lets_go = lets_go and mesh.plan.pp == 1  # else another microbatch's forward comes before the first backward
        settings = {"mp_policy": policy, "ignored_params": plain}
        settings |= shard_offload(mesh.plan, mesh.device, str(units[index]) in on_host)
        unit = fully_shard(module, mesh=meshes[axes[index].ranks], reshard_after_forward=lets_go, **settings)
        if lets_go and second is not None and axes[index].ranks == mesh["dp_shard"].ranks:
            keep_second_shards(unit, second)
        # The gradient of an embedding needs its tokens, not its weights.
        unit.set_unshard_in_backward(not embeds)
        return_no_views(module)
    return members, [name for unit, own in zip(units, members, strict=True) if str(unit) in on_host for name in own]
