"""What the child process hands over: safetensors files, and a table that says which tensor stands where."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: Bytes of tensors in memory before a file is written.
_SHARD_BYTES = 2**30
TABLE = "taken.json"
#: What may be handed over, in bytes of the source: a tensor may have several names, and be stored once.
_MOST_TIMES, _MOST_MORE = 8, 2**28
#: How files of torch.save begin since torch 1.6: they are zip archives.
_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(r"(?:GLOBAL|global|class|type)[: ]+`?([A-Za-z_][\w.]*\.[\w.]+)`?")


class NotTaken(Exception):
    """The files cannot be taken: a sentence."""


def most_bytes(source_bytes: int) -> int:
    """Return how many bytes of tensors a source of so many bytes may give."""
    return _MOST_TIMES * source_bytes + _MOST_MORE


class Taken:
    """Collects tensors by their place in the saved tables, such as ("model", "embed.weight").

    Args:
        out: folder for the files.
        max_bytes: of all tensors. A tensor with strides of 0 takes a few bytes in a file, and many when it is copied.
    """

    def __init__(self, out: Path, max_bytes: int):
        self._out, self._bytes_left = out, max_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_bytes = self._num_files = self._num_tensors = 0
        self._table: list[dict[str, Any]] = []
        self._values: list[list[Any]] = []
        self._left_out: list[str] = []

    def reserve(self, name: object, num_bytes: int) -> None:
        """Refuse a tensor that is far larger than the source's files.

        Args:
            name: for the message.
            num_bytes: of the tensor.

        Raises:
            NotTaken: if the tensors together would have more bytes than the source accounts for.
        """
        if num_bytes > self._bytes_left:
            raise NotTaken(f"{str(name)[:200]}: it expands to {num_bytes} bytes, far more than the files hold")

    def tensor(self, place: Sequence[Any], tensor: torch.Tensor) -> None:
        """Add one full tensor. NotTaken if it is far larger than the source's files."""
        if tensor.is_quantized or tensor.layout != torch.strided or tensor.dtype == torch.complex128:
            self._left_out.append(f"{'.'.join(map(str, place))} ({tensor.dtype}, {tensor.layout})")
            return
        num_bytes = tensor.numel() * tensor.element_size()
        self.reserve(".".join(map(str, place)), num_bytes)
        self._bytes_left -= num_bytes
        # Names in the files are numbers: those of the checkpoint are nobody's business there.
        number = f"t{self._num_tensors}"
        self._num_tensors += 1
        self._tensors[number] = tensor.detach().contiguous().clone()
        self._num_bytes += num_bytes
        self._table.append({"place": [*place], "file": self._num_files, "name": number})
        if self._num_bytes >= _SHARD_BYTES:
            self._write()

    def value(self, place: Sequence[Any], value: Any) -> None:
        """Add one plain value. What JSON cannot hold is left out."""
        try:
            plain = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            self._left_out.append(".".join(map(str, place)))
        else:
            self._values.append([[*place], plain])

    def close(self) -> None:
        """Write what is left, and the table."""
        self._write()
        said = {"tensors": self._table, "values": self._values, "left_out": self._left_out}
        (self._out / TABLE).write_text(json.dumps(said))

    def _write(self) -> None:
        if self._tensors:
            save_file(self._tensors, str(self._out / f"{self._num_files}.safetensors"))
            self._tensors, self._num_bytes, self._num_files = {}, 0, self._num_files + 1


def load_weights(source: Path | bytes, name: str, *, mapped: bool = False) -> Any:
    """Load weights and plain values, nothing else, from a file of torch.save.

    Args:
        source: the file, or its bytes.
        name: for messages.
        mapped: map the file instead of reading it.

    Raises:
        NotTaken: for damaged files, other formats and anything else in the file, which is named.
    """
    if _first_bytes(source) != _ZIP:
        raise NotTaken(
            f"{name}: it is not in the format of torch.save since torch 1.6. If you trust it, read it with "
            "torch.load(FILE, weights_only=True) and write it again with torch.save"
        )
    try:
        stream: Any = io.BytesIO(source) if isinstance(source, bytes) else str(source)
        return torch.load(stream, map_location="cpu", weights_only=True, mmap=mapped)  # noqa: TID251, confined
    except Exception as error:  # whatever a damaged or hostile file brings about
        raise NotTaken(f"{name}: {reason_of(error)}") from error


def _first_bytes(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source[: len(_ZIP)]
    with source.open("rb") as file:
        return file.read(len(_ZIP))


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, in one clause."""
    found = _GLOBAL.search(str(error))
    if found:
        return f"it holds {found[1]}, which is not a weight; Weft ran and loaded nothing from it"
    first = str(error).strip().split("\n")[0][:160]
    if isinstance(error, MemoryError) or "allocate memory" in first:
        return "reading it takes far more memory than its files have bytes"
    return f"it cannot be read as weights ({type(error).__name__}: {first})"


def within(folder: Path, name: Any) -> Path:
    """A plain file of a folder. Raises NotTaken for a name that leads elsewhere, a link, and what is not there."""
    if not isinstance(name, str) or not name or name != Path(name).name or name in (".", ".."):
        raise NotTaken(f"{str(name)[:80]!r} names a file outside of the checkpoint's folder")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise NotTaken(f"{name} is missing or is not a plain file")
    return path


def numel(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return math.prod(shape)
