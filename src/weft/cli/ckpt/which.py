"""Which checkpoint a word of the command line means: a run, its folder of checkpoints, one step of either."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint, step_in_name
from weft.checkpoint.targets import Location, StorePath, located
from weft.errors import ConfigError, nearest_name
from weft.train import RunFolder

#: What a word may be, for help texts.
RUN_HELP = "A run's folder, its folder of checkpoints (or URL, such as s3://bucket/prefix), or one step_NNNNNNNN in it."
ONE_HELP = f"{RUN_HELP} RUN@120 is its step 120; without @STEP, the newest whole checkpoint."


def root_of(word: str | Location) -> Location:
    """The folder that holds the checkpoints of a run, or that of a script's. ConfigError where there is none."""
    word = located(word)
    if not word.is_dir():
        if isinstance(word, StorePath) and not word.bucket.exists():
            raise ConfigError(f"RUN={word}: the store has no {word.bucket}. Check its name.")
        siblings = [found.name for found in word.parent.iterdir()] if word.parent.is_dir() else []
        near = nearest_name(word.name, siblings)
        hint = f" Did you mean '{word.parent / near}'?" if near else " Give a run's folder, such as runs/quickstart."
        raise ConfigError(f"RUN={word}: there is no such folder.{hint}")
    own = RunFolder(word).checkpoints if isinstance(word, Path) else word / "checkpoints"
    for root in (own, word):
        if root.is_dir() and any(_is_named_step(path) for path in root.iterdir()):
            return root
    raise ConfigError(
        f"RUN={word}: it has no checkpoints. Give a run's folder, such as runs/quickstart, or the folder that holds "
        "the step_NNNNNNNN folders."
    )


def one_of(word: str) -> Location:
    """The folder of the one checkpoint that a word names. ConfigError or CheckpointError where there is none."""
    path = located(word)
    if (path / "COMMIT").exists() or (path / "manifest.json").exists():
        return path
    run, at, step = word.rpartition("@")
    if at and not path.exists():
        return _of_step(root_of(run), step, word)
    if step_in_name(path.name) is not None and path.is_dir():
        load_checkpoint(path, lazily=True)  # says what is missing
    root = root_of(path)
    found = newest_checkpoint(root, verify=False)
    if found is None:
        raise ConfigError(f"RUN={word}: it has no finished checkpoint. `weft ckpt ls {word}` lists what it holds.")
    return found.path


def folder_of(field: str, word: str) -> Path:
    """The path of a folder on this machine's file systems. ConfigError for a URL of an object store."""
    place = located(word)
    if not isinstance(place, Path):
        raise ConfigError(f"{field}={place}: it is a URL, and only a folder works here. Give a path.")
    return place


def settled_steps(root: Location) -> dict[int, Location]:
    """The finished checkpoints by their step, oldest first."""
    return {step: path for path in list_checkpoints(root) if (step := step_in_name(path.name)) is not None}


def _of_step(root: Location, step: str, word: str) -> Location:
    saved = settled_steps(root)
    if not step.isdecimal() or int(step) not in saved:
        known = ", ".join(map(str, saved)) or "none"
        raise ConfigError(f"RUN={word}: it has no finished checkpoint of step {step!r}. Use one of: {known}.")
    return saved[int(step)]


def _is_named_step(path: Location) -> bool:
    return step_in_name(path.name.split(".")[0]) is not None and path.is_dir()
