"""Delete old checkpoints, and never the last whole one."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from weft.checkpoint import folders
from weft.checkpoint.folders import StepFolder
from weft.checkpoint.load import verify_checkpoint
from weft.errors import CheckpointError


def prune_checkpoints(
    root: Path,
    keep: int,
    best_step: int | None = None,
    *,
    spared: Collection[int] = (),
    whole: int | None = None,
    delete: bool = True,
) -> list[Path]:
    """Delete all checkpoints but some, and return where they were.

    Before anything is deleted the kept ones are verified, newest first, until one proves whole; when none does, the
    newest whole one of the others stays too. One that is being read stays until the next time.
    Deleting is a rename out of sight first, so that a crash in between leaves no half-deleted checkpoint to be found.
    Folders without COMMIT that are older than the newest checkpoint are left by killed writers, and go too.

    Args:
        root: the folder of the steps' folders.
        keep: how many of the newest stay, at least 1.
        best_step: stays too.
        spared: further steps that stay.
        whole: a step that was written and digested just now, and is not read again.
        delete: False only says what would go.

    Raises:
        CheckpointError: where `keep` is below 1, another process is saving there, or a folder cannot be deleted.
    """
    root = Path(root)
    if type(keep) is not int or keep < 1:
        raise CheckpointError(f"checkpoint.keep={keep!r}: at least 1 checkpoint must be kept. Use 1 or more.")
    if not any(folder.committed for folder in folders.step_folders(root)):
        return []
    try:
        with folders.writer_lock(root):
            doomed, dead = _doomed(root, keep, {best_step, *spared}, whole)
            for folder in (*doomed, *dead) if delete else ():
                folders.move_to_trash(folder.path)
            if delete:
                folders.empty_trash(root)
    except OSError as error:
        raise CheckpointError(f"run.dir={root}: old checkpoints could not be deleted ({error.strerror}).") from error
    return [folder.path for folder in doomed]


def _doomed(
    root: Path, keep: int, spared: Collection[int | None], proven: int | None
) -> tuple[list[StepFolder], list[StepFolder]]:
    """The checkpoints to delete, and the older folders that were never finished."""
    found = folders.step_folders(root)
    committed = [folder for folder in found if folder.committed]
    kept_steps = set(sorted({folder.step for folder in committed})[-keep:]) | {*spared}
    # An `.again` folder is a replacement that the next save finishes: it counts as its step does.
    doomed = [
        folder for folder in committed if folder.step not in kept_steps and not folders.is_being_read(folder.path)
    ]
    kept = [folder for folder in committed if folder.step in kept_steps]

    def is_whole(folder: StepFolder) -> bool:
        return folder.step == proven or not verify_checkpoint(folder.path)

    if doomed and not any(is_whole(folder) for folder in reversed(kept)):
        whole = next((folder for folder in reversed(doomed) if is_whole(folder)), None)
        doomed = [folder for folder in doomed if folder is not whole]
    dead = [folder for folder in found if not folder.committed and folder.step < committed[-1].step]
    return doomed, dead
