"""Set checkpoints aside: out of the way of resuming and pruning, and still on disk under another name.

step_00000120.aside/     whatever was there; nothing of Weft reads or deletes it
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weft.checkpoint import folders
from weft.checkpoint.folders import StepFolder
from weft.errors import CheckpointError


def set_aside(root: Path, chosen: Callable[[StepFolder], bool]) -> list[Path]:
    """Rename the chosen step folders, each in one rename; where they are now, oldest step first.

    Raises:
        CheckpointError: where another process is saving there, or a folder cannot be renamed.
    """
    root = Path(root)
    found = [folder for folder in folders.step_folders(root) if chosen(folder)]
    if not found:
        return []
    try:
        with folders.writer_lock(root):
            moved = [_rename(folder.path) for folder in found]
            folders.sync_folder(root)
    except OSError as error:
        raise CheckpointError(f"run.dir={root}: checkpoints could not be set aside ({error.strerror}).") from error
    return moved


def set_unfinished_aside(root: Path) -> list[Path]:
    """Set aside the step folders without COMMIT: a writer was killed, or a copy left files out.

    The second save of a step is left alone. Returns where they are now.

    Raises:
        CheckpointError: as `set_aside`.
    """
    return set_aside(root, lambda folder: not folder.committed and not folder.again)


def _rename(path: Path) -> Path:
    number = 1
    while (target := path.with_name(f"{path.name}.aside{'' if number == 1 else f'-{number}'}")).exists():
        number += 1
    path.rename(target)
    return target
