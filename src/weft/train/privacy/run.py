"""Private steps of `weft train`: the settings of a run's config."""

from __future__ import annotations

from weft.comm.mesh import Mesh
from weft.config.run_config import RunConfig
from weft.privacy.settings import Privacy, privacy_of
from weft.privacy.update import PrivateUpdate
from weft.train.folder import RunFolder
from weft.train.privacy.records import PrivateRecords


def private_settings(config: RunConfig, records: int, folder: RunFolder) -> Privacy:
    """Return the settings of a run's config. Raises PlanError for impossible ones."""
    section, key = config.privacy, str(folder.path / "privacy.key")
    more = {name: getattr(section, name) for name in ("unit", "unit_records", "passes", "canaries")}
    return privacy_of(section, records, config.train.global_batch, config.train.steps, key, **more)


def private_update(config: RunConfig, records: PrivateRecords, folder: RunFolder, mesh: Mesh) -> PrivateUpdate:
    """Return the noise and account of a run. All ranks call it."""
    return PrivateUpdate(private_settings(config, len(records), folder), mesh)
