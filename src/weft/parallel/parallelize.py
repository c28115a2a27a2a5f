"""The order in which a plan is applied to a model, on one screen."""

from __future__ import annotations

from torch import nn

from weft.errors import ModelError
from weft.memory.offload import Host, open_host
from weft.mesh import Mesh
from weft.parallel.flat import FlatModel
from weft.parallel.gradients import DataParallel, attach, is_attached


def parallelize(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Lay `model` over the mesh, in place, before its optimizer exists. Returns the same module.

    Built today: device, compile, number format and data parallel. Splitting into stages, experts, tensor and
    context parallel and recompute take their places here, in this order, between device and compile.
    Raises ModelError when the model was laid over a mesh before.
    """
    if is_attached(model):
        raise ModelError("model: it was laid over a mesh before. Build a new one, or copy.deepcopy this one.")
    model.to(device=mesh.device)
    if mesh.plan.compile:
        compile_blocks(model)
    host = open_host(mesh.plan, mesh.device)
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
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    for block in blocks or [model]:
        block.compile()
