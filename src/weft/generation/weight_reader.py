"""Reading one weight of a folder's files into memory: directly, in another dtype, or for a copy to a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from weft.checkpoint.pretrained import ByteRun, JoinedTensors
from weft.checkpoint.read import Part
from weft.checkpoint.safetensors_files import torch_formats
from weft.devices import access

#: Bytes that are read at a time if they are converted to another dtype or copied to a GPU.
CHUNK_BYTES = 4 * 2**20


class WeightReader:
    """Reads weights of one source, by name, for a device. Use one object per thread."""

    def __init__(self, source: JoinedTensors, device: torch.device):
        self.source, self.device = source, device
        self._runs: dict[str, list[ByteRun] | None] = {}
        self._checked: set[str] = set()
        #: Host memory of chunks: pinned for a GPU, and two, so that one is read while the other is copied.
        self._chunks: list[tuple[torch.Tensor, torch.Event | None]] = []

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a weight in the files."""
        return torch_formats()[self.source.entries[name].dtype]

    def is_rearranged(self, name: str) -> bool:
        """Return True if reading a weight needs memory for a second copy of it."""
        return self._runs_of(name) is None

    def fill(self, name: str, flat: torch.Tensor) -> None:
        """Read a weight into `flat`, (numel,) of the model's dtype. Copies to a GPU are queued on the current stream.

        Raises CheckpointError if bytes are missing or cannot be read, or the weight is not finite.
        """
        stored, is_new = self.stored_dtype(name), name not in self._checked
        if not flat.numel():
            return
        if flat.dtype == stored and flat.device.type == "cpu":
            self._read(name, 0, _bytes_of(flat), check=is_new)
        else:
            at_once = CHUNK_BYTES // stored.itemsize
            for first in range(0, flat.numel(), at_once):
                self._fill_chunk(name, flat[first : first + at_once], first * stored.itemsize, stored, is_new)
        self._checked.add(name)

    def _fill_chunk(self, name: str, target: torch.Tensor, start: int, stored: torch.dtype, check: bool) -> None:
        if not self._chunks:
            for _ in range(2 if access.has_streams(self.device) else 1):
                pins = access.pins_memory(self.device)
                memory = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pins)
                self._chunks.append((memory, access.new_event(self.device)))
        self._chunks.append(self._chunks.pop(0))
        memory, copied = self._chunks[0]
        if copied is not None:
            copied.synchronize()
        staged = memory[: target.numel() * stored.itemsize]
        self._read(name, start, _bytes_of(staged), check)
        target.copy_(staged.view(stored), non_blocking=True)
        if copied is not None:
            copied.record(access.current_stream(self.device))

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """Return rows (len(indices), *row) of a weight in its stored dtype on the host. The indices are ascending."""
        shape = self.source.entries[name].shape
        found = torch.empty((len(indices), *shape[1:]), dtype=self.stored_dtype(name))
        row_bytes, out, first = math.prod(shape[1:]) * found.itemsize, _bytes_of(found.view(-1)), 0
        for last in range(1, len(indices) + 1):
            if last == len(indices) or indices[last] != indices[last - 1] + 1:
                part = out[first * row_bytes : last * row_bytes]
                self._read(name, indices[first] * row_bytes, part, check=True)
                first = last
        return found

    def _read(self, name: str, start: int, out: memoryview, check: bool) -> None:
        """Fill `out` with a weight's stored bytes from `start` on."""
        runs = self._runs_of(name)
        if runs is None:
            part = Part(self.source.entries[name].shape)
            return self.source.read(name, part, start // self.stored_dtype(name).itemsize, out)
        for run in runs:
            low, high = max(start, run.start), min(start + len(out), run.start + run.num_bytes)
            if low < high:
                self.source.read_bytes(run.file, run.offset + low - run.start, out[low - start : high - start])
        return self.source.check_finite(name, out) if check else None

    def _runs_of(self, name: str) -> list[ByteRun] | None:
        if name not in self._runs:
            self._runs[name] = self.source.byte_runs(name)
        return self._runs[name]


def _bytes_of(flat: torch.Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


class FileEmbedding(nn.Embedding):
    """An embedding whose weight stays in the files: each call reads the rows of its ids."""

    _weft_reader: WeightReader
    _weft_name: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ids, (*input.shape, dim). Raises IndexError for ids that are not in the table."""
        ids, inverse = torch.unique(input, return_inverse=True)
        numbers = ids.tolist()
        if numbers and not 0 <= numbers[0] <= numbers[-1] < self.num_embeddings:
            raise IndexError("index out of range in self")  # torch's own message
        rows = self._weft_reader.rows(self._weft_name, numbers)
        return F.embedding(inverse, rows.to(self.weight.device, self.weight.dtype))


def reads_rows_only(embedding: nn.Embedding) -> bool:
    """Return True if forward uses the weight only through `nn.Embedding.forward`, which `FileEmbedding` replaces."""
    for kind in type(embedding).__mro__:
        if kind is nn.Embedding:
            return embedding.max_norm is None
        forward = vars(kind).get("forward")
        names = getattr(getattr(forward, "__code__", None), "co_names", ("weight",))
        if forward is not None and ("weight" in names or "super" not in names):
            return False
    return False
