"""Use of Weft in an existing script: process group, mesh, model, data and step from a one-line plan.

run = weft.init("dp_replicate=*")
model = run.parallelize(model)
loader = run.shard(loader)
step = run.train_step(model, torch.optim.AdamW, loss_fn, lr=3e-4)
for batch in loader:
    metrics = step(batch)
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from weft import env
from weft.comm.collectives import all_reduce
from weft.comm.gpu_settings import pick_device
from weft.comm.hang_watch import WARN_AFTER_S, Watch
from weft.comm.ledger import Ledger
from weft.comm.mesh import LIMIT_S, Mesh, build_mesh, join_ranks, leave_ranks
from weft.config.fields.layout import Layout
from weft.config.fields.plan_text import is_auto
from weft.config.plan import Plan, auto_fields
from weft.config.rules.plan_rules import check
from weft.config.rules.rule import Facts
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import ModelSpec
from weft.data.order.user_dataloader import ShardedLoader
from weft.data.order.user_stream import StreamLoader
from weft.errors import PlanError
from weft.memory.offload import MOST_OF_HOST
from weft.models.keras_model import refuse_other_models
from weft.parallel.expert import balance_routers
from weft.parallel.parallelize import parallelize
from weft.parallel.replicas.local_sgd import rare_sync
from weft.parallel.state.flat_slices import refuse_float64
from weft.parallel.state.precision import Precision
from weft.parallel.tables.host import TableSettings
from weft.train.batches.microbatches import Microbatches, from_loader
from weft.train.losses import give_float32
from weft.train.privacy.batches import private_batches
from weft.train.script.other_trainers import refuse_other_trainers
from weft.train.script.script_errors import report_user_errors
from weft.train.script.script_state import ScriptState
from weft.train.script.script_steps import ScriptSteps
from weft.train.script.script_weights import ScriptWeights
from weft.train.shares.probe import probed_shares
from weft.train.step.train_step import TrainStep
from weft.units import parse_seconds


class Run(ScriptSteps, ScriptState, ScriptWeights):
    """The result of `init`: a plan and its mesh, with methods to parallelize a model, shard a loader and train.

    Args:
        plan: a plan with all sizes resolved (without `*` or "auto").
        mesh: mesh of that plan on this rank.
        ledger: counts the communication of the mesh's collectives.
        seed: seed of initial weights, dropout and the order of samples.
        watch: reports long waits; None for no reports.
    """

    def __init__(self, plan: Plan, mesh: Mesh, ledger: Ledger, seed: int, watch: Watch | None = None):
        self._watch = watch
        self.plan = plan
        self.mesh = mesh
        self.ledger = ledger
        self.seed = seed
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.mesh.device

    @property
    def is_first(self) -> bool:
        """True on rank 0, which should print and write."""
        return self.mesh.rank == 0

    def parallelize(
        self,
        model: nn.Module,
        layout: Layout | str | Path | None = None,
        *,
        balance_rate: float = 0.0,
        pinned_limit: str = MOST_OF_HOST,
        norm_group: int = 0,
        bf16_layers: Sequence[str] = (),
        fp8_recipe: str = "rowwise",
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        example: Any = None,
        table_cache: float = 0.05,
        table_folder: str | Path = "",
        table_prefetch: bool = False,
    ) -> nn.Module:
        """Apply the plan to the model, in place. Call it before building the optimizer.

        Meta tensors (`weft.models.decoder.as_shapes`) are initialized from the run's seed. Each rank initializes its
        part. If the plan computes in 16 bits, a forward hook converts the model's 16-bit outputs to float32.

        Args:
            model: any nn.Module, which is also returned.
            layout: tensor-parallel style of each layer, as pattern=style text or a file from `weft layout --save`; None
                to find it from the model. Or styles of embedding tables over the data ranks: "user=rows item=columns".
            balance_rate: coefficient of an auxiliary loss for the experts of a Hugging Face model, like their
                router_aux_loss_coef, but computed by sequence and in backward; 0 to disable it.
            pinned_limit: host memory that all ranks of a machine may pin for offloading: "64GiB", or a fraction of the
                machine's memory.
            norm_group: compute batch norm statistics over groups of this many samples of the global batch, so that they
                are equal under every plan; 0 to use the samples of one microbatch on one rank. For `run.train_step`.
            bf16_layers: linear layers that stay in bf16 under precision=fp8: patterns of paths such as `*.down_proj`,
                and `first:N` or `last:N` for the first or last blocks.
            fp8_recipe: scaling recipe of precision=fp8: rowwise, or tensorwise, whose results depend on how the plan
                divides the batch.
            outer_lr: learning rate of the outer step of sync=diloco:H. Replicas synchronize in `run.train_step`, so the
                number of steps should be a multiple of H.
            outer_momentum: momentum of the outer step.
            example: inputs of one forward: a tensor, a tuple of arguments, or a dict of keyword arguments. tp and sp
                trace the model with it, and style auto of tables counts its ids. By default, inputs are made from the
                names of forward's parameters.
            table_cache: share of the rows that the device caches, for embedding tables with style host.
            table_folder: folder of a mapped file for each table with style host and each of its states; "" for host
                memory.
            table_prefetch: fetch the rows of tables that the next microbatch looks up under this one's backward. For
                `run.train_step`, to whose steps `next_batch` passes the next step's batch.

        Raises:
            ModelError: if the plan cannot train the model, such as one in float64 under another precision.
        """
        _parallelize(
            model, self.mesh, balance_rate, outer_lr, outer_momentum,
            layout=Layout.read(layout) if isinstance(layout, str | Path) else layout, seed=self.seed,
            pinned_limit=pinned_limit, norm_group=norm_group, bf16_layers=bf16_layers, fp8_recipe=fp8_recipe,
            example=example, table_settings=TableSettings(table_cache, str(table_folder), table_prefetch),
        )  # fmt: skip
        self._models.add(model)
        return model

    def shard(self, loader: DataLoader[Any], *, seed_samples: bool = True) -> ShardedLoader:
        """Return this rank's part of a DataLoader whose batch_size is the global batch. Supports `state_dict`.

        A sampler or batch_sampler is kept, and draws the same samples on all ranks. Batches are split by samples, and
        the loader's collate_fn is called for each part. If the plan splits a rank's samples into microbatches, or a
        batch has fewer samples than there are ranks, iteration yields `weft.Microbatches`; otherwise it yields batches
        in the loader's own format.

        Random transforms draw the same numbers at any number of ranks and workers: Python's, numpy's and torch's global
        generators are seeded for each sample.

        Args:
            loader: DataLoader of a map-style dataset.
            seed_samples: seed the global generators for each sample. False leaves them unchanged.

        Raises:
            DataError: if the ranks cannot agree on the samples, or, in a custom loop, if a rank has no sample.
        """
        return ShardedLoader(
            loader,
            self.mesh.data.rank,
            self.mesh.data.size,
            self.seed,
            num_microbatches=self.plan.microbatches_per_step,
            as_batch=from_loader,
            takes_empty=lambda: self._leaves_out,
            seed_samples=seed_samples,
            weights=self.plan.shares,
        )

    def loader(
        self,
        source: Iterable[Any],
        global_batch: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        repeat: bool = False,
    ) -> StreamLoader:
        """Return this rank's part of a stream, such as an IterableDataset. Supports `state_dict`.

        The global batches are equal for any number of ranks and workers. All ranks take the same number of steps: an
        epoch ends before the first global batch that cannot be filled, with a warning if samples are left.

        Args:
            source: an iterable that starts again at each `iter`, and gives equal samples on all ranks. It must not
                divide itself among ranks. If it has `num_shards` and `shard(num_shards, index)`, as streams of the
                `datasets` package have, each rank and worker reads only the shards of its samples, if there are enough
                shards. Otherwise each rank reads all samples and uses its own.
            global_batch: samples of a batch over all ranks.
            collate_fn: makes a batch of a list of samples; torch's default_collate by default.
            num_workers: processes of each rank that read shards.
            repeat: start shards that have ended again, so that the loop does not end.

        Raises:
            DataError: if the source cannot be read again, or is divided among ranks already.
        """
        data = self.mesh.data

        def total(number: int) -> int:
            return int(all_reduce(torch.tensor([int(number)], device=self.mesh.device), data, op="sum"))

        return StreamLoader(
            source, global_batch, data.rank, data.size, collate_fn=collate_fn, num_workers=num_workers, repeat=repeat,
            num_microbatches=self.plan.microbatches_per_step, as_batch=from_loader, total=total,
            weights=self.plan.shares,
        )  # fmt: skip

    def private_batches(
        self, dataset: Any, step: TrainStep, *, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> Iterator[Microbatches]:
        """Yield this rank's part of the batches of a private step, until its steps are done or its budget is spent.

        A step draws each record independently, so batches differ in size and may be empty.

        Args:
            dataset: map-style dataset of `privacy.records` records.
            step: the result of `train_step` with `privacy`.
            collate_fn: makes a batch of a list of samples; torch's default_collate by default.

        Raises:
            PlanError: if the step is not private, or the dataset has another number of records.
        """
        return private_batches(dataset, step, self.mesh, collate_fn)

    def close(self) -> None:
        """Wait for a background save, then destroy the process group. All ranks must call it.

        Call it last, or use the run as a context manager.

        Raises:
            CheckpointError: if that save failed.
        """
        self.wait_saved()
        if self._watch is not None:
            self._watch.close()
        leave_ranks()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, other ranks may never reach the final barrier, so skip it.
        if error is None:
            self.close()
        elif self._checkpointer is not None:
            self._checkpointer.leave(error)


def _parallelize(
    model: nn.Module, mesh: Mesh, balance_rate: float, outer_lr: float, outer_momentum: float, **options: Any
) -> None:
    refuse_other_models(model)
    refuse_float64(model, mesh.plan)
    if balance_rate:
        balance_routers(model, balance_rate)
    parallelize(model, mesh, **options)
    if (sync := rare_sync(model)) is not None:
        sync.outer_lr, sync.outer_momentum = outer_lr, outer_momentum
    if Precision.of(mesh.plan).compute.itemsize == 2:
        give_float32(model)
    if mesh.world_size > 1:
        refuse_other_trainers(model)


def init(
    plan: str | Plan = "dp_replicate=*",
    *,
    device: str = "auto",
    seed: int = 0,
    model: str | DecoderSpec | ModelSpec | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    timeout: str | float = LIMIT_S,
    warn_after: str | float = WARN_AFTER_S,
    route: str = "auto",
    links: str = "auto",
) -> Run:
    """Join the ranks that torchrun or srun started (or run as a single rank) and build the plan's mesh.

    Sets an exception hook that prints Weft's errors without a traceback, unless the script has set another hook.

    Args:
        plan: text such as "dp_replicate=4 accumulation=2", or a Plan. With "auto" the planner chooses, which requires
            `model`, `seq_len` and `global_batch`.
        device: a value of launch.device, such as "auto", "cpu" or "cuda".
        seed: seed of initial weights, dropout and the order of samples.
        model: a size, a Hugging Face config folder, package.module:function, or a spec. None unless the plan is "auto".
        seq_len: tokens per sequence.
        global_batch: sequences per step.
        timeout: timeout of a collective, as "30m" or in seconds. An existing process group keeps its own.
        warn_after: duration of a wait after which stderr reports the missing rank, its activity and the duration.
        route: communication between hosts of CPU ranks: "auto", "flat" or "two_level". Results do not depend on it.
        links: a file from `weft calibrate --hosts`, for route="auto"; "auto" for links.json in the cache folder, if it
            exists.

    Raises:
        PlanError: if the plan breaks a rule, needs another number of ranks than were started, or cannot be chosen; or
            if the device is missing or a duration is invalid.
    """
    report_user_errors()
    limit_s, warn_after_s = _duration("timeout", timeout), _duration("warn_after", warn_after)
    place = env.rank_env()
    world_size = place.world_size if place else 1
    if isinstance(plan, str) and is_auto(plan):
        plan = _chosen(plan, model, seq_len, global_batch, device, place)
    plan = Plan.parse(plan, world_size) if isinstance(plan, str) else plan
    violations = check(plan, Facts(world_size=world_size))
    if violations:
        raise PlanError("\n".join(violation.message for violation in violations))
    chosen = pick_device(device, place.local_rank if place else 0)
    if place is not None:
        join_ranks(place, chosen, limit_s)
        report_user_errors()
    ledger = Ledger()
    mesh = build_mesh(plan, chosen, ledger.record, route, links)
    if plan.measures_shares:
        plan = plan.replace(shares=probed_shares(mesh))
        mesh = build_mesh(plan, chosen, ledger.record, route, links)
    watch = Watch(mesh, _log, warn_after_s=warn_after_s, limit_s=limit_s, limit_name="timeout of weft.init")
    return Run(plan, mesh, ledger, seed, watch)


def _log(text: str) -> None:
    print(f"weft: {text}", file=sys.stderr, flush=True)


def _duration(name: str, value: str | float) -> float:
    try:
        seconds = parse_seconds(value)
    except ValueError as error:
        raise PlanError(f"{name}={value}: {error}.") from error
    if seconds <= 0:
        raise PlanError(f"{name}={value}: it must be more than 0 s. Use {name}='30m'.")
    return seconds


def _chosen(
    plan: str,
    model: str | DecoderSpec | ModelSpec | None,
    seq_len: int | None,
    global_batch: int | None,
    device: str,
    place: env.RankEnv | None,
) -> Plan:
    """Return the planner's plan for these ranks, and print it on rank 0.

    Raises PlanError without `model`, `seq_len` or `global_batch`.
    """
    from weft.config.parsing import MODEL_CODE
    from weft.planner.search.model_source import read_model
    from weft.train.planned import choose_plan, chosen_line, this_cluster
    from weft.train.tasks.description import trace

    if model is None or seq_len is None or global_batch is None:
        call = "weft.init('auto', model='llama3-8b', seq_len=4096, global_batch=64)"
        raise PlanError(f"plan=auto: the planner needs model, seq_len and global_batch. Write e.g. {call}.")
    sizes = (place.world_size, place.local_world_size) if place else (1, 1)
    machines = this_cluster(*sizes, device)
    described = trace(model) if isinstance(model, str) and MODEL_CODE.fullmatch(model) else model
    best = choose_plan(read_model(described), machines, auto_fields(plan), seq_len=seq_len, global_batch=global_batch)
    if place is None or place.rank == 0:
        print(chosen_line(best), flush=True)
    return best.plan
