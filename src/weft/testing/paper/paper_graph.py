"""torch.cuda.CUDAGraph of a paper device: what a capture forbids is an error, and a replay is one launch of the host.

While a graph is captured, kernels are put into it and not on a stream. What other streams do with the same memory
before and after a replay is looked at as for any kernel.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from weft.testing.paper.counts import line_of
from weft.testing.paper.device import Capture, PaperDevice


class PaperGraph:
    """As torch.cuda.CUDAGraph; `graph_class` gives the class its device."""

    on: ClassVar[PaperDevice]

    def __init__(self, keep_graph: bool = False) -> None:
        self._captured = Capture()

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        self.on.capture = self._captured

    def capture_end(self) -> None:
        self.on.capture = None
        self.on.graphs.append(self._captured)

    def replay(self) -> None:
        self.on.replay(self._captured)


def graph_class(device: PaperDevice) -> Any:
    """The class of graphs of one device."""
    return type("CUDAGraph", (PaperGraph,), {"on": device})


@contextlib.contextmanager
def capturing(graph: PaperGraph, pool: Any = None, stream: Any = None, **options: Any) -> Iterator[None]:
    """As torch.cuda.graph: the host waits for the device once, and then the stream is captured."""
    device = graph.on
    device.sync_all("cuda.graph")
    with contextlib.nullcontext() if stream is None else device.use(stream.stream_id):
        graph.capture_begin(pool, **options)
        try:
            yield
        finally:
            graph.capture_end()


def outlived(device: PaperDevice) -> dict[str, int]:
    """Memory that was made inside of captures and is still held: how much, by the line that made it."""
    found: Counter[str] = Counter()
    for one in device.graphs:
        found.update(line for storage, line in one.made.values() if not storage.expired())
    return dict(found)


def note_made(device: PaperDevice, tensors: list[torch.Tensor]) -> None:
    """Tensors are made by an operation; those of a capture are remembered as long as they live."""
    if device.capture is not None:
        for tensor in tensors:
            device.capture.make(tensor, line_of())
