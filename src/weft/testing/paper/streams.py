"""torch.cuda.Stream, torch.cuda.Event and torch.cuda.CUDAGraph of a paper device.

While a graph is captured, kernels are put into it and not on a stream, and what a capture forbids is an error. What
other streams do with the same memory before and after a replay is looked at as for any kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from weft.testing.paper.device import Event, GraphCapture, PaperDevice


class PaperEvent:
    """As torch.cuda.Event; `classes_of` gives the class its device."""

    on: ClassVar[PaperDevice]

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.moment = Event(self.on)

    def record(self, stream: Any = None) -> None:
        self.moment.record_on(self.on.current if stream is None else stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        self.moment.wait_on(self.on.current if stream is None else stream.stream_id)

    def synchronize(self) -> None:
        self.moment.wait_host()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: PaperEvent) -> float:
        """Simulated milliseconds."""
        return self.moment.seconds_until(other.moment) * 1000


class PaperStream:
    """As torch.cuda.Stream; `classes_of` gives the class its device. number: of a stream that is there already."""

    on: ClassVar[PaperDevice]
    event: ClassVar[type[PaperEvent]]

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None, **options: Any) -> None:
        self.stream_id = self.on.new_stream() if number is None else number
        self.device = torch.device("cuda", 0)
        self.priority = priority

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Any) -> None:
        event.moment.wait_on(self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = event or self.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.on.sync("stream.synchronize", self.stream_id)

    def query(self) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PaperStream) and other.stream_id == self.stream_id


class PaperGraph:
    """As torch.cuda.CUDAGraph; `graph_class` gives the class its device."""

    on: ClassVar[PaperDevice]

    def __init__(self, keep_graph: bool = False) -> None:
        self._captured = GraphCapture()

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


def classes_of(device: PaperDevice) -> tuple[Any, Any]:
    """The classes of streams and of events of one device."""
    event = type("Event", (PaperEvent,), {"on": device})
    return type("Stream", (PaperStream,), {"on": device, "event": event}), event


def device_here() -> PaperDevice:
    """The paper device of this process, for a script that runs on it."""
    return torch.cuda.Stream.on  # pyright: ignore[reportAttributeAccessIssue] - ours
