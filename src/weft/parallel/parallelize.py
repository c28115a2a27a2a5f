"""The order in which a plan is applied to a model, on one screen."""

from __future__ import annotations

from torch import nn

from weft.errors import ModelError
from weft.memory import apply_recompute, repeated_blocks
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
    attach(model, _engine(model, mesh))
    return model


def _engine(model: nn.Module, mesh: Mesh) -> DataParallel:
    """The stage that the plan asks for."""
    if mesh.plan.zero == 3:
        from weft.parallel.zero3 import FullyShardedModel

        return FullyShardedModel(model, mesh)
    return FlatModel(model, mesh)


def compile_blocks(model: nn.Module) -> None:
    """Compile each repeated block by itself: compile time stays flat in depth. Without blocks, the whole model."""
    for block in repeated_blocks(model).values() or [model]:
        block.compile()
