"""Sinks against test servers: complete delivery and retries while a server is down, slow or refusing."""

from __future__ import annotations

import json
import math
import sys
import urllib.request
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.monitor.servers import Recorder, free_port, until
from weft.config.sections import SinkSection
from weft.errors import ConfigError, MissingExtra
from weft.monitor.events import EventLog
from weft.monitor.sinks.base import Poster, SinkJob, SinkTrouble, secret_of
from weft.monitor.sinks.prometheus_sink import NewestMetrics
from weft.monitor.sinks.pump import EventFollower, Pump
from weft.monitor.sinks.registry import make_sink

SECRET = "PLANTED-SECRET-0815"


def step(number: int, **more: object) -> dict[str, object]:
    return {"event": "step", "time": 1000.0 + number, "step": number, "loss": 2.0 / number, "lr": 0.1,
            "seconds": {"total": 0.5}, **more}  # fmt: skip


METRICS = {"event": "figures", "time": 1002.5, "step": 2, "ranks": 2,
           "figures": {"gpu.temperature": [40, 50, 88, "rank 1", "rank 3"], "rank.silent": 0,
                       "phase_s{data}": [0.1, 0.2, 0.3, "rank 0", "rank 1"],
                       "gpu.xid_errors": [0, 0, 2, "rank 0", "rank 1"]}}  # fmt: skip


class SinkFixture:
    """A run folder with a pump for one sink."""

    def __init__(self, folder: Path, kind: str, **settings: object):
        self.folder, self.messages = folder, []
        self.log = EventLog(folder / "events.jsonl")
        self.settings = SinkSection.model_validate({"kind": kind, "timeout": "1s", **settings})
        self.pump: Pump | None = None

    def start(self) -> None:
        job = SinkJob(self.settings, self.folder, "run-1", {"optimizer": {"lr": 0.1}, "plan": "tp=2"})
        self.pump = Pump(self.settings.kind, make_sink, job, self.messages.append, pause_s=0.05)
        self.pump.start()

    def write(self, *events: dict[str, object]) -> None:
        for event in events:
            self.log.write(event)

    def end(self) -> bool:
        assert self.pump is not None
        self.pump.finish()
        self.pump.join(10)
        return self.pump.is_done

    def offset(self) -> int:
        state = self.folder / ".sinks" / f"{self.settings.kind}.json"
        return json.loads(state.read_text())["offset"] if state.exists() else 0


def got_steps(server: Recorder) -> list[int]:
    return [event["step"] for body in server.bodies() for event in body["events"]]


def test_events_are_delivered_after_server_was_down_refusing_or_slow(tmp_path):
    server = Recorder()
    one = SinkFixture(tmp_path, "http", url=server.url)
    one.write(*map(step, range(1, 4)))
    one.start()
    until(lambda: one.messages)
    assert "cannot be reached" in one.messages[0]
    with server:
        until(lambda: len(got_steps(server)) == 3)
        server.status = 503
        one.write(*map(step, range(4, 7)))
        until(lambda: len(one.messages) == 3)
        assert "answered 503" in one.messages[2]
        server.status, server.slow_s = 200, 30.0
        asked = server.num_asked
        until(lambda: server.num_asked > asked)  # it is asked, and the request times out after 1 s
        one.write(*map(step, range(7, 10)))
        server.slow_s = 0.0
        until(lambda: one.offset() == (tmp_path / "events.jsonl").stat().st_size)
        assert one.end()
    assert sorted(set(got_steps(server))) == [*range(1, 10)]
    assert one.messages[1] == "sink http is back; nothing was lost"


def test_unsent_events_are_sent_at_next_start_without_duplicates(tmp_path):
    server = Recorder()
    one = SinkFixture(tmp_path, "http", url=server.url)
    with server:
        one.start()
        one.write(step(1))
        until(lambda: got_steps(server) == [1])
        assert one.end()
    one.write(step(2))
    one.start()
    until(lambda: one.messages)
    assert one.pump is not None
    one.pump.finish()
    one.pump.join(0.3)
    assert not one.pump.is_done
    with Recorder(server.port) as later:
        until(lambda: one.pump is not None and one.pump.is_done)
        assert got_steps(later) == [2]


def test_memory_is_bounded_by_one_batch_during_an_outage(tmp_path):
    one = SinkFixture(tmp_path, "http", url="http://127.0.0.1:9")
    for number in range(1, 20_001):
        one.write(step(number))
    follower, sizes, steps = EventFollower(tmp_path / "events.jsonl"), [], 0
    while (found := follower.read())[1] != follower.offset:
        sizes.append(found[1] - follower.offset)
        steps += len(found[0])
        follower.offset = found[1]
    assert steps == 20_000
    assert max(sizes) <= 256 * 1024
    one.log.write({"event": "note", "time": 1.0, "text": "x" * 400_000})
    ((note,), after) = follower.read()
    assert len(note["text"]) == 400_000
    assert after == (tmp_path / "events.jsonl").stat().st_size


def test_torn_line_waits_for_its_end(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"step","step":1}\n{"event":"st')
    follower = EventFollower(path)
    events, after = follower.read()
    assert [event["step"] for event in events] == [1]
    follower.offset = after
    assert follower.read() == ([], after)
    path.write_bytes(b'{"event":"step","step":1}\n{"event":"step","step":2}\nnot json\n')
    assert [event["step"] for event in follower.read()[0]] == [2]


def test_prometheus_output_is_read_by_its_parser(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    one = SinkFixture(tmp_path, "prometheus", port=free_port())
    one.write({"event": "failure", "time": 5.0}, {"event": "failure", "time": 6.0}, step(1, loss="nan"), METRICS)
    one.start()
    until(lambda: one.offset() > 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{one.settings.port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{one.settings.port}/secrets", timeout=5)
    assert one.end()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    samples = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value
               for family in families.values() for sample in family.samples}  # fmt: skip
    run = ("run", "run-1")
    assert math.isnan(samples["weft_loss", (run,)])
    assert samples["weft_gpu_temperature_celsius", (run, ("stat", "max"))] == 88
    assert samples["weft_phase_seconds", (("phase", "data"), run, ("stat", "median"))] == 0.2
    assert samples["weft_failures_total", (run,)] == 2
    assert samples["weft_step_total", (run,)] == 1
    assert families["weft_gpu_xid_errors"].type == "counter"


def test_labels_are_escaped():
    metrics = NewestMetrics('a"b\\c\nd')
    metrics.see([step(1)])
    assert 'weft_loss{run="a\\"b\\\\c\\nd"} 2.0' in metrics.text()


def test_port_in_use_is_retried(tmp_path):
    with Recorder() as other:
        one = SinkFixture(tmp_path, "prometheus", port=other.port)
        one.write(step(1))
        one.start()
        until(lambda: one.messages)
        assert "cannot be used for listening" in one.messages[0]
    until(lambda: one.offset() > 0)
    assert one.end()


def test_push_gateway_has_the_newest_values(tmp_path):
    with Recorder() as server:
        one = SinkFixture(tmp_path, "pushgateway", url=server.url, project="my lab")
        one.write(step(1), step(2))
        one.start()
        until(lambda: server.got)
        one.write(step(3))
        until(lambda: one.offset() == (tmp_path / "events.jsonl").stat().st_size)
        assert one.end()  # values since the last push are pushed at the end
    method, path, body, _ = server.got[-1]
    assert (method, path) == ("PUT", "/metrics/job/my%20lab/instance/run-1")
    assert b'weft_step_total{run="run-1"} 3.0' in body


def test_otlp_output_matches_the_protocol(tmp_path):
    json_format = pytest.importorskip("google.protobuf.json_format")
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    with Recorder(answer={}) as server:
        one = SinkFixture(tmp_path, "otlp", url=server.url)
        one.write(step(1, loss="nan"), METRICS, {"event": "note", "time": 1.0})
        one.start()
        until(lambda: server.got)
        assert one.end()
    _, path, body, _ = server.got[0]
    assert path == "/v1/metrics"
    request = json_format.Parse(body, service.ExportMetricsServiceRequest())
    (resource,) = request.resource_metrics
    assert {item.key: item.value.string_value for item in resource.resource.attributes}["weft.run"] == "run-1"
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert math.isnan(metrics["weft.loss"].gauge.data_points[0].as_double)
    assert metrics["weft.loss"].gauge.data_points[0].time_unix_nano == 1001 * 10**9
    hottest = metrics["weft.gpu.temperature"].gauge.data_points[2]
    assert hottest.as_double == 88
    assert {item.key: item.value.string_value for item in hottest.attributes} == {"stat": "max", "owner": "rank 3"}
    assert metrics["weft.gpu.xid_errors"].sum.is_monotonic


def test_tensorboard_reads_the_sinks_output(tmp_path):
    one = SinkFixture(tmp_path, "tensorboard")
    one.write(step(1), step(2, loss=float("nan")), step(3, loss=1e300), METRICS)
    one.start()
    until(lambda: one.offset() > 0)
    assert one.end()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert ".tfevents." in file.name
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = found.Scalars("loss")
    assert [(one.wall_time, one.step) for one in losses] == [(1001.0, 1), (1002.0, 2), (1003.0, 3)]
    assert [str(one.value) for one in losses] == ["2.0", "nan", "inf"]
    assert [one.value for one in found.Scalars("gpu.temperature/max")] == [88.0]


def test_missing_tensorboard_error_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    job = SinkJob(SinkSection.model_validate({"kind": "tensorboard"}), tmp_path, "run-1", {})
    with pytest.raises(MissingExtra, match=r"sink\.kind=tensorboard needs it\. .*\[tensorboard\]"):
        make_sink(job)


def test_mlflow_gets_one_run_over_all_starts(tmp_path):
    with Recorder(answer={"experiment": {"experiment_id": "7"}, "run": {"info": {"run_id": "abc"}}}) as server:
        one = SinkFixture(tmp_path, "mlflow", url=server.url)
        one.write(step(1), METRICS)
        one.start()
        until(lambda: one.offset() > 0)
        assert one.end()
        one.write(step(2), {"event": "end", "time": 1003.0, "step": 2, "reason": "finished"})
        one.start()
        until(lambda: one.offset() == (tmp_path / "events.jsonl").stat().st_size)
        assert one.end()
    paths = [path.removeprefix("/api/2.0/mlflow/").partition("?")[0] for _, path, _, _ in server.got]
    assert paths == ["experiments/get-by-name", "runs/create", "runs/log-batch", "runs/log-batch", "runs/log-batch",
                     "runs/update"]  # fmt: skip
    bodies = [json.loads(body) if body else {} for _, _, body, _ in server.got]
    assert {param["key"]: param["value"] for param in bodies[2]["params"]} == {"optimizer.lr": "0.1", "plan": "tp=2"}
    assert {"key": "gpu.temperature/max", "value": 88, "timestamp": 1002500, "step": 2} in bodies[3]["metrics"]
    assert bodies[5] == {"run_id": "abc", "status": "FINISHED", "end_time": 1003000}


# --- secrets ---


def test_secrets_are_used_and_never_written(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SINK_TOKEN", SECRET)
    with Recorder() as server:
        one = SinkFixture(tmp_path, "http", url=server.url, token="env:SINK_TOKEN")
        one.write(step(1))
        server.status = 401  # a server that echoes the request
        one.start()
        until(lambda: one.messages)
        assert "answered 401" in one.messages[0]
        server.status = 302  # a token must not be sent to another server
        until(lambda: server.num_asked > 3)
        server.status = 200
        until(lambda: server.got)
        assert one.end()
    assert server.got[0][3]["Authorization"] == f"Bearer {SECRET}"
    assert SECRET not in " ".join(one.messages)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert SECRET not in "".join(capfd.readouterr())


def test_secrets_from_files_and_missing_secrets(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    assert secret_of(f"file:{file}", "sink http: token") == SECRET
    assert secret_of(None, "x") is None
    monkeypatch.delenv("NO_SUCH", raising=False)
    for reference, messages in (
        ("env:NO_SUCH", "sink http: token=env:NO_SUCH: this variable is not set. Set it where `weft train` starts."),
        ("file:/no/such", "sink http: token=file:/no/such: this file cannot be read (No such file or directory). "
                          "Check its path."),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            secret_of(reference, "sink http: token")
        assert str(caught.value) == messages


def test_error_omits_address_with_a_secret(monkeypatch):
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:9/{SECRET}")
    settings = SinkSection.model_validate({"kind": "http", "url": "env:HOOK", "timeout": "1s"})
    with pytest.raises(SinkTrouble) as caught:
        Poster.of(settings).post("", {})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_missing_package_error_has_its_command(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(MissingExtra) as caught:
        make_sink(SinkJob(SinkSection.model_validate({"kind": kind}), tmp_path, "run", {}))
    assert str(caught.value) == (
        f'{kind} is not installed: sink.kind={kind} needs it. In a checkout of Weft, run: pip install -e ".[{kind}]".'
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_trackers_record_a_run(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # it is read at import
    pytest.importorskip(kind)
    one = SinkFixture(tmp_path, kind)
    one.write(step(1), step(2), METRICS)
    one.start()
    until(lambda: one.offset() == (tmp_path / "events.jsonl").stat().st_size or one.messages, 120)
    one.pump.finish()
    one.pump.join(180)
    assert not one.pump.is_alive()
    assert one.messages == []
    found = [*tmp_path.rglob("*.wandb"), *tmp_path.rglob("*.db")]
    assert found
    assert b"loss" in b"".join(path.read_bytes() for path in [*found, *tmp_path.rglob("*.db-wal")])
