"""The order in which a plan is applied to a model, on one screen."""

from __future__ import annotations

from itertools import chain

from torch import nn

from weft.comm import broadcast
from weft.memory import apply_recompute, repeated_blocks
from weft.mesh import Mesh
from weft.parallel.precision import Precision


def parallelize(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Lay `model` over the mesh, in place, before its optimizer exists. Returns the same module.

    Built today: device and number format, recompute, compile, data parallel. Splitting into stages, experts, tensor
    and context parallel take their places here, in this order, between format and recompute.
    """
    model.to(device=mesh.device, dtype=Precision.of(mesh.plan).master)
    apply_recompute(model, mesh.plan, mesh["dp_replicate", "dp_shard", "cp", "tp"])
    if mesh.plan.compile:
        compile_blocks(model)
    equalise(model, mesh)
    return model


def compile_blocks(model: nn.Module) -> None:
    """Compile each repeated block by itself: compile time stays flat in depth. Without blocks, the whole model."""
    for block in repeated_blocks(model).values() or [model]:
        block.compile()


def equalise(model: nn.Module, mesh: Mesh) -> None:
    """Give every data-parallel rank the weights and buffers of the first, however each made its own."""
    for tensor in chain(model.parameters(), model.buffers()):
        broadcast(tensor.detach(), mesh.data)
