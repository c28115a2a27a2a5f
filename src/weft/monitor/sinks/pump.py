"""Pumps: one thread per sink that sends a run's events without blocking others.

events.jsonl is the only store. A pump stores its byte offset (RUN/.sinks/NAME.json), so an unreachable sink costs no
memory, and unsent events are sent when it is back, possibly at the run's next start. An event may be sent twice if a
server's response was lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.monitor.sinks.base import MetricSink, SinkJob, SinkTrouble

#: Poll interval (s) of a pump.
_LOOK_S = 0.5
#: Bytes of events in one batch, and of past events for a sink that shows only current metrics.
_BATCH_BYTES, _PRESENT_BYTES = 256 * 1024, 1 << 20
#: First and longest pause (s) between retries.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class EventFollower:
    """Reads complete lines of a growing events.jsonl, beginning at an offset."""

    def __init__(self, path: Path, offset: int = 0):
        self._path = path
        self.offset = offset

    def read(self) -> tuple[list[dict[str, Any]], int]:
        """Return the next events and the offset after them. Set `offset` to it to continue.

        A call reads at most 256 KiB, or one longer line. Lines that are no JSON object are skipped. If the file is
        shorter than `offset`, it is read from its start.
        """
        try:
            with open(self._path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = self.offset if self.offset <= size else 0  # the log was replaced by another run's
                file.seek(start)
                text = file.read(_BATCH_BYTES)
                end = text.rfind(b"\n") + 1
                if not end and len(text) == _BATCH_BYTES:  # a line longer than a batch
                    text += file.readline()
                    end = len(text) if text.endswith(b"\n") else 0
        except OSError:
            return [], self.offset
        return [event for line in text[:end].splitlines() if (event := _parsed(line)) is not None], start + end

    def skip_to_tail(self, num_bytes: int) -> None:
        """Move `offset` forward to the first line that begins in the last `num_bytes`."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return
        if size - num_bytes > self.offset:
            with open(self._path, "rb") as file:
                file.seek(size - num_bytes)
                file.readline()
                self.offset = file.tell()


class Pump(threading.Thread):
    """Sends events to one sink until `finish`.

    Args:
        name: the sink's name.
        make: creates the sink; retried if it fails.
        job: inputs of the sink. `kept` is filled with its stored state.
        notify: called with a line for the user when the sink becomes unreachable, is back, or fails when it is closed.
        pause_s: first pause between retries.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[SinkJob], MetricSink],
        job: SinkJob,
        notify: Callable[[str], None],
        *,
        pause_s: float = _FIRST_PAUSE_S,
    ):
        super().__init__(name=f"weft-sink-{name}", daemon=True)
        self._called, self._make, self._job, self._notify, self._first_pause_s = name, make, job, notify, pause_s
        self._state = job.folder / ".sinks" / f"{name}.json"
        kept: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._state.read_text())
            kept = found if isinstance(found, dict) else {}
        job.kept.update(kept.get("kept", {}))
        self._follower = EventFollower(job.folder / "events.jsonl", int(kept.get("offset", 0)))
        self._end = threading.Event()
        self._sink: MetricSink | None = None
        self._is_away = False
        #: True if all events were sent at the end.
        self.is_done = False

    def finish(self) -> None:
        """Stop after sending the remaining events. The caller waits with `join`."""
        self._end.set()

    def run(self) -> None:
        """Send events, with retries, until all are sent after `finish`. This is the thread's main function."""
        pause_s = self._first_pause_s
        while True:
            asked_to_end = self._end.is_set()
            try:
                sent = self._send()
                if self._is_away:
                    self._is_away, pause_s = False, self._first_pause_s
                    self._notify(f"sink {self._called} is back; nothing was lost")
            except (SinkTrouble, WeftError) as trouble:
                if not self._is_away:
                    self._is_away = True
                    self._notify(f"sink {self._called}: {trouble}. Training continues, and Weft retries")
                self._end.wait(pause_s) if not self._end.is_set() else threading.Event().wait(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                continue
            if sent:
                continue
            if asked_to_end:
                break
            self._end.wait(_LOOK_S)
        self.is_done = True
        self._close()

    def _send(self) -> bool:
        if self._sink is None:
            self._sink = self._make(self._job)
            if self._sink.is_current:
                self._follower.skip_to_tail(_PRESENT_BYTES)
        events, after = self._follower.read()
        if after == self._follower.offset:
            return False
        if events:
            try:
                self._sink.send(events)
            except (SinkTrouble, WeftError):
                raise
            except Exception as error:  # Errors of a sink must not end its thread.
                raise SinkTrouble(f"{type(error).__name__} while sending") from error
        self._follower.offset = after
        _keep(self._state, {"offset": after, "kept": self._job.kept})
        return True

    def _close(self) -> None:
        try:
            if self._sink is not None:
                self._sink.close()
        except Exception as error:
            self._notify(f"sink {self._called}: {type(error).__name__} at its end")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _keep(path: Path, state: Mapping[str, Any]) -> None:
    """Save the state. If this fails, for example on a full disk, the next start may send some events twice."""
    try:
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(state))
        os.replace(draft, path)
    except OSError:
        return
