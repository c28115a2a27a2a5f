"""The run folder: all files of one run.

runs/<name>/
  config.toml      the resolved config        plan.txt    the resolved plan, one line
  events.jsonl     one line per step, evaluation, checkpoint
  logs/rank_N.log  output of each rank        loss.png
  checkpoints/     step_NNNNNNNN/ (safetensors + JSON), unless checkpoint.dir is set
  .lock            locked by the command that trains here
  replica_K/       the same for replica K >= 1, if each is a separate process group; replica 0 uses the run's folder

and the files of the task. The decoder on text writes:
  model.json       its shape                  data.json   path of the tokenised data
  tokenizer/       a copy, so that the folder can be moved
  samples/         step_N.txt
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from weft.config.files import load_config, parse_config
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import CheckpointError, ConfigError, LaunchError
from weft.files import KILLED_S, try_lock

if TYPE_CHECKING:
    from weft.checkpoint.object_store import Location


@dataclass(frozen=True)
class RunFolder:
    """Paths and contents of one run's folder.

    Attributes:
        path: the folder.
        texts: contents of config.toml, plan.txt and the task's files as `prepare_run` resolved them. Ranks receive the
            contents, so that later edits of the files do not affect a running run. If empty, the files are read.
        resolved: the run's config, if known. Otherwise config.toml is parsed once, at the first use.
    """

    path: Path
    texts: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    resolved: RunConfig | None = field(default=None, repr=False, compare=False)

    @property
    def checkpoints(self) -> Location:
        """Location of the run's checkpoints, in its folder or below `checkpoint.dir`."""
        from weft.checkpoint.object_store import located

        if self.resolved is None and "config.toml" not in self.texts and not (self.path / "config.toml").is_file():
            return self.path / "checkpoints"
        config = self.config()
        if config.checkpoint.dir is None:
            return self.path / "checkpoints"
        location = located(config.checkpoint.dir) / config.run.name
        return location / self.path.name if self._is_of_replica else location

    @property
    def _is_of_replica(self) -> bool:
        return self.config().run.name != self.path.name and _REPLICA.fullmatch(self.path.name) is not None

    def with_replicas(self) -> list[RunFolder]:
        """Return this folder, and if it is the run's main folder, also the existing folders of the other replicas."""
        return [self] if self._is_of_replica else [self, *self.other_replicas()]

    def other_replicas(self) -> list[RunFolder]:
        """Return the existing folders of the run's other replicas, replica 0 first."""
        run = self.path.parent if self._is_of_replica else self.path
        named = [(int(one.name.partition("_")[2]), one) for one in run.glob("replica_[1-9]*") if one.is_dir()]
        paths = [run, *(path for _, path in sorted(named))]
        return [RunFolder(path) for path in paths if path != self.path and (path / "config.toml").is_file()]

    def checkpoint(self, step: int) -> Location:
        """Return the checkpoint of one step.

        Raises:
            CheckpointError: if it does not exist. The message lists the saved steps.
        """
        from weft.checkpoint.load import list_checkpoints

        saved = {
            int(path.name.split(".")[0].removeprefix("step_")): path for path in list_checkpoints(self.checkpoints)
        }
        if step not in saved:
            known = ", ".join(map(str, saved)) or "none"
            raise CheckpointError(f"step={step}: {str(self.path)!r} has no such checkpoint. Saved steps: {known}.")
        return saved[step]

    @property
    def logs(self) -> Path:
        """Folder of the ranks' logs."""
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """Event log, one JSON value per line."""
        return self.path / "events.jsonl"

    @property
    def loss_plot(self) -> Path:
        """Plot of the losses."""
        return self.path / "loss.png"

    def config(self) -> RunConfig:
        """Return the resolved config."""
        return self._config

    @cached_property
    def _config(self) -> RunConfig:
        if self.resolved is not None:
            return self.resolved
        if "config.toml" in self.texts:
            return parse_config(self.texts["config.toml"], str(self.path / "config.toml")).config
        return load_config(self._needed("config.toml")).config

    def plan(self) -> Plan:
        """Return the resolved plan."""
        return Plan.parse(self.text("plan.txt").strip())

    def text(self, name: str) -> str:
        """Return the contents of one of the files that `prepare_run` wrote.

        Raises:
            ConfigError: if it is missing.
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
        config: the run's config.
        replica: index of the replica, if each is a separate process group; None for `launch.replica`.
    """
    path = Path(config.run.dir) / config.run.name
    number = config.launch.replica if replica is None else replica
    return RunFolder(path / f"replica_{number}" if number else path, resolved=config)


def free_name(folder: RunFolder) -> str:
    """Return a setting with an unused run name, to paste on a command line."""
    base, number = folder.path.name, 2
    while (folder.path.parent / f"{base}-{number}").exists():
        number += 1
    return f"run.name={base}-{number}"


# The lock of a run folder: a command holds it from before its first write until it ends.

_NAME = ".lock"
#: Number of attempts to create a folder while other processes remove it.
_TRIES = 100
#: Permissions of a new run folder by `run.mode`, before the umask.
_RIGHTS = {"private": 0o700, "group": 0o750, "umask": 0o777}
_REPLICA = re.compile(r"replica_[1-9]\d*")


def restrict_new_files(folder: Path) -> int:
    """Set the umask such that new files get at most the permissions of a run folder; return the old umask.

    Args:
        folder: an existing run folder.
    """
    rights = stat.S_IMODE(folder.stat().st_mode)
    before = os.umask(0o077)
    os.umask(before | (~rights & 0o077))
    return before


@contextmanager
def new_files_like(folder: Path) -> Generator[None]:
    """Give new files in this context at most the permissions of `folder`. The umask is restored at the end."""
    before = restrict_new_files(folder)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def run_lock(folder: Path, mode: str = "private") -> Generator[int]:
    """Hold the lock of a run folder, and yield its descriptor, which child processes may inherit.

    If an error ends the block before anything was written, a folder that was created here is removed again.

    Args:
        folder: the run's folder; created if it is missing.
        mode: `run.mode`, the permissions of a new folder.

    Raises:
        LaunchError: if another command has locked the folder.
        ConfigError: if the folder is not writable.
    """
    try:
        descriptor, made = _acquire(folder, _RIGHTS[mode])
    except OSError as error:
        raise ConfigError(
            f"run.dir={folder.parent}: cannot write {str(folder)!r} ({error.strerror}). Use another run.dir."
        ) from error
    try:
        yield descriptor
    except BaseException:
        _take_away(folder, made)
        raise
    finally:
        # Do not call LOCK_UN: it would release the lock while ranks that inherited it still write.
        os.close(descriptor)


def _acquire(folder: Path, rights: int) -> tuple[int, list[Path]]:
    """Lock the folder. Return the descriptor of the lock, and the folders that were created for it."""
    for tries_left in reversed(range(_TRIES)):
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            if _REPLICA.fullmatch(folder.name):
                folder.parent.mkdir(rights, parents=True, exist_ok=True)
            folder.mkdir(rights, parents=True, exist_ok=True)
            descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, rights & 0o666)
        except (FileExistsError, FileNotFoundError):
            # The previous holder removed the folder just now, before `open` or during `mkdir`.
            if tries_left == 0 or folder.is_file():
                raise
            continue
        try:
            _lock(descriptor, folder)
            if _exists(descriptor, folder / _NAME):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
                return descriptor, made
        except BaseException:
            os.close(descriptor)
            raise
        # The folder was removed between `open` and the lock.
        os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "other processes keep taking the lock", str(folder))


def _lock(descriptor: int, folder: Path) -> None:
    if not try_lock(descriptor, wait_s=KILLED_S):
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "another process"
        raise LaunchError(
            f"run.name={folder.name}: {holder} is training in {str(folder)!r} right now. "
            f"Wait for it, or use another run.name."
        )


def _exists(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _take_away(folder: Path, made: list[Path]) -> None:
    """Remove the folder and its new parents if they contain nothing but the lock."""
    with suppress(OSError):  # another process has written a file there
        if folder in made and os.listdir(folder) == [_NAME]:
            (folder / _NAME).unlink()
            for path in made:
                path.rmdir()
