"""Write a checkpoint so that a crash at any moment leaves either all of it or none of it.

Order: files into a hidden folder, each fsynced -> manifest -> rename to the step's name -> COMMIT (the digest of the
manifest) -> fsync of the folders. Readers ignore a folder without COMMIT. A step that was saved before is written
beside it and takes its place only when committed, so that one complete copy exists at every moment.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

from weft import env
from weft.checkpoint import folders, strict_json
from weft.checkpoint.arrays import RawArray, dtype_name, write_file, write_tensors
from weft.checkpoint.load import verify_checkpoint
from weft.checkpoint.manifest import (
    GROUP_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    FileEntry,
    Manifest,
    TensorEntry,
    commit_text,
)
from weft.checkpoint.targets import Location, Target, located, target_at
from weft.errors import CheckpointError
from weft.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

#: Tensors of one group go on in a new file beyond this size.
MAX_FILE_BYTES = 4 * 2**30
#: Sees all values of a save, (group, some MiB of a tensor), while they are written; raises UnfitError to end it.
Look = Callable[[str, RawArray], None]


def save_checkpoint(
    root: Location,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor | RawArray]],
    state: Mapping[str, object],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    look: Look | None = None,
) -> Location:
    """Save one step durably and return its folder, `<root>/step_00000120`.

    One process saves; the others wait where the caller makes them.

    Args:
        root: the folder of the steps' folders; made where it is missing.
        step: optimizer steps done.
        tensors: named groups, such as {"model": {...}, "optimizer": {...}}; any device, strides and sharing, or blocks
            (a
            tensor that is stored under two names is written once and comes back as one).
        state: JSON values (floats, also inf and nan, come back exactly; tuples come back as lists).
        max_file_bytes: tensors go on in a new file before one would grow past this; a larger tensor has its own.
        look: sees all values as they are written, and may end the save.

    Raises:
        CheckpointError: when something cannot be stored or the disk is too full; earlier checkpoints then stand as they
            were, and nothing half-written stays.
    """
    root = located(root)
    # Hold every tensor: a mapping that makes them on the way could give two of them the same address otherwise.
    tensors = {group: dict(members) for group, members in tensors.items()}
    check_step(step)
    entries = {group: _place(group, members, max_file_bytes) for group, members in tensors.items()}
    state_text = strict_json.encode(dict(state), "state")
    with disk_errors_told(root, step), contextlib.ExitStack() as held:
        prepare(root, held)
        _check_space(root, entries, len(state_text))
        return _write(root, step, tensors, entries, state_text, look)


def check_step(step: object) -> None:
    """CheckpointError for what can be no checkpoint's step."""
    if type(step) is not int or not 0 <= step < 10**15:
        raise CheckpointError(f"step={step!r}: a checkpoint's step is a whole number, 0 or more.")


@contextlib.contextmanager
def disk_errors_told(root: Location, step: int) -> Generator[None]:
    """Turn what the system says of the disk into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise not_written(root, step, str(error.strerror or error)) from error


def not_written(root: Location, step: int, reason: str) -> CheckpointError:
    """The error of a checkpoint that could not be written."""
    target = target_at(root)
    return CheckpointError(
        f"{target.setting}: the checkpoint of step {step} could not be written ({reason})."
        f" Earlier checkpoints are untouched. {target.remedy}."
    )


def prepare(root: Location, held: contextlib.ExitStack) -> None:
    """The place is there, its lock is this process's while `held` is open, and what killed writers left is gone."""
    target = target_at(root)
    target.prepare(held)
    _finish_replacements(target, root)


def _place(group: str, members: Mapping[str, Tensor | RawArray], max_file_bytes: int) -> dict[str, TensorEntry]:
    """Decide for each tensor of a group the file it goes to, and which names share one tensor."""
    if not GROUP_NAME.fullmatch(group):
        raise CheckpointError(f"tensors: {group!r} cannot name a group. Use lower-case letters, digits and '_'.")
    first_names: dict[tuple[object, ...], str] = {}
    shared: dict[str, str] = {}
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in members.items():
        dtype_name(f"{group}.{name}", tensor)
        if type(name) is not str or name == "__metadata__" or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise CheckpointError(f"tensors.{group}: {name!r} cannot name a tensor. Rename it.")
        first = first_names.setdefault(_memory(name, tensor), name)
        if first != name:
            shared[name] = first
            continue
        num_bytes = tensor.data.nbytes if isinstance(tensor, RawArray) else tensor.numel() * tensor.element_size()
        if filled and filled + num_bytes > max_file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += num_bytes

    def entry(name: str, tensor: Tensor | RawArray) -> TensorEntry:
        position = numbers[shared.get(name, name)]
        file = f"{group}.safetensors" if number == 1 else f"{group}-{position:05d}-of-{number:05d}.safetensors"
        return TensorEntry(file, dtype_name(name, tensor), tuple(tensor.shape), shared.get(name))

    return {name: entry(name, tensor) for name, tensor in members.items()}


def _memory(name: str, tensor: Tensor | RawArray) -> tuple[object, ...]:
    """Equal for two names of one tensor; empty tensors own no memory and are never shared."""
    if isinstance(tensor, RawArray):
        return (id(tensor),)
    if tensor.numel() == 0:
        return (name,)
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), flags)


def _check_space(root: Location, entries: Mapping[str, Mapping[str, TensorEntry]], state_bytes: int) -> None:
    stored = [(n, e) for members in entries.values() for n, e in members.items() if e.same_as is None]
    # Headers and manifest name each tensor twice; file systems round up.
    require_space(root, sum(e.num_bytes + 2 * len(n) + 512 for n, e in stored) + state_bytes + 2**20)


def require_space(root: Location, needed: int) -> None:
    """Refuse to save where an existing folder has no room, or a store takes nothing.

    Raises:
        CheckpointError: where fewer than `needed` bytes are free, or nothing can be written.
    """
    try:
        free = target_at(root).free_bytes()
    except OSError as error:
        target = target_at(root)
        raise CheckpointError(
            f"{target.setting}: nothing can be written ({error.strerror}). {target.remedy}."
        ) from error
    if free is not None and needed > free:
        raise CheckpointError(
            f"run.dir={root}: the checkpoint needs {format_bytes(needed)} ({needed} bytes), and"
            f" {format_bytes(free)} ({free} bytes) are free. Free {format_bytes(needed - free)} or choose another"
            " run.dir, and run the command again."
        )


def _write(
    root: Location,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor | RawArray]],
    entries: Mapping[str, Mapping[str, TensorEntry]],
    state_text: bytes,
    look: Look | None,
) -> Location:
    target = target_at(root)
    place = target.begin(step)
    try:
        manifest = _write_files(place, step, tensors, entries, state_text, look)
        return publish(root, step, place, manifest)
    except BaseException:
        target.discard(place)
        raise


def publish(root: Location, step: int, place: Location, manifest: bytes) -> Location:
    """Make a folder whose files are all durable the checkpoint of its step; where it is now."""
    target = target_at(root)
    settled = target.settle(step, place)
    try:
        target.sync(root)
        _commit(target, settled, manifest)
    except BaseException:
        target.discard(settled)
        raise
    if settled.name != folders.folder_name(step):
        settled = target.replace(settled, root / folders.folder_name(step))
    target.remove([])
    return settled


def _write_files(
    place: Location,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor | RawArray]],
    entries: Mapping[str, Mapping[str, TensorEntry]],
    state_text: bytes,
    look: Look | None,
) -> bytes:
    files: dict[str, FileEntry] = {}
    for group, members in entries.items():
        stored = {name: entry for name, entry in members.items() if entry.same_as is None}
        for file in sorted({entry.file for entry in stored.values()}):
            chosen = {name: tensors[group][name] for name, entry in stored.items() if entry.file == file}
            files[file] = write_tensors(place / file, chosen, stored, look and functools.partial(look, group))
    files[STATE_NAME] = write_file(place / STATE_NAME, state_text)
    return write_manifest(place, step, files, entries)


def write_manifest(
    place: Location, step: int, files: Mapping[str, FileEntry], entries: Mapping[str, Mapping[str, TensorEntry]]
) -> bytes:
    """Write what the folder holds, and make its names durable; the manifest's bytes."""
    written_by = {"weft": env.weft_version()}
    if "torch" in sys.modules:  # not where another engine trains
        written_by["torch"] = str(sys.modules["torch"].__version__)
    manifest = Manifest(step, files, entries, written_by).to_bytes()
    write_file(place / MANIFEST_NAME, manifest)
    target_at(place.parent).sync(place)
    return manifest


def _commit(target: Target, place: Location, manifest: bytes) -> None:
    """From in here on, the checkpoint exists."""
    target.commit(place, commit_text(manifest))


def _finish_replacements(target: Target, root: Location) -> None:
    """Complete, or undo, what a killed writer had begun to replace."""
    for folder in target.step_folders():
        if not folder.again:
            continue
        final = root / folders.folder_name(folder.step)
        if not folder.committed or (final.exists() and verify_checkpoint(folder.path)):
            target.remove([folder.path])
        else:
            target.replace(folder.path, final)
    target.remove([])
