"""Build the batches, model and step of a torch engine on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.checkpoint.load import list_checkpoints
from weft.comm.mesh import Mesh
from weft.config.partitioning import ShareTimeline
from weft.config.run_config import RunConfig
from weft.data.batches import move_batch
from weft.devices import access
from weft.memory.recompute import recompute_of
from weft.models.adapters import adapted
from weft.monitor.step_times import Meter
from weft.optim.build import build_optimizer, freeze, refuse_groups_of
from weft.optim.table_optimizer import TableOptimizer
from weft.parallel.context.context import local_batch, sequence_in_use
from weft.parallel.dropout.embedding_noise import embedding_noise
from weft.parallel.replicas.local_sgd import rare_sync
from weft.parallel.state.gradients import data_parallel
from weft.parallel.tables.model import add_tables, table_weights
from weft.privacy.update import PrivateUpdate
from weft.train.batches.data_share import Batches, Share
from weft.train.engine import EngineJob
from weft.train.engines.gpu_kernels import GpuKernels
from weft.train.engines.replica_engine import OtherWorlds
from weft.train.joined_rank import JoinedRank
from weft.train.privacy.batches import DrawnBatches
from weft.train.privacy.records import PrivateRecords, private_records, private_update
from weft.train.states.averaged_weights import check_averages
from weft.train.states.model_state import packed_source
from weft.train.step.evaluation import RankForwards
from weft.train.step.train_step import TrainStep
from weft.train.weights.built_model import lay_out
from weft.train.weights.run_adapter import set_values, started_values, with_adapter


@dataclass(frozen=True, slots=True)
class Built:
    """The batches, model and step of an engine on one rank."""

    step: TrainStep
    batches: Batches
    eval_batches: Iterable[Any] | None
    replicas: OtherWorlds | None
    forwards: RankForwards


def build(job: EngineJob, rank: JoinedRank, kernels: GpuKernels, meter: Meter) -> Built:
    """Build batches, model, optimizer and step. All ranks must call it.

    Loads the pretrained weights, unless the run has a checkpoint that contains them, and calls `task.begin`.

    Raises:
        WeftError: if the plan cannot be applied to the model.
    """
    config, task, mesh = job.config, job.task, rank.mesh
    task.open(job.folder)
    private = private_records(config, task) if config.privacy.is_on else None
    update = None if private is None else private_update(config, private, job.folder, mesh)
    batches, eval_batches = _batches(job, mesh, private, update)

    base = task.initial_model(mesh.plan)
    weights = task.initial_weights(base)
    model = with_adapter(base, config)
    weights = None if weights is None else packed_source(model, weights)
    freeze(model, config.optimizer)
    is_resumed = rank.group.on_first(lambda: bool(list_checkpoints(job.folder.checkpoints)))
    started = {} if is_resumed else started_values(model, config)
    # The checkpoint of an adapter does not contain the base.
    reads = adapted(model) is not None or not is_resumed
    noise = embedding_noise(model, config.train.neftune_alpha, config.train.seq_len)
    lay_out(config, mesh, model, weights, reads=reads, noise=noise)
    set_values(model, started)
    kernels.choose_convolutions(model)
    if (second := task.second_model(mesh.plan)) is not None:
        lay_out(config, mesh, second.requires_grad_(False), task.second_weights(second))

    replicas = None if job.world is None else OtherWorlds(job, job.world, mesh, model, rank.group)
    optimizer = _build_optimizer(model, config)
    check_averages(mesh.plan, optimizer)
    step = TrainStep(
        model,
        optimizer,
        task.loss,
        mesh,
        forward=task.forward,
        max_grad_norm=config.optimizer.max_grad_norm if update is None else 0.0,
        nominal_tokens=task.nominal_count(),
        meter=meter,
        check_batch=config.train.check_batch,
        # On a CPU, copies take compute time, so overlapping gains nothing.
        weights_follow=access.collectives_overlap(mesh.device),
        privacy=update,
    )
    data_parallel(model).coders.exact_steps = config.train.compress_after
    if (sync := rare_sync(model)) is not None:
        sync.outer_lr, sync.outer_momentum = config.train.outer_lr, config.train.outer_momentum
    if replicas is not None:
        replicas.stop_with(step)

    step.wait_for_weights()
    with mesh.pulse.doing("computes what the task needs before the first step"):
        task.begin(forwards := RankForwards(model, mesh, task, second, job.record))
    _choose_recompute(model, mesh, job, batches)
    return Built(step, batches, eval_batches, replicas, forwards)


def _build_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """Build the config's optimizer, with a group for the tables that its layout shards."""
    tables = {id(weight) for weight in table_weights(model)}
    named = list(model.named_parameters())
    refuse_groups_of((name for name, param in named if id(param) in tables), config.optimizer)
    dense = [(name, param) for name, param in named if id(param) not in tables]
    optimizer = build_optimizer(dense, config.full_optimizer, config.seed)
    if tables:
        own = config.tables
        add_tables(model, optimizer, TableOptimizer(own.optimizer, own.lr, own.betas, own.eps, own.weight_decay))
    return optimizer


def _batches(
    job: EngineJob, mesh: Mesh, private: PrivateRecords | None, update: PrivateUpdate | None
) -> tuple[Batches, Iterable[Any] | None]:
    """Return training and evaluation batches. Each replica evaluates the full set, in microbatches of equal size.

    private: records that a private run draws, or None. update: its noise and account, or None.
    """
    axis = mesh.reader
    share = Share(
        job.config.train.global_batch,
        mesh.plan.microbatches_per_step,
        axis.rank,
        axis.size,
        pin=access.pins_memory(mesh.device),
        timeline=job.timeline,
    )
    passes = share.microbatches * (axis.size // mesh.data.size)
    own = replace(share, microbatches=passes, rank=mesh.data.rank, size=mesh.data.size, timeline=ShareTimeline())
    if private is not None and update is not None:
        return DrawnBatches(private, share, update), job.task.eval_batches(own)
    return job.task.batches(share), job.task.eval_batches(own)


def _choose_recompute(model: nn.Module, mesh: Mesh, job: EngineJob, batches: Batches) -> None:
    recompute = recompute_of(model)
    if recompute is None or recompute.is_chosen:
        return
    batch = local_batch(model, move_batch(batches.batches(0)[0], mesh.device))

    def example() -> None:
        with sequence_in_use(model):
            job.task.forward(model, batch)

    recompute.prepare(model, example)
