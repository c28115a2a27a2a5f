"""Order in which a plan is applied to a model, on one screen."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from weft.comm.mesh import Mesh
from weft.config.layout import Layout
from weft.errors import ModelError, PlanError, Problem, WeftWarning
from weft.memory.activation_offload import offload_activations
from weft.memory.offload import MOST_OF_HOST, Host, offload_lines, open_host
from weft.memory.recompute import apply_recompute
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.find_layout import expect_parts_named
from weft.parallel.batch_norm import group_norms
from weft.parallel.choose_engine import build_engine
from weft.parallel.compile_blocks import compile_blocks, register_operators, warn_of_uncompiled
from weft.parallel.context.context import apply_context, check_sequences, context_of
from weft.parallel.dropout import drop_by_position
from weft.parallel.expert import distribute_experts, divide_sequences, expect_experts
from weft.parallel.layers.distributed_encoders import EncoderChoice, choose_encoders, distribute_encoders
from weft.parallel.layers.documents import attend_in_documents, separate_by_position_ids
from weft.parallel.layers.encoder_items import attend_by_borders
from weft.parallel.layers.float8 import choose_float8, use_float8
from weft.parallel.layers.index_check import watch_indices
from weft.parallel.layers.rope_tables import track_row_lengths
from weft.parallel.local_means import refuse_frequencies, watch_local_means
from weft.parallel.local_sgd import attach_local_sgd
from weft.parallel.pipeline.runtime import build_pipeline, pipeline_of
from weft.parallel.state.flat_slices import dtype_growth_warning, originals_of
from weft.parallel.state.gradients import attach, is_attached
from weft.parallel.state.materialize import guard_model, move
from weft.parallel.state.placement import Placement, merge_placements
from weft.parallel.state.precision import Precision
from weft.parallel.state.stale_references import OriginalParameters
from weft.parallel.tensor.apply import check_full_model, fuse_replicated_head, shard_tensors


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    layout: Layout | None = None,
    placements: Mapping[str, Placement] | None = None,
    seed: int | None = None,
    filled_later: bool = False,
    pinned_limit: str = MOST_OF_HOST,
    norm_group: int = 0,
    bf16_layers: Sequence[str] = (),
    fp8_recipe: str = "rowwise",
    example: Any = None,
) -> nn.Module:
    """Apply the mesh's plan to `model`, in place, before its optimizer exists. Returns the same module.

    Args:
        model: any nn.Module; its parameters may be on the meta device.
        mesh: mesh of the plan.
        layout: styles of modules for tensor parallelism, and modules with experts. None derives it from the model.
        placements: placements of a module that the caller sharded manually, by parameter name. Nothing else is sharded.
        seed: seed of parameters on the meta device, filled as in `weft.models.initialize`, and of unkeyed dropout.
        filled_later: `data_parallel(model).load_weights` fills parameters on the meta device.
        pinned_limit: host memory that all ranks of one machine may pin for offloading: a size or a share.
        norm_group: samples per group of batch norm statistics, on any ranks; 0: the samples of this rank.
        bf16_layers, fp8_recipe: for precision=fp8: layers that stay in bf16 (paths, `first:N`), and sharing of scales.
        example: arguments of a forward with which tp and sp trace the model, or None to generate them.

    Raises:
        ModelError: if the model was already parallelized. Errors of each technique are raised here too.
    """
    if is_attached(model):
        raise ModelError("model: it is parallelized already. Build a new one, or copy.deepcopy this one.")
    before, params, whole, mesh = originals_of(model), OriginalParameters(model), mesh, mesh.replica
    if mesh.rank == 0 and (said := dtype_growth_warning(before, Precision.of(mesh.plan))):
        warnings.warn(said, WeftWarning, stacklevel=3)
    refuse_frequencies(model, mesh)
    _prepare(model, mesh, bf16_layers, fp8_recipe)
    spread = choose_encoders(model, mesh, layout)
    placed = cut(model, mesh, layout, spread, example) if placements is None else dict(placements)
    drop_by_position(model, mesh, seed or 0)
    use_float8(model)
    groups = group_norms(model, mesh, norm_group) if norm_group else None
    if (pipeline := pipeline_of(model)) is not None:
        pipeline.defer_weight_gradients(model)
    move(model, mesh.device)
    apply_recompute(model, mesh.plan, mesh["dp_replicate", "dp_shard", "cp", "tp"])
    if mesh.plan.compile:
        register_operators(model, mesh.plan)
        warn_of_uncompiled(model, mesh, stacklevel=3)
        compile_blocks(model)
    if (host := open_host(mesh.plan, mesh.device, pinned_limit)) is not None:
        _offload(model, mesh, host)
    engine = build_engine(model, mesh, placed, host=host, seed=seed, filled_later=filled_later)
    distribute_encoders(model, mesh, spread)
    attach(model, engine, before)
    attach_local_sgd(model, engine, whole)
    guard_model(model, engine.axes)
    watch_local_means(model, mesh, groups_norms=groups is not None)
    params.watch(model, mesh.plan.compile)
    return model


def cut(
    model: nn.Module, mesh: Mesh, layout: Layout | None = None, spread: EncoderChoice | None = None, example: Any = None
) -> dict[str, Placement]:
    """Apply the techniques that shard the model, outermost first. Return the placements of changed parameters."""
    spread = spread or choose_encoders(model, mesh, layout)
    _refuse_graphs(mesh, spread)
    if layout is not None and spread.shared:
        layout = layout.without_distributed if layout.without_distributed.pairs else None
    plan, tensor_layout = mesh.plan, layout
    if plan.pp > 1:
        expect_experts(model, layout, plan.ep)
    if plan.tp > 1 and layout is not None:
        expect_parts_named(model, layout, example)
    regions = None
    if plan.tp > 1:
        # On the original model: a single stage, or distributed experts, cannot be traced.
        tensor_layout, regions = check_full_model(
            model, mesh, layout, *([spread.holds] if spread.shared else []), example=example
        )
    why_whole = check_sequences(model, mesh, example)
    stages = build_pipeline(model, mesh) if plan.pp > 1 else {}
    pipeline = pipeline_of(model)
    experts = distribute_experts(model, mesh, layout)
    if plan.tp > 1:
        runs = pipeline.runs if pipeline else None
        tensors = shard_tensors(model, mesh, tensor_layout, experts, runs, spread.holds, regions)
        # Each tp rank encodes different items, so their gradients are summed.
        tensors |= dict.fromkeys(spread.parameters(model), Placement(partial=("tp",)))
    else:
        tensors = {}
        fuse_replicated_head(model, mesh)
    context = apply_context(model, mesh, why_whole, pipeline.runs if pipeline else None)
    divide_sequences(model, mesh, context_of(model))
    return merge_placements(stages, experts, tensors, context)


def _prepare(model: nn.Module, mesh: Mesh, bf16_layers: Sequence[str], fp8_recipe: str) -> None:
    """Change layers before they are sharded."""
    watch_indices(model)
    track_row_lengths(model, mesh.plan.cp)
    if mesh.plan.compile or mesh.device.type == "cuda":
        attend_by_borders(model)
    if mesh.plan.cp == 1:
        separate_by_position_ids(model)
        attend_in_documents(model)
    if mesh.plan.precision == "fp8":
        choose_float8(model, mesh.device, bf16_layers, fp8_recipe, speaks=mesh.rank == 0)


def _refuse_graphs(mesh: Mesh, spread: EncoderChoice) -> None:
    if mesh.plan.graphs and spread.shared:
        rule = "ranks share the work of a spread encoder, and communicate within forward"
        raise PlanError([Problem("graphs", f"graphs=on: {rule}. Use graphs=off, or leave spread out of layout.")])


def _offload(model: nn.Module, mesh: Mesh, host: Host) -> None:
    """Offload the plan's share of activations to the host. Warn if that saves no device memory."""
    if share := mesh.plan.offload_share("activations"):
        offload_activations(list(repeated_blocks(model).items()) or [("", model)], share, host)
    if mesh.rank == 0 and mesh.device.type != "cuda":
        said = f"offload={'+'.join(mesh.plan.offload)}: {offload_lines(mesh.plan, mesh.device)[-1]}"
        warnings.warn(said, WeftWarning, stacklevel=3)
