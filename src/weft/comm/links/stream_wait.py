"""What the device's compute stream waits for a collective: the host goes on at once, and its clock says nothing."""

from __future__ import annotations

import torch


class StreamWait:
    """From where the compute stream begins to wait to where it goes on: two events, read when somebody asks."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    @classmethod
    def begin(cls, tensor: torch.Tensor) -> StreamWait | None:
        """Begin to time the wait for a tensor; None where the host waits, or another stream than the compute stream.

        What another stream waits for holds nothing up by itself.
        """
        if tensor.device.type != "cuda" or torch.cuda.current_stream() != torch.cuda.default_stream():
            return None
        return cls()

    def end(self) -> StreamWait:
        """Say that the stream goes on."""
        self._end.record()
        return self

    def seconds(self) -> float:
        """Return how long it waited; the host waits until that is known."""
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1000
