"""The engine that trains with PyTorch: build, step, evaluate, state and close."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import Checkpoint
from weft.checkpoint.save import SavedSlice
from weft.comm.mesh import Mesh
from weft.config.partitioning import ShareTimeline, microbatch_samples
from weft.config.run_config import RunConfig
from weft.errors import ModelError
from weft.memory.offload import HostCopies
from weft.monitor.step_times import Meter, own_seconds
from weft.parallel.context.context import takes_full_samples
from weft.parallel.replicas.local_sgd import rare_sync
from weft.privacy.update import restore_account
from weft.train.batches.data_share import Batches
from weft.train.batches.microbatches import Microbatches
from weft.train.engine import EngineJob, Evaluation, LateResult, StepResult, TraceKind, derive_seed
from weft.train.engines.gpu_kernels import GpuKernels
from weft.train.engines.replica_engine import OtherWorlds
from weft.train.engines.torch_build import build
from weft.train.engines.torch_reports import TorchReports
from weft.train.joined_rank import JoinedRank
from weft.train.states.averaged_weights import averaged
from weft.train.states.model_state import adapter_state, resume, state_slices
from weft.train.step.evaluation import evaluate_run
from weft.train.step.profile import StepProfiler
from weft.train.step.tracer import StepTracer, TracedStep
from weft.train.step.train_step import TrainStep
from weft.train.step.update import StepMetrics
from weft.train.tasks.base import Task

#: Passes that `pass_seconds` runs. The first one is not counted, because it allocates memory.
_TIMED_PASSES = 3


class StepInputs:
    """Makes the inputs of steps from a task's batches. All random seeds derive from the number of earlier steps."""

    def __init__(self, config: RunConfig, mesh: Mesh, task: Task, timeline: ShareTimeline):
        self._config, self._mesh, self._task, self._timeline = config, mesh, task, timeline
        # The ranks of cp have different tokens, and need different dropout masks.
        self._part = (mesh["cp"].rank,) if mesh.plan.cp > 1 else ()

    def share_samples(self) -> None:
        """Give all cp ranks the same seeds, because they compute the same samples."""
        self._part = (0,)

    def make(self, batches: Sequence[Any], number: int) -> tuple[Microbatches, list[int], int]:
        """Return the microbatches of a step, their seeds, and the step's seed.

        Raises ModelError if data.batching=cost and `before_step` returned tensors without sample indices.
        """
        by_cost = self._config.data.batching == "cost"
        microbatches = Microbatches(self._task.before_step(batches), any_number=by_cost)
        seed, size, axis = self._config.seed, self._config.train.global_batch, self._mesh.reader
        if weights := self._timeline.at(number):
            own = microbatch_samples(size, axis.size, self._mesh.plan.microbatches_per_step, axis.rank, weights)
            if microbatches.samples is None:
                microbatches = Microbatches(list(microbatches), own, total=size)
            firsts = [part.start for part in own]
        elif not by_cost:
            num_micro = self._mesh.plan.microbatches_per_step
            each = size // (axis.size * num_micro)
            firsts = [(axis.rank + micro * axis.size) * each for micro in range(num_micro)]
        elif microbatches.samples is not None:
            firsts = [min(one.numbers, default=-1 - self._mesh.data.rank) for one in microbatches.samples]
        else:
            raise ModelError(
                "data.batching=cost: before_step returned batches of new tensors, so their samples are unknown. Return "
                "changed batches that still contain the old tensors, or leave data.batching out."
            )
        seeds = [derive_seed(seed, number, number * size + first, *self._part) for first in firsts]
        return microbatches, seeds, derive_seed(seed, number)


class TorchState:
    """Saves and loads the model and optimizer of an engine's step; implements `EngineState`.

    Args:
        step: the step, with model and optimizer. All ranks construct the state before its first step.
    """

    def __init__(self, step: TrainStep, replicas: OtherWorlds | None):
        self._step, self._replicas, self._copies = step, replicas, HostCopies(step.mesh.device)
        step.wait_for_weights()
        # Computed once, because it needs communication and the base does not change.
        self._adapter = adapter_state(step.model)

    @property
    def buffers(self) -> Collection[str]:
        return frozenset(name for name, _ in self._step.model.named_buffers())

    def slices(self, *, aside: bool = False) -> Iterable[SavedSlice]:
        self._step.wait_for_weights()
        return state_slices(self._step.model, self._step.optimizer, self._copies if aside else None)

    def values(self) -> Mapping[str, Any]:
        adapter = {} if self._adapter is None else {"adapter": self._adapter}
        replicas = {} if self._replicas is None else self._replicas.state()
        privacy = self._step.privacy
        account = {} if privacy is None else {"privacy": privacy.ledger.to_json()}
        return {"loss_scale": self._step.loss_scale.state(), **adapter, **replicas, **account}

    def load(self, checkpoint: Checkpoint) -> Sequence[str]:
        self._step.wait_for_weights()
        left_out = resume(self._step.model, self._step.optimizer, checkpoint)
        self._step.loss_scale.restore(checkpoint.state["loss_scale"])
        restore_account(self._step.privacy, checkpoint.state.get("privacy"))
        return left_out


class TorchEngine:
    """One rank's part of a model that PyTorch trains; implements `Engine`. The constructor joins the ranks.

    Attributes:
        state: interface to save and load weights and optimizer states, after `build`.
        reports: reports for users and monitoring, after `build`.
        replicas: the other replicas, if each is a separate process group.
    """

    state: TorchState
    reports: TorchReports
    batches: Batches

    def __init__(self, job: EngineJob):
        self._job, self._rank = job, JoinedRank(job)
        self.mesh = self._rank.mesh
        self._kernels = GpuKernels(job.config, self.mesh.plan, self.mesh.device)
        self._profiler = StepProfiler(job.config.train, self.mesh.rank, self.mesh.device, job.folder.path)
        self.plan, self.rank, self.device = self.mesh.plan, self.mesh.rank, str(self.mesh.device)
        self.pulse, self.ranks = self.mesh.pulse, self._rank.group
        self.meter = Meter(self.mesh.device, communication=self._rank.ledger)
        self._inputs = StepInputs(job.config, self.mesh, job.task, job.timeline)
        self.replicas: OtherWorlds | None = None
        self._step: TrainStep | None = None
        self._compiles = self.plan.compile

    def build(self) -> None:
        """Build the model, optimizer and step from the task and the plan."""
        built = build(self._job, self._rank, self._kernels, self.meter)
        self._step, self.batches, self.replicas = built.step, built.batches, built.replicas
        self._eval_batches, self._forwards = built.eval_batches, built.forwards
        if takes_full_samples(built.step.model):
            self._inputs.share_samples()
        self._tracer = StepTracer(built.step.model, self.mesh, self._job.task, built.batches)
        self.state = TorchState(built.step, built.replicas)
        self.reports = TorchReports(self._job, self._rank, built.step, self._kernels.lines(), built.replicas)

    @property
    def train_step(self) -> TrainStep:
        """The step of the built model."""
        assert self._step is not None, "call build first"
        return self._step

    @property
    def model(self) -> nn.Module:
        """The model. Read this property again for each use, because it waits for the weights of the last step."""
        self.train_step.wait_for_weights()
        return self.train_step.model

    @property
    def wants_stop(self) -> bool:
        """True if this rank requests a stop. The next step sends the request to all ranks."""
        return self.train_step.wants_stop

    @wants_stop.setter
    def wants_stop(self, wanted: bool) -> None:
        self.train_step.wants_stop = wanted

    @property
    def asks(self) -> bool:
        """True if this rank wants all ranks to read the user's requests. The next step sends it to all ranks."""
        return self.train_step.asks

    @asks.setter
    def asks(self, wanted: bool) -> None:
        self.train_step.asks = wanted

    @property
    def prefetches(self) -> bool:
        """True if `step` uses the batches of the step after it."""
        return self.train_step.prefetches

    def step(
        self, batches: Sequence[Any], number: int, lr_factor: float, following: Sequence[Any] | None = None
    ) -> StepResult | LateResult:
        """Take one optimizer step on this rank's microbatches.

        Returns a `LateResult` if the host has not read the step's numbers from the device yet.

        Args:
            batches: the microbatches in order.
            number: steps done before. All random seeds derive from it.
            lr_factor: factor of each group's peak learning rate.
            following: microbatches of the next step, or None if they are unknown. They change no result.
        """
        step, config = self.train_step, self._job.config
        for group in step.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor
        if step.privacy is not None and step.privacy.is_last:
            self.wants_stop = self.wants_stop or number + 1 < config.train.steps
        step.measures_update = config.monitor.measures_update(number + 1)
        self._kernels.before(batches)
        if (sync := rare_sync(step.model)) is not None:
            sync.meets_now = number + 1 == config.train.steps
        if self.replicas is not None:
            self.replicas.before_step(number)
        # Ranks may compile their first step at different times.
        compiling = self.pulse.doing("compiles the model in its first step") if self._compiles else nullcontext()
        with compiling, self._profiler.step(number + 1):
            next_batch = None if following is None else Microbatches(following, any_number=True)
            done = step(*self._inputs.make(batches, number), next_batch=next_batch)
        self._compiles = False
        self._job.task.after_step(number + 1)
        self._tracer.remember(TracedStep(number + 1, batches, step.microbatch_losses))
        return LateResult(lambda: self._result(done)) if step.is_unread else self._result(done)

    def _result(self, done: StepMetrics) -> StepResult:
        self.train_step.finalize(done)
        numbers = done.loss, done.grad_norm, done.num_tokens, done.loss_scale
        result = StepResult(*numbers, done.skipped, done.wants_stop, done.update_ratio)
        return result if self.replicas is None else self.replicas.after_step(result)

    def pass_seconds(self, number: int) -> float:
        """Return this rank's seconds for the forward and backward passes of a step, without waits. All ranks call it.

        The weights and the random numbers of later steps do not change.
        """
        inputs, found = self._inputs.make(self.batches.batches(number), number), list[float]()
        for _ in range(_TIMED_PASSES):
            self.meter.begin_step()
            self.train_step.compute_again(*inputs)
            found.append(own_seconds(self.meter.end_step())["compute"])
        return min(found[1:])

    def trace(self, kind: TraceKind, number: int) -> Mapping[str, object] | None:
        """Repeat the computation of a step that went wrong, without an update, and return an event with the cause.

        Returns None if the step is older than the last two.
        """
        step, is_late = self.train_step, self.train_step.is_unread
        step.finalize()
        traced = self._tracer.remembered(number)
        if traced is None:
            return None
        if kind == "gradient" and is_late:
            # The next step has already overwritten the gradients, so compute them again.
            step.compute_again(*self._inputs.make(traced.batches, number - 1))
        step.wait_for_weights()
        return self._tracer.trace(kind, traced)

    @property
    def evaluates(self) -> bool:
        """True if the task has an evaluation set."""
        return self._eval_batches is not None

    def evaluate(self) -> Evaluation:
        """Compute loss and metrics over the task's evaluation set."""
        assert self._eval_batches is not None
        self._kernels.before_evaluation()
        with averaged(self.model, self.train_step.optimizer):
            return evaluate_run(self.model, self._eval_batches, self.mesh, self._job.task)

    def sample(self, step: int) -> str:
        """Return the task's sample output of the current weights on the first rank. All ranks call it."""
        self._kernels.before_evaluation()
        return self._job.task.sample(self._job.folder, step, self._forwards)

    def background_ranks(self) -> RankGroup:
        """Return a group of all ranks for background threads, which communicates over the rendezvous store."""
        return self._rank.background_group()

    def close(self, *, failed: bool = False) -> None:
        """Wait for all ranks, stop hang detection, restore torch's kernel flags, and leave the process group.

        With `failed`, do not wait and do not leave the group: after an error, other ranks may be in a collective.
        """
        try:
            if not failed:
                if self._step is not None:
                    self._step.wait_for_weights()
                # Wait for rank 0 here, with hang detection, and not while disconnecting.
                self._rank.wait()
        finally:
            self._profiler.close()
            self._kernels.close()
            self._rank.close()
            if self.replicas is not None:
                self.replicas.close()
        if not failed:
            self._rank.leave()
