"""The engine that trains with JAX: one process drives all devices of the plan as one SPMD program.

It reads the same batches as the torch engine, and its checkpoints have torch's names and states, so a run can change
engines at any step. Evaluation and samples run on the host in torch, with the trained weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import Checkpoint
from weft.checkpoint.save import SavedSlice
from weft.comm.heartbeat import Heartbeat
from weft.comm.mesh import build_mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.errors import CheckpointError, MissingExtra, ModelError
from weft.models.inspect.blocks import repeated_blocks
from weft.models.inspect.find_layout import find_layout
from weft.monitor.step_times import Meter, TimeBook
from weft.optim.build import build_optimizer, freeze
from weft.optim.step_decision import LossScale
from weft.parallel.parallelize import parallelize
from weft.private_torch import tree_map
from weft.train.batches.data_share import Batches, Share
from weft.train.engine import EngineJob, Evaluation, Measures, StepResult, TraceKind
from weft.train.folder import RunFolder
from weft.train.states.model_state import model_tensors
from weft.train.step.evaluation import RankForwards
from weft.train.tasks.base import Task
from weft.train.weights.published_weights import fill_full

try:
    import weft.jax_engine.capture as capturing
    from weft.jax_engine.program import Program, Sharding, jax_version
    from weft.jax_engine.update import read_optimizer
except ModuleNotFoundError as error:
    if error.name not in ("jax", "jaxlib"):
        raise
    raise MissingExtra("jax", "jax", "launch.engine=jax") from error

Arrays = dict[str, Any]
_MASTERS = {"fp64": torch.float64}


class JaxState:
    """Weights and optimizer states as arrays by torch's names; implements `EngineState`.

    Attributes:
        params, tensors: trained and frozen parameters, and persistent buffers.
        states: optimizer states by parameter and state name.
        updates: number of updates so far.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.optimizer = read_optimizer(optimizer, model)
        names = dict(model.named_parameters())
        self.params: Arrays = {name: capturing.to_array(param) for name, param in names.items()}
        self._kept = [name for name in model_tensors(model) if name not in names]
        self.tensors: Arrays = {name: capturing.to_array(buffer) for name, buffer in model.named_buffers()}
        self.states: dict[str, Arrays] | None = None
        self.updates = 0

    @property
    def buffers(self) -> Collection[str]:
        return frozenset(self.tensors)

    def slices(self, *, aside: bool = False) -> Iterable[SavedSlice]:
        # The arrays of one step are never overwritten, so copies to the host are valid later.
        found = [(f"model/{name}", capturing.to_tensor(one)) for name, one in self.params.items()]
        found += [(f"model/{name}", capturing.to_tensor(self.tensors[name])) for name in self._kept]
        for name, states in (self.states or {}).items():
            found += [(f"optimizer/{name}/{key}", capturing.to_tensor(one)) for key, one in states.items()]
            if self.optimizer.kind == "adamw":
                found.append((f"optimizer/{name}/step", torch.tensor(float(self.updates))))
        return [SavedSlice.full(path, tensor) for path, tensor in found]

    def values(self) -> Mapping[str, Any]:
        return {"loss_scale": LossScale().state()}

    def load(self, checkpoint: Checkpoint) -> Sequence[str]:
        """Load a checkpoint of either engine. Raises CheckpointError if it belongs to another model or optimizer."""
        weights = checkpoint.tensors("model")
        expected = {
            **{name: self.params[name] for name in self.params},
            **{one: self.tensors[one] for one in self._kept},
        }
        if wrong := sorted(weights.keys() ^ expected.keys()):
            raise CheckpointError(
                f"tensor {wrong[0]!r}: it is not in both the checkpoint and the model. Use its model."
            )
        for name, known in expected.items():
            array = capturing.to_array(weights[name])
            if array.shape != known.shape:
                raise CheckpointError(f"tensor {name!r}: {array.shape} in the checkpoint, {known.shape} in the model.")
            (self.params if name in self.params else self.tensors)[name] = array.astype(known.dtype)
        saved = checkpoint.tensors("optimizer") if "optimizer" in checkpoint.groups else {}
        if saved:
            self._load_states(saved)
        return [f"{group}: only the torch engine uses it" for group in checkpoint.groups if group not in _OWN_GROUPS]

    def _load_states(self, saved: Mapping[str, torch.Tensor]) -> None:
        names = {f"{name}/{key}" for name in self.optimizer.hyper for key in self.optimizer.state_names}
        steps = {name for name in saved if name.endswith("/step")}
        if wrong := sorted((saved.keys() - steps) ^ names):
            raise CheckpointError(
                f"optimizer state {wrong[0]!r}: it is not in both the checkpoint and this optimizer. Resume with the "
                "optimizer and the frozen parameters of the run that saved it."
            )
        self.states = {
            name: {
                key: capturing.to_array(saved[f"{name}/{key}"]).astype(self.params[name].dtype)
                for key in self.optimizer.state_names
            }
            for name in self.optimizer.hyper
        }
        self.updates = max((int(saved[name]) for name in steps), default=1)


_OWN_GROUPS = ("model", "optimizer")


class JaxReports:
    """Reports of the engine; implements `EngineReports`."""

    def __init__(self, job: EngineJob, state: JaxState):
        self._job, self._state = job, state

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__, "jax": jax_version()}

    def opening(self) -> Sequence[str]:
        return [f"engine  jax {jax_version()}, one program on {self._job.plan.world_size} devices"]

    def checkpoint_bytes(self) -> int:
        states = 1 + len(self._state.optimizer.state_names)
        return sum(one.nbytes for one in self._state.params.values()) * states

    def peak_flops(self) -> float | None:
        return None

    def times(self, book: TimeBook, start_step: int) -> Sequence[str]:
        return ()

    def measures(self) -> Measures:
        return Measures()


class HostModel:
    """The trained model on the host in torch, for evaluation and samples.

    Args:
        model: the model that was captured. Its weights are overwritten by the current ones.
        state: the current weights.
        task: forward, loss and samples.
    """

    def __init__(self, model: nn.Module, state: JaxState, task: Task):
        self._model, self._state, self._task = model, state, task

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """Return loss and metrics over an evaluation set."""
        task, model = self._task, self._current().eval()
        totals = dict.fromkeys(("loss", "count", *task.sum_names), 0.0)
        scorer = task.scorer(model, build_mesh(Plan()).data)
        for batch in batches:
            output = task.forward(model, batch)
            if scorer is not None:
                scorer.add(output, batch, counts=True)
            loss, count = task.loss(output, batch)
            found = {"loss": loss, "count": count, **(task.sums(output, batch) if task.sum_names else {})}
            totals = {name: total + float(found[name]) for name, total in totals.items()}
        model.train()
        count = totals["count"]
        metrics = {**task.measure(totals), **(scorer.finish() if scorer is not None else {})}
        return Evaluation(totals["loss"] / max(count, 1.0), round(count), metrics)

    def sample(self, folder: RunFolder, step: int) -> str:
        """Return the task's sample output."""
        mesh = build_mesh(Plan())
        with torch.no_grad():
            own = copy.deepcopy(self._current())
        model = parallelize(own, mesh)
        return self._task.sample(folder, step, RankForwards(model, mesh, self._task))

    def _current(self) -> nn.Module:
        for name, param in self._model.named_parameters():
            param.copy_(capturing.to_tensor(self._state.params[name]))
        for name, buffer in self._model.named_buffers():
            buffer.copy_(capturing.to_tensor(self._state.tensors[name]))
        return self._model


class JaxEngine:
    """A model that JAX trains; implements `Engine`. The process is the only rank of its group.

    Attributes:
        state: interface to save and load weights and optimizer states, after `build`.
        reports: reports for users and monitoring, after `build`.
    """

    state: JaxState
    reports: JaxReports
    batches: Batches
    replicas = None
    rank = 0

    def __init__(self, job: EngineJob):
        self._job, self.plan, self.device = job, job.plan, "cpu"
        self.ranks, self.pulse, self.meter = RankGroup(), Heartbeat(), Meter("cpu")
        self.wants_stop = self.asks = False
        self._programs: dict[Any, Program] = {}
        self._sharding: Sharding | None = None
        self._placed = False

    def build(self) -> None:
        """Build the model and the optimizer from the task. Each shape of batches is captured when it first occurs."""
        config, task, plan = self._job.config, self._job.task, self.plan
        if type(task).begin is not Task.begin:
            raise ModelError(f"task.name={config.task.name}: launch.engine=jax trains the default task. Leave it out.")
        task.open(self._job.folder)
        share = Share(config.train.global_batch, plan.microbatches_per_step)
        self.batches, self._eval_batches = task.batches(share), task.eval_batches(share)
        model = task.initial_model(plan)
        if (weights := task.initial_weights(model)) is not None:
            model = task.build()
            fill_full(model, weights)
        self._model = model = model.to(_MASTERS.get(plan.precision, torch.float32))
        freeze(model, config.optimizer)
        self._layout = Layout.read(config.layout) if config.layout else None
        if self._layout is None and (plan.tp > 1 or plan.ep > 1):
            self._layout = find_layout(model)
        platform = "" if config.launch.device == "auto" else config.launch.device
        self._sharding = Sharding.of(plan, self._layout, platform)
        optimizer = build_optimizer(model.named_parameters(), config.full_optimizer, config.seed)
        self.state = JaxState(model, optimizer)
        self.reports = JaxReports(self._job, self.state)
        self._on_host = HostModel(model, self.state, task)

    prefetches = False

    def step(
        self, batches: Sequence[Any], number: int, lr_factor: float, following: Sequence[Any] | None = None
    ) -> StepResult:
        """Take one optimizer step on all microbatches of the global batch.

        Args:
            batches: the microbatches in order, with the samples of all data ranks.
            number: steps done before.
            lr_factor: factor of each group's peak learning rate.
            following: unused.
        """
        state, parts = self.state, [_padded(one) for one in self._job.task.before_step(batches)]
        program = self._program_of(parts)
        if not self._placed:
            state.params, state.states = program.place(state.params, state.states)
            self._placed = True
        inputs = program.place_batch([program.captured.inputs(part, state.tensors) for part in parts])
        updates, factor = np.int64(state.updates), np.float64(lr_factor)
        state.params, report, state.states, moved, _ = program.step(
            state.params, state.tensors, state.states, inputs, updates, factor
        )
        state.tensors |= {name: np.asarray(one) for name, one in moved.items()}
        loss, norm, count = np.asarray(report).tolist()  # one transfer
        skipped = None
        if not math.isfinite(loss):
            skipped = "no trained token in the global batch" if not count else f"loss is {loss}"
        elif not math.isfinite(norm):
            skipped = f"gradient norm is {norm}"
        state.updates += skipped is None
        self._job.task.after_step(number + 1)
        return StepResult(loss, norm, round(count), None, skipped, self.wants_stop)

    def _program_of(self, parts: Sequence[Any]) -> Program:
        """Return the program for microbatches of these shapes. Captures the model if they are new."""
        shapes = {_shape_of(part) for part in parts}
        if len(shapes) > 1:
            raise ModelError(
                "launch.engine=jax: the microbatches of a step have different shapes. Use plan accumulation=1."
            )
        [shape] = shapes
        if shape not in self._programs:
            with self.pulse.doing("captures the model and compiles its step"):
                self._programs[shape] = self._capture(parts[0])
        return self._programs[shape]

    def _capture(self, batch: Any) -> Program:
        task, plan, model = self._job.task, self.plan, self._model
        assert self._sharding is not None
        if plan.precision == "bf16":
            model = capturing.rounded(copy.deepcopy(model))
        capturing.prepare_routers(model)

        def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            total, count = task.loss(task.forward(model, batch), batch)
            return total, count if isinstance(count, torch.Tensor) else torch.tensor(count)

        captured = capturing.capture(model, loss, batch, task.model_line())
        shapes = {name: one.shape for name, one in self.state.params.items()}
        return Program(
            captured, self.state.optimizer, self._sharding, shapes=shapes, blocks=list(repeated_blocks(model)),
            max_grad_norm=self._job.config.optimizer.max_grad_norm,
        )  # fmt: skip

    def trace(self, kind: TraceKind, number: int) -> Mapping[str, object] | None:
        """Return None: a compiled program has no modules to trace."""
        return None

    @property
    def evaluates(self) -> bool:
        """True if the task has an evaluation set."""
        return self._eval_batches is not None

    def evaluate(self) -> Evaluation:
        """Compute loss and metrics over the task's evaluation set, on the host in torch."""
        assert self._eval_batches is not None
        return self._on_host.evaluate(self._eval_batches)

    def sample(self, step: int) -> str:
        """Return the task's sample output of the current weights, computed on the host in torch."""
        return self._on_host.sample(self._job.folder, step)

    def background_ranks(self) -> RankGroup:
        """Return the group of this process."""
        return RankGroup()

    def close(self, *, failed: bool = False) -> None:
        """Release the compiled programs."""
        self._programs.clear()


def _padded(batch: Any) -> Any:
    """Pad the table of document starts to a fixed width, so that all batches have one shape."""
    if not isinstance(batch, dict) or "document_starts" not in batch:
        return batch
    starts, num_tokens = batch["document_starts"], batch["input_ids"].shape[1]
    wide = torch.full((len(starts), num_tokens), num_tokens, dtype=starts.dtype)
    wide[:, : starts.shape[1]] = starts
    return {**batch, "document_starts": wide}


def _shape_of(batch: Any) -> tuple[str]:
    shapes = tree_map(lambda one: tuple(one.shape) if isinstance(one, torch.Tensor) else one, batch)
    return (repr(shapes),)
