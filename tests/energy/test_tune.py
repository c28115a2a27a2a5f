"""Tuning: the search on known curves, limits on fake devices, and restoring after errors and kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.energy.fake_run import MOST, cpufreq, curve
from tests.energy.fakes import FakeGpu, FakeNvml, rapl
from weft import env
from weft.config.files import format_config
from weft.config.run_config import RunConfig
from weft.energy.guard import Guarded, boot_id, restore_earlier, state_file
from weft.energy.limits import CpuFrequency, NoRights, PowerLimit, restore
from weft.energy.search import LimitSearch, Try
from weft.energy.tuner import choice
from weft.errors import LaunchError

VALUES = range(200, 701, 25)


def saturated(watts: float, most: float, exponent: float) -> tuple[float, float]:
    """Return (step time, power) of a GPU that draws at most `most` watts and slows down below."""
    return max(1.0, (most / watts) ** exponent), min(watts, most)


def cubic(watts: float, idle: float, memory: float) -> tuple[float, float]:
    """Return (step time, power) of a GPU whose power grows with the cube of its clock."""
    clock = max(0.05, (watts - idle) / (700 - idle)) ** (1 / 3)
    return memory + (1 - memory) / clock, watts


def searched(device, slowdown: float, noise: float, seed: int) -> tuple[int, int, int]:
    """Return the chosen and the true best index, and the number of tries, on a machine that becomes 5 % slower."""
    draw, search = random.Random(seed), LimitSearch(list(VALUES), slowdown)
    while (value := search.next_value()) is not None:
        step_s, watts = device(value)
        step_s *= (1 + 0.05 * len(search.tries) / 12) * (1 + draw.gauss(0, noise))
        search.add(Try(value, step_s, watts * step_s * (1 + draw.gauss(0, noise))))
    points = np.array([device(value) for value in VALUES])
    time_s, energy = points[:, 0], points[:, 0] * points[:, 1]
    best = int(np.argmin(np.where(time_s <= time_s[-1] * (1 + slowdown), energy, np.inf)))
    return VALUES.index(search.best()), best, len(search.tries)


@pytest.mark.parametrize("slowdown", [0.05, 0.15, 10.0])
@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_best_limit_is_found_within_one_step_in_twelve_tries(slowdown, noise):
    for seed in range(12):
        draw = random.Random(seed)
        devices = (
            partial(saturated, most=draw.uniform(420, 660), exponent=draw.uniform(0.3, 0.8)),
            partial(cubic, idle=draw.uniform(80, 170), memory=draw.uniform(0, 0.4)),
        )
        for device in devices:
            found, best, tries = searched(device, slowdown, noise, seed)
            assert tries <= 12
            assert abs(found - best) <= 1, (seed, slowdown, VALUES[found], VALUES[best])


def test_value_that_saves_nothing_is_not_chosen():
    search = LimitSearch(list(VALUES), 0.05)
    while (value := search.next_value()) is not None:
        search.add(Try(value, 1.0, 300.0))
    found = choice(search)
    assert (found.value, found.energy) == (700, 1.0)


def test_power_limits_are_set_per_gpu_and_restored():
    nvml = FakeNvml(a=FakeGpu(limit=700_000), b=FakeGpu(limit=500_000, constraints=(300_000, 700_000)))
    limit = PowerLimit(nvml, ["GPU-a", "GPU-b"], lambda: True)
    assert (limit.values[0], limit.values[-1], len(limit.values)) == (300, 700, 21)
    limit.set(600)
    assert [gpu.limit for gpu in nvml.gpus.values()] == [600_000, 500_000]
    restore(limit.state, Path("/sys"), nvml)
    assert [gpu.limit for gpu in nvml.gpus.values()] == [700_000, 500_000]
    assert limit.command(450) == "sudo nvidia-smi -i GPU-a,GPU-b -pl 450"


def test_limits_are_not_set_without_rights():
    nvml = FakeNvml(may_write=False, a=FakeGpu())
    limit = PowerLimit(nvml, ["GPU-a"], lambda: False)
    with pytest.raises(NoRights, match="only the root user"):
        limit.check_rights()
    with pytest.raises(NoRights, match="Insufficient Permissions"):
        limit.set(500)
    assert nvml.limits_set == []


@pytest.mark.parametrize(
    "state",
    [{}, {"kind": "cpu_frequency", "first": {"/etc/passwd": 1}}, {"kind": "shell", "first": {"x": 1}},
     {"kind": "cpu_frequency", "first": []},
     {"kind": "cpu_frequency", "first": {"/sys/devices/system/cpu/cpufreq/../scaling_max_freq": 1}}],
)  # fmt: skip
def test_foreign_state_is_refused(state):
    with pytest.raises(ValueError, match=r"state names no limit|is no file of cpufreq"):
        restore(state, Path("/sys"))


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WEFT_SYSFS", str(tmp_path / "sys"))
    return tmp_path


def test_limits_are_restored_after_an_error_and_only_one_tuning_runs(home):
    files = cpufreq(home / "sys")
    limit = CpuFrequency(home / "sys")
    with contextlib.suppress(ZeroDivisionError), Guarded(limit.state, home / "sys") as guarded:
        limit.set(1500)
        guarded.check()
        assert [file.read_text() for file in files] == ["1500000\n"] * 2
        with pytest.raises(LaunchError, match="another `weft energy` command"), Guarded(limit.state, home / "sys"):
            pass
        raise ZeroDivisionError
    assert [file.read_text() for file in files] == [f"{MOST}\n"] * 2
    assert not state_file().exists()


def test_limits_left_by_a_killed_guard_are_restored_by_the_next_command(home):
    files = cpufreq(home / "sys")
    limit = CpuFrequency(home / "sys")
    program = (
        "from weft.energy.guard import *; from weft.energy.limits import *; import os, signal; from pathlib import "
    )
    program += f"Path; root = Path({str(home / 'sys')!r}); limit = CpuFrequency(root); guarded = Guarded(limit.state, "
    program += "root).__enter__(); limit.set(1200); os.kill(guarded._guard.pid, 9); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert files[0].read_text() == "1200000\n"
    assert json.loads(state_file().read_text())["kind"] == "cpu_frequency"
    assert restore_earlier(home / "sys")
    assert [file.read_text() for file in files] == [f"{MOST}\n"] * 2
    assert not restore_earlier(home / "sys")
    assert limit.values[-1] == MOST // 1000


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "shell", "first": {"/x": 1}}', "[" * 10_000])
def test_damaged_state_file_is_refused_and_kept(home, text):
    state_file().parent.mkdir(parents=True)
    state_file().write_text(text.replace('"kind"', f'"boot": "{boot_id()}", "kind"'))
    with pytest.raises(LaunchError, match=r"this file of an earlier tuning is damaged .* and delete it."):
        restore_earlier(home / "sys")
    assert state_file().exists()


def test_limits_before_a_reboot_are_not_set_again(home):
    files = cpufreq(home / "sys")
    state_file().parent.mkdir(parents=True)
    state_file().write_text(json.dumps({"kind": "cpu_frequency", "first": {str(files[0]): 1}, "boot": "another"}))
    assert restore_earlier(home / "sys")
    assert files[0].read_text() == f"{MOST}\n"


@contextmanager
def training(home: Path) -> Iterator[Path]:
    """Start a fake run, and yield its folder once it steps."""
    run = home / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(format_config(RunConfig()))
    command = [sys.executable, "-m", "tests.energy.fake_run", str(run), str(home / "sys")]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        until(lambda: (run / "events.jsonl").is_file() and (run / "events.jsonl").read_text().count('"step"') > 5)
        yield run
    finally:
        process.kill()
        process.wait()


def until(is_true, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def tune_command(run: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "weft", "energy", "tune", str(run), "--steps=15", "--seconds=0", *options]


def test_command_tunes_a_run_and_restores(home):
    files = cpufreq(home / "sys")
    rapl(home / "sys")
    with training(home) as run:
        done = subprocess.run([*tune_command(run), "--max-slowdown=10%", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [file.read_text() for file in files] == [f"{MOST}\n"] * 2
    # 10 % slower: 0.8 + 0.2 / f = 1.1, so f = 2/3 of the highest frequency.
    assert found["value"] == pytest.approx(2000, abs=150)
    assert found["energy"] < 0.75
    assert len(found["tries"]) == 12
    assert curve(MOST)[0] == pytest.approx(found["tries"][0][1], rel=0.2)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(one, marks=pytest.mark.full) for one in (signal.SIGTERM, signal.SIGINT))]
)
def test_killed_command_leaves_no_limit_behind(home, number):
    files = cpufreq(home / "sys")
    rapl(home / "sys")
    with training(home) as run:
        process = subprocess.Popen(tune_command(run, "--steps=3"), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until(lambda: files[1].read_text() not in ("", f"{MOST}\n"))
        process.send_signal(number)
        process.wait()
        until(lambda: [file.read_text() for file in files] == [f"{MOST}\n"] * 2 and not state_file().exists())


def test_run_that_ends_restores(home):
    files = cpufreq(home / "sys")
    rapl(home / "sys")
    with training(home) as run:
        process = subprocess.Popen(tune_command(run, "--steps=3"), stderr=subprocess.PIPE, text=True)
        until(lambda: files[0].read_text() not in ("", f"{MOST}\n"))
        with open(run / "events.jsonl", "a") as log:
            log.write('{"event": "end", "reason": "finished"}\n')
        _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "the run no longer trains (event end). All limits are restored." in " ".join(errors.split())
    assert [file.read_text() for file in files] == [f"{MOST}\n"] * 2


def test_without_rights_the_command_for_an_administrator_is_printed(home, monkeypatch, capsys):
    from weft.cli.app import run as weft

    files = cpufreq(home / "sys")
    rapl(home / "sys")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(home / "sys")))
    with training(home) as run:
        assert weft(["energy", "tune", str(run)]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert f"CPU frequency (MHz): this user may not write {files[0]}. Nothing was changed." in text
    assert f"An administrator must type: sudo {sys.executable} -m weft energy tune {run}" in text
    assert "It would try 21 values from 1000 to 3000, in at most 12 tries of 20 steps, and restore 3000." in text
    assert files[0].read_text() == f"{MOST}\n"


def test_runs_that_cannot_be_tuned_are_refused(home, capsys):
    from weft.cli.app import run as weft

    run = home / "runs" / "two"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(format_config(RunConfig()))
    assert weft(["energy", "tune", str(run)]) == 2
    assert "no command trains in this folder" in " ".join(capsys.readouterr().err.split())
    assert weft(["energy", "tune", str(run), "--max-slowdown=0"]) == 2
    assert "a share above 0 is needed" in capsys.readouterr().err
    assert weft(["energy", "show", str(run)]) == 2
    assert env.sysfs() == home / "sys"
