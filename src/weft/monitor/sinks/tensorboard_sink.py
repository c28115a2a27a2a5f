"""TensorBoard sink: event files in the run folder, written with TensorBoard's package, without torch."""

from __future__ import annotations

import importlib
import io
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from weft.errors import MissingExtra
from weft.monitor.sinks.base import MetricSink, SinkJob, SinkTrouble, flat_values


class TensorboardSink(MetricSink):
    """Sink that writes scalars by step. Each start writes a new file to RUN/tensorboard, as SummaryWriter does."""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        try:
            self._event_type: Any = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
            self._writer_type: Any = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "sink.kind=tensorboard") from error
        self._file: BinaryIO | None = None

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Append the metrics of the events, in one write."""
        buffer = io.BytesIO()
        writer = self._writer_type(buffer)
        if self._file is None:
            writer.write(self._event_type(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        for event in events:
            if values := flat_values(event):
                step = event.get("step")
                message = self._event_type(wall_time=float(event["time"]), step=step if type(step) is int else 0)
                for name, value in values.items():
                    message.summary.value.add(tag=name, simple_value=value)
                writer.write(message.SerializeToString())
        try:
            if self._file is None:
                folder = self.job.folder / "tensorboard"
                folder.mkdir(parents=True, exist_ok=True)
                name = f"events.out.tfevents.{time.time_ns() // 1000}.{os.uname().nodename}.{os.getpid()}"
                self._file = open(folder / name, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
            self._file.write(buffer.getvalue())
        except OSError as error:
            raise SinkTrouble(f"{self.job.folder}/tensorboard cannot be written ({error.strerror})") from None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
