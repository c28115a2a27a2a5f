"""Delete old checkpoints, and never the last whole one; or set them aside: out of the way of resuming and pruning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from weft.checkpoint.folders import StepFolder
from weft.checkpoint.load import verify_checkpoint
from weft.checkpoint.targets import Location, Target, located, target_at
from weft.errors import CheckpointError


def prune_checkpoints(
    root: Location,
    keep: int,
    best_step: int | None = None,
    *,
    spared: Collection[int] = (),
    whole: int | None = None,
    delete: bool = True,
) -> list[Location]:
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
    target = target_at(located(root))
    if type(keep) is not int or keep < 1:
        raise CheckpointError(f"checkpoint.keep={keep!r}: at least 1 checkpoint must be kept. Use 1 or more.")
    if not any(folder.committed for folder in target.step_folders()):
        return []
    try:
        with contextlib.ExitStack() as held:
            target.hold(held)
            doomed, dead = _doomed(target, keep, {best_step, *spared}, whole)
            if delete:
                target.remove([folder.path for folder in (*doomed, *dead)])
    except OSError as error:
        raise CheckpointError(f"{target.setting}: old checkpoints could not be deleted ({error.strerror}).") from error
    return [folder.path for folder in doomed]


def _doomed(
    target: Target, keep: int, spared: Collection[int | None], proven: int | None
) -> tuple[list[StepFolder], list[StepFolder]]:
    """The checkpoints to delete, and the older folders that were never finished."""
    found = target.step_folders()
    committed = [folder for folder in found if folder.committed]
    kept_steps = set(sorted({folder.step for folder in committed})[-keep:]) | {*spared}
    # An `.again` folder is a replacement that the next save finishes: it counts as its step does.
    doomed = [folder for folder in committed if folder.step not in kept_steps and not target.is_being_read(folder.path)]
    kept = [folder for folder in committed if folder.step in kept_steps]

    def is_whole(folder: StepFolder) -> bool:
        return folder.step == proven or not verify_checkpoint(folder.path)

    if doomed and not any(is_whole(folder) for folder in reversed(kept)):
        whole = next((folder for folder in reversed(doomed) if is_whole(folder)), None)
        doomed = [folder for folder in doomed if folder is not whole]
    dead = [folder for folder in found if not folder.committed and folder < committed[-1]]
    return doomed, dead


def set_aside(root: Location, chosen: Callable[[StepFolder], bool]) -> list[Location]:
    """Set the chosen checkpoints aside, where nothing of Weft reads or deletes them, and return their new names.

    Raises:
        CheckpointError: where another process is saving there, or one cannot be set aside.
    """
    target = target_at(located(root))
    return _each_aside(target, [one for one in target.step_folders() if chosen(one)], target.set_aside)


def set_unfinished_aside(root: Location) -> list[Location]:
    """Set those without COMMIT aside: a writer was killed, or a copy left files out.

    The second save of a step is left alone. In an object store they stay, and go with the next pruning.
    """
    target = target_at(located(root))
    found = [folder for folder in target.step_folders() if not folder.again and not folder.committed]
    return _each_aside(target, found, target.set_unfinished_aside)


def _each_aside(target: Target, found: list[StepFolder], act: Callable[[Location], Location | None]) -> list[Location]:
    if not found:
        return []
    try:
        with contextlib.ExitStack() as held:
            target.hold(held)
            moved = [act(folder.path) for folder in found]
    except OSError as error:
        raise CheckpointError(f"{target.setting}: checkpoints could not be set aside ({error.strerror}).") from error
    return [one for one in moved if one is not None]
