"""Write a checkpoint such that a crash at any time leaves either all of it or none of it.

Order: files into a hidden folder, each fsynced -> manifest -> rename to the step's name -> COMMIT (the digest of the
manifest) -> fsync of the folders. Readers ignore a folder without COMMIT. A step that was saved before is written next
to the old one and replaces it only when committed, so that one complete copy exists at any time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft import env
from weft.checkpoint import folders, strict_json
from weft.checkpoint.folders import RankGroup, folder_name
from weft.checkpoint.load import verify_checkpoint
from weft.checkpoint.manifest import (
    DTYPE_BYTES,
    GROUP_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    FileEntry,
    Manifest,
    RankLists,
    Slice,
    TensorEntry,
    commit_text,
    parse_manifest,
    read_slices,
    shard_name,
)
from weft.checkpoint.object_store import Location, located
from weft.checkpoint.read import OwnershipMap, Part
from weft.checkpoint.safetensors_files import RawArray, dtype_name, write_file, write_tensors
from weft.checkpoint.targets import Target, target_at
from weft.errors import CheckpointError, UnfitError
from weft.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

#: Maximum size of a file. A larger group is split into several files.
MAX_FILE_BYTES = 4 * 2**30
#: Called during a save with all values, as (group, name, some MiB of a tensor). It raises UnfitError to abort the save.
Look = Callable[[str, str, RawArray], None]


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

    One process saves. The caller synchronizes the other ranks.

    Args:
        root: the folder of the steps' folders, which is created if it is missing.
        tensors: tensors or arrays by group and name, {"model": {...}, "optimizer": {...}}. Tensors may be on any
            device, have any strides, and share memory. A tensor under two names is written once and loaded as one.
        state: JSON values. Floats, including inf and nan, are restored exactly. Tuples are restored as lists.
        max_file_bytes: size limit of a file. A larger tensor has a separate file.
        look: called with all values as they are written. It may abort the save by raising UnfitError.

    Raises:
        CheckpointError: if a value cannot be stored, the disk is too full, or another process is saving there. Earlier
            checkpoints are then unchanged, and no partial files remain.
    """
    root = located(root)
    # Keep a reference to every tensor: a mapping that creates tensors on access could reuse the address of another.
    tensors = {group: dict(members) for group, members in tensors.items()}
    check_step(step)
    entries = {group: _assign_files(group, members, max_file_bytes) for group, members in tensors.items()}
    state_text = strict_json.encode(dict(state), "state")
    with disk_errors_as_checkpoint_errors(root, step), contextlib.ExitStack() as held:
        prepare(root, held)
        stored = [(n, e) for members in entries.values() for n, e in members.items() if e.same_as is None]
        # Headers and manifest contain each name twice, and file systems round up.
        require_space(root, sum(e.num_bytes + 2 * len(n) + 512 for n, e in stored) + len(state_text) + 2**20)
        return _write(root, step, tensors, entries, state_text, look)


def check_step(step: object) -> None:
    """Check a step number. Raises CheckpointError if it is not a valid step of a checkpoint."""
    if type(step) is not int or not 0 <= step < 10**15:
        raise CheckpointError(f"step={step!r}: a checkpoint's step is a whole number, 0 or more.")


@contextlib.contextmanager
def disk_errors_as_checkpoint_errors(root: Location, step: int) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise not_written(root, step, str(error.strerror or error)) from error


def not_written(root: Location, step: int, reason: str) -> CheckpointError:
    target = target_at(root)
    return CheckpointError(
        f"{target.setting}: the checkpoint of step {step} could not be written ({reason})."
        f" Earlier checkpoints are untouched. {target.remedy}."
    )


def prepare(root: Location, held: contextlib.ExitStack) -> None:
    """Create the target, lock it until `held` closes, and remove or complete the saves of killed writers."""
    target = target_at(root)
    target.prepare(held)
    _finish_replacements(target, root)


def _assign_files(group: str, members: Mapping[str, Tensor | RawArray], max_file_bytes: int) -> dict[str, TensorEntry]:
    """Choose a file for each tensor of a group, and find the names that share one tensor.

    Raises CheckpointError if the group or a tensor has an unsupported name.
    """
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
    """Return a key that is equal for names of the same tensor. Empty tensors have no memory and are never shared."""
    if isinstance(tensor, RawArray):
        return (id(tensor),)
    if tensor.numel() == 0:
        return (name,)
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), flags)


def require_space(root: Location, needed: int) -> None:
    """Check that the target has enough free space and can be written to.

    Raises CheckpointError if fewer than `needed` bytes are free, or if a test object cannot be written to a store.
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
    """Turn a folder of fully written files into the checkpoint of its step, and return its final path.

    An earlier checkpoint of the step is replaced. If COMMIT cannot be written, the folder is deleted.
    """
    target = target_at(root)
    settled = target.finalize(step, place)
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
    """Write the manifest of a folder, flush the folder's entries to disk, and return the manifest's bytes."""
    written_by = {"weft": env.weft_version()}
    if "torch" in sys.modules:  # it is not loaded with another engine
        written_by["torch"] = str(sys.modules["torch"].__version__)
    manifest = Manifest(step, files, entries, written_by).to_bytes()
    write_file(place / MANIFEST_NAME, manifest)
    target_at(place.parent).sync(place)
    return manifest


def _commit(target: Target, place: Location, manifest: bytes) -> None:
    """Write COMMIT. After it, the checkpoint exists."""
    target.commit(place, commit_text(manifest))


def _finish_replacements(target: Target, root: Location) -> None:
    """Complete or undo replacements of checkpoints that a killed writer had begun."""
    for folder in target.step_folders():
        if not folder.again:
            continue
        final = root / folders.folder_name(folder.step)
        if not folder.committed or (final.exists() and verify_checkpoint(folder.path)):
            target.remove([folder.path])
        else:
            target.replace(folder.path, final)
    target.remove([])


# Sharded saves: each rank writes its files in parallel, and the first rank writes the manifest.

#: Groups of per-rank tensors that only the same plan can use. They are in a rank's file and not in the manifest.
PRIVATE = ("wire",)
_TOLD, _TOLD_NAME = "told-{rank:05d}.json", re.compile(r"told-\d+\.json")
_SAID = 200
#: Names of a step's folder during a save (folders.py): a hidden name, or the final one in an object store.
_FOLDER = r"\.tmp-{step}-[0-9]+-[0-9a-f]+|{step}(\.again[0-9]*)?"


@dataclass(frozen=True, slots=True, eq=False)
class SavedSlice:
    """A flat slice of a tensor that one rank writes.

    Attributes:
        path: "group/name".
        part: the part of the full tensor.
        deal: the ranks that own its elements.
        start: first element, as an index into the flattened part.
        data: the elements from `start` on: a tensor or an array of any shape.
    """

    path: str
    part: Part
    deal: OwnershipMap
    start: int
    data: Tensor | RawArray

    @classmethod
    def full(cls, path: str, data: Tensor | RawArray, rank: int = 0) -> SavedSlice:
        """Return the slice for a tensor that only one rank has."""
        part = Part(tuple(data.shape))
        return cls(path, part, OwnershipMap.to_one(rank, part.numel), 0, data)

    @property
    def group(self) -> str:
        """Group of the tensor."""
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        """Name of the tensor in its group."""
        return self.path.partition("/")[2]


def save_slices(
    root: Location,
    step: int,
    pieces: Iterable[SavedSlice],
    state: Mapping[str, object],
    together: RankGroup,
    groups: Sequence[str] = ("model", "optimizer"),
    look: Look | None = None,
) -> Location:
    """Save one step from all ranks, each of which passes its own slices, and return the folder. All ranks call it.

    Args:
        root: the folder of the steps' folders, shared by all ranks.
        step: number of the step.
        state: JSON values, as in `save_checkpoint`. Rank 0's are saved.
        together: the ranks.
        groups: groups that the checkpoint has even if they are empty.
        look: called with all values as they are written. It may abort the save by raising UnfitError.

    Raises:
        CheckpointError: on all ranks if one cannot write. Earlier checkpoints are then unchanged.
        UnfitError: on all ranks if `look` raises it on one.
    """
    members: dict[str, dict[str, SavedSlice]] = {group: {} for group in groups}
    for piece in pieces:
        members.setdefault(piece.group, {})[piece.name] = piece
    if together.number == 1:
        tensors = {group: {name: piece.data for name, piece in found.items()} for group, found in members.items()}
        return save_checkpoint(root, step, tensors, state, look=look)
    return _Saving(located(root), step, members, together, look).save(state)


class _Saving:
    """One sharded save, on one rank."""

    def __init__(
        self,
        root: Location,
        step: int,
        members: dict[str, dict[str, SavedSlice]],
        together: RankGroup,
        look: Look | None,
    ):
        self._root, self._step, self._members, self._ranks, self._look = root, step, members, together, look
        self._target = target_at(root)
        self._held = contextlib.ExitStack()  # the writer's lock, on the first rank

    def save(self, state: Mapping[str, object]) -> Location:
        needed = json.dumps(sum(_bytes_of(one) + 1024 for found in self._members.values() for one in found.values()))
        sizes = self._ranks.gather(needed.encode())
        with self._held:
            name = self._ranks.on_first(lambda: self._open(sum(map(int, sizes))).name)
            place = self._root / _checked_name(name, self._step)
            try:
                said = {"files": self._write(place)}
            except UnfitError as error:
                said = {"unfit": str(error)}
            except (OSError, CheckpointError) as error:
                said = {"error": f"{getattr(error, 'strerror', None) or error}"[:_SAID]}
            except BaseException as error:
                # The other ranks wait for this rank: on an interrupt, send them an error before this rank ends.
                with contextlib.suppress(CheckpointError):
                    self._agree(place, {"error": type(error).__name__}, state)
                raise
            ended = self._agree(place, said, state)
        if "unfit" in ended:
            raise UnfitError(ended["unfit"])
        return self._root / _checked_name(ended["name"], self._step)

    def _agree(self, place: Location, said: Mapping[str, object], state: Mapping[str, object]) -> dict[str, str]:
        answers = self._ranks.gather(json.dumps(said).encode())
        return self._ranks.on_first(lambda: self._bind(place, [json.loads(one) for one in answers], state))

    def _open(self, num_bytes: int) -> Location:
        check_step(self._step)
        with disk_errors_as_checkpoint_errors(self._root, self._step):
            prepare(self._root, self._held)
            require_space(self._root, num_bytes + 2**20)
            return self._target.begin(self._step)

    def _write(self, place: Location) -> dict[str, list[object]]:
        """Write this rank's files, and return [bytes, digest] by file name."""
        rank, tables = self._ranks.rank, RankLists()
        told: dict[str, dict[str, object]] = {}
        written: dict[str, list[object]] = {}
        for group, found in self._members.items():
            if not found:
                continue
            entries = {name: TensorEntry("", _dtype(piece), _shape(piece)) for name, piece in found.items()}
            name = shard_name(group, rank)
            look = self._look and functools.partial(self._look, group)
            file = write_tensors(place / name, {one: piece.data for one, piece in found.items()}, entries, look)
            written[name] = [file.num_bytes, file.sha256]
            if group not in PRIVATE:
                told[group] = {
                    name: {
                        "dtype": entries[name].dtype,
                        "shape": list(piece.part.shape),
                        "slice": Slice(piece.part, piece.deal).to_json(tables),
                    }
                    for name, piece in found.items()
                    if piece.start == 0
                }
        if any(told.values()):
            text = json.dumps({"ranks": tables.rows, "tensors": told}, separators=(",", ":")).encode()
            write_file(place / _TOLD.format(rank=rank), text)
        return written

    def _bind(self, place: Location, answers: list[dict[str, Any]], state: Mapping[str, object]) -> dict[str, str]:
        """Commit or discard the files of all ranks. Runs on the first rank.

        Return {"name": folder name}, or {"unfit": reason} if `look` rejected the values on a rank. Raise
        CheckpointError if a rank could not write its files.
        """
        try:
            with disk_errors_as_checkpoint_errors(self._root, self._step):
                for rank, answer in enumerate(answers):
                    if "error" in answer:
                        raise not_written(self._root, self._step, f"rank {rank}: {answer['error']}")
                if unfit := [answer["unfit"] for answer in answers if "unfit" in answer]:
                    self._target.discard(place)
                    return {"unfit": unfit[0]}
                files = {name: FileEntry(*entry) for answer in answers for name, entry in answer["files"].items()}
                names = {path.name for path in place.iterdir()}  # one listing for all ranks
                missing = sorted(files.keys() - names)
                if missing:
                    raise CheckpointError(
                        f"{self._target.setting}: {missing[0]} was written by another machine and is not here. Choose "
                        "a folder that all machines share."
                    )
                entries = self._join(place, names)
                files[STATE_NAME] = write_file(place / STATE_NAME, strict_json.encode(dict(state), "state"))
                manifest = write_manifest(place, self._step, files, entries)
                parse_manifest(manifest)  # refuse an invalid manifest before the commit
                return {"name": publish(self._root, self._step, place, manifest).name}
        except BaseException:
            self._target.discard(place)
            raise

    def _join(self, place: Location, names: Set[str]) -> dict[str, dict[str, TensorEntry]]:
        """Merge the tensor descriptions of all ranks into manifest entries, and delete the description files."""
        parts: dict[str, dict[str, tuple[str, tuple[int, ...], list[Slice]]]] = {
            group: {} for group in self._members if group not in PRIVATE
        }
        files = [place / name for name in sorted(names) if _TOLD_NAME.fullmatch(name)]
        for text in self._target.take(files).values():
            told: dict[str, Any] = json.loads(text)
            tables = RankLists([tuple(row) for row in told["ranks"]])
            for group, members in told["tensors"].items():
                for name, one in members.items():
                    shape = tuple(one["shape"])
                    (found,) = read_slices([one["slice"]], shape, tables)
                    entry = parts.setdefault(group, {}).setdefault(name, (one["dtype"], shape, []))
                    if not any(_overlap(found.part, known.part) for known in entry[2]):
                        entry[2].append(found)  # else another stage saved it too
        return {
            group: {
                name: TensorEntry("", dtype, shape, None, tuple(slices)) for name, (dtype, shape, slices) in m.items()
            }
            for group, m in parts.items()
        }


def _checked_name(name: object, step: int) -> str:
    """Return the folder name that rank 0 sent, after a check that it is a plain name directly in the run's folder.
    Raises CheckpointError for any other value.
    """
    if not isinstance(name, str) or not re.fullmatch(_FOLDER.format(step=folder_name(step)), name):
        raise CheckpointError(
            f"checkpoint of step {step}: the folder name {str(name)[:_SAID]!r} from rank 0 is not a plain name of this "
            "step, and nothing was written. Start the run where only its ranks reach their store."
        )
    return name


def _overlap(one: Part, other: Part) -> bool:
    if one.rows is None or other.rows is None:
        return True
    return any(low < end and start < high for low, high in one.rows for start, end in other.rows)


def _dtype(piece: SavedSlice) -> str:
    return dtype_name(piece.path, piece.data)


def _shape(piece: SavedSlice) -> tuple[int, ...]:
    """Return the part's shape if the slice covers the part, else its flat shape."""
    numel, local = math.prod(piece.data.shape), piece.part.local_shape
    is_all = piece.start == 0 and numel == piece.part.numel and not piece.part.order
    return local if is_all else (numel,)


def _bytes_of(piece: SavedSlice) -> int:
    return math.prod(piece.data.shape) * DTYPE_BYTES[_dtype(piece)]
