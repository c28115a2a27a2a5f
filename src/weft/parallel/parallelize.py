"""The order in which a plan is applied to a model, on one screen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError, WeftWarning
from weft.memory import (
    MOST_OF_HOST,
    Host,
    apply_recompute,
    offload_activations,
    offload_lines,
    open_host,
    repeated_blocks,
)
from weft.mesh import Mesh
from weft.models import MoE
from weft.parallel.context import apply_context
from weft.parallel.dropout import FunctionalDropout, follow_positions
from weft.parallel.expert.expert_balance import divide_sequences
from weft.parallel.expert.spread import SpreadExperts, expect_experts, spread_experts
from weft.parallel.layout_find import find_layout
from weft.parallel.local_means import watch_local_means
from weft.parallel.pipeline.runtime import build_pipeline, pipeline_of
from weft.parallel.placement.gradients import DataParallel, attach, is_attached
from weft.parallel.placement.materialise import move
from weft.parallel.placement.original import grown, originals_of
from weft.parallel.placement.placement import Placement, merge_placements
from weft.parallel.placement.precision import Precision
from weft.parallel.placement.state_guard import guard_model
from weft.parallel.tensor.cut_tensors import check_whole_model, cut_tensors, fuse_whole_head
from weft.parallel.zero.flat.flat_model import FlatModel
from weft.parallel.zero.sharded.sharded_model import FullyShardedModel
from weft.spec import Layout

#: torch._dynamo's word for side effects of a recomputed forward that its replay leaves out; some releases lack it.
_NOTES_ONCE = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    layout: Layout | None = None,
    placements: Mapping[str, Placement] | None = None,
    seed: int | None = None,
    pinned_limit: str = MOST_OF_HOST,
) -> nn.Module:
    """Lay `model` over the mesh, in place, before its optimizer exists. Returns the same module.

    seed: of parameters on the meta device, which are made here, as `weft.models.initialise` would fill them; and of
    dropout in steps that nobody gives a key.
    layout: which modules tensor parallelism cuts how, and which hold experts; found from the model where it is None.
    placements: of a module that the caller cut by hand, by parameter name; nothing else is cut then.
    pinned_limit: host memory that all ranks of one machine may pin for what is offloaded: a size, or a share of it.
    Raises ModelError when the model was laid over a mesh before.
    """
    if is_attached(model):
        raise ModelError("model: it is parallelized already. Build a new one, or copy.deepcopy this one.")
    before = originals_of(model)
    if mesh.rank == 0 and (said := grown(before, Precision.of(mesh.plan))):
        warnings.warn(said, WeftWarning, stacklevel=3)
    placed = cut(model, mesh, layout) if placements is None else dict(placements)
    follow_positions(model, mesh, seed or 0)
    _hold_back(model, mesh)
    move(model, mesh.device)
    apply_recompute(model, mesh.plan, mesh["dp_replicate", "dp_shard", "cp", "tp"])
    if mesh.plan.compile:
        _tell_uncompiled(model, mesh)
        compile_blocks(model)
    host = open_host(mesh.plan, mesh.device, pinned_limit)
    if host is not None and (share := mesh.plan.offload_share("activations")):
        offload_activations(list(repeated_blocks(model).items()) or [("", model)], share, host)
    if host is not None and mesh.rank == 0 and mesh.device.type != "cuda":
        warnings.warn(
            f"offload={'+'.join(mesh.plan.offload)}: {offload_lines(mesh.plan, mesh.device)[-1]}", stacklevel=2
        )
    engine = _engine(model, mesh, host, placed, seed)
    attach(model, engine, before)
    guard_model(model, engine.axes)
    watch_local_means(model, mesh)
    return model


def cut(model: nn.Module, mesh: Mesh, layout: Layout | None = None) -> dict[str, Placement]:
    """Apply the techniques that divide the model, outermost first. Returns what they did to which parameter."""
    plan = mesh.plan
    tensor_layout = layout
    if plan.pp > 1:
        expect_experts(model, layout, plan.ep)
    if plan.tp > 1 and (plan.pp > 1 or plan.sp):
        # Of the whole model: a stage alone cannot be traced, and lacks modules that the layout names.
        tensor_layout = find_layout(model) if layout is None else layout
        check_whole_model(model, mesh, tensor_layout)
    stages = build_pipeline(model, mesh) if plan.pp > 1 else {}
    experts = spread_experts(model, mesh, layout)
    tensors = cut_tensors(model, mesh, tensor_layout, experts) if plan.tp > 1 else {}
    if plan.tp == 1:
        fuse_whole_head(model)
    context = apply_context(model, mesh)
    divide_sequences(model, mesh)
    return merge_placements(stages, experts, tensors, context)


def _hold_back(model: nn.Module, mesh: Mesh) -> None:
    """Let weight gradients wait where the schedule of the model's pipeline says so."""
    pipeline = pipeline_of(model)
    if pipeline is None:
        return
    if not repeated_blocks(model) and (mesh.plan.recompute != "none" or mesh.plan.compile):
        field = "compile=on" if mesh.plan.recompute == "none" else f"recompute={mesh.plan.recompute}"
        raise ModelError(
            f"{field}: under a pipeline it works on repeated blocks, and {type(model).__name__} has none. "
            f"Put its layers into an nn.ModuleList or composite children of nn.Sequential, or leave it out."
        )
    pipeline.hold_weight_gradients(model)


def _engine(
    model: nn.Module, mesh: Mesh, host: Host | None, placements: Mapping[str, Placement], seed: int | None
) -> DataParallel:
    """The stage that the plan asks for."""
    if mesh.plan.zero == 3:
        return FullyShardedModel(model, mesh, placements, seed, host=host)
    return FlatModel(model, mesh, placements, host=host, seed=seed)


def _tell_uncompiled(model: nn.Module, mesh: Mesh) -> None:
    """Warn where blocks cannot be compiled: torch.compile takes a recomputed block whole or not at all."""
    plan = mesh.plan
    if plan.recompute_policy not in ("full", "selective") or mesh.rank:
        return
    kinds = {type(part) for block in repeated_blocks(model).values() for part in block.modules()}
    reasons = (
        (plan.cp > 1, "attention over cp"),
        (any(issubclass(kind, MoE | SpreadExperts) for kind in kinds), "experts"),
        (any(issubclass(kind, FunctionalDropout) for kind in kinds), "dropout inside of attention"),
    )
    if (reason := next((words for holds, words in reasons if holds), None)) is not None:
        warnings.warn(
            f"compile=on: blocks with {reason} run uncompiled where they recompute. "
            f"Use recompute=none to have them compiled in parts, or leave compile out.",
            stacklevel=3,
        )


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each repeated block by itself: compile time stays flat in depth. Without blocks, the whole model.

    Blocks of one class share one graph. backend: torch.compile's.
    """
    # A recomputed block notes where it is in cut parts and dropout. Each forward begins that anew, and the replay is
    # in the compiled graph already, so it needs no notes.
    if hasattr(torch._dynamo.config, _NOTES_ONCE):
        setattr(torch._dynamo.config, _NOTES_ONCE, True)
    for block in repeated_blocks(model).values() or [model]:
        block.compile(backend=backend)
