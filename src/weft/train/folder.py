"""The run folder: everything one run needs and leaves behind.

runs/<name>/
  config.toml      the resolved config        plan.txt    the resolved plan, one line
  events.jsonl     one line per step, evaluation, checkpoint
  logs/rank_N.log  output of each rank        loss.png
  checkpoints/     step_NNNNNNNN/ (safetensors + JSON), unless checkpoint.dir names another place
  .lock            held by the command that trains here (run/folder_lock.py)
  replica_K/       the same of replica K from 1 on, where each is a world of its own; replica 0 has the run's folder

and what the task keeps there. The decoder on text keeps:
  model.json       its shape                  data.json   where the tokenised data lies
  tokenizer/       a copy, so that the folder can be moved
  samples/         step_N.txt
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import CheckpointError, ConfigError
from weft.spec import RunConfig
from weft.spec.files import load_config, parse_config
from weft.spec.plan import Plan

if TYPE_CHECKING:
    from weft.checkpoint.targets import Location


@dataclass(frozen=True)
class RunFolder:
    """Paths and contents of one run's folder.

    texts: contents of config.toml, plan.txt and the task's files as `prepare_run` settled them. A rank gets them by
    value: what happens to the files afterwards does not reach a run under way. Empty: the files are read.
    """

    path: Path
    texts: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def checkpoints(self) -> Location:
        """Where the run's checkpoints are: in its folder, or below `checkpoint.dir`."""
        from weft.checkpoint.targets import located

        if "config.toml" in self.texts or (self.path / "config.toml").is_file():
            config = self.config()
            if config.checkpoint.dir is not None:
                place = located(config.checkpoint.dir) / config.run.name
                return place / self.path.name if self._is_of_replica(config) else place
        return self.path / "checkpoints"

    def _is_of_replica(self, config: RunConfig) -> bool:
        return config.run.name != self.path.name and re.fullmatch(r"replica_[1-9]\d*", self.path.name) is not None

    def with_replicas(self) -> list[RunFolder]:
        """Return this folder, and of a run whose replicas are worlds of their own those of the others."""
        return [self] if self._is_of_replica(self.config()) else [self, *self.other_replicas()]

    def other_replicas(self) -> list[RunFolder]:
        """Return the folders of the run's other replicas, as far as they are there: replica 0's first."""
        run = self.path.parent if self._is_of_replica(self.config()) else self.path
        named = [(int(one.name.partition("_")[2]), one) for one in run.glob("replica_[1-9]*") if one.is_dir()]
        paths = [run, *(path for _, path in sorted(named))]
        return [RunFolder(path) for path in paths if path != self.path and (path / "config.toml").is_file()]

    def checkpoint(self, step: int) -> Location:
        """Return the checkpoint of one step.

        Raises:
            CheckpointError: names the steps that were saved.
        """
        from weft.checkpoint import list_checkpoints

        saved = {
            int(path.name.split(".")[0].removeprefix("step_")): path for path in list_checkpoints(self.checkpoints)
        }
        if step not in saved:
            known = ", ".join(map(str, saved)) or "none"
            raise CheckpointError(f"step={step}: {str(self.path)!r} has no such checkpoint. Saved steps: {known}.")
        return saved[step]

    @property
    def logs(self) -> Path:
        """The folder of the ranks' logs."""
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """The file of events, one JSON value a line."""
        return self.path / "events.jsonl"

    @property
    def loss_plot(self) -> Path:
        """The picture of the losses."""
        return self.path / "loss.png"

    def config(self) -> RunConfig:
        """Return the resolved config."""
        if "config.toml" in self.texts:
            return parse_config(self.texts["config.toml"], str(self.path / "config.toml")).config
        return load_config(self._needed("config.toml")).config

    def plan(self) -> Plan:
        """Return the resolved plan."""
        return Plan.parse(self.text("plan.txt").strip())

    def text(self, name: str) -> str:
        """Return the contents of one of the files that `prepare_run` wrote.

        Raises:
            ConfigError: where it is missing.
        """
        return self.texts[name] if name in self.texts else self._needed(name).read_text(errors="replace")

    def _needed(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            raise ConfigError(
                f"run folder {str(self.path)!r}: it has no {name}, so it is not a run folder of Weft. "
                f"Give a folder that `weft train` made, such as runs/quickstart."
            )
        return file


def run_folder(config: RunConfig, replica: int | None = None) -> RunFolder:
    """Return the folder of the config's run, which need not exist.

    Args:
        config: of the run.
        replica: which one is meant, where each is a world of its own; None: as `launch.replica` says.
    """
    path = Path(config.run.dir) / config.run.name
    number = config.launch.replica if replica is None else replica
    return RunFolder(path / f"replica_{number}" if number else path)


def free_name(folder: RunFolder) -> str:
    """A setting that makes a new run, to be pasted on a command line."""
    base, number = folder.path.name, 2
    while (folder.path.parent / f"{base}-{number}").exists():
        number += 1
    return f"run.name={base}-{number}"
