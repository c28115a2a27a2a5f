"""Batches of private steps: the units that a step draws, each whole on one rank, divided among microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import default_collate

from weft.comm.mesh import Mesh
from weft.config.partitioning import microbatch_samples
from weft.data.batches import map_tensors
from weft.data.order.stream import rows_of
from weft.errors import PlanError
from weft.privacy.update import PrivateUpdate
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.privacy.records import PrivateRecords, records_of
from weft.train.step.train_step import TrainStep
from weft.train.tasks.indexed import IndexedBatches


def private_batches(
    dataset: Any, step: TrainStep, mesh: Mesh, collate_fn: Callable[[list[Any]], Any] | None = None
) -> Iterator[Microbatches]:
    """Yield the batches of a private step until its steps are done or its budget is spent, as `Run.private_batches`.

    Raises:
        PlanError: if the step is not private, or the dataset has another number of records.
        DataError: if a record has no value in the unit's column.
    """
    update = step.privacy
    if update is None:
        raise PlanError(
            "private_batches: the step is not private. Build it with run.train_step(..., privacy=Privacy(...))."
        )
    records = records_of(dataset, collate_fn or default_collate, update.privacy.unit)
    if len(records) != update.privacy.records:
        unit = "record" if records.units is None else f"value of {update.privacy.unit}"
        raise PlanError(
            f"privacy.records={update.privacy.records}: the data set has {len(records)}, one for each {unit}. Use "
            f"records={len(records)}."
        )
    division = mesh.data.size, mesh.plan.microbatches_per_step, mesh.data.rank
    while update.ledger.count < update.privacy.steps and not update.ledger.is_spent:
        number = update.ledger.count
        yield drawn_batch(records, update.draw_records(number, records.units), number, division)


class DrawnBatches(IndexedBatches):
    """One rank's batches of the units that each step of `weft train` draws."""

    def __init__(self, records: PrivateRecords, share: Share, update: PrivateUpdate):
        super().__init__(records.samples, share, records.collate, seed=0)
        self._records, self._update, self._pins = records, update, share.pin
        self._division = share.size, share.microbatches, share.rank

    def batches_ahead(self, step: int) -> list[Any]:
        """Return the microbatches of a step. The next draw is not read ahead."""
        return self.batches(step)

    def batches(self, step: int) -> list[Any]:
        """Return the microbatches of a step's draw."""
        drawn = self._update.draw_records(step, self._records.units)
        made = drawn_batch(self._records, drawn, step, self._division)
        if self._pins:
            made = made.map(lambda batch: map_tensors(lambda tensor: tensor.pin_memory(), batch))
        return made.marked()


def drawn_batch(
    records: PrivateRecords, drawn: Sequence[Sequence[int]], step: int, division: tuple[int, int, int]
) -> Microbatches:
    """Return a rank's microbatches of a step's draw. A microbatch without units is a placeholder.

    The units of a microbatch have as many rows as the largest. The first record of a unit fills the others.

    Args:
        records: all records.
        drawn: records of each drawn unit.
        step: steps done before. A dataset with `in_epoch` gets it as the epoch.
        division: number of ranks, microbatches of a rank, and this rank.
    """
    own = microbatch_samples(len(drawn), *division)
    parts: list[list[int]] = []
    for part in own:
        units = [drawn[number] for number in part or own[0][:1]] or [drawn[0] if drawn else [0]]
        most = max(map(len, units))
        parts.append([record for unit in units for record in (*unit, *[unit[0]] * (most - len(unit)))])
    read = _read(records.samples, step, list(dict.fromkeys(chain.from_iterable(parts))))
    samples = [[read[record] for record in part] for part in parts]
    batches = [records.collate(part) for part in samples]
    if records.units is None:
        return Microbatches(batches, own, [rows_of(part) for part in samples], len(drawn))
    return Microbatches(batches, own, None, len(drawn), records=[[len(drawn[one]) for one in part] for part in own])


def _read(samples: Any, step: int, wanted: list[int]) -> dict[int, Any]:
    if (many := getattr(samples, "many", None)) is not None:
        return dict(zip(wanted, many([(step, record) for record in wanted], []), strict=True))
    in_epoch = getattr(samples, "in_epoch", None)
    return {record: samples[record] if in_epoch is None else in_epoch(step, record) for record in wanted}
