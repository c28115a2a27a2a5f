"""The engine that trains with PyTorch, with its device, CPU binding and random seeds."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import Checkpoint, list_checkpoints
from weft.checkpoint.save import SavedSlice
from weft.comm.collectives import barrier
from weft.comm.gpu_settings import CoreChoice, Topology, bind, choose_cores, format_cores, pick_device
from weft.comm.hang_watch import Watch, hang_event
from weft.comm.ledger import Ledger
from weft.comm.mesh import Mesh, build_mesh, join_ranks, leave_ranks
from weft.comm.store import StoreChannel, StoreReports, share_store_key
from weft.config.cluster import device_by_torch_name
from weft.config.layout import Layout
from weft.config.metrics import series
from weft.config.run_config import RunConfig
from weft.data.batches import move_batch
from weft.env import RankEnv
from weft.errors import ModelError
from weft.memory.offload import HostCopies, offload_lines
from weft.memory.recompute import recompute_of
from weft.models.adapters import adapted
from weft.monitor.metrics import LocalReports
from weft.monitor.step_times import Meter, TimeBook
from weft.optim.build import build_optimizer, freeze
from weft.parallel.context.context import sequence_in_use, shard_sequence
from weft.parallel.local_sgd import anchored, rare_sync
from weft.parallel.parallelize import parallelize
from weft.parallel.state.flat_slices import StateSource
from weft.parallel.state.gradients import data_parallel, originals
from weft.parallel.state.precision import Precision
from weft.parallel.zero.magnitudes import load_base
from weft.train.data_share import Batches, Share
from weft.train.engine import EngineJob, Evaluation, LateResult, Measures, StepResult, TraceKind, derive_seed
from weft.train.gpu_kernels import GpuKernels
from weft.train.loop.time_report import report_times
from weft.train.microbatches import Microbatches
from weft.train.model_state import adapter_state, expected_bytes, packed_source, resume, state_slices
from weft.train.replica_engine import OtherWorlds, plan_within
from weft.train.state_io import gather, on_first
from weft.train.step.evaluation import RankForwards, evaluate
from weft.train.step.tracer import StepTracer, TracedStep
from weft.train.step.train_step import StepMetrics, TrainStep
from weft.train.tasks.base import Task
from weft.train.weights.run_adapter import with_adapter
from weft.units import format_count, parse_seconds


def memory_by_class(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Iterable[torch.Tensor]
) -> dict[str, float]:
    """Return bytes by series. Each storage counts once, for the first class that holds it.

    Args:
        model: a parallelized model, whose parameters and buffers count as weights.
        optimizer: an optimizer, whose states and masters count as optimizer.
        gradients: the tensors that hold gradients.
    """
    seen: set[int] = set()
    classes = {
        "weights": chain(model.parameters(), model.buffers()),
        "gradients": gradients,
        "optimizer": _of_optimizer(optimizer),
    }
    return {series("memory.bytes", name): float(_new_bytes(held, seen)) for name, held in classes.items()}


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _new_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Return the bytes of storages that were not counted yet."""
    total = 0
    for tensor in tensors:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.device.type == "meta":
            continue
        storage = own.untyped_storage()
        if storage.data_ptr() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


# Device of a rank, and binding of its process to CPU cores near the GPU.


def device_of_rank(kind: str, numa: bool, place: RankEnv | None) -> torch.device:
    """Return the device of this rank. With `numa`, bind the process to cores near its GPU.

    Prints the binding to stderr, which is a rank's log in `weft train`. Raises the errors of `pick_device`.

    Args:
        kind: device kind, as for `pick_device`.
        numa: bind the process if the device is a GPU.
        place: rank of this process; None for a single rank.
    """
    device = pick_device(kind, place.local_rank if place is not None else 0)
    if device.type == "cuda" and numa:
        print(f"rank {place.rank if place is not None else 0}: {stay_near_gpu(place).text}", file=sys.stderr)
    return device


def stay_near_gpu(place: RankEnv | None) -> CoreChoice:
    """Bind this process to its share of the cores of its GPU's NUMA node, unless cores were already chosen.

    Returns the resulting binding. `place` is this rank's position on the machine; None for a single rank.
    """
    if sys.platform != "linux":
        return CoreChoice(None, f"not bound to cores: {sys.platform} offers no way")
    local_rank, count = (place.local_rank, place.local_world_size) if place is not None else (0, 1)
    gpus = [_pci_id(index) for index in range(min(count, torch.cuda.device_count()))]
    apart = place is not None and place.starter == "slurm"
    choice = choose_cores(Topology(), frozenset(os.sched_getaffinity(0)), gpus, local_rank, apart=apart)
    if choice.cores is None:
        return choice
    try:
        bind(choice.cores)
    except OSError as error:
        return CoreChoice(
            None, f"not bound to cores: the system refuses cores {format_cores(choice.cores)} ({error.strerror})"
        )
    # More threads than cores would slow each other down.
    torch.set_num_threads(min(torch.get_num_threads(), len(choice.cores)))
    return choice


def _pci_id(index: int) -> str:
    gpu = torch.cuda.get_device_properties(index)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


# Seeds of a step: one per microbatch of a rank, for torch's generators.


def seeds_by_position(config: RunConfig, mesh: Mesh, number: int) -> list[int]:
    """Return the seeds of microbatches of equal size.

    Args:
        config: the run's config.
        mesh: the mesh, which has this rank's position.
        number: steps done before.
    """
    axis, num_micro = mesh.reader, mesh.plan.microbatches_per_step
    batch, seed = config.train.global_batch, config.seed
    per_micro = batch // (axis.size * num_micro)
    first = number * batch + axis.rank * per_micro
    part = _part(mesh)
    return [derive_seed(seed, number, first + micro * axis.size * per_micro, *part) for micro in range(num_micro)]


def seeds_by_sample(config: RunConfig, mesh: Mesh, number: int, whole: Microbatches) -> list[int]:
    """Return the seeds of cost-based microbatches, each derived from its first sample.

    Args:
        config: the run's config.
        mesh: the mesh, which has this rank's position.
        number: steps done before.
        whole: the microbatches.

    Raises:
        ModelError: if the task made new tensors, so that their samples are unknown.
    """
    if whole.samples is None:
        raise ModelError(
            "data.batching=cost: before_step returned batches of new tensors, so their samples are unknown. Return "
            "changed batches that still contain the old tensors, or leave data.batching out."
        )
    first, seed = number * config.train.global_batch, config.seed
    part = _part(mesh)
    return [
        derive_seed(seed, number, first + min(one.numbers, default=-1 - mesh.data.rank), *part) for one in whole.samples
    ]


def _part(mesh: Mesh) -> tuple[int, ...]:
    """Return a seed component for the cp rank. Its ranks hold different tokens, and need different dropout masks."""
    return (mesh["cp"].rank,) if mesh.plan.cp > 1 else ()


# The torch engine: the model parallelized over the plan's mesh, its optimizer and its step.


class TorchEngine:
    """One rank's part of a model that PyTorch trains. Constructing one joins the ranks and watches for hangs."""

    def __init__(self, job: EngineJob):
        self._job, self._config, self._task = job, job.config, job.task
        launch = job.config.launch
        device = device_of_rank(launch.device, launch.numa, job.place)
        if job.place is not None:
            join_ranks(job.place, device, parse_seconds(launch.timeout), job.store, job.tell)
        if dist.is_initialized():
            # Under torchrun the folder's texts came through the store before messages could be signed.
            share_store_key(job.store_key, repr((str(job.folder.path), sorted(job.folder.texts.items()))).encode())
        self._ledger = Ledger()
        self.plan = plan_within(job.plan, job.world)
        self.mesh = build_mesh(self.plan, device, self._ledger.record, launch.route, launch.links or "auto")
        self._kernels = GpuKernels(job.config, self.plan, device)
        if job.world is not None:
            self.mesh.reader = self.mesh.reader.in_replica(job.world.replica, job.plan)
        self.rank, self.device, self.pulse = self.mesh.rank, str(device), self.mesh.pulse
        self.meter = Meter(device, communication=self._ledger)
        self._watch = Watch(
            self.mesh,
            job.tell,
            warn_after_s=None if launch.warn_after == "auto" else parse_seconds(launch.warn_after),
            limit_s=parse_seconds(launch.timeout),
            limit_name=f"launch.timeout={launch.timeout}",
            where_stacks=f"{job.folder.logs}/rank_*.log",
            owns_process=job.place is not None,
            on_report=lambda state, found: job.on_hang(hang_event(state, found)),
        )
        self._copies = HostCopies(device)
        #: The last two steps, because results may be read during the next step.
        self._traceable: deque[TracedStep] = deque(maxlen=2)
        self._others: OtherWorlds | None = None
        self._started = self._is_built = False

    def build(self) -> None:
        """Build the model, optimizer and step from the task and the plan."""
        config, task, mesh = self._config, self._task, self.mesh
        task.open(self._job.folder)
        share = Share(
            config.train.global_batch,
            mesh.plan.microbatches_per_step,
            mesh.reader.rank,
            mesh.reader.size,
            pin=mesh.device.type == "cuda",
        )
        self._batches = task.batches(share)
        # Each world evaluates on the full set, in batches of the training size.
        passes = share.microbatches * (mesh.reader.size // mesh.data.size)
        own = replace(share, microbatches=passes, rank=mesh.data.rank, size=mesh.data.size)
        self._eval_batches = task.eval_batches(own)
        base = task.initial_model(mesh.plan)
        weights = task.initial_weights(base)
        self._model: nn.Module = with_adapter(base, config)
        weights = None if weights is None else packed_source(self._model, weights)
        freeze(self._model, config.optimizer)
        self._lay_out(self._model, weights, reads=self._reads_base())
        self._kernels.choose_convolutions(self._model)
        if (second := task.second_model(mesh.plan)) is not None:
            self._lay_out(second.requires_grad_(False), task.second_weights(second), reads=True)
        if self._job.world is not None:
            asked = weakref.ref(self)
            self._others = OtherWorlds(
                self._job, self._job.world, mesh, self._model, self.on_first, self.gather,
                lambda: (engine := asked()) is not None and engine.wants_stop,
            )  # fmt: skip
        self._step = TrainStep(
            self._model,
            build_optimizer(self._model.named_parameters(), config.optimizer, config.seed),
            task.loss,
            mesh,
            forward=task.forward,
            max_grad_norm=config.optimizer.max_grad_norm,
            nominal_tokens=task.nominal_count(),
            meter=self.meter,
            check_batch=config.train.check_batch,
            # On a CPU the copies take compute time, so overlap gains nothing.
            weights_follow=mesh.device.type == "cuda",
        )
        data_parallel(self._model).coders.exact_steps = config.train.compress_after
        self._sync = rare_sync(self._model)
        if self._sync is not None:
            self._sync.outer_lr, self._sync.outer_momentum = config.train.outer_lr, config.train.outer_momentum
        # Computed here, because all ranks call build and the base does not change later.
        self._adapter = adapter_state(self.model)
        with self.pulse.doing("computes what the task needs before the first step"):
            task.begin(RankForwards(self.model, mesh, task, second))
        self._choose_recompute()
        self._is_built = True

    @property
    def model(self) -> nn.Module:
        """The model. Read it for each use, because it waits for the weights of the last step."""
        self._step.wait_for_weights()
        return self._model

    def _lay_out(self, model: nn.Module, weights: StateSource | None, *, reads: bool) -> None:
        """Parallelize a model in place, and read its initial weights if `reads`."""
        parallelize(
            model,
            self.mesh,
            layout=Layout.read(self._config.layout) if self._config.layout else None,
            seed=self._config.seed,
            filled_later=weights is not None,
            pinned_limit=self._config.memory.pinned_limit,
            norm_group=self._config.train.norm_group,
            bf16_layers=self._config.train.bf16_layers,
            fp8_recipe=self._config.train.fp8_recipe,
        )
        if weights is not None and reads:
            with self.pulse.doing("reads the pretrained weights"):
                load_base(model, weights)

    def rejoin(self, step: int) -> int | None:
        """Join waiting replicas before the first step. Return the step to continue from, or None to stop."""
        return step if self._others is None else self._others.rejoin(step)

    @property
    def over(self) -> Mapping[str, Any] | None:
        """The record of other replicas that have ended without this one, or None."""
        return None if self._others is None else self._others.sync.over

    def end(self) -> None:
        """Send replicas in other worlds the end of this one."""
        if self._others is not None:
            self._others.end()

    @property
    def batches(self) -> Batches:
        """The training batches of this rank."""
        return self._batches

    @property
    def wants_stop(self) -> bool:
        """True if this rank requests a stop, which the next step broadcasts."""
        return self._step.wants_stop

    @wants_stop.setter
    def wants_stop(self, wanted: bool) -> None:
        self._step.wants_stop = wanted

    @property
    def asks(self) -> bool:
        """True if this rank asks all ranks to read the requests, which the next step broadcasts."""
        return self._step.asks

    @asks.setter
    def asks(self, wanted: bool) -> None:
        self._step.asks = wanted

    def step(self, batches: Sequence[Any], number: int, lr_factor: float) -> StepResult | LateResult:
        """Take one optimizer step on this rank's microbatches.

        Args:
            batches: the microbatches in order.
            number: steps done before. All random seeds derive from it.
            lr_factor: factor on each group's peak learning rate.
        """
        for group in self._step.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor
        self._step.measures_update = self._config.monitor.measures_update(number + 1)
        self._kernels.before(batches)
        with self._first_is_long():
            if self._sync is not None:
                self._sync.meets_now = number + 1 == self._config.train.steps
            if self._others is not None:
                self._others.before_step(number)
            done = self._step(*self._asked(batches, number))
        self._traceable.append(TracedStep(number + 1, batches, self._step.microbatch_losses))
        return LateResult(lambda: self._result(done)) if self._step.is_unread else self._result(done)

    def _result(self, done: StepMetrics) -> StepResult:
        """Return the result of a step for the loop. All ranks call it at the same point."""
        self._step.finalize(done)
        numbers = done.loss, done.grad_norm, done.num_tokens, done.loss_scale
        result = StepResult(*numbers, done.skipped, done.wants_stop, done.update_ratio)
        return result if self._others is None else self._others.after_step(result)

    def trace(self, kind: TraceKind, number: int) -> Mapping[str, object] | None:
        """Repeat a step that went wrong and return an event with the cause, or None if the step is too old."""
        is_late = self._step.is_unread
        self._step.finalize()
        step = next((one for one in self._traceable if one.number == number), None)
        if step is None:
            return None
        if kind == "gradient" and is_late:
            # The next step has already overwritten the gradients.
            self._step.compute_again(*self._asked(step.batches, number - 1))
        return StepTracer(self.model, self.mesh, self._task, self._batches).trace(kind, step)

    def _asked(self, batches: Sequence[Any], number: int) -> tuple[Microbatches, list[int], int]:
        """Return the inputs of a step: its microbatches, their seeds and the step's seed. `number` counts from 0."""
        by_cost = self._config.data.batching == "cost"
        whole = Microbatches(self._task.before_step(batches), any_number=by_cost)
        seeds = (
            seeds_by_sample(self._config, self.mesh, number, whole)
            if by_cost
            else seeds_by_position(self._config, self.mesh, number)
        )
        return whole, seeds, derive_seed(self._config.seed, number)

    @property
    def evaluates(self) -> bool:
        """True if the task has an evaluation set."""
        return self._eval_batches is not None

    def evaluate(self) -> Evaluation:
        """Compute loss and metrics over the task's evaluation set."""
        assert self._eval_batches is not None
        batches: Iterable[Any] = self._eval_batches
        if type(self._task).before_step is not Task.before_step:
            every, num = list(batches), self.mesh.plan.microbatches_per_step
            whole = [every[first : first + num] for first in range(0, len(every), num)]
            batches = [one for batch in whole for one in self._task.before_step(batch)]
        self._kernels.before_evaluation()
        with anchored(self.model):
            return evaluate(self.model, batches, self.mesh, self._task)

    def save(self, *, aside: bool = False) -> Iterable[SavedSlice]:
        """Return this rank's slices, as copies in host memory if `aside`."""
        return state_slices(self.model, self._step.optimizer, self._copies if aside else None)

    def state(self) -> Mapping[str, Any]:
        """Return the loss scale, and the records of an adapter and of replicas."""
        adapter = {} if self._adapter is None else {"adapter": self._adapter}
        others = {} if self._others is None else self._others.state()
        return {"loss_scale": self._step.loss_scale.state(), **adapter, **others}

    def load(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Load weights, optimizer states and loss scale. Return lines about parts that are left out."""
        left_out = resume(self.model, self._step.optimizer, checkpoint)
        self._step.loss_scale.restore(checkpoint.state["loss_scale"])
        return left_out

    def on_first(self, act: Callable[[], Any]) -> Any:
        """Run `act` on rank 0 and return its JSON value on all ranks."""
        return on_first(self.mesh, act)

    def gather(self, record: bytes) -> list[bytes]:
        """Return the bytes of every rank in rank order, on all ranks."""
        return gather(self.mesh, record)

    def store_channel(self) -> RankGroup:
        """Return a rank group for background threads, which communicates over the rendezvous store."""
        rank, number = self.mesh.rank, self.mesh.world_size
        if number == 1:
            return RankGroup()
        found = StoreChannel(rank, number)
        return RankGroup(rank, number, found.on_first, found.gather)

    def measures(self) -> Measures:
        """Return the report channel in the store, bytes by axis, memory by class, and the GPU."""
        rank, number, device = self.mesh.rank, self.mesh.world_size, self.mesh.device
        return Measures(
            board=StoreReports(rank, number) if number > 1 else LocalReports(),
            traffic=lambda: {series("sent_bytes", axis): total for axis, total in self._ledger.sent().items()},
            memory=lambda: memory_by_class(self._model, self._step.optimizer, self._step.local_gradients()),
            gpu=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
        )

    def close(self, *, failed: bool = False) -> None:
        """Leave the other ranks. After an error, do not wait for them."""
        try:
            if not failed:
                if self._is_built:
                    self._step.wait_for_weights()
                # Wait for rank 0 here, where hangs are watched, and not while leaving the group.
                barrier(self.mesh.world)
        finally:
            self._kernels.close()
            self._watch.close()
            if self._others is not None:
                self._others.close()
        if not failed:
            # After an error, the others may be in a collective and never arrive. The launcher ends them.
            leave_ranks()

    # --- reports for users ---

    def versions(self) -> Mapping[str, str]:
        """Return torch's version."""
        return {"torch": torch.__version__}

    def lines(self) -> Sequence[str]:
        """Return number format, recompute and offload, for the opening of a run."""
        recompute = recompute_of(self.model)
        return [
            f"format  {Precision.of(self.plan)}",
            *self._kernels.lines(),
            *self._adapter_lines(),
            *(self._others.lines() if self._others else ()),
            *([f"memory  recompute {recompute.describe()}"] if recompute and recompute.setting != "none" else []),
            *(f"offload {line}" for line in offload_lines(self.plan, self.mesh.device)),
        ]

    def checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint of all ranks in bytes."""
        shapes = with_adapter(self._task.shapes(), self._config)
        return expected_bytes(shapes, self._config.optimizer, Precision.of(self.plan).master)

    def peak_flops(self) -> float | None:
        """Return the GPU's peak FLOP/s at the plan's precision, or None for a CPU or an unknown GPU."""
        if self.mesh.device.type != "cuda":
            return None
        device = device_by_torch_name(torch.cuda.get_device_name(self.mesh.device))
        return device.peak_flops(self.plan.precision) if device else None

    def report(self, book: TimeBook, start_step: int) -> Sequence[str]:
        """Write the time report into the run folder, and return its lines."""
        return report_times(self._job.folder, self.mesh, self.model, book, self._task, start_step)

    # --- private ---

    def _reads_base(self) -> bool:
        """Return True if initial weights must be read: for a new run, or an adapter, whose checkpoint has no base."""
        if adapted(self._model) is not None:
            return True
        return not self.on_first(lambda: bool(list_checkpoints(self._job.folder.checkpoints)))

    def _adapter_lines(self) -> list[str]:
        record, params = adapted(self.model), [one for one in originals(self.model).values() if one.is_parameter]
        trained, every = (sum(one.numel for one in params if one.is_trained or is_all) for is_all in (False, True))
        counts = f"{format_count(trained)} of {format_count(every)} parameters trained"
        return [] if record is None else [f"adapter {record.kind}, on {len(record.layers)} layers: {counts}"]

    def _choose_recompute(self) -> None:
        """Choose the recomputed layers before the first step, from the run's first microbatch."""
        recompute = recompute_of(self._model)
        if recompute is None or recompute.is_chosen:
            return
        batch = shard_sequence(self.model, move_batch(self._batches.batches(0)[0], self.mesh.device))

        def example() -> None:
            with sequence_in_use(self.model):
                self._task.forward(self.model, batch)

        recompute.prepare(self.model, example)

    def _first_is_long(self) -> AbstractContextManager[None]:
        """Mark the first step of a start as compiling, which ranks need not finish together."""
        if self._started or not self.plan.compile:
            return nullcontext()
        self._started = True
        return self.pulse.doing("compiles the model in its first step")
