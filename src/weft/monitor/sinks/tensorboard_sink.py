"""TensorBoard: event files in the run folder, written without TensorBoard and without torch.

An event file is a sequence of records: length, its masked CRC-32C, the bytes of a protobuf message, their masked
CRC-32C.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, BinaryIO

from weft.monitor.sinks.base import FigureSink, SinkJob, SinkTrouble, flat_values

_POLYNOMIAL = 0x82F63B78


class TensorboardSink(FigureSink):
    """Scalars by step. Each start writes a new file to RUN/tensorboard, as TensorBoard's writers do."""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        self._file: BinaryIO | None = None

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Append the figures of the events."""
        records: list[bytes] = []
        for event in events:
            values, step = flat_values(event), event.get("step")
            if values:
                records.append(record(scalar_event(float(event["time"]), step if type(step) is int else 0, values)))
        try:
            file = self._opened()
            file.write(b"".join(records))
            file.flush()
        except OSError as error:
            raise SinkTrouble(f"{self.job.folder}/tensorboard cannot be written ({error.strerror})") from None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            folder = self.job.folder / "tensorboard"
            folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns() // 1000}.{os.uname().nodename}.{os.getpid()}"
            self._file = open(folder / name, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
            self._file.write(record(_double(1, time.time()) + _bytes(3, b"brain.Event:2")))
        return self._file


def scalar_event(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return a message Event of scalars.

    Its fields: wall_time = 1, step = 2, summary = 5 { value = 1 { tag = 1, simple_value = 2 } }.
    """
    summary = b"".join(
        _bytes(1, _bytes(1, tag.encode()) + struct.pack("<Bf", (2 << 3) | 5, _narrow(value)))
        for tag, value in values.items()
    )
    return _double(1, wall_time) + _varint(2 << 3) + _varint(step) + _bytes(5, summary)


def record(message: bytes) -> bytes:
    """Return a message as a record of the file."""
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _narrow(value: float) -> float:
    """Return a float clipped to the range of 32 bits."""
    limit = 3.4028234663852886e38
    return max(-limit, min(limit, value)) if abs(value) != float("inf") else value


def _double(field: int, value: float) -> bytes:
    return struct.pack("<Bd", (field << 3) | 1, value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint((field << 3) | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append((value & 0x7F) | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


@cache
def _table() -> tuple[int, ...]:
    entries: list[int] = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        entries.append(byte)
    return tuple(entries)


def _masked(data: bytes) -> bytes:
    """Return the masked CRC-32C: rotated and offset, so that the checksum of a nested record differs."""
    crc, table = 0xFFFFFFFF, _table()
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
