"""Under which circumstances a run trains: its config, data, versions and machine. Its first event keeps them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weft import env
from weft.errors import ConfigError
from weft.spec import RunConfig
from weft.train.folder import RunFolder

#: One folder for each GPU, with a file that names it.
_GPUS = Path("/proc/driver/nvidia/gpus")


def circumstances(folder: RunFolder, config: RunConfig) -> dict[str, Any]:
    """Return JSON values: "config" as tables, "data" by source, versions and machine of this process. No torch."""
    return {
        **_versions(),
        "config": config.model_dump(mode="json", by_alias=True, exclude_none=True),
        "data": _data_digests(folder),
        "machine": _machine(),
    }


def _versions() -> dict[str, str]:
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return {"weft": env.weft_version(), "torch": torch, "python": platform.python_version()}


def _machine() -> dict[str, Any]:
    """Name, system, cores and GPUs of this machine."""
    found = {"host": platform.node(), "system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count()}
    models = Counter(
        line.partition(":")[2].strip()
        for file in _GPUS.glob("*/information")
        for line in file.read_text(errors="replace").splitlines()
        if line.startswith("Model:")
    )
    return {**found, "gpus": ", ".join(f"{count} x {name}" for name, count in sorted(models.items())) or "none"}


def _data_digests(folder: RunFolder) -> dict[str, str]:
    """A digest of each source's tokens, as the run's data.json has them; empty for tasks that keep none."""
    try:
        described = json.loads(folder.text("data.json"))
        return {
            f"{split}.{source['name']}": _digest(source["counts"]["files"])
            for split in ("train", "eval")
            for source in described[split]
        }
    except (ConfigError, ValueError, KeyError, TypeError):  # a task of one's own may keep another data.json, or none
        return {}


def _digest(files: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
