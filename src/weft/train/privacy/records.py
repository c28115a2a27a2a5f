"""Records that a private run draws: samples of a task, or sequences of its token files, in units; and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.comm.mesh import Mesh
from weft.config.run_config import RunConfig
from weft.data.order.loader import build_batch
from weft.errors import ConfigError, DataError
from weft.privacy.settings import privacy_of
from weft.privacy.update import PrivateUpdate
from weft.train.batches.data_share import MapDataset
from weft.train.folder import RunFolder
from weft.train.privacy.units import Units, numbered_values
from weft.train.tasks.base import Task
from weft.train.tasks.decoder import DecoderTask


@dataclass(frozen=True, slots=True)
class PrivateRecords:
    """Records, the function that makes a batch of some, and their units; None if each record is a unit."""

    samples: MapDataset
    collate: Callable[[list[Any]], Any]
    units: Units | None = None

    def __len__(self) -> int:
        return len(self.samples if self.units is None else self.units)


def records_of(samples: MapDataset, collate: Callable[[list[Any]], Any], unit: str) -> PrivateRecords:
    """Return records by unit. unit: "sample", or a column, whose values are read from all records.

    Raises:
        DataError: if a record has no value in the column.
    """
    units = None if unit == "sample" else Units.of(numbered_values(samples, unit, "privacy.unit"))
    return PrivateRecords(samples, collate, units)


def refuse_streams(task: Task, setting: str) -> None:
    """Raise ConfigError if a task's batches are not made of single samples, or it computes more than their loss."""
    for name in ("before_step", "second_model", "batches"):
        if getattr(type(task), name) is not getattr(Task, name):
            raise ConfigError(
                f"{setting}: {type(task).__name__} has a {name} of its own, so its steps are not made of single "
                "records. Use a task with one sample for each record, such as task.name=classify_text, or a Task of "
                "your own."
            )


def single_records(task: Task, setting: str) -> MapDataset:
    """Return the training samples of a task whose batches are made of single samples. setting: for errors.

    Raises:
        ConfigError: as `refuse_streams`.
        DataError: if there are none.
    """
    refuse_streams(task, setting)
    samples = task.samples("train")
    if samples is None or not len(samples):
        raise DataError("task: it has no training samples. Let samples('train') return some.")
    return samples


def private_records(config: RunConfig, task: Task) -> PrivateRecords:
    """Return the records of a private run.

    Raises:
        ConfigError: if the task's batches are not made of single records, or a record mixes units.
        DataError: if there are no records, or a record has no value in the unit's column.
    """
    if isinstance(task, DecoderTask) and all(
        getattr(type(task), name) is getattr(DecoderTask, name) for name in ("batches", "before_step", "second_model")
    ):
        return _text_records(config, task)
    samples = single_records(task, f"privacy.epsilon={config.privacy.epsilon:g}")
    return records_of(samples, task.collate, config.privacy.unit)


def private_update(config: RunConfig, records: PrivateRecords, folder: RunFolder, mesh: Mesh) -> PrivateUpdate:
    """Return the noise and account of a run. All ranks call it. Raises PlanError for impossible settings."""
    section, train, key = config.privacy, config.train, str(folder.path / "privacy.key")
    more = {name: getattr(section, name) for name in ("unit", "unit_records", "passes", "canaries")}
    return PrivateUpdate(privacy_of(section, len(records), train.global_batch, train.steps, key, **more), mesh)


def _text_records(config: RunConfig, task: DecoderTask) -> PrivateRecords:
    """Return the sequences of token files. With data.packing=pad, each has tokens of one document."""
    packings = {config.data.packing or source.packing for source in task.data.train}
    if config.data.stream or packings != {"pad"}:
        raise ConfigError(
            f"privacy.epsilon={config.privacy.epsilon:g}: sequences of a stream pack several documents, so clipping a "
            "sequence bounds none of them. Use data.packing=pad and data.stream=false."
        )
    if config.privacy.unit not in ("sample", "document"):
        raise ConfigError(
            f"privacy.unit={config.privacy.unit}: token files keep no columns. Use unit=document, or unit=sample for "
            "single sequences."
        )
    if any(source.weight is not None for source in task.data.train):
        raise ConfigError("data.train.0.weight: with privacy, records are drawn with equal probability. Leave it out.")
    stream = task.text.stream("train", shuffle=False)
    units = Units.of(stream.documents()) if config.privacy.unit == "document" else None
    return PrivateRecords(
        range(stream.num_sequences), lambda indices: build_batch(stream, indices, len(indices)), units
    )
