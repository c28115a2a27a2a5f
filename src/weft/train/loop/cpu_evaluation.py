"""Evaluation of a run's checkpoints on the CPU while training goes on (`launch.evaluate_on=cpu`)."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

from weft import env
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import ConfigError
from weft.monitor.events import last_per_step, read_events
from weft.train.engine import Evaluation
from weft.train.folder import RunFolder, new_files_like
from weft.train.hooks import Hook, Progress, SaveEnd
from weft.train.tasks.base import Task

#: Module of the process that evaluates one checkpoint. Importing it imports torch.
_PROGRAM = "weft.inference.task_metrics"
_LOOK_S = 0.05


def only_while_training(task: Task) -> str:
    """Return why a task's checkpoints cannot be evaluated without its training step, or ""."""
    kind, config = type(task), task.config
    if config.adapter.rank:
        return "a run with an adapter is evaluated only while it trains"
    if kind.before_step is not Task.before_step or kind.second_model is not Task.second_model:
        return f"task.name={config.task.name} is evaluated only while it trains"
    return ""


def refuse_cpu_evaluation(task: Task) -> None:
    """Raise ConfigError if the run evaluates on the CPU, and the task cannot."""
    if task.config.launch.evaluate_on == "cpu" and (why := only_while_training(task)):
        raise ConfigError(f"launch.evaluate_on=cpu: {why}. Use launch.evaluate_on=ranks.")


class CpuEvaluator(Hook):
    """Evaluates checkpoints in a process of its own: one at a time, in the order of their steps. Rank 0 has one.

    While a checkpoint is being evaluated, one other may wait. A newer one takes its place, with a warning.

    Args:
        folder: the run's folder.
        config: the run's config.
        plan: the run's plan, whose microbatches the evaluation uses.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, plan: Plan):
        self._folder, self._config = folder, config
        precision = "fp64" if plan.precision == "fp64" else "fp32"
        self._plan = Plan(accumulation=plan.microbatches_per_step * plan.dp_size, precision=precision)
        self._running: _Evaluation | None = None
        self._waiting: int | None = None
        self._settled = 0
        self._left_out: set[int] = set()
        self._done: deque[tuple[int, Evaluation | str]] = deque()

    def keeps(self, step: int) -> bool:
        """Return True if the checkpoint of a step must not be deleted, because it is not evaluated yet."""
        return step > self._settled and step not in self._left_out and self._is_due(step)

    def resume(self, progress: Progress) -> None:
        """Take the best evaluation from the log, because a checkpoint is older than its evaluation.

        Evaluate the checkpoint that the run resumes from, if its evaluation was lost.
        """
        step = progress.step
        found = [one for one in last_per_step(read_events(self._folder.events), "eval") if one["step"] <= step]
        _replay(progress, found, self._config)
        self._settled = step
        if step and self._is_due(step) and all(one["step"] != step for one in found):
            self._submit(step)

    def on_checkpoint(self, saved: SaveEnd) -> None:
        if not saved.is_copy and self.keeps(saved.step):
            self._submit(saved.step)

    def take(self) -> list[tuple[int, Evaluation | str]]:
        """Return each evaluation that ended since the last call, with its step: the result, or why there is none."""
        running = self._running
        if running is not None and (result := running.result()) is not None:
            self._running = None
            self._settled = running.step
            self._done.append((running.step, result))
            if self._waiting is not None:
                step, self._waiting = self._waiting, None
                self._submit(step)
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self, seconds: float) -> bool:
        """Wait until no evaluation runs, for at most so many seconds. Return True if none runs, or one has ended."""
        end = time.monotonic() + seconds
        while self._running is not None and not self._running.is_over and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self._running is None or self._running.is_over

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is being evaluated or waits."""
        return self._running is not None

    def close(self) -> None:
        """Stop the running evaluation."""
        if self._running is not None:
            self._running.kill()
            self._running = None

    def _is_due(self, step: int) -> bool:
        every = self._config.eval.every
        return (bool(every) and step % every == 0) or step == self._config.train.last_step

    def _submit(self, step: int) -> None:
        if self._running is None:
            self._left_out = {one for one in self._left_out if one > self._settled}
            self._running = _Evaluation(self._folder, step, self._plan)
            return
        if self._waiting is not None:
            self._left_out.add(self._waiting)
            why = f"the CPU still evaluates step {self._running.step}, and step {step} is newer"
            self._done.append((self._waiting, why))
        self._waiting = step


class _Evaluation:
    """A process that evaluates one checkpoint. It ends if this process ends."""

    def __init__(self, folder: RunFolder, step: int, plan: Plan):
        self.step, self._log = step, folder.path / "logs" / "evaluation.log"
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `result` and `kill` close it
        with new_files_like(folder.path):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.touch()
        with open(self._log, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, str(folder.path), str(step), plan.format()], stdin=subprocess.PIPE,
                stdout=self._answer, stderr=log, env=env.alone_env(), start_new_session=True,
            )  # fmt: skip

    @property
    def is_over(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def result(self) -> Evaluation | str | None:
        """Return the evaluation, a sentence about its failure, or None while it runs."""
        if not self.is_over:
            return None
        with self._process, self._answer as answer:
            answer.seek(0)
            lines = answer.read().splitlines()
        if self._process.returncode == 0:
            found: dict[str, Any] = json.loads(lines[-1])
            return Evaluation(found["loss"], found["count"], found["metrics"])
        with open(self._log, "rb") as log:
            log.seek(self._log_start)
            said = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        why = said[-1].rstrip(".") if said else f"its process ended with exit code {self._process.returncode}"
        return f"{why} ({Path(*self._log.parts[-2:])})"

    def kill(self) -> None:
        """Stop the process and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process, self._answer:
            self._process.wait()


def _replay(progress: Progress, events: list[dict[str, Any]], config: RunConfig) -> None:
    """Set the best evaluation of `progress` to that of the logged ones."""
    kept = config.checkpoint
    progress.best_loss = progress.best_step = progress.best_value = None
    for event in events:
        values = {name: one for name, one in event.items() if isinstance(one, int | float)}
        progress.note_evaluation(values.get("loss", math.nan), config.train.early_stop.min_delta)
        progress.note_best(event["step"], kept.best_by, values.get(kept.best_by), highest=kept.best_is == "highest")
