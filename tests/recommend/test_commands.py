"""`weft data`, `weft train` and `weft eval` of a recommender, on one rank and on two."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.choice import todays
from tests.recommend.cases import settings, write_jsonl
from tests.recommend.test_recommend import LAYOUTS
from weft.cli.app import run as weft
from weft.comm.mesh import build_mesh
from weft.config.files import format_config, load_config
from weft.config.plan import Plan
from weft.inference.task_metrics import metrics_on_rank
from weft.monitor.events import read_events
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    data = write_jsonl(tmp_path / "events.jsonl")

    def write(name: str, *more: str) -> Path:
        file = tmp_path / f"{name}.toml"
        file.write_text(
            format_config(load_config(None, settings(name, data, tmp_path, LAYOUTS[name][0], *more)).config)
        )
        return file

    return write


def test_data_is_prepared_verified_and_shown(config, capsys):
    file = str(config("two_tower"))
    assert weft(["data", "prepare", file]) == 0
    found = capsys.readouterr().out
    assert "rows of tables: user" in found
    assert len(stored := [line for line in found.splitlines() if line.startswith("stored in")]) == 6
    assert all(Path(line.removeprefix("stored in ")).is_dir() for line in stored)
    assert weft(["data", "verify", file]) == 0
    assert "ok: 6 tables, all digests match" in capsys.readouterr().out
    for split in ("train", "eval"):
        assert weft(["data", "preview", file, "--num", "1", "--split", split]) == 0
        assert "log_q: [" in capsys.readouterr().out
    assert weft(["data", "preview", file, "--sheet", "a.png"]) == 2
    assert "--sheet=a.png: rows of ids and numbers have no picture. Leave it out." in capsys.readouterr().err


def evaluate_on_rank(plan: str, folder: str, step: int) -> dict[str, float]:
    return metrics_on_rank(build_mesh(Plan.parse(plan)), folder, step)


@pytest.mark.parametrize("name", todays(["deepfm", "two_tower", "sasrec"], parts=3))
def test_evaluation_is_repeated_on_one_rank_and_on_two(name, config, capsys, tmp_path, ranks2):
    folder = prepare_run(load_config(config(name)).config, world_size=1)
    run_rank(folder, None, io.StringIO())
    expected = [event for event in read_events(folder.events) if event["event"] == "eval"][-1]
    assert weft(["eval", str(folder.path), "--plan", "dp_replicate=1", "--device", "cpu", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone.pop("step") == 6
    assert len(alone) > 2
    plan = "dp_shard=2 zero=1" if name == "deepfm" else "dp_replicate=2"
    for found in (alone, *ranks2.run(evaluate_on_rank, plan, str(folder.path), 6)):
        for key, value in found.items():
            assert value == pytest.approx(expected[key], rel=1e-6), key


def test_evaluation_without_tasks_needs_a_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert weft(["eval", str(tmp_path)]) == 2
    assert "--tasks: it names no task, and" in capsys.readouterr().err
    assert weft(["eval", str(tmp_path), "--few-shot", "2"]) == 2
    assert "--tasks: it names no task. Use --tasks arc_easy or a task of --task-folder." in capsys.readouterr().err
