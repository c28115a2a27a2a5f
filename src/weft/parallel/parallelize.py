"""The order in which a plan is applied to a model, on one screen."""

from __future__ import annotations

import warnings

from torch import nn

from weft.errors import ModelError
from weft.memory import apply_recompute, repeated_blocks
from weft.memory.activations import offload_activations
from weft.memory.offload import Host, offload_lines, open_host
from weft.mesh import Mesh
from weft.parallel.flat import FlatModel
from weft.parallel.gradients import DataParallel, attach, is_attached


def parallelize(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Lay `model` over the mesh, in place, before its optimizer exists. Returns the same module.

    Built today: device, recompute, compile, number format and data parallel. Splitting into stages, experts, tensor
    and context parallel take their places here, in this order, between device and recompute.
    Raises ModelError when the model was laid over a mesh before.
    """
    if is_attached(model):
        raise ModelError("model: it was laid over a mesh before. Build a new one, or copy.deepcopy this one.")
    model.to(device=mesh.device)
    apply_recompute(model, mesh.plan, mesh["dp_replicate", "dp_shard", "cp", "tp"])
    if mesh.plan.compile:
        compile_blocks(model)
    host = open_host(mesh.plan, mesh.device)
    if host is not None and (share := mesh.plan.offload_share("activations")):
        offload_activations(list(repeated_blocks(model).items()) or [("", model)], share, host)
    if host is not None and mesh.rank == 0 and mesh.device.type != "cuda":
        warnings.warn(
            f"offload={'+'.join(mesh.plan.offload)}: {offload_lines(mesh.plan, mesh.device)[-1]}", stacklevel=2
        )
    attach(model, _engine(model, mesh, host))
    return model


def _engine(model: nn.Module, mesh: Mesh, host: Host | None) -> DataParallel:
    """The stage that the plan asks for."""
    if mesh.plan.zero == 3:
        from weft.parallel.zero3 import FullyShardedModel

        return FullyShardedModel(model, mesh)
    return FlatModel(model, mesh, host=host)


def compile_blocks(model: nn.Module) -> None:
    """Compile each repeated block by itself: compile time stays flat in depth. Without blocks, the whole model."""
    for block in repeated_blocks(model).values() or [model]:
        block.compile()
