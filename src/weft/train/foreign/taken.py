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
_GLOBAL = re.compile(r"(?:GLOBAL|global|class|type)[: ]+`?([A-Za-z_][\w.]*\.[\w.]+)`?")


class NotTaken(Exception):
    """The files cannot be taken: a sentence."""


class Taken:
    """Collects tensors by their place in the saved tables, such as ("model", "embed.weight")."""

    def __init__(self, out: Path):
        self._out = out
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_bytes = self._num_files = self._num_tensors = 0
        self._table: list[dict[str, Any]] = []
        self._values: list[list[Any]] = []
        self._left_out: list[str] = []

    def tensor(self, place: Sequence[Any], tensor: torch.Tensor) -> None:
        """One whole tensor."""
        if tensor.is_quantized or tensor.layout != torch.strided or tensor.dtype == torch.complex128:
            self._left_out.append(f"{'.'.join(map(str, place))} ({tensor.dtype}, {tensor.layout})")
            return
        # Names in the files are numbers: those of the checkpoint are nobody's business there.
        number = f"t{self._num_tensors}"
        self._num_tensors += 1
        self._tensors[number] = tensor.detach().contiguous().clone()
        self._num_bytes += tensor.numel() * tensor.element_size()
        self._table.append({"place": [*place], "file": self._num_files, "name": number})
        if self._num_bytes >= _SHARD_BYTES:
            self._write()

    def value(self, place: Sequence[Any], value: Any) -> None:
        """One plain value; what JSON cannot hold is left out."""
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            self._left_out.append(".".join(map(str, place)))
        else:
            self._values.append([[*place], json.loads(text)])

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
    """torch.load of weights and plain values alone. Raises NotTaken, with the name of what else was in the file."""
    try:
        stream: Any = io.BytesIO(source) if isinstance(source, bytes) else str(source)
        return torch.load(stream, map_location="cpu", weights_only=True, mmap=mapped)  # noqa: TID251, confined
    except Exception as error:  # whatever a damaged or hostile file brings about
        raise NotTaken(f"{name}: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Why a file cannot be read, in one clause."""
    found = _GLOBAL.search(str(error))
    if found:
        return f"it holds {found[1]}, which is not a weight; Weft ran and loaded nothing from it"
    first = str(error).strip().split("\n")[0][:160]
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
