"""Application of a plan to a model: a sequence of techniques, each with the condition under which it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from weft.comm.mesh import Mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.devices import access
from weft.errors import ModelError, PlanError, Problem, WeftWarning
from weft.memory.activation_offload import offload_activations
from weft.memory.offload import MOST_OF_HOST, Host, offload_lines, open_host
from weft.memory.recompute import apply_recompute
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.find_layout import expect_parts_named
from weft.models.inspect.token_flow import TokenRegions
from weft.models.keras_model import adopt_keras, refuse_other_models
from weft.parallel.batch_norm.norm_groups import group_norms, norm_groups_of
from weft.parallel.choose_engine import build_engine
from weft.parallel.compile_blocks import compile_blocks, register_operators, warn_of_uncompiled
from weft.parallel.context.context import apply_context, check_sequences, context_of
from weft.parallel.context.full_samples import FullSamplesPlan, choose_full_samples
from weft.parallel.dropout.by_position import drop_by_position
from weft.parallel.dropout.embedding_noise import add_embedding_noise
from weft.parallel.expert import distribute_experts, divide_sequences, expect_experts, refuse_balance
from weft.parallel.layers.distributed_encoders import EncoderChoice, choose_encoders, distribute_encoders
from weft.parallel.layers.documents import attend_in_documents, separate_by_position_ids
from weft.parallel.layers.encoder_items import attend_by_borders
from weft.parallel.layers.float8 import choose_float8, use_float8
from weft.parallel.layers.index_check import watch_indices
from weft.parallel.layers.rope_tables import track_row_lengths
from weft.parallel.layers.state_mixers import separate_states
from weft.parallel.local_means import refuse_frequencies, watch_local_means
from weft.parallel.pipeline.runtime import build_pipeline, pipeline_of
from weft.parallel.replicas.local_sgd import attach_local_sgd
from weft.parallel.state.flat_slices import Original, dtype_growth_warning, originals_of
from weft.parallel.state.forward_writes import refuse_shared_memory
from weft.parallel.state.gradients import DataParallel, attach, is_attached
from weft.parallel.state.materialize import guard_model, move
from weft.parallel.state.placement import Placement, merge_placements
from weft.parallel.state.precision import Precision
from weft.parallel.state.stale_references import OriginalParameters
from weft.parallel.tables.apply import outside_model, shard_tables
from weft.parallel.tables.host import TableSettings
from weft.parallel.tables.table import Table
from weft.parallel.tensor.apply import check_full_model, fuse_replicated_head, shard_tensors
from weft.parallel.tiled_mlp import tile_mlps


@dataclass(slots=True)
class Application:
    """One call to `parallelize`: its arguments, and results of techniques that later techniques read.

    Attributes:
        encoders: encoders whose items tp or data ranks share.
        experts: placements of distributed experts.
        sharded_layout: `layout` without distributed encoders, or derived from the full model.
        regions: regions in which sp shards tokens, or None.
        why_full: reason why attention needs all tokens under cp, or "".
        full_samples: how cp shards a model of which every rank gets full samples, or None.
        placements: placements of changed parameters by name.
        host: pinned host memory for offloading, or None.
        tables: embedding tables that the layout shards over data ranks.
    """

    model: nn.Module
    mesh: Mesh
    layout: Layout | None = None
    seed: int | None = None
    pinned_limit: str = MOST_OF_HOST
    norm_group: int = 0
    bf16_layers: Sequence[str] = ()
    fp8_recipe: str = "rowwise"
    example: Any = None
    noise: tuple[str, float] | None = None
    encoders: EncoderChoice = field(default_factory=lambda: EncoderChoice({}))
    experts: Mapping[str, Placement] = field(default_factory=dict)
    sharded_layout: Layout | None = None
    regions: TokenRegions | None = None
    why_full: str = ""
    full_samples: FullSamplesPlan | None = None
    placements: dict[str, Placement] = field(default_factory=dict)
    host: Host | None = None
    table_settings: TableSettings = field(default_factory=TableSettings)
    tables: list[Table] = field(default_factory=list[Table])

    @property
    def plan(self) -> Plan:
        """The mesh's plan."""
        return self.mesh.plan

    @property
    def has_full_sequences(self) -> bool:
        """True if the model gets full sequences, whose documents it must separate itself."""
        return self.plan.cp == 1 or self.full_samples is not None

    @property
    def stage_blocks(self) -> Sequence[Sequence[str]] | None:
        """Paths of the blocks of each local pipeline stage, or None without a pipeline."""
        pipeline = pipeline_of(self.model)
        return pipeline.runs if pipeline else None

    def add(self, placements: Mapping[str, Placement]) -> None:
        """Add placements of parameters that a technique changed."""
        self.placements = merge_placements(self.placements, placements)


class Technique(NamedTuple):
    """One change of a model. `when` is a condition on plan and device under which it runs, or None to run it always."""

    apply: Callable[[Application], object]
    when: Callable[[Application], bool] | None = None


def _check_full_model(run: Application) -> None:
    """Check layout and sequences on the full model, because a stage or distributed experts cannot be traced.

    Stores the results in `run`: `sharded_layout`, `regions` and `why_full`. Removes distributed encoders from
    `run.layout`.
    """
    if run.plan.graphs and run.encoders.shared:
        rule = "ranks share the work of a spread encoder, and communicate within forward"
        raise PlanError([Problem("graphs", f"graphs=on: {rule}. Use graphs=off, or leave spread out of layout.")])
    run.sharded_layout = run.layout
    if run.layout is not None and run.encoders.shared:
        run.layout = run.sharded_layout = (
            run.layout.without_distributed if run.layout.without_distributed.pairs else None
        )
    if run.plan.pp > 1:
        expect_experts(run.model, run.layout, run.plan.ep)
    if run.plan.tp > 1:
        if run.layout is not None:
            expect_parts_named(run.model, run.layout, run.example)
        shared = [run.encoders.holds] if run.encoders.shared else []
        run.sharded_layout, run.regions = check_full_model(
            run.model, run.mesh, run.layout, *shared, example=run.example
        )
    if run.plan.cp > 1 and run.full_samples is None:
        run.why_full = check_sequences(run.model, run.mesh, run.example)


def _shard_tables(run: Application) -> None:
    assert run.layout is not None
    run.tables = shard_tables(run.model, run.mesh, run.layout, run.table_settings, run.example)
    run.tables[0].queue.prefetches = run.table_settings.prefetch and run.mesh.data.size > 1
    run.layout = None


def _move(run: Application) -> None:
    with outside_model([table for table in run.tables if table.host is not None]):
        move(run.model, run.mesh.device)


def _choose_float8(run: Application) -> None:
    choose_float8(run.model, run.mesh.device, run.bf16_layers, run.fp8_recipe, speaks=run.mesh.rank == 0)


def _distribute_experts(run: Application) -> None:
    run.experts = distribute_experts(run.model, run.mesh, run.layout)
    run.add(run.experts)


def _shard_tensors(run: Application) -> None:
    encoders = run.encoders
    tensors = shard_tensors(
        run.model, run.mesh, run.sharded_layout, run.experts, run.stage_blocks, encoders.holds, run.regions
    )
    # Each tp rank encodes different items, so their gradients are summed.
    run.add(tensors | dict.fromkeys(encoders.parameters(run.model), Placement(partial=("tp",))))


def _defer_weight_gradients(run: Application) -> None:
    pipeline = pipeline_of(run.model)
    if pipeline is not None:
        pipeline.defer_weight_gradients(run.model)


def _offload(run: Application) -> None:
    plan, mesh = run.mesh.stage_plan, run.mesh
    run.host = open_host(plan, mesh.device, run.pinned_limit)
    if run.host is None:
        return
    if share := plan.offload_share("activations"):
        offload_activations(list(repeated_blocks(run.model).items()) or [("", run.model)], share, run.host)
    if mesh.rank == 0 and not access.has_cuda_kernels(mesh.device):
        message = f"offload={'+'.join(plan.offload)}: {offload_lines(plan, mesh.device)[-1]}"
        warnings.warn(message, WeftWarning, stacklevel=4)


#: Changes of layers while they are full. Later techniques copy or shard the changed layers.
PREPARE = (
    # Tables check their ids and settings themselves.
    Technique(_shard_tables, when=lambda run: run.layout is not None and run.layout.is_of_tables),
    Technique(lambda run: refuse_frequencies(run.model, run.mesh)),
    Technique(lambda run: watch_indices(run.model)),
    Technique(lambda run: track_row_lengths(run.model, run.plan.cp)),
    # Compiled blocks and CUDA kernels need boundaries of items that do not depend on data.
    Technique(
        lambda run: attend_by_borders(run.model),
        when=lambda run: run.plan.compile or access.is_accelerator(run.mesh.device),
    ),
    # Context parallelism replaces attention, and separates documents there.
    Technique(lambda run: separate_by_position_ids(run.model), when=lambda run: run.has_full_sequences),
    Technique(lambda run: separate_states(run.model, is_compiled=run.plan.compile)),
    Technique(lambda run: attend_in_documents(run.model), when=lambda run: run.has_full_sequences),
    # Float8 layers are chosen by full sizes, and become float8 after sharding.
    Technique(_choose_float8, when=lambda run: run.plan.precision == "fp8"),
)

#: Techniques that shard the model, outermost first. Skipped if the caller sharded it.
SHARD = (
    # Checks of the full model come before a pipeline removes parts of it.
    Technique(_check_full_model),
    # Stages are built first, so that a rank shards only local layers.
    Technique(lambda run: run.add(build_pipeline(run.model, run.mesh)), when=lambda run: run.plan.pp > 1),
    # Tensor parallelism does not shard distributed experts.
    Technique(_distribute_experts),
    Technique(_shard_tensors, when=lambda run: run.plan.tp > 1),
    # With tp, the sharded head computes the loss itself.
    Technique(lambda run: fuse_replicated_head(run.model, run.mesh), when=lambda run: run.plan.tp == 1),
    # Context parallelism replaces attention whose heads tp may have sharded.
    Technique(
        lambda run: run.add(apply_context(run.model, run.mesh, run.why_full, run.stage_blocks, run.full_samples)),
        when=lambda run: run.plan.cp > 1,
    ),
    # Routers need the final sharding of sequences by sp and cp.
    Technique(
        lambda run: divide_sequences(run.model, run.mesh, context_of(run.model)),
        when=lambda run: run.plan.sp or run.plan.cp > 1,
    ),
)

#: Changes of the sharded model, before the engine replaces its parameters.
FINISH = (
    # Positions of random numbers depend on how tp and cp sharded the model.
    Technique(lambda run: add_embedding_noise(run.model, run.noise)),
    Technique(lambda run: drop_by_position(run.model, run.mesh, run.seed or 0)),
    Technique(lambda run: use_float8(run.model), when=lambda run: run.plan.precision == "fp8"),
    Technique(lambda run: group_norms(run.model, run.mesh, run.norm_group), when=lambda run: run.norm_group != 0),
    Technique(_defer_weight_gradients, when=lambda run: run.plan.pp > 1),
    Technique(_move),
    Technique(lambda run: tile_mlps(run.model, run.plan.mlp_tiles), when=lambda run: run.plan.mlp_tiles > 1),
    # Compiled blocks include recomputation, so recompute comes before compilation.
    Technique(
        lambda run: apply_recompute(run.model, run.mesh.stage_plan, run.mesh["dp_replicate", "dp_shard", "cp", "tp"])
    ),
    Technique(lambda run: register_operators(run.model, run.plan), when=lambda run: run.plan.compile),
    Technique(lambda run: warn_of_uncompiled(run.model, run.mesh, stacklevel=5), when=lambda run: run.plan.compile),
    Technique(lambda run: compile_blocks(run.model), when=lambda run: run.plan.compile),
    # Offloads the activations that compiled blocks save.
    Technique(_offload, when=lambda run: bool(run.plan.offload)),
)


def shard(run: Application) -> dict[str, Placement]:
    """Apply the techniques that shard the model. Return the placements of changed parameters."""
    run.encoders = choose_encoders(run.model, run.mesh, run.layout)
    _apply(SHARD, run)
    return run.placements


def _full_samples(model: nn.Module, replica: Mesh, example: Any) -> FullSamplesPlan | None:
    chosen = choose_full_samples(model, replica, example)
    if chosen is not None:
        refuse_balance(model, replica.plan.cp)
    return chosen


def _apply(techniques: Sequence[Technique], run: Application) -> None:
    for technique in techniques:
        if technique.when is None or technique.when(run):
            technique.apply(run)


def _attach_engine(run: Application, engine: DataParallel, before: Mapping[str, Original], mesh: Mesh) -> None:
    # Encoders communicate in hooks that run outside all others.
    distribute_encoders(run.model, run.mesh, run.encoders)
    attach(run.model, engine, before)
    attach_local_sgd(run.model, engine, mesh)
    guard_model(run.model, engine.axes)


def _build_engine(run: Application, filled_later: bool) -> DataParallel:
    return build_engine(
        run.model, run.mesh, run.placements, tables=run.tables, host=run.host, seed=run.seed, filled_later=filled_later
    )


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
    noise: tuple[str, float] | None = None,
    table_settings: TableSettings | None = None,
) -> nn.Module:
    """Apply the mesh's plan to `model`, in place, before its optimizer exists. Returns the same module.

    Args:
        model: any nn.Module; its parameters may be on the meta device.
        mesh: mesh of the plan.
        layout: styles of modules for tensor parallelism, of experts, or of tables; None to derive it from the model.
        placements: placements of a module that the caller sharded manually, by parameter name. Then pp, ep, tp and cp
            are not applied, only the rest of the plan.
        seed: seed of parameters on the meta device, filled as in `weft.models.initialize`, and of dropout.
        filled_later: True if `data_parallel(model).load_weights` will fill parameters on the meta device.
        pinned_limit: host memory that all ranks of one machine may pin for offloading: a size or a share.
        norm_group: samples per group of batch norm statistics, over any ranks; 0 for each rank's microbatch.
        bf16_layers: with precision=fp8, layers that stay in bf16: patterns of paths, `first:N` or `last:N` blocks.
        fp8_recipe: with precision=fp8, "rowwise" or "tensorwise" scales.
        example: arguments of a forward with which tp, sp and cp trace the model, or None to generate them.
        noise: path of the input embedding and largest noise on its output in training, or None.
        table_settings: settings of embedding tables that the layout shards; None for the defaults.

    Raises:
        ModelError: if the model was already parallelized, or the plan does not support it.
        LayoutError: if the layout does not fit the model, or none can be derived.
        PlanError: if the plan does not fit the model.
        CommError: if ranks built different models.
    """
    refuse_other_models(model)
    if is_attached(model):
        raise ModelError("model: it is parallelized already. Build a new one, or copy.deepcopy this one.")
    adopt_keras(model, mesh.plan, mesh.device, mesh.data.size)
    refuse_shared_memory(model)
    before, params, replica = originals_of(model), OriginalParameters(model), mesh.replica
    _warn_of_growth(before, mesh)
    run = Application(model, replica, layout, seed, pinned_limit, norm_group, bf16_layers, fp8_recipe, example, noise)
    run.table_settings = table_settings or TableSettings()
    run.full_samples = _full_samples(model, replica, example) if placements is None else None
    _apply(PREPARE, run)
    if placements is None:
        shard(run)
    else:
        run.encoders, run.placements = choose_encoders(model, replica, layout), dict(placements)
    _apply(FINISH, run)
    _attach_engine(run, _build_engine(run, filled_later), before, mesh)
    watch_local_means(model, replica, groups_norms=norm_groups_of(model) is not None)
    params.watch(model, replica.plan.compile)
    return model


def _warn_of_growth(before: Mapping[str, Original], mesh: Mesh) -> None:
    if mesh.rank == 0 and (message := dtype_growth_warning(before, Precision.of(mesh.plan))):
        warnings.warn(message, WeftWarning, stacklevel=4)
