"""`weft drill`: the table of faults, their injection in a rank, the report; in `full`, the complete campaign."""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft import env
from weft.cli.drill import KINDS, NEED_TWO_RANKS, DrillRow, Trial, chosen, report, state_of
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.monitor.events import StepRecord
from weft.train.folder import RunFolder
from weft.train.loop import injected_faults as injected
from weft.train.loop.injected_faults import ACTS, DAMAGES, Fault, FaultHook, asked_fault

#: Faults that happen at another time than after a step, or outside of the ranks.
ELSEWHERE = {"kill_in_save", "loader", "nan_gradient", "port_taken"}


def test_each_fault_of_the_table_is_implemented():
    assert set(KINDS) == {*ACTS, *ELSEWHERE}
    assert len(KINDS) >= 21
    assert set(DAMAGES) < set(ACTS)


def test_kinds_are_chosen_by_name_and_number_of_ranks():
    assert chosen("kill_rank, truncate", 1) == ["kill_rank", "truncate"]
    assert set(KINDS) - set(chosen("", 1)) == NEED_TWO_RANKS
    with pytest.raises(ConfigError, match=r"there is no such fault. Did you mean 'kill_rank'"):
        chosen("kil_rank", 2)
    with pytest.raises(ConfigError, match="it needs two ranks"):
        chosen("lose_rank", 1)


def fault(tmp_path: Path, kind: str, **other: Any) -> Fault:
    return Fault(**{"kind": kind, "step": 5, "rank": 0, "mark": str(tmp_path / "mark"), "world_size": 2, **other})


def record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=1.0, lr=0.1, grad_norm=1.0, count=1, count_per_s=1.0)


TWO = Plan.parse("dp_shard=2")


def test_nan_loss_is_injected_on_the_stage_that_computes_it(tmp_path, monkeypatch):
    asked = {"kind": "nan_gradient", "step": 5, "rank": 1, "mark": str(tmp_path / "mark"), "world_size": 4}
    monkeypatch.setenv("WEFT_DRILL", json.dumps(asked))
    plan = Plan.parse("pp=2 dp_replicate=2 microbatches=2")
    assert [rank for rank in range(4) if asked_fault(rank, plan)] == [1, 3]
    monkeypatch.setenv("WEFT_DRILL", json.dumps(asked | {"kind": "nan_weight"}))
    assert [rank for rank in range(4) if asked_fault(rank, plan)] == [1]


def test_rank_gets_only_its_own_fault_and_once(tmp_path, monkeypatch):
    assert asked_fault(0, TWO) is None
    asked = {"kind": "exception", "step": 5, "rank": 1, "mark": str(tmp_path / "mark"), "world_size": 2}
    monkeypatch.setenv("WEFT_DRILL", json.dumps(asked))
    assert asked_fault(0, TWO) is None
    found = asked_fault(1, TWO)
    assert found is not None
    hook = FaultHook(found, object(), RunFolder(tmp_path))  # type: ignore[arg-type]
    assert hook.on_step(record(4)) is None
    with pytest.raises(RuntimeError, match="drill"):
        hook.on_step(record(5))
    assert json.loads((tmp_path / "mark").read_text())["step"] == 5
    assert hook.on_step(record(6)) is None
    assert asked_fault(1, TWO) is None


def test_nan_loss_is_injected_only_at_its_step(tmp_path):
    class Losing:
        def loss(self, output: float, batch: int) -> tuple[float, int]:
            return output, batch

        loss.takes_head_loss = True  # pyright: ignore[reportFunctionMemberAccess] - a mark

    task = Losing()
    hook = FaultHook(fault(tmp_path, "nan_gradient"), task, RunFolder(tmp_path))  # type: ignore[arg-type]
    hook.on_start(3)
    assert task.loss(2.0, 8) == (2.0, 8)
    assert getattr(task.loss, "takes_head_loss", False)
    hook.on_step(record(4))
    loss, count = task.loss(2.0, 8)
    assert (math.isnan(loss), count) == (True, 8)
    assert task.loss(2.0, 8) == (2.0, 8)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_waits_for_second_checkpoint_and_hits_the_newest(tmp_path, kind, monkeypatch):
    died: list[int] = []
    monkeypatch.setattr(injected.os, "kill", lambda pid, signum: died.append(signum))
    hook = FaultHook(fault(tmp_path, kind), object(), RunFolder(tmp_path))  # type: ignore[arg-type]
    for step in (3, 6):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        for name in ("model.safetensors", "manifest.json", "COMMIT"):
            (folder / name).write_text("warp and weft")
        before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("step_*/*"))}
        hook.on_step(record(step + 1))
        if step == 3:
            assert not died
    after = {path: path.read_bytes() for path in sorted(tmp_path.rglob("step_*/*"))}
    assert died == [signal.SIGKILL]
    changed = {path for path in before if before[path] != after.get(path)}
    assert len(changed) == 1
    assert {path.parent.name for path in changed} == {"step_00000006"}


def test_report_states_survival(tmp_path):
    good = DrillRow("kill_rank", step=7, detected_s=0.31, back_s=8.4, steps_lost=1, state="equal")
    bad = DrillRow("hang", error="not over after 600 s")
    assert (good.survived, bad.survived, DrillRow("abort", state="equal", left=1).survived) == (True, False, False)
    lines = report([good, bad])
    assert lines[1].split() == ["kill_rank", "7", "0.3", "s", "8.4", "s", "1", "1", "equal", "survived"]
    assert lines[2].endswith("NOT SURVIVED not over after 600 s")
    assert lines[-1] == "1 of 2 faults survived"
    assert good.as_json()["survived"] is True


def test_campaign_counts_the_results_in_its_folder(tmp_path):
    campaign = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "drill_campaign.py"))
    rows = [
        (1, 1, DrillRow("hang", state="the last loss differs by 1e-02")),
        (1, 2, DrillRow("hang", detected_s=5.0, back_s=9.0, steps_lost=1, state="equal")),
        (1, 1, DrillRow("hang", detected_s=6.0, back_s=10.0, steps_lost=2, state="equal")),  # tried again
        (3, 1, DrillRow("abort", error="not over after 120 s")),
    ]
    for number, (plan, turn, row) in enumerate(rows):
        place = tmp_path / f"plan{plan}" / f"round{turn}" / str(number)
        place.mkdir(parents=True)
        (place / "drill.jsonl").write_text(json.dumps({**row.as_json(), "seed": turn}) + '\n{"kind": "ab')
        os.utime(place / "drill.jsonl", (number, number))
    lines = campaign["table"](tmp_path)
    assert f"| `hang`: {KINDS['hang']} | 2 of 2 | - | - | 5.5 s | 9.5 s | 1 to 2 |" in lines
    assert f"| `abort`: {KINDS['abort']} | - | - | 0 of 1 | - | - | 0 |" in lines
    assert lines[-1] == "plan pp=2 dp_replicate=2, round 1, abort: not over after 120 s, 0 left"


def test_final_states_are_compared_by_file_digests(tmp_path):
    folders = [RunFolder(tmp_path / name) for name in "ab"]
    for number, folder in enumerate(folders):
        made = folder.checkpoints / "step_00000009"
        made.mkdir(parents=True)
        (made / "COMMIT").touch()
        (made / "manifest.json").write_text(json.dumps({"files": {"model": 1}}))
        folder.events.write_text(json.dumps({"event": "step", "step": 9, "loss": 2.0 + number * 1e-4}) + "\n")
    assert state_of(folders[0], folders[1], "abort") == "equal"
    (folders[1].checkpoints / "step_00000009" / "manifest.json").write_text('{"files": {"model": 2}}')
    assert state_of(folders[0], folders[1], "abort") == "the last loss differs by 5.0e-05"
    assert state_of(folders[0], folders[1], "lose_rank").startswith("equal in the last loss to 5e-05")
    assert state_of(RunFolder(tmp_path / "none"), folders[1], "abort") == "no last checkpoint"


SMALL = """
[model]
name = "tiny"
dim = 32
num_layers = 2
num_heads = 2
num_kv_heads = 2
ffn_dim = 64
[tokenizer]
kind = "bytes"
[data]
holdout = 0.2
[train]
seq_len = 32
global_batch = 8
[eval]
every = 0
batches = 1
[launch]
device = "cpu"
"""

#: Plans, and the faults that each is tried with: two ranks get all of them, four ranks one of each kind of failure.
CAMPAIGNS = {
    "dp_shard=2 zero=3": "",
    "tp=2 dp_replicate=2": "kill_rank,hang,nan_gradient,flip_byte",
    "pp=2 dp_replicate=2": "stop_rank,kill_in_save,exception,truncate",
}


@pytest.mark.full
@pytest.mark.parametrize(("plan", "faults"), CAMPAIGNS.items())
def test_all_faults_are_survived(tmp_path, plan, faults):
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft {i * i}"}}\n' for i in range(400)))
    (tmp_path / "small.toml").write_text(SMALL)
    words = [str(tmp_path / "small.toml"), f"plan={plan}", f"data.train={tmp_path / 'text.jsonl'}"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "weft",
            "drill",
            *words,
            *(["--faults", faults] if faults else []),
            "--json",
            "--keep",
            str(tmp_path / "runs"),
        ],
        env=env.child_env(WEFT_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=7200,
    )
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout)
    assert {row["kind"] for row in rows} == (set(faults.split(",")) if faults else set(KINDS))
    assert not [row for row in rows if not row["survived"]]
    assert done.returncode == 0


@pytest.mark.full
def test_no_process_outlives_a_killed_launcher(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft {i * i}"}}\n' for i in range(400)))
    (tmp_path / "small.toml").write_text(SMALL)
    words = [
        str(tmp_path / "small.toml"),
        "plan=dp_shard=2 zero=3",
        f"data.train={tmp_path / 'text.jsonl'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"run.dir={tmp_path}",
        "train.steps=12",
        "checkpoint.every=3",
    ]
    before = set(Path("/dev/shm").iterdir())
    row = Trial(words, tmp_path, "kill_launcher", 7, 1, 2, 300.0).run(RunFolder(tmp_path / "kill_launcher"))
    assert (row.error, row.left, row.starts, row.state) == ("", 0, 2, "equal")
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith(("weft", "torch"))]
