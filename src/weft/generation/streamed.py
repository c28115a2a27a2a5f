"""Forwards of a model whose weights do not fit into memory: blocks are read from files while earlier ones compute.

A thread reads the next blocks into a ring buffer. A block's parameters are views of the buffer during its forward.
At other times they are placeholders of their shape, dtype and device without memory, filled with NaN.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.checkpoint.pretrained import Computed, JoinedTensors
from weft.devices import access
from weft.errors import ModelError
from weft.generation.residency import ModelWeights, Residency, StreamUnit, Weight
from weft.generation.weight_reader import CHUNK_BYTES, FileEmbedding, WeightReader, reads_rows_only
from weft.models.inspect.blocks import replace_class
from weft.units import format_bytes

_CLOSED = "memory: the files of this model's weights are closed. Open the model again."


@dataclass(slots=True)
class StreamReport:
    """Time and bytes of streaming.

    Attributes:
        num_forwards: forwards of the model.
        forward_s: time in them.
        wait_s: part of it that waited for weights.
        bytes_read: bytes of weights read from files, or copied from the host.
        read_s: time of these reads. They overlap with computing.
    """

    num_forwards: int = 0
    forward_s: float = 0.0
    wait_s: float = 0.0
    bytes_read: int = 0
    read_s: float = 0.0

    @property
    def over_bound(self) -> float:
        """Time over the longer one of reading and computing, which is the bound of a perfect overlap."""
        return self.forward_s / max(self.read_s, self.forward_s - self.wait_s, 1e-9)

    def line(self) -> str:
        """Return the figures for users."""
        rate = format_bytes(int(self.bytes_read / max(self.read_s, 1e-9)))
        return (
            f"streamed: {self.num_forwards} forwards in {self.forward_s:.2f} s, "
            f"{format_bytes(self.bytes_read)} read at {rate}/s; reading {self.read_s:.2f} s, computing "
            f"{self.forward_s - self.wait_s:.2f} s, waiting {self.wait_s:.2f} s: {self.over_bound:.2f} times the bound"
        )


@dataclass(slots=True, eq=False)
class _Load:
    """A unit in the ring buffer: its region, and the views of its weights once they are read."""

    index: int
    start: int
    end: int
    views: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    is_ready: bool = False
    is_used: bool = False
    error: BaseException | None = None
    copied: torch.Event | None = None


class _Prefetcher:
    """Reads units into a ring buffer in a thread, in the order of their last use.

    Args:
        units: the weights of each unit.
        fill: reads the weight of a name into flat memory.
        num_bytes: size of the buffer. The largest unit must fit.
    """

    def __init__(
        self, units: Sequence[Sequence[Weight]], fill: Callable[[str, torch.Tensor], object], num_bytes: int,
        device: torch.device, report: StreamReport,
    ):  # fmt: skip
        self._units, self._fill, self._device, self._report = units, fill, device, report
        self._buffer = _allocate(num_bytes, device)
        self._changed = threading.Condition()
        self._loads: list[_Load] = []  # in the order of their regions in the ring
        self._is_closed = False
        self._next, self._last = 0, -1
        self._follower = [(index + 1) % len(units) for index in range(len(units))]
        self._stream = access.new_stream(device)
        self._freed: torch.Event | None = None  # with streams: after the last forward whose region was given back
        self._thread = threading.Thread(target=self._run, name="weight-stream", daemon=True)
        self._thread.start()

    def take(self, index: int) -> list[torch.Tensor]:
        """Wait until a unit is in the buffer, and return the views of its weights. They stay until `give_back`."""
        with self._changed:
            if self._last >= 0:
                self._follower[self._last] = index
            self._last = index
            found = self._unused(index)
            # Units that were expected before this one, or instead of it, are dropped.
            before = self._loads[: self._loads.index(found)] if found is not None else self._loads
            self._loads = [load for load in self._loads if load.is_used or load not in before]
            if found is None:
                self._next = index
            self._changed.notify_all()
            while found is None or not found.is_ready:
                if self._is_closed:
                    raise ModelError(_CLOSED)
                self._changed.wait()
                found = self._unused(index)
            if found.error is not None:
                self._loads.remove(found)
                self._next = index  # a second try reads again
                self._changed.notify_all()
                raise found.error
            found.is_used = True
        if found.copied is not None:
            access.current_stream(self._device).wait_event(found.copied)
        return found.views

    def _unused(self, index: int) -> _Load | None:
        return next((load for load in self._loads if load.index == index and not load.is_used), None)

    def give_back(self, index: int) -> None:
        """Free the region of a unit after its forward."""
        with self._changed:
            self._freed = access.record_event(self._device)
            self._loads = [load for load in self._loads if not (load.is_used and load.index == index)]
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and free the buffer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._stream is not None:
            self._stream.synchronize()
        self._loads, self._buffer = [], torch.empty(0)

    def _run(self) -> None:
        while True:
            with self._changed:
                load = None
                while not self._is_closed and (load := self._find_room()) is None:
                    self._changed.wait()
                if load is None or self._is_closed:
                    return
                self._loads.append(load)
                self._next = self._follower[load.index]
            try:
                self._read(load)
            except BaseException as error:  # `take` raises it in the thread of the forward
                load.error = error
            with self._changed:
                load.is_ready = True
                self._changed.notify_all()
                while load.error is not None and load in self._loads and not self._is_closed:
                    self._changed.wait()  # until the forward has seen the error

    def _find_room(self) -> _Load | None:
        """Return a region for the next unit after the last one in the ring, or None if units in use are in it."""
        size = sum(weight.num_bytes for weight in self._units[self._next])
        for start in (self._loads[-1].end if self._loads else 0, 0):
            end = start + size
            if end <= len(self._buffer) and all(end <= one.start or start >= one.end for one in self._loads):
                return _Load(self._next, start, end)
        return None

    def _read(self, load: _Load) -> None:
        began, start = time.perf_counter(), load.start
        with access.on_stream(self._stream), torch.no_grad():
            if self._stream is not None and self._freed is not None:
                self._stream.wait_event(self._freed)
            for weight in self._units[load.index]:
                flat = weight.view(self._buffer, start)
                self._fill(weight.name, flat)
                load.views.append(flat.view(weight.shape))
                start += weight.num_bytes
                self._report.bytes_read += flat.nbytes
            if self._stream is not None:
                load.copied = self._stream.record_event()
        self._report.read_s += time.perf_counter() - began


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory of `num_bytes` bytes; on a Linux host in huge pages, which are faster to fill and to read."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class WeightStream:
    """A model's weights within a memory limit. The model cannot compute after `close`.

    Attributes:
        residency: which weights stay in memory.
        report: time and bytes so far.
    """

    def __init__(
        self, model: nn.Module, weights: ModelWeights, residency: Residency, reader: WeightReader, from_host: bool
    ):
        self.residency, self.report = residency, StreamReport()
        self._began, self._is_closed = 0.0, False
        self._finalizer: Callable[[], object] | None = None
        params = _materialize(model, weights, residency, reader)
        units = [unit.weights for unit in residency.streamed]
        if units:
            fill: Callable[[str, torch.Tensor], object] = reader.fill
            if from_host:
                host = {weight.name: _on_host(weight, reader) for weights in units for weight in weights}
                fill = lambda name, flat: flat.copy_(host[name], non_blocking=True)  # noqa: E731
            prefetcher = _Prefetcher(units, fill, residency.buffer_bytes, reader.device, self.report)
            # The thread has no reference to this object, so it ends with a model that is no longer used.
            self._finalizer = weakref.finalize(self, prefetcher.close)
            for index, unit in enumerate(residency.streamed):
                self._attach(prefetcher, index, unit, [params[weight] for weight in unit.weights])
        rows = WeightReader(reader.source.reopened(), reader.device)
        for embedding, weight in residency.rows:
            is_derived = type(embedding) is not nn.Embedding
            replace_class(embedding, FileEmbedding, inside=is_derived, reader=rows, name=weight.name)
        model.register_forward_pre_hook(self._start, prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    def close(self) -> None:
        """Stop reading, and free the buffer."""
        self._is_closed = True
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, *_: Any) -> None:
        if self._is_closed:
            raise ModelError(_CLOSED)
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.report.num_forwards += 1
        self.report.forward_s += time.perf_counter() - self._began

    def _attach(self, prefetcher: _Prefetcher, index: int, unit: StreamUnit, params: list[nn.Parameter]) -> None:
        """Register hooks that load a unit before its forward and unload it after."""
        empty, is_loaded = [param.data for param in params], [False]

        def load(*_: Any) -> None:
            began = time.perf_counter()
            for param, view in zip(params, prefetcher.take(index), strict=True):
                param.data = view
            is_loaded[0] = True
            self.report.wait_s += time.perf_counter() - began

        def unload(*_: Any) -> None:
            if is_loaded[0]:  # False if loading failed
                is_loaded[0] = False
                for param, placeholder in zip(params, empty, strict=True):
                    param.data = placeholder
                prefetcher.give_back(index)

        def refuse(*_: Any) -> None:
            if not is_loaded[0]:
                raise ModelError(
                    f"memory: the model calls a part of {unit.path!r} outside that block, and its weights are in "
                    "memory only during the block's forward. Give memory for the full model."
                )

        unit.module.register_forward_pre_hook(load, prepend=True)
        unit.module.register_forward_hook(unload, always_call=True)
        for part in unit.module.modules():
            if part is not unit.module and not set(params).isdisjoint(part.parameters(recurse=False)):
                part.register_forward_pre_hook(refuse, prepend=True)


def stream_weights(
    model: nn.Module, source: JoinedTensors, memory_bytes: int, device: torch.device | str = "cpu", *,
    from_host: bool = False,
) -> WeightStream:  # fmt: skip
    """Give a model its weights from files within a memory limit, for forwards without gradients.

    Weights that do not fit are read for each forward. Tied weights are in memory once.

    Args:
        model: a transformers model or Decoder. Its parameters are on the meta device and have the dtypes to compute in;
            its buffers have values.
        source: the model's weights, from `pretrained_source`.
        memory_bytes: limit for weights, module buffers and read buffers on `device`. Activations, caches, and rows of
            embeddings that are looked up are not included.
        device: the device of the forwards.
        from_host: True to read streamed weights once into the host's memory, and to copy them from there. On a CPU,
            all weights then stay in memory.

    Raises:
        ModelError: if the memory is too small, or the model or a weight cannot be streamed.
        CheckpointError: if files are missing or damaged, or a weight is not finite.
    """
    if any(hasattr(module, "layers_are_rescaled") for module in model.modules()):
        raise ModelError(
            f"memory: {type(model).__name__} changes its weights in place in forward, and streamed weights are read "
            "again each time. Load the full model."
        )
    reader = WeightReader(source, torch.device(device))
    weights = ModelWeights(model, lambda embedding, name: reads_rows_only(embedding) and not reader.is_rearranged(name))
    named = list(dict.fromkeys(weights.by_param.values()))
    reads_directly = reader.device.type == "cpu" and all(reader.stored_dtype(one.name) == one.dtype for one in named)
    extra = 0 if reads_directly else CHUNK_BYTES
    extra += max((2 * one.num_bytes for one in named if reader.is_rearranged(one.name)), default=0)
    extra += sum(buffer.nbytes for buffer in model.buffers())
    total = extra + sum(one.num_bytes for one in named)
    all_resident = from_host and reader.device.type == "cpu"
    residency = weights.choose(2 * total if all_resident else memory_bytes, extra)
    for weight in (weight for unit in residency.streamed for weight in unit.weights):
        if isinstance(source.entries[weight.name], Computed):
            raise ModelError(
                f"memory={format_bytes(memory_bytes)}: weight {weight.name!r} can only be computed from full tensors "
                "of the files, and streaming would repeat that in each forward. Give memory for the full model: "
                f"{format_bytes(2 * total)}."
            )
    return WeightStream(model, weights, residency, reader, from_host)


def _on_host(weight: Weight, reader: WeightReader) -> torch.Tensor:
    """Read a weight into pinned memory, and return it flat."""
    flat = torch.empty(math.prod(weight.shape), dtype=weight.dtype, pin_memory=True)
    reader.fill(weight.name, flat)
    return flat


@torch.no_grad()
def _materialize(
    model: nn.Module, weights: ModelWeights, residency: Residency, reader: WeightReader
) -> dict[Weight, nn.Parameter]:
    """Replace a model's parameters: resident ones by their values, and others by placeholders.

    Buffers that are in the files get their values, too.
    """
    found: dict[Weight, nn.Parameter] = {}
    device, start = reader.device, 0
    memory = _allocate(sum(weight.num_bytes for weight in residency.resident), device)
    for weight in residency.resident:
        flat = weight.view(memory, start)
        reader.fill(weight.name, flat)
        found[weight] = nn.Parameter(flat.view(weight.shape), requires_grad=False)
        start += weight.num_bytes
    for weight in weights.by_param.values():
        if weight not in found:
            fill = float("nan") if weight.dtype.is_floating_point else 0
            value = torch.full((), fill, dtype=weight.dtype, device=device).expand(weight.shape)
            found[weight] = nn.Parameter(value, requires_grad=False)
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, key, found[weights.by_param[param]])
        for key, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, key, buffer.to(device))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, nn.Parameter) and name in reader.source.entries:
            value = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            reader.fill(name, value.view(-1))
            tensor.copy_(value)
    return found
