"""Batches of private steps: the records that a step draws, divided among ranks and microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import default_collate

from weft.comm.mesh import Mesh
from weft.config.partitioning import microbatch_samples
from weft.errors import PlanError
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep


def private_batches(
    dataset: Any, step: TrainStep, mesh: Mesh, collate_fn: Callable[[list[Any]], Any] | None = None
) -> Iterator[Microbatches]:
    """Yield the batches of a private step until its steps are done or its budget is spent, as `Run.private_batches`.

    Raises:
        PlanError: if the step is not private, or the dataset has another number of records.
    """
    update = step.privacy
    if update is None:
        raise PlanError(
            "private_batches: the step is not private. Build it with run.train_step(..., privacy=Privacy(...))."
        )
    if len(dataset) != update.privacy.records:
        raise PlanError(
            f"privacy.records={update.privacy.records}: the data set has {len(dataset)} records. Use "
            f"records={len(dataset)}."
        )
    while update.ledger.count < update.privacy.steps and not update.ledger.is_spent:
        yield drawn_batch(dataset, update.draw().tolist(), mesh, collate_fn or default_collate)


def drawn_batch(dataset: Any, records: list[int], mesh: Mesh, collate_fn: Callable[[list[Any]], Any]) -> Microbatches:
    """Return this rank's microbatches of drawn records. If none was drawn, each microbatch is a placeholder."""
    own = microbatch_samples(len(records), mesh.data.size, mesh.plan.microbatches_per_step, mesh.data.rank)

    def sample_at(number: int) -> Any:
        return dataset[records[number] if number < len(records) else 0]

    return Microbatches.of_samples(sample_at, own, collate_fn, total=len(records))
