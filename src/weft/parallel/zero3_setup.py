"""zero=3, at the start: what torch must have, equal weights on all ranks, and fully_shard on each unit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from weft.comm import broadcast
from weft.errors import LaunchError, PlanError
from weft.memory.offload import choose, shard_offload
from weft.mesh import Axis, Mesh
from weft.parallel.axes import AxisMap
from weft.parallel.precision import Precision
from weft.parallel.units import Unit
from weft.parallel.zero3_placed import group_of, own_params

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
    if mesh.plan.dp_shard * mesh.plan.cp == 1:
        raise PlanError("zero=3: it shards over dp_shard, and dp_shard is 1. Use dp_shard=2 or more, or zero=0.")
    missing = [name for name in NEEDED if not hasattr(FSDPModule, name)]
    if missing:
        raise LaunchError(
            f"zero=3: fully_shard of torch {torch.__version__} lacks {', '.join(missing)}. Install torch 2.11 or later."
        )


def settle(
    model: nn.Module, chosen: Mapping[nn.Parameter, torch.dtype], precision: Precision, axes: AxisMap
) -> dict[str, torch.Tensor]:
    """Parameters and buffers become the first rank's; what is trained, in the master's format.

    Returns the buffers that checkpoints hold; training may move them.
    """
    for name, param in model.named_parameters():
        dtype = precision.master if param.requires_grad and param.is_floating_point() else chosen[param]
        param.data = broadcast(param.data.to(dtype).contiguous(), axes.of(name, param.shape).same)
    for name, buffer in model.named_buffers():
        settled = broadcast(buffer.detach().contiguous(), axes.settling(name, buffer))
        if settled.data_ptr() != buffer.data_ptr():
            buffer.copy_(settled)
    lasting = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in lasting}


def shard_units(
    units: tuple[Unit, ...], axes: list[Axis], mesh: Mesh, precision: Precision, plain: set[nn.Parameter]
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
    sizes = [(str(unit), sum(param.numel() for param in own)) for unit, own in zip(units, owned, strict=True)]
    on_host = choose(sizes, mesh.plan.offload_share("params"))
    for index, (module, reshard) in enumerate((unit.module, mesh.plan.reshard) for unit in units):
        members.append([names[param] for param in owned[index]])
        # The backward of the last unit follows its forward, and the root is in use all along.
        in_use = index >= len(units) - 2
        embeds = type(module) is nn.Embedding
        lets_go = (reshard == "after_forward" and not in_use) or (reshard == "after_backward" and embeds)
        settings = {"mp_policy": policy, "ignored_params": plain}
        settings |= shard_offload(mesh.plan, mesh.device, str(units[index]) in on_host)
        fully_shard(module, mesh=meshes[axes[index].ranks], reshard_after_forward=lets_go, **settings)
        # The gradient of an embedding needs its tokens, not its weights.
        module.set_unshard_in_backward(not embeds)
    return members, [name for unit, own in zip(units, members, strict=True) if str(unit) in on_host for name in own]
