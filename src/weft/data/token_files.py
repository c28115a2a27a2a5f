"""Writing, reading and verification of tokenized splits, which are files of tokens, masks and document offsets."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from weft.errors import DataError


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Make a temporary folder that is renamed to `final` when the block succeeds, and removed when it fails.

    An existing folder `final` is replaced. The caller must hold a lock on `final`, since the temporary folders of other
    writers are removed first.
    """
    prefix = f".{final.name}.partial-"
    for left in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = final.parent / f"{prefix}{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for here, _, names in os.walk(temporary):
            for name in names:
                sync(Path(here, name))
            sync(Path(here))
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Tokenised documents on disk: files of little-endian integers that are memory-mapped.

SHARD_BYTES = 256 * 2**20
_OFFSETS_FLUSH = 8192
_READERS = 4
#: Number of different values of a mask byte. Value 0 is a weight of 0.
_MOST_WEIGHTS = 256


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """Files of a tokenized split (train or eval), and their counts.

    Attributes:
        num_tokens: number of tokens.
        num_documents: number of documents.
        num_trained: number of tokens whose loss weight is not 0.
        dtype: numpy dtype of the stored tokens.
        shard_tokens: number of tokens in each file of tokens. The last file may have fewer.
        has_mask: whether there are files with one mask value per token. Otherwise, all weights are 1.
        files: size in bytes and blake2b hex digest of each file.
        weights: loss weights of the mask values 2, 3, ... Mask value 0 is weight 0, and 1 is weight 1.
    """

    num_tokens: int
    num_documents: int
    num_trained: int
    dtype: str
    shard_tokens: int
    has_mask: bool
    files: dict[str, tuple[int, str]]
    weights: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SplitCounts:
        """Return the object from the output of `to_dict`."""
        files = {name: (int(size), str(digest)) for name, (size, digest) in values["files"].items()}
        return cls(**{**values, "files": files, "weights": tuple(values.get("weights", ()))})

    @property
    def weight_table(self) -> np.ndarray:
        """Loss weight of each mask value, float32."""
        return np.array([0.0, 1.0, *self.weights], np.float32)


@dataclass(slots=True)
class _Output:
    """An output file whose digest is computed while it is written."""

    path: Path
    handle: BinaryIO
    num_bytes: int = 0
    hasher: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=32))

    def write(self, data: bytes) -> None:
        self.handle.write(data)
        self.hasher.update(data)
        self.num_bytes += len(data)

    def close(self) -> tuple[str, tuple[int, str]]:
        self.handle.close()
        return self.path.name, (self.num_bytes, self.hasher.hexdigest())


class SplitWriter:
    """Appends documents to a split.

    Args:
        folder: a new folder.
        vocab_size: determines whether a token is stored in 2 or 4 bytes.
        with_mask: write a mask, which `close` deletes if all tokens have a weight of 1.
        shard_bytes: bytes of tokens in one file.
    """

    def __init__(self, folder: Path, *, vocab_size: int, with_mask: bool, shard_bytes: int = SHARD_BYTES):
        folder.mkdir(parents=True)
        self._folder, self._with_mask = folder, with_mask
        self._dtype = "<u2" if vocab_size <= 2**16 else "<u4"
        self._shard_tokens = max(1, shard_bytes // np.dtype(self._dtype).itemsize)
        self._files: dict[str, tuple[int, str]] = {}
        self._tokens: _Output | None = None
        self._mask: _Output | None = None
        self._offsets = self._open("offsets.bin")
        self._pending = [0]
        self._num_tokens = self._num_documents = self._num_trained = 0
        self._numbers: dict[float, int] = {0.0: 0, 1.0: 1}

    def append(self, tokens: np.ndarray, trained: np.ndarray | None) -> None:
        """Add tokens to the open document.

        tokens: int [n]. trained: bool [n], or weights, float32 [n], or None for a weight of 1.

        Raises:
            DataError: if the split has more than 254 different weights other than 0 and 1.
        """
        if trained is not None:
            trained = self._numbered(trained)
        self._num_trained += tokens.size if trained is None else int(np.count_nonzero(trained))
        while tokens.size:
            used = self._num_tokens % self._shard_tokens
            if used == 0:
                number = self._num_tokens // self._shard_tokens
                self._finish(self._tokens)
                self._tokens = self._open(f"tokens-{number:05d}.bin")
                if self._with_mask:
                    self._finish(self._mask)
                    self._mask = self._open(f"trained-{number:05d}.bin")
            room = self._shard_tokens - used
            assert self._tokens is not None
            self._tokens.write(tokens[:room].astype(self._dtype).tobytes())
            if self._mask is not None:
                now = np.ones(min(room, tokens.size), np.uint8) if trained is None else trained[:room].astype(np.uint8)
                self._mask.write(now.tobytes())
                trained = None if trained is None else trained[room:]
            self._num_tokens += min(room, tokens.size)
            tokens = tokens[room:]

    def _numbered(self, weights: np.ndarray) -> np.ndarray:
        if weights.dtype == bool:
            return weights.astype(np.uint8)
        found, places = np.unique(weights, return_inverse=True)
        numbers = [self._numbers.setdefault(float(weight), len(self._numbers)) for weight in found]
        if len(self._numbers) > _MOST_WEIGHTS:
            raise DataError(
                f"{self._folder.parent.name}: its messages have more than {_MOST_WEIGHTS - 1} different weights. Round "
                "them to fewer values."
            )
        return np.array(numbers, np.uint8)[places]

    def end_document(self) -> None:
        """Close the open document. The next tokens begin another one."""
        self._num_documents += 1
        self._pending.append(self._num_tokens)
        if len(self._pending) >= _OFFSETS_FLUSH:
            self._flush_offsets()

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files. They are incomplete if `close` was not called."""
        for output in (self._offsets, self._tokens, self._mask):
            if output is not None:
                output.handle.close()

    def close(self) -> SplitCounts:
        """Write the remaining offsets, close the files, and return their counts.

        The files of the mask are deleted if all tokens have a weight of 1.
        """
        self._flush_offsets()
        for output in (self._offsets, self._tokens, self._mask):
            self._finish(output)
        all_trained = self._num_trained == self._num_tokens and len(self._numbers) == 2
        if self._with_mask and all_trained:
            for name in [name for name in self._files if name.startswith("trained")]:
                (self._folder / name).unlink()
                del self._files[name]
        return SplitCounts(
            self._num_tokens, self._num_documents, self._num_trained, self._dtype, self._shard_tokens,
            self._with_mask and not all_trained, self._files, tuple(self._numbers)[2:],
        )  # fmt: skip

    def _open(self, name: str) -> _Output:
        path = self._folder / name
        return _Output(path, path.open("wb"))

    def _finish(self, output: _Output | None) -> None:
        if output is not None:
            name, entry = output.close()
            self._files[name] = entry

    def _flush_offsets(self) -> None:
        self._offsets.write(np.array(self._pending, "<i8").tobytes())
        self._pending = []


class SplitReader:
    """Reads ranges of tokens of a split. The constructor checks the files' sizes. `verify_split` checks their digests.

    Raises:
        DataError: if a file is missing or its size differs from `counts`.
    """

    def __init__(self, folder: Path, counts: SplitCounts):
        wrong = size_problems(folder, counts)
        if wrong:
            raise DataError(f"{folder}: {wrong[0]}. Run the same command again, which tokenises it again.")
        self._folder, self._counts = folder, counts
        self.num_tokens, self.num_documents = counts.num_tokens, counts.num_documents
        self.offsets = _mapped(folder / "offsets.bin", "<i8")
        shards = range(-(-counts.num_tokens // counts.shard_tokens))
        self._tokens = [_mapped(folder / f"tokens-{number:05d}.bin", counts.dtype) for number in shards]
        self._masks = [_mapped(folder / f"trained-{n:05d}.bin", "u1") for n in shards] if counts.has_mask else None

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return `length` tokens from `start`, in the stored integer dtype. Positions wrap at the end of the split."""
        return self._read(self._tokens, start, length)

    def trained(self, start: int, length: int) -> np.ndarray | None:
        """Return the mask values of a range, uint8 [length], or None if all weights are 1.

        The values are indices into `SplitCounts.weight_table`. Positions wrap as in `tokens`.
        """
        return None if self._masks is None else self._read(self._masks, start, length)

    def borders(self, start: int, length: int) -> np.ndarray:
        """Return the sorted distances d, 1 <= d <= length, such that a document starts at token start + d.

        Wraps like `tokens`.
        """
        first = np.searchsorted(self.offsets, start, side="right")
        last = np.searchsorted(self.offsets, start + length, side="right")
        borders = self.offsets[first:last] - start
        if start + length > self.num_tokens:
            again = np.searchsorted(self.offsets, start + length - self.num_tokens, side="right")
            borders = np.concatenate([borders, self.offsets[1:again] + (self.num_tokens - start)])
        return borders

    def _read(self, shards: list[np.ndarray], start: int, length: int) -> np.ndarray:
        size = self._counts.shard_tokens
        number, inside = divmod(start, size)
        if inside + length <= shards[number].size:
            return shards[number][inside : inside + length]
        parts = []
        while length > 0:
            number, inside = divmod(start % self.num_tokens, size)
            parts.append(shards[number][inside : inside + length])
            start, length = start + parts[-1].size, length - parts[-1].size
        return np.concatenate(parts)


def _mapped(path: Path, dtype: str) -> np.ndarray:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def size_problems(folder: Path, counts: SplitCounts) -> list[str]:
    """Return a message for each file that is missing or whose size differs from `counts`."""
    found = []
    for name, (size, _) in counts.files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size} bytes, and {size} were written")
    return found


def verify_split(folder: Path, counts: SplitCounts, report: Callable[[int, int], None] | None = None) -> list[str]:
    """Compare the size and digest of every file with `counts`, and return a message for each damaged file.

    If a file is missing or a size differs, no digests are computed. Up to four files are read in parallel, at about
    1 s per GB each.

    Args:
        folder: folder of the split.
        counts: counts in its manifest.
        report: called after each file as report(done, total), in bytes.
    """
    wrong = size_problems(folder, counts)
    if wrong:
        return wrong
    done, total = 0, sum(size for size, _ in counts.files.values())
    with ThreadPoolExecutor(_READERS) as readers:  # hashing releases the GIL
        digests = readers.map(_digest, [folder / name for name in counts.files])
        for (name, (size, expected)), digest in zip(counts.files.items(), digests, strict=True):
            if digest != expected:
                wrong.append(f"{name} does not match its digest")
            done += size
            if report is not None:
                report(done, total)
    return wrong


def _digest(path: Path) -> str:
    hasher = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while block := file.read(2**20):
            hasher.update(block)
    return hasher.hexdigest()
