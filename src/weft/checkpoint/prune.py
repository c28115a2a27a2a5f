"""Delete old checkpoints but never the last good one, or rename them so that resuming and pruning ignore them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from weft.checkpoint.folders import StepFolder
from weft.checkpoint.load import verify_checkpoint
from weft.checkpoint.object_store import Location, located
from weft.checkpoint.targets import Target, target_at
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
    """Delete old checkpoints, and return the paths of those that had COMMIT.

    The newest `keep` intact checkpoints stay. A damaged one does not count, and stays until `keep` intact ones are
    newer. A checkpoint that is being read stays until the next call. Folders without COMMIT that are older than the
    newest checkpoint are from killed writers, and are deleted too. Each folder is renamed before it is deleted, so that
    a crash leaves no partly deleted checkpoint.

    Args:
        root: folder of the run's checkpoints.
        keep: number of intact checkpoints to keep, at least 1.
        best_step: a step to keep, or None.
        spared: other steps to keep.
        whole: a step that was just written and need not be verified. Of older steps only sizes and headers are then
            verified, of newer steps all bytes. If None, all bytes of all steps are verified.
        delete: if False, return the paths without deleting them.

    Raises:
        CheckpointError: if `keep` is below 1, another process is saving there, or a folder cannot be deleted.
    """
    target = target_at(located(root))
    if type(keep) is not int or keep < 1:
        raise CheckpointError(f"checkpoint.keep={keep!r}: at least 1 checkpoint must be kept. Use 1 or more.")
    if not any(folder.committed for folder in target.step_folders()):
        return []
    try:
        with contextlib.ExitStack() as held:
            target.lock(held)
            doomed, dead = _doomed(target, keep, {best_step, *spared}, whole)
            if delete:
                target.remove([folder.path for folder in (*doomed, *dead)])
    except OSError as error:
        raise CheckpointError(f"{target.setting}: old checkpoints could not be deleted ({error.strerror}).") from error
    return [folder.path for folder in doomed]


def _doomed(
    target: Target, keep: int, spared: Collection[int | None], proven: int | None
) -> tuple[list[StepFolder], list[StepFolder]]:
    """Return the checkpoints to delete, and the older folders that were not finished."""
    found = target.step_folders()
    committed = [folder for folder in found if folder.committed]

    def is_good(folder: StepFolder) -> bool:
        if folder.step == proven:
            return True
        # Steps after the one just saved exist only if resuming skipped them, so they are read in full.
        return not verify_checkpoint(folder.path, digests=proven is None or folder.step > proven)

    doomed: list[StepFolder] = []
    num_good = 0
    for step in sorted({folder.step for folder in committed}, reverse=True):
        # An `.again` folder is a replacement of its step that the next save will finish.
        of_step = [folder for folder in committed if folder.step == step]
        if num_good >= keep:
            doomed += [one for one in of_step if step not in spared and not target.is_being_read(one.path)]
        elif any(is_good(folder) for folder in reversed(of_step)):
            num_good += 1
    doomed.sort()
    dead = [folder for folder in found if not folder.committed and folder < committed[-1]]
    return doomed, dead


def set_aside(root: Location, chosen: Callable[[StepFolder], bool]) -> list[Location]:
    """Rename the checkpoints for which `chosen` is true, so that Weft neither reads nor deletes them.

    Return the new paths.

    Raises CheckpointError if another process is saving there, or a checkpoint cannot be moved.
    """
    target = target_at(located(root))
    return _each_aside(target, [one for one in target.step_folders() if chosen(one)], target.set_aside)


def set_unfinished_aside(root: Location) -> list[Location]:
    """Rename folders without COMMIT so that Weft ignores them, and return them. Delete leftovers of killed writers.

    A folder without COMMIT is from a killed writer or an incomplete copy. A second save of a step is not renamed. In an
    object store such folders stay, and the next pruning deletes them. Raises CheckpointError if another process is
    saving there, or a folder cannot be moved.
    """
    target = target_at(located(root))
    target.clear_debris()
    found = [folder for folder in target.step_folders() if not folder.again and not folder.committed]
    return _each_aside(target, found, target.set_unfinished_aside)


def _each_aside(target: Target, found: list[StepFolder], act: Callable[[Location], Location | None]) -> list[Location]:
    if not found:
        return []
    try:
        with contextlib.ExitStack() as held:
            target.lock(held)
            moved = [act(folder.path) for folder in found]
    except OSError as error:
        raise CheckpointError(f"{target.setting}: checkpoints could not be set aside ({error.strerror}).") from error
    return [one for one in moved if one is not None]
