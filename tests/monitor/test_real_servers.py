"""Sinks against real servers: killed, stopped, slow, refusing, and cutting answers off.

Prometheus and its push gateway are Debian's (`apt-get install prometheus prometheus-pushgateway`). MLflow is the
program that WEFT_TEST_MLFLOW names, for example in a separate virtual environment (`pip install mlflow`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.monitor.programs import FaultyProxy, Program, fetch
from tests.monitor.servers import Recorder, free_port, until
from tests.monitor.test_channels import channel
from tests.monitor.test_sinks import SinkFixture, step
from weft import env
from weft.monitor.channels import AlertMessage, NotificationSender

pytestmark = pytest.mark.full


def debian(name: str) -> str:
    if (found := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    return found


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[list[str], str], Program]]:
    programs: list[Program] = []

    def start(command: list[str], ready: str) -> Program:
        program = Program(command, ready, tmp_path)
        programs.append(program)
        program.start()
        return program

    yield start
    for program in programs:
        program.kill()


def write_through_all_faults(one: SinkFixture, front: FaultyProxy, server: Program) -> int:
    """Write steps while the server works and while it fails. Return the number of steps, which must all arrive."""
    number = 0

    def write(count: int = 10) -> None:
        nonlocal number
        one.write(*map(step, range(number + 1, number + count + 1)))
        number += count

    def wait_until_sent() -> None:
        front.mode = "pass"
        until(lambda: one.offset() == (one.folder / "events.jsonl").stat().st_size, 60)

    one.start()
    write()
    wait_until_sent()
    for fault in ("refuse", "slow", "cut", "killed", "stopped"):
        asked = front.num_asked
        if fault in ("killed", "stopped"):
            server.send(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        else:
            front.mode = fault
        write()
        until(lambda asked=asked: front.num_asked > asked)
        write()
        if fault == "killed":
            server.kill()
            server.start()
        server.send(signal.SIGCONT)
        wait_until_sent()
    assert one.end()
    return number


def test_prometheus_scrapes_a_run_and_survives_a_kill(tmp_path, started):
    port, own = free_port(), free_port()
    scrape = f"scrape_interval: 1s\n    static_configs: [{{targets: ['127.0.0.1:{own}']}}]"
    (tmp_path / "prometheus.yml").write_text(f"scrape_configs:\n  - job_name: weft\n    {scrape}\n")
    address = f"http://127.0.0.1:{port}"
    command = [debian("prometheus"), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    server = started(command, f"{address}/-/ready")
    one = SinkFixture(tmp_path, "prometheus", port=own)

    def value(query: str) -> float | None:
        found = json.loads(fetch(f"{address}/api/v1/query?query={query}"))["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    one.write(step(1), {"event": "failure", "time": 5.0})
    one.start()
    until(lambda: value("weft_step_total") == 1)
    server.send(signal.SIGSTOP)
    one.write(step(2))
    until(lambda: one.offset() == (tmp_path / "events.jsonl").stat().st_size)  # a scraped sink waits for no server
    server.send(signal.SIGCONT)
    until(lambda: value("weft_step_total") == 2)
    server.kill()
    one.write(step(3))
    server.start()
    until(lambda: value("weft_step_total") == 3)
    assert value("weft_failures_total") == 1
    assert value("weft_loss") == pytest.approx(2 / 3)
    (target,) = json.loads(fetch(f"{address}/api/v1/targets"))["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    kinds = json.loads(fetch(f"{address}/api/v1/metadata"))["data"]
    assert kinds["weft_step_total"][0]["type"] == "counter"
    assert kinds["weft_loss"][0]["type"] == "gauge"
    assert one.end()


def test_push_gateway_gets_all_steps_through_faults(tmp_path, started, monkeypatch):
    monkeypatch.setattr("weft.monitor.sinks.prometheus_sink._PUSH_S", 0.0)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server = started([debian("prometheus-pushgateway"), f"--web.listen-address=127.0.0.1:{port}"], f"{address}/-/ready")
    front = FaultyProxy(address)
    one = SinkFixture(tmp_path, "pushgateway", url=front.url, project="my lab")
    number = write_through_all_faults(one, front, server)
    front.stop()
    assert f'weft_step_total{{instance="run-1",job="my lab",run="run-1"}} {number}\n' in fetch(f"{address}/metrics")
    assert "push_failure_time_seconds" not in "".join(one.messages)


def test_mlflow_gets_all_steps_through_faults(tmp_path, started):
    program = env.get("WEFT_TEST_MLFLOW")
    if not program:
        pytest.skip("MLflow is not known: WEFT_TEST_MLFLOW must name its program")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [program, "server", "--host=127.0.0.1", f"--port={port}", "--workers=1",
               f"--backend-store-uri=sqlite:///{tmp_path}/mlflow.db",
               f"--artifacts-destination={tmp_path}/made"]  # fmt: skip
    server = started(command, f"{address}/health")
    front = FaultyProxy(address)
    one = SinkFixture(tmp_path, "mlflow", url=front.url)
    number = write_through_all_faults(one, front, server)
    front.stop()
    run_id = json.loads((tmp_path / ".sinks" / "mlflow.json").read_text())["kept"]["run_id"]
    api = f"{address}/api/2.0/mlflow"
    history = json.loads(fetch(f"{api}/metrics/get-history?run_id={run_id}&metric_key=loss"))["metrics"]
    assert {one["step"]: one["value"] for one in history} == {at: 2.0 / at for at in range(1, number + 1)}
    run = json.loads(fetch(f"{api}/runs/get?run_id={run_id}"))["run"]
    assert {one["key"]: one["value"] for one in run["data"]["params"]} == {"optimizer.lr": "0.1", "plan": "tp=2"}
    body = json.dumps({"experiment_ids": [run["info"]["experiment_id"]]}).encode()
    assert len(json.loads(fetch(f"{api}/runs/search", body))["runs"]) == 1


@pytest.mark.parametrize("kind", ["otlp", "http"])
def test_long_outage_needs_no_memory_and_loses_nothing(kind, tmp_path, monkeypatch):
    # Pauses double while the events are written, so on a slow machine they would exceed the limits below.
    monkeypatch.setattr("weft.monitor.sinks.pump._LONGEST_PAUSE_S", 1.0)
    server = Recorder(answer={})
    one = SinkFixture(tmp_path, kind, url=server.url)
    one.start()
    tracemalloc.start()
    for number in range(1, 30_001):
        one.write(step(number, note="x" * 200))
    server.slow_s, server.forgets = 30.0, True  # exclude the server's own storage from the measurement
    with server:
        until(lambda: server.num_asked > 1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        server.status, server.slow_s, server.forgets = 500, 0.0, False
        asked = server.num_asked
        until(lambda: server.num_asked > asked)
        server.status = 200
        until(lambda: one.offset() == (tmp_path / "events.jsonl").stat().st_size, 120)
        assert one.end()
    assert (tmp_path / "events.jsonl").stat().st_size > 9e6
    assert peak < 6e6
    if kind == "http":
        steps = [event["step"] for body in server.bodies() for event in body["events"]]
    else:
        metrics = [one for body in server.bodies() for one in body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]]
        steps = [int(point["asDouble"]) for one in metrics if one["name"] == "weft.step"
                 for point in one["sum"]["dataPoints"]]  # fmt: skip
    assert sorted(set(steps)) == [*range(1, 30_001)]


def test_mails_survive_refusal_delay_and_kill_of_the_server():
    controller = pytest.importorskip("aiosmtpd.controller")
    got: list[str] = []

    class Post:
        mode = "pass"

        async def handle_DATA(self, server, session, envelope) -> str:
            if self.mode == "refuse":
                return "451 try again later"
            if self.mode == "slow":
                await asyncio.sleep(30)
            got.append(envelope.content.decode().split("Subject: ")[1].splitlines()[0])
            return "250 OK"

    post, port, messages = Post(), free_port(), []
    server = controller.Controller(post, hostname="127.0.0.1", port=port)
    server.start()
    room = NotificationSender(
        channel("mail", to=["a@b.c"], server=f"127.0.0.1:{port}", timeout="1s"), messages.append, pause_s=0.1
    )
    room.start()
    for mode in ("pass", "refuse", "slow"):
        post.mode = mode
        room.put(AlertMessage(mode, "", {}))
        time.sleep(1.5)
        post.mode = "pass"
        until(lambda mode=mode: mode in got, 60)
    server.stop()
    room.put(AlertMessage("killed", "", {}))
    time.sleep(1)
    later = controller.Controller(post, hostname="127.0.0.1", port=port)
    later.start()
    until(lambda: "killed" in got, 60)
    room.finish()
    room.join(10)
    later.stop()
    assert list(dict.fromkeys(got)) == ["pass", "refuse", "slow", "killed"]
    assert not room.is_alive()
