"""Loss and metrics of a run's task on its evaluation set, under any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.checkpoint.load import load_checkpoint
from weft.comm.mesh import Mesh
from weft.config.fields.layout import Layout
from weft.errors import ConfigError, DataError
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.batches.data_share import Share
from weft.train.folder import RunFolder
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
    kind = type(task)
    if kind.before_step is not Task.before_step or kind.second_model is not Task.second_model or config.adapter.rank:
        what = "a run with an adapter" if config.adapter.rank else f"task.name={config.task.name}"
        raise ConfigError(
            f"RUN={run.path}: {what} is evaluated only while it trains. Read its evaluations in events.jsonl."
        )
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
    config = task.config
    task.open(run)
    passes = mesh.plan.microbatches_per_step
    batches = task.eval_batches(Share(config.train.global_batch, passes, mesh.data.rank, mesh.data.size))
    if batches is None:
        raise DataError(f"RUN={source}: it has no evaluation data. Train with data.holdout or data.eval.")
    checkpoint = load_checkpoint(find_checkpoint(run, step))
    model = task.initial_model(mesh.plan)
    layout = Layout.read(config.layout) if config.layout else None
    parallelize(model, mesh, layout=layout, seed=config.seed, filled_later=True)
    load_model(model, checkpoint, is_part=mesh.plan.pp > 1)
    data_parallel(model).wait_for_weights()
    found = evaluate_run(model, batches, mesh, task)
    return {"loss": found.loss, task.unit: found.count, **found.metrics}
