"""`weft map`: kill -9 of workers and of the command, signals, and a million items."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from weft import env

ROOT = Path(__file__).parents[2]


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    """Start `weft map` in a session of its own, so that its processes can be found."""
    return subprocess.Popen(
        [sys.executable, "-m", "weft", "map", *words], cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env.child_env(CI="true", WEFT_POOL_TEST=str(home)),
    )  # fmt: skip


def workers_of(home: Path) -> list[psutil.Process]:
    """Return all processes that the command started, also those whose parent has ended."""
    found = []
    for process in psutil.process_iter():
        try:
            is_command = "map" in process.cmdline()[2:4]
            if process.environ().get("WEFT_POOL_TEST") == str(home) and not is_command:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until_gone(home: Path) -> None:
    end = time.monotonic() + 10
    while left := workers_of(home):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def run_through_kills(home: Path, num_kills: int, seed: int) -> None:
    """Kill a worker, all workers or the command at random moments until all have happened; then check the results."""
    rng, num_items = random.Random(seed), 150
    items, out, kills = home / "items.jsonl", home / "out", 0
    items.write_text("".join(f"{n}\n" for n in range(num_items)))
    words = ["tests.pools.work:slow_square", "--over", str(items), "--out", str(out), "--on", "local:3"]
    while True:
        command = start(home, *words, "--retries", "10000")
        while kills < num_kills:
            victims = rng.choice(["worker", "workers", "command"])
            try:
                command.wait(rng.uniform(0.0, 1.0))
                break
            except subprocess.TimeoutExpired:
                kills += 1
            if victims == "command":
                command.kill()
            else:
                found = workers_of(home)
                for process in found if victims == "workers" else rng.sample(found, min(1, len(found))):
                    process.kill()
        error = command.communicate(timeout=120)[1]
        assert command.returncode in (0, -signal.SIGKILL), error
        if command.returncode == 0:
            lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
            assert [(line["item"], line["result"]) for line in lines] == [(n, n * n) for n in range(num_items)]
            journal = [json.loads(line[9:])["item"] for line in (out / "journal.jsonl").read_text().splitlines()]
            assert sorted(journal) == list(range(num_items))
            if kills >= num_kills:
                break
            for path in out.iterdir():  # once more from the start
                path.unlink()
    wait_until_gone(home)


def test_each_result_exactly_once_through_kills(tmp_path):
    run_through_kills(tmp_path, num_kills=8, seed=1)


@pytest.mark.full
def test_each_result_exactly_once_through_200_kills(tmp_path):
    run_through_kills(tmp_path, num_kills=200, seed=2)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_command_leaves_no_process(signum, code, tmp_path):
    # A shell starts background commands with SIGINT ignored, and children would inherit that from this process.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    (tmp_path / "items.jsonl").write_text('"quick"\n"orphans"\n"orphans"\n')
    out = tmp_path / "out"
    words = ["--over", str(tmp_path / "items.jsonl"), "--out", str(out), "--on", "local:2"]
    command = start(tmp_path, "tests.pools.work:misbehave", *words)
    end = time.monotonic() + 30
    while not (out / "map.json").exists() or sum("sleep" in p.name() for p in workers_of(tmp_path)) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    signal.signal(signal.SIGINT, before)
    os.kill(command.pid, signum)
    error = command.communicate(timeout=30)[1]
    assert command.returncode == code
    wait_until_gone(tmp_path)
    if code > 0:
        assert f"stopped: 1 of 3 results are in {out}/journal.jsonl" in error
    assert len((out / "journal.jsonl").read_text().splitlines()) == 1


def test_exit_codes_and_reports(tmp_path):
    items = tmp_path / "items.jsonl"
    items.write_text('\n"fine"\n\n"raise"\n')
    words = ["--over", str(items), "--out", str(tmp_path / "out"), "--on", "local:1"]
    command = start(tmp_path, "tests.pools.work:misbehave", *words)
    error = command.communicate(timeout=60)[1]
    assert command.returncode == 1
    assert "weft: item 1 failed: ValueError: no good\n" in error
    assert f"weft: 1 of 2 results in {tmp_path}/out/results.jsonl; 1 new in" in error
    assert "1 task failed. Run the same command to try them again.\nitem 1: ValueError: no good\nTraceback" in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"1\n{\n", "items.jsonl:2: it is not JSON (Expecting property name"),
        (b"NaN\n", "items.jsonl:1: it is not JSON (JSON has no NaN). Write one JSON value per line."),
        (b'"\xff"\n', "items.jsonl:1: it is not UTF-8. Save the file as UTF-8."),
        (b"\n", "it has no lines. Write one JSON value per line."),
        (None, "it cannot be read (No such file or directory). Give a JSONL file."),
    ],
)
def test_bad_files_of_items(text, said, tmp_path, capsys, monkeypatch):
    from weft.cli.app import run

    items = tmp_path / "items.jsonl"
    if text is not None:
        items.write_bytes(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert run(["map", "m:f", "--over", str(items)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("maps/*"))
    assert run(["map", "m", "--over", str(items)]) == 2
    assert "function=m: it has no function's name. Write package.module:function." in capsys.readouterr().err


@pytest.mark.full
def test_a_million_items_need_little_memory(tmp_path):
    items = tmp_path / "items.jsonl"
    items.write_text("".join(f"{n}\n" for n in range(1_000_000)))
    command = start(
        tmp_path, "tests.pools.work:square", "--over", str(items), "--out", str(tmp_path / "o"), "--on", "local:2"
    )
    process, peak = psutil.Process(command.pid), 0
    while command.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
        except psutil.Error:
            break
        time.sleep(0.2)
    assert command.wait() == 0
    assert peak < 200 * 2**20
    with (tmp_path / "o" / "results.jsonl").open() as file:
        assert sum(1 for _ in file) == 1_000_000
