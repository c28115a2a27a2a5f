"""Attacks on `weft watch`: files that block, clients that never finish, password guesses, secrets in settings."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the page needs starlette: pip install starlette uvicorn")

from tests.watch.synthetic_run import SyntheticRun
from weft.monitor.dashboard import run_index, timed_calls
from weft.monitor.dashboard import run_index as shelf
from weft.monitor.dashboard.connections import Connections, GuessLimit
from weft.monitor.dashboard.run_index import RunCatalog, RunIndex
from weft.monitor.redact import text_without_secrets, without_secrets

# --- logs that block, and long logs ---


def test_fifo_device_or_folder_as_log_does_not_block_other_runs(tmp_path):
    SyntheticRun(steps=20, end=1e9).write(tmp_path / "ok")
    for name in ("fifo", "folder", "zero", "linked"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "fifo" / "events.jsonl")
    (tmp_path / "folder" / "events.jsonl").mkdir()
    (tmp_path / "zero" / "events.jsonl").symlink_to("/dev/zero")
    (tmp_path / "linked" / "events.jsonl").symlink_to(tmp_path / "fifo" / "events.jsonl")
    os.mkfifo(tmp_path / "ok" / "measured.json")
    began = time.monotonic()
    found = RunCatalog(tmp_path)
    found.read_all()
    assert time.monotonic() - began < 10
    assert found.runs["ok"].step == 20
    for name in ("fifo", "folder", "zero", "linked"):
        assert found.runs[name].state() == ("unreadable", "events.jsonl: it is not a regular file"), name
    # A valid log replaces it.
    (tmp_path / "fifo" / "events.jsonl").unlink()
    SyntheticRun(steps=5, end=1e9).write(tmp_path / "fifo")
    found.read_all()
    assert (found.runs["fifo"].step, found.runs["fifo"].state()[0]) == (5, "finished")


def test_hanging_file_system_blocks_only_its_own_run(tmp_path, monkeypatch):
    for name in ("ok", "hung"):
        SyntheticRun(steps=20, end=1e9).write(tmp_path / name)
    monkeypatch.setattr(shelf, "_LIMIT_S", 0.3)
    found, answers = RunCatalog(tmp_path), threading.Event()
    hung, fetch = found.runs["hung"], found.runs["hung"].fetch
    monkeypatch.setattr(hung, "fetch", lambda: answers.wait(60) and fetch())
    found.refresh()
    assert hung.state() == ("unreadable", "events.jsonl: its file system does not answer within 0 s")
    assert found.runs["ok"].step == 20
    began = time.monotonic()
    found.refresh()  # it is not waited for again
    assert time.monotonic() - began < 0.3
    assert hung.lock.acquire(timeout=1)  # and requests can take the lock
    hung.lock.release()
    answers.set()
    end = time.monotonic() + 20
    while hung.step != 20 and time.monotonic() < end:
        found.refresh()
        time.sleep(0.02)
    assert (hung.step, hung.state()[0]) == (20, "finished")


def test_late_call_keeps_its_result_and_errors_are_raised():
    calls, answers = timed_calls.TimedCalls(0.1), threading.Event()
    with pytest.raises(timed_calls.Late):
        calls.call("a", lambda: answers.wait(30) and 7)
    assert calls.call("b", lambda: 1) == 1
    with pytest.raises(timed_calls.Late):
        calls.call("a", lambda: 8)
    answers.set()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with contextlib.suppress(timed_calls.Late):
            assert calls.call("a", lambda: 9) == 7
            break
    with pytest.raises(OSError, match="gone"):
        calls.call("a", lambda: (_ for _ in ()).throw(OSError("gone")))
    calls.close()


def test_long_log_is_read_from_its_end_with_the_same_result(tmp_path, monkeypatch):
    made = SyntheticRun(steps=3000, ranks=4, fails_at=1500, save_every=500, eval_every=200, end=1e9).write(
        tmp_path / "run"
    )
    at_once = RunIndex(made, "run")
    while at_once.refresh():
        pass
    for name, value in {"_LONG_LOG": 2**18, "_BEGIN_BYTES": 2**14, "_NEWEST_BYTES": 2**15}.items():
        monkeypatch.setattr(run_index, name, value)
    monkeypatch.setattr(run_index.LogTail.read, "__defaults__", (2**16,))
    run = RunIndex(made, "run")
    assert run.refresh()
    assert run.step == 3000
    assert run.num_steps == at_once.num_steps
    assert run.read_share < 0.1
    times = 1
    while run.refresh():
        times += 1
        assert run.step == 3000
    assert times > 5
    assert run.read_share == 1
    assert run.steps.steps.tolist() == at_once.steps.steps.tolist()
    assert run.ledger.seconds() == at_once.ledger.seconds()
    assert run.num_events == at_once.num_events
    with open(made / "events.jsonl", "ab") as file:
        file.write(b'{"event":"step","step":3001,"time":2e9,"loss":1.0}\n')
    assert run.refresh()
    assert run.step == 3001


# --- clients that never finish ---


class FakeSocket:
    def __init__(self, number: int):
        self.number, self.ended = number, False

    def fileno(self) -> int:
        return self.number

    def shutdown(self, how: int) -> None:
        self.ended = True


def test_excess_connection_replaces_the_longest_idle_one():
    now = [0.0]
    found = Connections(3, 10.0, lambda: now[0])
    calls = [FakeSocket(number) for number in range(5)]
    for at, call in enumerate(calls[:3]):
        now[0] = at
        found.add(call)
    found.works(0)  # the first has sent its request
    now[0] = 5.0
    found.add(calls[3])
    assert [call.ended for call in calls] == [False, True, False, False, False]
    now[0] = 12.5
    found.end_late()
    assert [call.ended for call in calls] == [False, True, True, False, False]
    found.waits(0)  # for its next request, or to receive its answer
    now[0] = 23.0
    found.end_late()
    assert [call.ended for call in calls] == [True, True, True, True, False]
    assert len(found) == 0


@contextlib.contextmanager
def served(folder: Path, most: int, deadline_s: float):
    """Run the page's server in a thread, with the test's limits. Yield its port and its connections."""
    import uvicorn

    from weft.monitor.dashboard import connections
    from weft.monitor.dashboard import routes as addresses
    from weft.monitor.dashboard.server import AccessRules

    found = RunCatalog(folder)
    found.read_all()
    open_ones = connections.Connections(most, deadline_s)
    listening = connections.CountedListener.of(socket.create_server(("127.0.0.1", 0)), open_ones)
    app = addresses.make_app(addresses.Page(found, AccessRules(frozenset({"localhost", "127.0.0.1"}))))
    protocol = connections.protocol_of(open_ones)
    settings = uvicorn.Config(app, log_level="error", loop="asyncio", http=protocol, ws="none", lifespan="off",
                              backlog=min(64, most), timeout_graceful_shutdown=1)  # fmt: skip
    server = connections.PageServer(settings, open_ones)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1], open_ones
    finally:
        server.should_exit = True
        thread.join(20)


UNFINISHED = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ",
    b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\ntoken=",
    b"",
    # A complete request, and then half of one.
    b"GET /login HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT",
)


def test_unfinished_requests_are_dropped_and_block_no_other_client(tmp_path, capfd):
    SyntheticRun(steps=20, end=1e9).write(tmp_path / "runs" / "a")
    with served(tmp_path / "runs", 8, 1.0) as (port, open_ones), contextlib.ExitStack() as held:
        calls = [held.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(40)]
        for number, call in enumerate(calls):
            with contextlib.suppress(OSError):
                call.sendall(UNFINISHED[number % len(UNFINISHED)])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=30) as answer:
            assert json.load(answer)["runs"][0]["step"] == 20
        assert len(open_ones) <= 8
        for call in calls:  # each is closed: by another connection, or by its deadline
            with contextlib.suppress(ConnectionError):
                while call.recv(4096):
                    pass
    assert not capfd.readouterr().err


def test_client_that_reads_no_answer_is_dropped_but_a_listening_page_is_not(tmp_path):
    SyntheticRun(steps=4000, end=1e9).write(tmp_path / "runs" / "a")
    ask = b"GET /api/curves?id=a&points=2000 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(tmp_path / "runs", 8, 1.0) as (port, open_ones), contextlib.ExitStack() as held:
        page = held.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        page.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in page.recv(4096)
        lazy = held.enter_context(socket.socket())
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(20)
        lazy.connect(("127.0.0.1", port))
        lazy.sendall(ask * 60)  # more than all buffers can contain
        end = time.monotonic() + 30
        while len(open_ones) > 1 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(open_ones) == 1  # the listening page


@contextlib.contextmanager
def watched(folder: Path, descriptors: int):
    """Run `weft watch` in a process with few descriptors. Yield its port and the file of its errors."""
    errors = folder.parent / "watch.err"
    with open(errors, "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", "watch", str(folder), "--port", "0"], stdout=subprocess.DEVNULL, stderr=log,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)),
        )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while "http://" not in errors.read_text():
            assert time.monotonic() < end, errors.read_text()
            time.sleep(0.05)
        yield int(errors.read_text().partition("http://localhost:")[2].split()[0]), errors
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.full
def test_unfinished_requests_exhaust_neither_descriptors_nor_log(tmp_path):
    SyntheticRun(steps=20, end=1e9).write(tmp_path / "runs" / "a")
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
    body = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\ntoken="
    with watched(tmp_path / "runs", 256) as (port, errors), contextlib.ExitStack() as held:
        calls = []
        for number in range(400):
            call = held.enter_context(socket.socket())
            call.settimeout(20)
            call.connect(("127.0.0.1", port))
            with contextlib.suppress(OSError):
                call.sendall((head, body, b"")[number % 3])
            calls.append(call)
        began = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=30) as answer:
            assert json.load(answer)["runs"][0]["step"] == 20
        assert time.monotonic() - began < 15
        # All of them are dropped, including the last ones.
        deadline = time.monotonic() + 60
        for call in calls:
            call.settimeout(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ConnectionError):
                while call.recv(4096):
                    pass
        assert len(errors.read_text()) < 2000


# --- password guesses ---


def test_guesses_are_limited_per_address_and_in_total():
    now = [0.0]
    limit = GuessLimit(lambda: now[0])
    for _ in range(5):
        assert limit.wait_s("10.0.0.1") == 0
        limit.note("10.0.0.1", right=False)
    waits = []
    for _ in range(9):
        waits.append(limit.wait_s("10.0.0.1"))
        now[0] += waits[-1]
        limit.note("10.0.0.1", right=False)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert limit.wait_s("10.0.0.2") == 0
    limit.note("10.0.0.1", right=True)
    assert limit.wait_s("10.0.0.1") == 0
    for number in range(100):  # from any number of addresses; an IPv6 network is one
        limit.note(f"2001:db8::{number}", right=False)
    assert limit.wait_s("2001:db8::ffff") > 0
    assert limit.wait_s("192.0.2.7") > 0
    now[0] += 61
    assert limit.wait_s("192.0.2.7") == 0
    for number in range(3000):
        limit.note(f"10.1.{number // 256}.{number % 256}", right=False)
    assert len(limit._wrong) <= 1000


def test_login_and_bearer_share_the_limit(tmp_path):
    pytest.importorskip("httpx2", reason="starlette's test client needs httpx2: pip install httpx2")
    from starlette.testclient import TestClient

    from weft.monitor.dashboard.routes import Page, make_app
    from weft.monitor.dashboard.server import AccessRules

    SyntheticRun(steps=3, end=1e9).write(tmp_path / "a")
    access = AccessRules(frozenset({"localhost"}), token="a-token-of-enough-letters")
    page = Page(RunCatalog(tmp_path), access)
    client = TestClient(make_app(page), base_url="http://localhost", follow_redirects=False)
    origin = {"origin": "http://localhost"}
    codes = [client.post("/login", data={"token": f"x{number}"}, headers=origin).status_code for number in range(3)]
    codes += [client.get("/api/runs", headers={"authorization": f"Bearer {n}"}).status_code for n in range(3)]
    assert codes == [403, 403, 403, 401, 401, 429]
    refused = client.post("/login", data={"token": access.token}, headers=origin)  # not even compared
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60


# --- secrets in settings ---


@pytest.mark.parametrize(
    "settings",
    [
        {"api_key": ["PLANTED"]},
        {"token": {"x": "PLANTED", "y": ["PLANTED"]}},
        {"channel": [{"name": "ops", "url": "https://hooks.slack.com/services/T0/B0/PLANTED"}]},
        {"channel": [{"name": "ops", "password": "PLANTED"}, {"auth": {"basic": ["me", "PLANTED"]}}]},
        {"url": "http://10.0.0.1/echo/services/PLANTED"},
        {"text": "look at https://me:PLANTED@host/x, or https://host/x?key=PLANTED"},
        {"url": "slack://PLANTED/B0/x"},
        {"accessToken": "PLANTED", "aws_secret_access_key": "PLANTED", "hf-token": "PLANTED"},
        {"credentials": {"a": [[{"b": "PLANTED"}]]}, "Authorization": "Bearer PLANTED"},
        {"hook": "https://example.com/webhook/PLANTED"},
        {"sink": {"uri": "https://example.com/3f9a8b7c6d5e4PLANTED"}},
    ],
)
def test_secrets_are_hidden_in_lists_tables_and_addresses(settings):
    assert "PLANTED" not in json.dumps(without_secrets(settings))
    assert "PLANTED" not in json.dumps(without_secrets({"a": [settings, {"b": settings}]}))


def test_ordinary_settings_are_unchanged():
    settings = {
        "tokenizer": {"kind": "file", "path": "my/tok"},
        "train": {"tokens": 4096, "max_tokens": 7, "steps": 100, "keys": ["a"]},
        "data": {"train": ["https://example.com/data/train-00001.jsonl", "s3://bucket/prefix/x.jsonl"]},
        "sink": [{"kind": "mlflow", "url": "http://localhost:5000", "token": "env:MLFLOW_TOKEN"}],
        "author": "someone",
        "seed": None,
        "on": True,
    }
    assert without_secrets(settings) == settings
    assert without_secrets({"password": 12345}) == {"password": "(hidden)"}
    assert text_without_secrets("saved to /a/b.c, see https://example.com/docs") == (
        "saved to /a/b.c, see https://example.com/docs"
    )
