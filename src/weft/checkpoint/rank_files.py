"""All ranks write one checkpoint: each its own files at the same time, and the first rank the manifest.

    every rank    its files into the hidden folder, fsynced and digested, and what it says of tensors that begin with it
    all           sizes, digests, or what went wrong, to the first rank: one exchange of some 250 bytes a rank
    first rank    state.json and manifest.json; then the rename and COMMIT, as for one process

What a rank says of a tensor holds for all ranks that have some of it, and it is said once: where the tensor begins.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.checkpoint import save, strict_json
from weft.checkpoint.all_ranks import Together
from weft.checkpoint.arrays import RawArray, dtype_name, write_file, write_tensors
from weft.checkpoint.folders import folder_name
from weft.checkpoint.manifest import DTYPE_BYTES, STATE_NAME, FileEntry, TensorEntry, parse_manifest
from weft.checkpoint.parts import Deal, Part
from weft.checkpoint.slices import RankLists, Slice, read_slices, shard_name
from weft.checkpoint.targets import Location, located, target_at
from weft.errors import CheckpointError, UnfitError

if TYPE_CHECKING:
    from torch import Tensor

#: Groups whose tensors belong to one rank each, under one plan: its file holds them, and the manifest leaves them out.
PRIVATE = ("wire",)
_TOLD, _TOLD_NAME = "told-{rank:05d}.json", re.compile(r"told-\d+\.json")
_SAID = 200
#: Names of the folder that one step is written to (folders.py): hidden until it is committed, or as in an object store.
_FOLDER = r"\.tmp-{step}-[0-9]+-[0-9a-f]+|{step}(\.again[0-9]*)?"


@dataclass(frozen=True, slots=True, eq=False)
class SavedPiece:
    """What one rank writes of one tensor.

    path: "group/name". data: the elements of the part's line from `start` on: a tensor or a block of any shape.
    """

    path: str
    part: Part
    deal: Deal
    start: int
    data: Tensor | RawArray

    @classmethod
    def whole(cls, path: str, data: Tensor | RawArray, rank: int = 0) -> SavedPiece:
        """Return a tensor that lies on one rank alone.

        Args:
            path: "group/name".
            data: all of the tensor.
            rank: the one that writes it.
        """
        part = Part(tuple(data.shape))
        return cls(path, part, Deal.to_one(rank, part.numel), 0, data)

    @property
    def group(self) -> str:
        """The group of its path."""
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        """The tensor's name in its group."""
        return self.path.partition("/")[2]


def save_pieces(
    root: Location,
    step: int,
    pieces: Iterable[SavedPiece],
    state: Mapping[str, object],
    together: Together,
    groups: Sequence[str] = ("model", "optimizer"),
    look: save.Look | None = None,
) -> Location:
    """Save one step, each rank its own pieces, and return its folder on all ranks. All ranks call it.

    Args:
        root: the folder of the steps' folders, one for all ranks.
        step: optimizer steps done.
        pieces: what this rank writes.
        state: JSON values, of the first rank.
        together: the ranks.
        groups: those that are there even if empty.
        look: sees all values as they are written, and may end the save.

    Raises:
        CheckpointError: on all ranks where one cannot write; earlier checkpoints then stand as they were.
        UnfitError: on all ranks where `look` raises it.
    """
    members: dict[str, dict[str, SavedPiece]] = {group: {} for group in groups}
    for piece in pieces:
        members.setdefault(piece.group, {})[piece.name] = piece
    if together.number == 1:
        tensors = {group: {name: piece.data for name, piece in found.items()} for group, found in members.items()}
        return save.save_checkpoint(root, step, tensors, state, look=look)
    return _Saving(located(root), step, members, together, look).save(state)


class _Saving:
    """One sharded save, on one rank."""

    def __init__(
        self,
        root: Location,
        step: int,
        members: dict[str, dict[str, SavedPiece]],
        together: Together,
        look: save.Look | None,
    ):
        self._root, self._step, self._members, self._together, self._look = root, step, members, together, look
        self._target = target_at(root)
        self._held = contextlib.ExitStack()  # the writer's lock, on the first rank

    def save(self, state: Mapping[str, object]) -> Location:
        needed = json.dumps(sum(_bytes_of(one) + 1024 for found in self._members.values() for one in found.values()))
        sizes = self._together.gather(needed.encode())
        with self._held:
            name = self._together.on_first(lambda: self._open(sum(map(int, sizes))).name)
            place = self._root / _checked_name(name, self._step)
            try:
                said = {"files": self._write(place)}
            except UnfitError as error:
                said = {"unfit": str(error)}
            except (OSError, CheckpointError) as error:
                said = {"error": f"{getattr(error, 'strerror', None) or error}"[:_SAID]}
            except BaseException as error:
                # The others wait for word from this rank; who was interrupted says so, and then ends.
                with contextlib.suppress(CheckpointError):
                    self._agree(place, {"error": type(error).__name__}, state)
                raise
            ended = self._agree(place, said, state)
        if "unfit" in ended:
            raise UnfitError(ended["unfit"])
        return self._root / _checked_name(ended["name"], self._step)

    def _agree(self, place: Location, said: Mapping[str, object], state: Mapping[str, object]) -> dict[str, str]:
        answers = self._together.gather(json.dumps(said).encode())
        return self._together.on_first(lambda: self._bind(place, [json.loads(one) for one in answers], state))

    def _open(self, num_bytes: int) -> Location:
        save.check_step(self._step)
        with save.disk_errors_told(self._root, self._step):
            save.prepare(self._root, self._held)
            save.require_space(self._root, num_bytes + 2**20)
            return self._target.begin(self._step)

    def _write(self, place: Location) -> dict[str, list[object]]:
        """This rank's files: name -> [bytes, digest]."""
        rank, tables = self._together.rank, RankLists()
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
        """On the first rank: make what all wrote a checkpoint, or nothing. Its path, or why it is unfit."""
        try:
            with save.disk_errors_told(self._root, self._step):
                for rank, answer in enumerate(answers):
                    if "error" in answer:
                        raise save.not_written(self._root, self._step, f"rank {rank}: {answer['error']}")
                if unfit := [answer["unfit"] for answer in answers if "unfit" in answer]:
                    self._target.discard(place)
                    return {"unfit": unfit[0]}
                files = {name: FileEntry(*entry) for answer in answers for name, entry in answer["files"].items()}
                names = {path.name for path in place.iterdir()}  # one listing, however many ranks there are
                self._check_there(names, files)
                entries = self._join(place, names)
                files[STATE_NAME] = write_file(place / STATE_NAME, strict_json.encode(dict(state), "state"))
                manifest = save.write_manifest(place, self._step, files, entries)
                parse_manifest(manifest)  # what no reader would take is refused here, where it can still be said
                return {"name": save.publish(self._root, self._step, place, manifest).name}
        except BaseException:
            self._target.discard(place)
            raise

    def _check_there(self, names: Set[str], files: Mapping[str, FileEntry]) -> None:
        """All ranks wrote to the folder that this one sees."""
        missing = sorted(files.keys() - names)
        if missing:
            raise CheckpointError(
                f"{self._target.setting}: {missing[0]} was written by another machine and is not here. Choose a folder"
                " that all machines share."
            )

    def _join(self, place: Location, names: Set[str]) -> dict[str, dict[str, TensorEntry]]:
        """What ranks said of tensors, as entries of the manifest; their files go."""
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
                        entry[2].append(found)  # else another stage has the same: one of them counts
        return {
            group: {
                name: TensorEntry("", dtype, shape, None, tuple(slices)) for name, (dtype, shape, slices) in m.items()
            }
            for group, m in parts.items()
        }


def _checked_name(name: object, step: int) -> str:
    """Return the name of a step's folder that rank 0 sent: plain, so that it lies directly in the folder of the run.

    Raises:
        CheckpointError: for any other value.
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


def _dtype(piece: SavedPiece) -> str:
    return dtype_name(piece.path, piece.data)


def _shape(piece: SavedPiece) -> tuple[int, ...]:
    """Its own shape where it is all of a part, else a line."""
    numel, local = math.prod(piece.data.shape), piece.part.local_shape
    is_all = piece.start == 0 and numel == piece.part.numel and not piece.part.order
    return local if is_all else (numel,)


def _bytes_of(piece: SavedPiece) -> int:
    return math.prod(piece.data.shape) * DTYPE_BYTES[_dtype(piece)]
