"""Serving the page: locally, or with a token and TLS; and next to a growing run."""

from __future__ import annotations

import contextlib
import json
import re
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.watch.synthetic_run import SyntheticRun
from weft.cli.app import run
from weft.errors import ConfigError
from weft.monitor.dashboard.server import Serving, read_token


@contextlib.contextmanager
def served(folder, *words):
    """Run `weft watch` in a separate process. Yield its address."""
    command = [sys.executable, "-m", "weft", "watch", str(folder), "--port", "0", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"https?://\S+", line)
        assert found, line + process.stderr.read()
        yield found[0]
    finally:
        process.terminate()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "node-07"])
def test_serving_beyond_this_machine_requires_token_and_tls(host, tmp_path, capsys):
    folder = SyntheticRun(steps=3, ranks=1).write(tmp_path / "run")
    assert run(["watch", str(folder), "--host", host]) == 2
    assert capsys.readouterr().err == (
        f"error: --host={host}: others than this machine would reach the page, and it needs a token and TLS then. Add "
        "--token-file, --tls-cert and --tls-key, or leave --host out and use ssh -L 8765:127.0.0.1:8765.\n"
    )


def test_incomplete_tls_and_missing_files_are_reported(tmp_path):
    (tmp_path / "cert.pem").write_text("x")
    with pytest.raises(ConfigError, match=r"one is of no use without the other\. Give both"):
        Serving(certificate=tmp_path / "cert.pem").access()
    with pytest.raises(ConfigError, match=r"there is no such file\. Check the path"):
        Serving(certificate=tmp_path / "cert.pem", key=tmp_path / "none.pem").access()


def test_token_file_is_readable_only_by_its_owner(tmp_path):
    path = tmp_path / "token"
    token = read_token(path)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == token
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"other users may read it \(mode 644\). Type chmod 600"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="the token has 5 characters, and 16 is the least"):
        read_token(path)
    assert token not in repr(Serving(token_file=path))


@pytest.mark.parametrize(
    "words, message",
    [
        (["watch", "{0}/none"], "there is no run in it (no events.jsonl)"),
        (["watch", "{0}/none", "--terminal"], "there is no run in it (no events.jsonl)"),
        (["runs", "list", "{0}/none"], "there is no run in it (no events.jsonl)"),
        (
            ["runs", "show", "{0}/run", "--price", "cheap"],
            "error: price=cheap: a price is a number, a currency",
        ),
        (
            ["watch", "{0}/run", "--port", "99999"],
            "Input should be less than or equal to 65535",
        ),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(words, message, tmp_path, capsys):
    SyntheticRun(steps=3, ranks=1).write(tmp_path / "run")
    assert run([word.format(tmp_path) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_port_in_use_is_reported_and_browser_gets_each_step(tmp_path, capsys):
    folder = SyntheticRun(steps=100, until=40, ranks=2).write(tmp_path / "run")
    with served(folder) as address:
        port = address.rpartition(":")[2]
        assert run(["watch", str(folder), "--port", port]) != 0
        assert (
            f"--port={port}: 127.0.0.1 cannot be used for listening (Address already in use)" in capsys.readouterr().err
        )
        stream = urllib.request.urlopen(f"{address}/api/stream", timeout=20)
        assert stream.headers["content-type"].startswith("text/event-stream")

        def wait_for_step(wanted):
            end = time.monotonic() + 20
            while time.monotonic() < end:
                line = stream.readline().decode()
                if line.startswith("data: "):
                    for one in json.loads(line[6:]):
                        if one["step"] >= wanted:
                            return one
            raise AssertionError(f"step {wanted} was not heard of")

        assert wait_for_step(40)["state"] == "running"
        event = {"event": "step", "time": time.time(), "step": 41, "loss": 1.5, "seconds": {"total": 0.5}}
        with open(folder / "events.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")
        assert wait_for_step(41)["now"]["loss"] == 1.5
        request = urllib.request.Request(f"{address}/api/runs", headers={"host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="421") as refused:
            urllib.request.urlopen(request, timeout=20)
        refused.value.close()
        stream.close()
