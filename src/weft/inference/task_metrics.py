"""Loss and metrics of a run's task on its evaluation set, under any plan.

Run as `python -m weft.inference.task_metrics RUN_DIR STEP PLAN`, it evaluates a checkpoint as the run does, on the CPU,
and prints JSON. It ends when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from weft.checkpoint.load import load_checkpoint
from weft.comm.mesh import Mesh, build_mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.errors import ConfigError, DataError, WeftError
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.batches.data_share import Share
from weft.train.engine import Evaluation
from weft.train.folder import RunFolder, restrict_new_files
from weft.train.loop.cpu_evaluation import only_while_training
from weft.train.states.model_state import load_model
from weft.train.step.evaluation import evaluate_run
from weft.train.tasks.base import Task
from weft.train.tasks.generation import find_checkpoint
from weft.train.tasks.registry import find_task

#: Maximum number of global batches: the full evaluation set.
_ALL = 2**62


def evaluated_task(run: RunFolder) -> Task:
    """Return the task of a run, for an evaluation of its full evaluation set.

    Raises:
        ConfigError: if the task evaluates only while it trains, or the run has an adapter.
    """
    config = run.config()
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"batches": _ALL})})
    task = find_task(config)
    if why := only_while_training(task):
        raise ConfigError(f"RUN={run.path}: {why}. Read its evaluations in events.jsonl.")
    return task


def metrics_on_rank(mesh: Mesh, source: str, step: int) -> dict[str, Any]:
    """Return the loss, the number of samples and the metrics, as a function for `run_on_ranks`.

    Args:
        mesh: the ranks.
        source: folder of the run.
        step: step of the checkpoint.

    Raises:
        DataError: if the run has no evaluation set.
    """
    run = RunFolder(Path(source))
    task = evaluated_task(run)
    found = _evaluated(task, run, mesh, step)
    return {"loss": found.loss, task.unit: found.count, **found.metrics}


def _evaluated(task: Task, run: RunFolder, mesh: Mesh, step: int) -> Evaluation:
    config = task.config
    task.open(run)
    passes = mesh.plan.microbatches_per_step
    batches = task.eval_batches(Share(config.train.global_batch, passes, mesh.data.rank, mesh.data.size))
    if batches is None:
        raise DataError(f"RUN={run.path}: it has no evaluation data. Train with data.holdout or data.eval.")
    checkpoint = load_checkpoint(find_checkpoint(run, step))
    model = task.initial_model(mesh.plan)
    layout = Layout.read(config.layout) if config.layout else None
    parallelize(model, mesh, layout=layout, seed=config.seed, filled_later=True)
    load_model(model, checkpoint, is_part=mesh.plan.pp > 1)
    data_parallel(model).wait_for_weights()
    return evaluate_run(model, batches, mesh, task)


def main() -> None:
    """Print the evaluation of a checkpoint: the run's `eval.batches`, in the microbatches of a plan of one rank."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(10)  # training has the cores first
    run, step, plan = RunFolder(Path(sys.argv[1])), int(sys.argv[2]), Plan.parse(sys.argv[3])
    restrict_new_files(run.path)
    try:
        found = _evaluated(find_task(run.config()), run, build_mesh(plan, "cpu"), step)
    except WeftError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print("\n" + json.dumps({"loss": found.loss, "count": found.count, "metrics": dict(found.metrics)}))


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
