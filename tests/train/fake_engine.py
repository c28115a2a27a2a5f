"""An engine without torch: a least-squares line in numpy. It tests the loop, the run folder and the display."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.safetensors_files import RawArray
from weft.checkpoint.save import SavedSlice
from weft.comm.heartbeat import Heartbeat
from weft.monitor.step_times import Meter
from weft.train.engine import EngineJob, Evaluation, Measures, StepResult
from weft.train.tasks.base import Metric, Task


class Points:
    """Microbatches of points near y = 3 x, as pure functions of the step."""

    samples_per_epoch = 32

    def batches(self, step: int) -> list[Any]:
        x = np.random.default_rng(step).normal(size=8)
        return [(x, 3.0 * x)]

    def iterate(self, start_step: int, end_step: int):
        return contextlib.nullcontext([self.batches(step) for step in range(start_step, end_step)])

    def state_at(self, num_samples: int) -> int:
        return num_samples


class LineTask(Task):
    """Task that fits a line."""

    unit = sample_unit = "points"
    metrics = (Metric("slope", "", "The line's slope."),)

    def build(self):
        return np.zeros(2)

    def loss(self, output, batch):
        _, y = batch
        return float(((output - y) ** 2).sum()), len(y)

    def batches(self, share):
        return Points()

    def samples_per_epoch(self):
        return Points.samples_per_epoch

    def model_line(self):
        return "a line: 2 parameters"


class FakeEngine:
    """Gradient descent with momentum on [slope, offset]."""

    rank, device, wants_stop, asks, evaluates = 0, "cpu", False, False, True
    replicas, ranks, prefetches = None, RankGroup(), False

    def __init__(self, job: EngineJob):
        self.plan, self.config, self.pulse, self.meter = job.plan, job.config, Heartbeat(), Meter()
        self.task, self.batches = job.task, job.task.batches(None)
        self.state = self.reports = self

    def build(self) -> None:
        self.weights, self.momentum = self.task.build(), np.zeros(2)

    def step(self, batches: Sequence[Any], number: int, lr_factor: float, following: Any = None) -> StepResult:
        ((x, y),) = batches
        fit = self.weights[0] * x + self.weights[1]
        off, (loss, count) = fit - y, self.task.loss(fit, (x, y))
        gradient = np.array([(off * x).mean(), off.mean()])
        self.momentum = 0.9 * self.momentum + gradient
        self.weights = self.weights - self.config.optimizer.lr * lr_factor * self.momentum
        norm = float(np.linalg.norm(gradient))
        return StepResult(loss / count, norm, count, wants_stop=self.wants_stop or self.asks)

    def trace(self, kind, number):
        return None

    def evaluate(self) -> Evaluation:
        return Evaluation(float((self.weights[0] - 3.0) ** 2), 1, {"slope": float(self.weights[0])})

    def sample(self, step: int) -> str:
        return ""

    def background_ranks(self):
        return RankGroup()

    buffers = frozenset()

    def slices(self, *, aside=False):
        yield SavedSlice.full("model/line", RawArray.of(self.weights))
        yield SavedSlice.full("optimizer/line/momentum", RawArray.of(self.momentum))

    def values(self):
        return {"fake": True}

    def load(self, checkpoint) -> list[str]:
        assert checkpoint.state["fake"]
        self.weights, self.momentum = (
            checkpoint.block(path).array().copy() for path in ("model/line", "optimizer/line/momentum")
        )
        return []

    def measures(self):
        return Measures()

    def close(self, *, failed: bool = False) -> None:
        self.closed = True

    def versions(self):
        return {"numpy": np.__version__}

    def opening(self):
        return ["format  float64"]

    def checkpoint_bytes(self) -> int:
        return 32

    def peak_flops(self):
        return None

    def times(self, book, start_step):
        return []
