"""Which modules a run's ranks will import: what the server that they are forked from loads beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.spec import RunConfig

_OF_EVERY_RANK = ("torch", "weft.engines.torch_engine", "weft.train.run.rank_run", "weft.monitor.screen")
_OF_DECODERS = ("weft.train.tasks.decoder_task", "weft.models")
_OF_FOLDERS = ("transformers", "weft.train.tasks.pretrained_task", "weft.train.tasks.tuned", "weft.models.adapters")


def preloaded_modules(config: RunConfig) -> list[str]:
    """Return the modules by name, in the order in which they are loaded. None of them is the user's own code."""
    path = config.model.path
    if not path:
        return [*_OF_EVERY_RANK, *_OF_DECODERS]
    return [*_OF_EVERY_RANK, *_OF_FOLDERS, *_of_architecture(Path(path).expanduser())]


def _of_architecture(folder: Path) -> list[str]:
    """The modules of transformers that hold a folder's model; none where its config does not say which."""
    try:
        kind = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the checks of the run tell what is wrong
    if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier():
        return []
    name = kind.replace("-", "_")
    return [f"transformers.models.{name}.{part}_{name}" for part in ("configuration", "modeling")]
