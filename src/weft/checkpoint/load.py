"""Find the newest complete checkpoint, verify it, and read it lazily. No checkpoint is modified."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weft.checkpoint import folders, strict_json
from weft.checkpoint.folders import ALONE, RankGroup
from weft.checkpoint.manifest import (
    COMMIT_NAME,
    MANIFEST_NAME,
    STATE_NAME,
    Manifest,
    TensorEntry,
    commit_text,
    parse_manifest,
    rank_of,
    runs_in,
    shard_name,
)
from weft.checkpoint.object_store import Location, located
from weft.checkpoint.read import Part
from weft.checkpoint.read_tensors import SliceReader, TensorGroup, read_bytes
from weft.checkpoint.safetensors_files import (
    RawArray,
    header_problems,
    missing_slices,
    open_tensors,
    sha256_of,
    unheard,
    write_tensors,
)
from weft.checkpoint.targets import target_at
from weft.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

#: A manifest of a million tensors is about 150 MB; COMMIT is 65 bytes.
_MAX_MANIFEST_BYTES = 512 * 2**20
_VERIFY_THREADS = 4
#: Maximum number of problems in a report.
_MOST_TOLD = 8


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer checkpoint that was skipped, and the reason."""

    path: Location
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint, and the newer ones that were skipped (newest first)."""

    path: Location
    step: int
    passed_over: tuple[PassedOver, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint. `state` is the saved state, and `written_by` has the versions of weft and torch."""

    path: Location
    step: int
    state: dict[str, Any]
    written_by: Mapping[str, str]
    _manifest: Manifest
    _reader: SliceReader

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the checkpoint's groups of tensors, such as "model" and "optimizer"."""
        return tuple(self._manifest.tensors)

    @property
    def files(self) -> Mapping[str, int]:
        """Sizes in bytes of the files by name, without manifest.json and COMMIT."""
        return {name: entry.num_bytes for name, entry in self._manifest.files.items()}

    def files_of(self, group: str, name: str) -> list[str]:
        """Return the names of the files that contain a tensor of a group or parts of it."""
        entry = self.entries(group)[name]
        if entry.file:
            return [entry.file]
        runs = (one.deal.runs(0, one.part.numel, one.part.numel) for one in entry.slices)
        return sorted({shard_name(group, rank) for ranks in runs for rank, _, _ in ranks})

    def tensors_in(self, file: str) -> list[str]:
        """Return "group/name" of each tensor that has data in a file."""
        whole_ones = [
            f"{group}/{name}"
            for group, entries in self._manifest.tensors.items()
            for name, entry in entries.items()
            if entry.file == file and entry.same_as is None
        ]
        group = file.rpartition("-")[0]
        return whole_ones or [f"{group}/{name}" for name in runs_in(file, self._manifest)]

    def tensors(self, group: str) -> Mapping[str, Tensor]:
        """Return the tensors of a group by name, in the order they were saved.

        Raises CheckpointError if the group is unknown.
        """
        if group not in self._manifest.tensors:
            known = ", ".join(self.groups) or "none"
            raise CheckpointError(
                f"{self.path.name} has no tensors named '{group}' (it has: {known}).{did_you_mean(group, self.groups)}"
            )
        return TensorGroup(self.path, group, self._manifest.tensors[group], self._reader)

    def entries(self, group: str) -> Mapping[str, TensorEntry]:
        """Return the shapes and dtypes of a group's tensors by name, or {} for a group that was not saved."""
        return self._manifest.tensors.get(group, {})

    def read(self, group: str, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a part of a tensor, in the saved dtype.

        Only the requested bytes are read, whichever plan wrote them. Raises CheckpointError if bytes are missing or
        cannot be read.

        Args:
            group: name of the group, such as "model".
            part: the part of the full tensor, which is flattened.
            start: first element to read, as an index into the flattened part.
            out: contiguous buffer to fill, a multiple of the element size.
        """
        try:
            self._reader.read(group, name, self.entries(group)[name], part, start, out)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}. Use another checkpoint.") from error

    def block(self, path: str) -> RawArray:
        """Return the full array "group/name", without torch."""
        group, _, name = path.partition("/")
        entry = self.entries(group)[name]
        data = read_bytes(entry, lambda part, out: self.read(group, name, part, 0, out))
        return RawArray(entry.dtype, entry.shape, data)

    def private(self, group: str, rank: int) -> Mapping[str, Tensor]:
        """Return one rank's tensors of a group that has separate tensors per rank, by name; {} if it has nothing.

        If a single rank wrote the checkpoint, return all tensors of the group.
        """
        if group in self._manifest.tensors:  # a checkpoint that one rank wrote
            return self.tensors(group)
        file = shard_name(group, rank)
        if file not in self._manifest.files:
            return {}
        handle = open_tensors(self.path / file)
        return {name: handle.get_tensor(name) for name in [*handle.keys()]}

    def write_atomic(
        self, file: Location, group: str, names: Sequence[str], convert: Callable[[RawArray], RawArray]
    ) -> None:
        """Write full tensors of a group into a new safetensors file. All of them are in memory at the same time.

        group: name of the group, such as "model". convert: returns the array to write for a stored array.
        """
        blocks = {name: convert(self.block(f"{group}/{name}")) for name in names}
        entries = self.entries(group)
        write_tensors(file, blocks, {name: replace(entries[name], dtype=one.dtype) for name, one in blocks.items()})

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors that were read from files."""
        return self._reader.num_bytes


def load_checkpoint(path: Location, *, verify: bool = False, lazily: bool = False) -> Checkpoint:
    """Open a checkpoint. Bytes of tensors are read on access.

    COMMIT, the manifest and the state are always checked.

    Args:
        path: folder of a step.
        verify: also check the digests of all tensors, unless `lazily`.
        lazily: check the size and header of a file on first access, so that a rank opens only the files that it needs.
            If False, check all files now.

    Raises:
        CheckpointError: if the checkpoint is damaged. The message names the damage.
    """
    path = located(path)
    try:
        manifest = _read_manifest(path)
        problems = [] if lazily else _file_problems(path, manifest, digests=verify)
        if problems:
            raise CheckpointError("; ".join(problems))
        reader = SliceReader(path, manifest.files)
        return Checkpoint(path, manifest.step, _read_state(path, manifest), manifest.written_by, manifest, reader)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}. Use another checkpoint.") from error


def verify_checkpoint(
    path: Location, *, digests: bool = True, together: RankGroup = ALONE, report: Callable[[int], None] = unheard
) -> list[str]:
    """Return the first problems of a checkpoint, at most 8, as one sentence each, or [] if it is intact.

    Args:
        path: folder of a step.
        digests: if False, skip the digests of tensor files and find only missing, resized and mislabelled files.
        together: ranks that share the work. All return the same problems.
        report: called by several threads with the number of bytes digested since the last call.
    """
    found = json.dumps(_problems(located(path), digests, together, report)[:_MOST_TOLD])
    answers = together.gather(found.encode())

    def joined() -> list[str]:
        return list(dict.fromkeys(problem for answer in answers for problem in json.loads(answer)))[:_MOST_TOLD]

    return together.on_first(joined)


def _problems(path: Location, digests: bool, together: RankGroup, report: Callable[[int], None]) -> list[str]:
    try:
        manifest = _read_manifest(path)
        problems = _file_problems(path, manifest, digests=digests, together=together, report=report)
        if not problems:
            _read_state(path, manifest)
    except CheckpointError as error:
        return [str(error)]
    return problems


def list_checkpoints(root: Location) -> list[Location]:
    """Return the committed checkpoints, oldest step first, one per step.

    Digests are verified only if a step was saved twice.
    """
    by_step: dict[int, Location] = {}
    for folder in target_at(located(root)).step_folders():
        # After a crash, a second save of a step may exist next to the first. It counts if it is complete.
        if folder.committed and not (folder.step in by_step and verify_checkpoint(folder.path)):
            by_step[folder.step] = folder.path
    return list(by_step.values())


def newest_checkpoint(root: Location, *, verify: bool = True, together: RankGroup = ALONE) -> Found | None:
    """Return the newest complete checkpoint of a run, or None if none was finished.

    The result lists each newer one that was skipped, with the reason. A folder without COMMIT is only listed.

    Args:
        root: folder of a run's checkpoints.
        verify: check the digests of all bytes. If False, check everything else.
        together: ranks that share the work; all return the same result.

    Raises:
        CheckpointError: if all finished checkpoints are damaged, since a silent restart would lose the run.
    """
    passed_over: list[PassedOver] = []
    damaged, target = False, target_at(located(root))
    seen = together.on_first(lambda: [(one.path.name, one.committed) for one in target.step_folders()])
    for name, committed in reversed(seen):
        folder = folders.step_folder(located(root) / name)
        if not committed:
            passed_over.append(PassedOver(folder.path, f"it has no {COMMIT_NAME}, so saving it never finished"))
            continue
        problems = verify_checkpoint(folder.path, digests=verify, together=together)
        if not problems:
            return Found(folder.path, folder.step, tuple(passed_over))
        damaged = True
        passed_over.append(PassedOver(folder.path, "; ".join(problems)))
    if damaged:
        lines = "\n".join(f"  {one}" for one in passed_over)
        raise CheckpointError(
            f"{target.setting}: every checkpoint is damaged, so there is nothing to resume from.\n{lines}\n"
            "Restore a copy, or give the run another run.name to start over."
        )
    return None


def _read_manifest(path: Location) -> Manifest:
    try:
        commit = _read_small(path / COMMIT_NAME, 1024)
    except FileNotFoundError:
        reason = f"it has no {COMMIT_NAME}, so saving it never finished" if path.is_dir() else "no such checkpoint"
        raise CheckpointError(reason) from None
    try:
        text = _read_small(path / MANIFEST_NAME, _MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST_NAME} is missing") from None
    if commit != commit_text(text):
        raise CheckpointError(f"{COMMIT_NAME} does not contain the digest of {MANIFEST_NAME}: one of them changed")
    manifest = parse_manifest(text)
    named = folders.step_in_name(path.name)
    if named is not None and named != manifest.step:
        raise CheckpointError(f"{MANIFEST_NAME} is of step {manifest.step}, not {named}")
    return manifest


def _read_state(path: Location, manifest: Manifest) -> dict[str, Any]:
    try:
        text = _read_small(path / STATE_NAME, manifest.files[STATE_NAME].num_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{STATE_NAME} is missing") from None
    if hashlib.sha256(text).hexdigest() != manifest.files[STATE_NAME].sha256:
        raise CheckpointError(f"{STATE_NAME} does not match its digest: its bytes changed after it was written")
    state = strict_json.decode(text, STATE_NAME)
    if not isinstance(state, dict):
        raise CheckpointError(f"{STATE_NAME} is not a table")
    return state


def _read_small(path: Location, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes`. Raise FileNotFoundError if it is missing."""
    try:
        target = target_at(path.parent)
        size = target.size(path)
        if size > max_bytes:
            raise CheckpointError(f"{path.name} is larger than {max_bytes} bytes")
        with contextlib.closing(target.open(path)) as file:
            text, read = memoryview(bytearray(size)), 0
            while read < size and (number := file.into(text[read:], read)):
                read += number
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror})") from error
    return bytes(text[:read])


def _file_problems(
    path: Location,
    manifest: Manifest,
    *,
    digests: bool,
    together: RankGroup = ALONE,
    report: Callable[[int], None] = unheard,
) -> list[str]:
    in_files: dict[str, dict[str, TensorEntry]] = {}
    for members in manifest.tensors.values():
        for name, entry in members.items():
            if (
                entry.same_as is None
                and entry.file
                and in_files.setdefault(entry.file, {}).setdefault(name, entry) is not entry
            ):
                return [f"{MANIFEST_NAME}: two tensors named {name[:200]!r} are in {entry.file}"]

    def check(name: str) -> list[str]:
        try:
            digest = digests or name == STATE_NAME
            found = _one_file(path / name, manifest, digest, in_files.get(name), report)
            wanted = runs_in(name, manifest)
            return found or (missing_slices(path / name, wanted) if wanted else [])
        except FileNotFoundError:
            return [f"{name} is missing"]
        except OSError as error:
            return [f"{name} cannot be read ({error.strerror or error})"]

    # A rank verifies the files with its rank in their name, so that under an unchanged plan it reads its files once.
    share = list(manifest.files)
    if together.number > 1:
        share = [name for name in share if rank_of(name) % together.number == together.rank]
    if not share:
        return []
    with ThreadPoolExecutor(min(_VERIFY_THREADS, len(share))) as threads:
        return [problem for problems in threads.map(check, share) for problem in problems]


def _one_file(
    path: Location,
    manifest: Manifest,
    digest: bool,
    tensors: Mapping[str, TensorEntry] | None,
    report: Callable[[int], None],
) -> list[str]:
    expected = manifest.files[path.name]
    try:
        size = target_at(path.parent).size(path)
    except CheckpointError as error:
        return [str(error)]
    if size != expected.num_bytes:
        return [f"{path.name} has {size} bytes instead of {expected.num_bytes}"]
    if digest and sha256_of(path, report) != expected.sha256:
        return [f"{path.name} does not match its digest: its bytes changed after it was written"]
    return header_problems(path, tensors) if tensors is not None else []
