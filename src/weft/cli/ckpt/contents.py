"""`weft ckpt show`: tensors of a checkpoint with shape, dtype and files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

from weft.checkpoint import Checkpoint
from weft.cli.console import table
from weft.units import counted, format_bytes


@dataclass(frozen=True, slots=True)
class ShownTensor:
    """name: "group/name". same_as: the tensor that it shares its memory with, or None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    files: tuple[str, ...]
    same_as: str | None

    def as_json(self) -> dict[str, object]:
        """For --json."""
        return asdict(self)


def shown_tensors(checkpoint: Checkpoint, pattern: str) -> Iterator[ShownTensor]:
    """Tensors whose "group/name" fits the pattern; one without *, ? and [ fits anywhere in the name."""
    if not any(letter in pattern for letter in "*?["):
        pattern = f"*{pattern}*"
    for group in checkpoint.groups:
        for name, entry in checkpoint.entries(group).items():
            if fnmatchcase(f"{group}/{name}", pattern):
                files = tuple(checkpoint.files_of(group, name))
                yield ShownTensor(f"{group}/{name}", entry.dtype, entry.shape, entry.num_bytes, files, entry.same_as)


def contents_text(found: list[ShownTensor]) -> list[str]:
    """A table as lines, and their sum."""
    rows = [("tensor", "dtype", "shape", "size", "files")]
    for one in found:
        files = ", ".join(one.files[:2]) + (f" and {len(one.files) - 2} more" if len(one.files) > 2 else "")
        shared = f"shared with {one.same_as}" if one.same_as else files
        rows.append((one.name, one.dtype, str(list(one.shape)), format_bytes(one.num_bytes), shared))
    own = [one for one in found if one.same_as is None]
    total = f"{counted(len(found), 'tensor')}, {format_bytes(sum(one.num_bytes for one in own))}"
    return [*table(rows, right=(3,)), total]
