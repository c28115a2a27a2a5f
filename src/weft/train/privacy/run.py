"""Private steps of `weft train`: settings of a run's config, and batches of drawn records."""

from __future__ import annotations

from typing import Any

from weft.comm.mesh import Mesh
from weft.config.partitioning import microbatch_samples
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, DataError
from weft.privacy.settings import Privacy
from weft.privacy.update import PrivateUpdate
from weft.train.data_share import MapDataset, Share
from weft.train.folder import RunFolder
from weft.train.tasks.base import Task
from weft.train.tasks.indexed import Collate, IndexedBatches, as_microbatches


def private_samples(config: RunConfig, task: Task) -> MapDataset:
    """Return the records that a private run draws.

    Raises:
        ConfigError: if the task's batches are not made of single records.
        DataError: if there are no records.
    """
    if type(task).batches is not Task.batches:
        raise ConfigError(
            f"privacy.epsilon={config.privacy.epsilon:g}: {type(task).__name__} makes batches of a stream or of "
            "several records, so no record can be drawn or clipped by itself. Use a task with one sample for each "
            "record, such as task.name=classify_text, or a Task of your own."
        )
    samples = task.samples("train")
    if samples is None or not len(samples):
        raise DataError("task: it has no training samples. Let samples('train') return some.")
    return samples


def private_settings(config: RunConfig, records: int, folder: RunFolder) -> Privacy:
    """Return the settings of a run's config. Raises PlanError for impossible ones."""
    section = config.privacy
    return Privacy(
        records, config.train.global_batch, config.train.steps, section.delta, section.epsilon or None, section.clip,
        section.noise or None, section.unit, section.accountant, section.key or str(folder.path / "privacy.key"),
        section.passes, section.canaries,
    )  # fmt: skip


def private_update(config: RunConfig, samples: MapDataset, folder: RunFolder, mesh: Mesh) -> PrivateUpdate:
    """Return the noise and account of a run. All ranks call it."""
    return PrivateUpdate(private_settings(config, len(samples), folder), mesh)


class PrivateBatches(IndexedBatches):
    """The microbatches of one rank of a private run: the records that each step draws.

    A dataset with `in_epoch` gets the step as the epoch.
    """

    def __init__(self, samples: MapDataset, share: Share, collate: Collate, update: PrivateUpdate):
        super().__init__(samples, share, collate, seed=0)
        self._update = update

    def batches_ahead(self, step: int) -> list[Any]:
        return self.batches(step)

    def batches(self, step: int) -> list[Any]:
        share, samples = self._share, self._samples
        records = self._update.draw(step).tolist()
        own = microbatch_samples(len(records), share.size, share.microbatches, share.rank)
        many, in_epoch = getattr(samples, "many", None), getattr(samples, "in_epoch", None)
        found: dict[int, Any] = {}
        if many is not None:
            wanted = sorted({number for part in own for number in part} | {0})
            found = dict(zip(wanted, many([(step, _record(records, one)) for one in wanted], []), strict=True))

        def sample_at(number: int) -> Any:
            if found:
                return found[number if number in found else 0]
            record = _record(records, number)
            return samples[record] if in_epoch is None else in_epoch(step, record)

        return as_microbatches(sample_at, own, len(records), share, self._collate)


def _record(records: list[int], number: int) -> int:
    """Return the record of a sample of the batch, or record 0 for a placeholder of an empty batch."""
    return records[number] if number < len(records) else 0
