"""What the device's compute stream waits for a collective: the host goes on at once, and its clock says nothing."""

from __future__ import annotations

import torch


class StreamWait:
    """From where the compute stream begins to wait to where it goes on: two events, read when somebody asks."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    @classmethod
    def begin(cls, device: torch.device) -> StreamWait | None:
        """Begin to time a wait of the current stream; None where the host waits, or another than the compute stream.

        What another stream waits for holds nothing up by itself.
        """
        if device.type != "cuda" or torch.cuda.current_stream() != torch.cuda.default_stream():
            return None
        return cls()

    def end(self, arrived: torch.cuda.Event | None = None) -> StreamWait:
        """Say that the stream goes on.

        arrived: when what it waited for was there, on another stream, perhaps before the wait; None: now.
        """
        if arrived is None:
            self._end.record()
        else:
            self._end = arrived
        return self

    def seconds(self) -> float:
        """Return how long it waited; the host waits until that is known."""
        self._start.synchronize()
        self._end.synchronize()
        return max(0.0, self._start.elapsed_time(self._end) / 1000)


def waited(wait: StreamWait | None, device: torch.device, host_s: float) -> float | StreamWait:
    """Return the seconds of a wait that ends now, for the ledger.

    Args:
        wait: what `StreamWait.begin` gave.
        device: of the tensor that was waited for.
        host_s: by the host's clock, which counts where the host itself waits.
    """
    if wait is not None:
        return wait.end()
    return 0.0 if device.type == "cuda" else host_s
