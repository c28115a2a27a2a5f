"""Work of a device that is recorded once and launched as one from then on, with other numbers in the same memory."""

from __future__ import annotations

from weft.memory.replay.record_graphs import CudaRecorder, Recorder, Recording, cannot_record
from weft.memory.replay.send_numbers import send_numbers

__all__ = ["CudaRecorder", "Recorder", "Recording", "cannot_record", "send_numbers"]
