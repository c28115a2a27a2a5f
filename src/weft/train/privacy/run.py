"""Private steps of `weft train`: records and settings of a run's config."""

from __future__ import annotations

from weft.comm.mesh import Mesh
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, DataError
from weft.privacy.settings import Privacy, privacy_of
from weft.privacy.update import PrivateUpdate
from weft.train.batches.data_share import MapDataset
from weft.train.folder import RunFolder
from weft.train.tasks.base import Task


def private_samples(config: RunConfig, task: Task) -> MapDataset:
    """Return the records that a private run draws.

    Raises:
        ConfigError: if the task's batches are not made of single records.
        DataError: if there are no records.
    """
    own = [name for name in ("batches", "before_step", "second_model") if name in _overridden(task)]
    if "batches" not in own and own:
        raise ConfigError(
            f"privacy.epsilon={config.privacy.epsilon:g}: {type(task).__name__} has a {own[0]} of its own, and steps "
            "that compute more than the loss of drawn records are not tested. Use another task."
        )
    if own:
        raise ConfigError(
            f"privacy.epsilon={config.privacy.epsilon:g}: {type(task).__name__} makes batches of a stream or of "
            "several records, so no record can be drawn or clipped by itself. Use a task with one sample for each "
            "record, such as task.name=classify_text, or a Task of your own."
        )
    samples = task.samples("train")
    if samples is None or not len(samples):
        raise DataError("task: it has no training samples. Let samples('train') return some.")
    return samples


def _overridden(task: Task) -> set[str]:
    """Return the names of the methods that the task's class replaces."""
    return {name for kind in type(task).__mro__[: type(task).__mro__.index(Task)] for name in vars(kind)}


def private_settings(config: RunConfig, records: int, folder: RunFolder) -> Privacy:
    """Return the settings of a run's config. Raises PlanError for impossible ones."""
    section, key = config.privacy, str(folder.path / "privacy.key")
    more = {"unit": section.unit, "passes": section.passes, "canaries": section.canaries}
    return privacy_of(section, records, config.train.global_batch, config.train.steps, key, **more)


def private_update(config: RunConfig, samples: MapDataset, folder: RunFolder, mesh: Mesh) -> PrivateUpdate:
    """Return the noise and account of a run. All ranks call it."""
    return PrivateUpdate(private_settings(config, len(samples), folder), mesh)
