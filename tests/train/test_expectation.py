"""Run report: expected times with measured times, and no estimate for machines without a profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.measured.synthetic import profile
from weft.cli.app import run
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.planner.measured.corrections import RUN_FILE
from weft.planner.measured.machine_profile import load_profile
from weft.planner.measured.profile_tables import this_host
from weft.train.planned import expectation_lines
from weft.train.tasks.decoder import DecoderTask

MODEL = {"vocab_size": 256, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 128}
RANK = {"typical": {"compute": 0.5, "optimizer": 0.1, "data": 0.01}, "memory": 2**28, "steps": 7}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    return tmp_path


def lines(folder: Path) -> list[str]:
    config = RunConfig.model_validate(
        {"model": MODEL, "tokenizer": {"kind": "bytes"}, "train": {"seq_len": 32, "global_batch": 8}}
    )
    task = DecoderTask()
    task.config = config
    return expectation_lines(folder, task, build_mesh(Plan()), [RANK])


def save_profile_of_this_host(home: Path) -> Path:
    """Save a synthetic profile that claims to be of this machine."""
    path = home / "home" / "profile.json"
    replace(profile(), machine=this_host()).save(path)
    return path


def test_unknown_machine_has_no_estimate(home: Path) -> None:
    [line] = lines(home)
    assert line == "planned: no estimate; run `weft calibrate` once (2 min)"
    assert json.loads((home / RUN_FILE).read_text())["expected"] is None


def test_estimate_and_measurement_are_listed_by_part(home: Path) -> None:
    save_profile_of_this_host(home)
    told = lines(home)
    assert told[0].startswith("planned ")
    assert "measured 610 ms" in told[0]
    assert any(line.strip().startswith("compute: ") and "500 ms measured" in line for line in told)
    assert "of tensors planned" in told[-1]
    kept = json.loads((home / RUN_FILE).read_text())
    assert kept["measured"]["parts"] == RANK["typical"]
    assert sum(kept["expected"]["terms"].values()) == pytest.approx(kept["expected"]["step_s"])
    assert kept["expected"]["time_by_rung"] == pytest.approx({"here": 1.0})


def test_stale_profile_is_reported(home: Path) -> None:
    profile().save(home / "home" / "profile.json")
    [line] = lines(home)
    assert "device loom, here " in line


def test_format_not_measured_at_this_rank_count_is_reported(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = replace(profile(), machine=this_host())
    alone = [replace(each, dtype="bf16") for each in made.samples if each.ranks == 1]
    replace(made, samples=(*made.samples, *alone)).save(home / "home" / "profile.json")
    words = ["plan", "tiny", "2xhere", "--seq-len", "64", "--global-batch", "8", "--top", "1"]
    assert run([*words, "--fix", "precision=bf16"]) == 2
    told = capsys.readouterr().err
    assert told == (
        "error: precision=bf16: not measured with 2 ranks on this machine. "
        "Measure it, with more time: weft calibrate --budget 5m.\n"
    )
    assert run(words) == 0  # fp32 was measured, so the planner has an estimate
    assert "bf16" not in capsys.readouterr().out
    assert run([*words[:2], "1xhere", *words[3:], "--fix", "precision=bf16"]) == 0


def test_planner_exception_becomes_one_line(home: Path, monkeypatch, capsys) -> None:
    save_profile_of_this_host(home)
    monkeypatch.setattr("weft.train.planned.estimate", lambda *_: {}["linear_f"])
    [line] = lines(home)
    assert line == "planned: not measured (KeyError: 'linear_f'; the traceback is in the log of rank 0)"
    assert "Traceback" in capsys.readouterr().err


def test_corrections_of_a_run_change_the_next_plan(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_profile_of_this_host(home)
    lines(home)
    words = ["plan", "tiny", "2xhere", "--seq-len", "64", "--global-batch", "8", "--top", "1"]
    assert run(words) == 0
    before = capsys.readouterr().out
    assert "learned" not in before
    assert run([*words, "--learn", str(home)]) == 0
    after = capsys.readouterr()
    assert "compute x " in after.err
    assert "(learned from 1 run)" in after.out
    assert [lesson.run for lesson in load_profile(path).learned] == [str(home.resolve())]
