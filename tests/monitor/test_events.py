from __future__ import annotations

import errno
import json
import math
import os
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import DataError, TrainingHalted
from weft.monitor.events import EventLog, StepRecord, last_per_step, number, read_events, tail_events


def record(step: int, loss: float = 4.0, **more) -> StepRecord:
    return StepRecord(step=step, loss=loss, lr=1e-3, grad_norm=0.5, count=100, count_per_s=1e4, **more)


def test_step_is_one_line_of_json(tmp_path):
    with EventLog(tmp_path / "run" / "events.jsonl") as log:
        log.write(record(3, seconds={"forward": 0.1, "total": 0.25}, memory_bytes=7, skipped=None).to_event())
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert len(lines) == 1
    event = json.loads(lines[0])
    assert abs(event.pop("time") - time.time()) < 60
    assert event == {
        "event": "step", "step": 3, "loss": 4.0, "lr": 1e-3, "grad_norm": 0.5, "tokens": 100, "tokens_per_s": 1e4,
        "seconds": {"forward": 0.1, "total": 0.25}, "memory_bytes": 7,
    }  # fmt: skip


def refuse(constant: str):
    raise AssertionError(f"{constant} is not JSON")


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), st.floats() | st.text() | st.integers() | st.lists(st.floats()) | st.none()))
def test_every_line_is_strict_json_for_any_float(tmp_path_factory, fields):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with EventLog(path) as log:
        log.write({"event": "x", **fields})
        log.write({"event": "y"})
    first, second = (json.loads(line, parse_constant=refuse) for line in path.read_bytes().splitlines())
    assert second["event"] == "y"
    for key, value in fields.items():
        if isinstance(value, float):
            assert number(first[key]) == value or math.isnan(value)
        elif not isinstance(value, list):
            assert first[key] == value


def test_non_finite_floats_round_trip_as_text(tmp_path):
    with EventLog(tmp_path / "e") as log:
        log.write({"event": "step", "step": 1, "loss": math.nan, "deep": {"list": [math.inf, (-math.inf, 1.0)]}})
    (event,) = read_events(tmp_path / "e")
    assert event["loss"] == "nan"
    assert event["deep"] == {"list": ["inf", ["-inf", 1.0]]}
    assert math.isnan(number(event["loss"]))
    assert [number(value) for value in ("inf", "-inf", 2)] == [math.inf, -math.inf, 2.0]
    assert all(math.isnan(number(value)) for value in (None, "x", [1]))


def test_torn_last_line_is_skipped_and_truncated_by_next_writer(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write({"event": "a"})
    with path.open("ab") as file:
        file.write(b'{"event": "torn", "x": "' + b"y" * 200_000)
    assert [event["event"] for event in read_events(path)] == ["a"]
    with EventLog(path) as log:
        log.write({"event": "b"})
    assert [event["event"] for event in read_events(path)] == ["a", "b"]
    path.write_bytes(b"only torn")
    EventLog(path).close()
    assert path.read_bytes() == b""


def test_damaged_lines_are_reported_and_others_are_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"a"}\n\0\0\0\n[1]\n' + b"[" * 100_000 + b'\n{"event":"b"}\n')
    assert read_events(path) == [
        {"event": "a"},
        *({"event": "damaged", "line": line} for line in (2, 3, 4)),
        {"event": "b"},
    ]


def test_lines_survive_sigkill_of_the_writer(tmp_path):
    child = os.fork()
    if child == 0:
        log = EventLog(tmp_path / "e")
        for step in range(50):
            log.write(record(step).to_event())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [event["step"] for event in read_events(tmp_path / "e")] == list(range(50))


def test_each_event_is_one_write_call(tmp_path, monkeypatch):
    calls = []
    with EventLog(tmp_path / "e") as log:
        real = os.write
        monkeypatch.setattr(os, "write", lambda handle, data: calls.append(data) or real(handle, data))
        log.write({"event": "a", "text": "x" * 50_000})
    assert len(calls) == 1
    assert calls[0].endswith(b"\n")


def test_missing_log_is_empty_and_folder_is_an_error(tmp_path):
    assert read_events(tmp_path / "none") == []
    with pytest.raises(DataError, match="events cannot be read"):
        read_events(tmp_path)
    with pytest.raises(TrainingHalted, match="events cannot be written to"):
        EventLog(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_disk_raises_at_close():
    with pytest.raises(TrainingHalted) as caught, EventLog("/dev/full") as log:
        log.write({"event": "a"})
    assert str(caught.value) == (
        "run.dir=/dev: events cannot be written to full (No space left on device). Free space or choose another "
        "run.dir, and run the same command again: it resumes."
    )


class SmallDisk:
    """os.write on a disk with `room` bytes left."""

    def __init__(self, monkeypatch, room: int):
        self.room, self._real = room, os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, handle, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self._real(handle, data[: self.room])
        self.room -= done
        return done


def test_events_wait_in_order_while_the_disk_is_full(tmp_path, monkeypatch):
    disk = SmallDisk(monkeypatch, 100)  # ends within a line
    with EventLog(tmp_path / "e") as log:
        for step in range(50):
            log.write({"event": "step", "step": step})
            assert log.num_waiting == max(0, step - 1)
        disk.room = 10**6
        log.write({"event": "step", "step": 50})
        assert log.num_waiting == 0
    assert [event["step"] for event in read_events(tmp_path / "e")] == list(range(51))


def test_waiting_events_are_bounded_and_lost_ones_are_counted(tmp_path, monkeypatch):
    disk = SmallDisk(monkeypatch, 0)
    with EventLog(tmp_path / "e") as log:
        for step in range(60):
            log.write({"event": "step", "step": step, "text": "x" * 50_000})
        assert sum(map(len, log._waiting)) <= 2**20
        disk.room = 10**9
        log.write({"event": "step", "step": 60})
    *events, told, last = read_events(tmp_path / "e")
    assert [event["step"] for event in events] == list(range(20))
    assert told["text"] == "40 events were lost while the disk was full"
    assert last["step"] == 60


def test_other_disk_errors_halt_immediately(tmp_path, monkeypatch):
    def broken(handle, data):
        raise OSError(errno.EIO, "Input/output error")

    log = EventLog(tmp_path / "e")
    monkeypatch.setattr(os, "write", broken)
    with pytest.raises(TrainingHalted, match=r"cannot be written to e \(Input/output error\)"):
        log.write({"event": "a"})


def test_later_of_two_events_of_a_step_counts():
    events = [record(step, loss=1.0).to_event() for step in (1, 2, 3)]
    events += [{"event": "eval", "step": 2, "loss": 9.0}, {"event": "note"}, {"event": "step", "step": "3"}]
    events += [record(step, loss=2.0).to_event() for step in (3, 2)]
    assert [(event["step"], event["loss"]) for event in last_per_step(events)] == [(1, 1.0), (2, 2.0), (3, 2.0)]
    assert last_per_step(events, "eval") == [{"event": "eval", "step": 2, "loss": 9.0}]


def test_resume_drops_steps_that_will_be_repeated():
    events = [record(step).to_event() for step in range(1, 8)]
    events += [{"event": "resume", "step": 4}, record(5, loss=2.0).to_event()]
    assert [event["step"] for event in last_per_step(events)] == [1, 2, 3, 4, 5]


def test_event_costs_one_write_without_fsync(tmp_path, monkeypatch):
    event = record(1, seconds=dict.fromkeys(("data", "forward", "backward", "optimizer", "total"), 0.1), mfu=0.4)
    called = []
    with EventLog(tmp_path / "e") as log:
        for name in ("write", "fsync", "fdatasync", "open"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *args, name=name, real=real: called.append(name) or real(*args))
        for _ in range(100):
            log.write(event.to_event())
    assert called == ["write"] * 100  # the kernel has it; nothing waits for the disk


def test_tail_has_the_last_events(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for step in range(100):
            log.write({"event": "step", "step": step})
    with open(path, "a") as file:
        file.write('{"torn')
    assert [event["step"] for event in tail_events(path)] == list(range(100))
    last = tail_events(path, num_bytes=300)
    assert 0 < len(last) < 10
    assert last[-1]["step"] == 99
    assert tail_events(tmp_path / "none") == []
