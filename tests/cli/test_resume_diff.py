"""`weft resume-diff`: nothing where nothing changed, and one line for each thing that did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.app import run
from weft.config.files import format_config, load_config
from weft.train.folder import RunFolder
from weft.train.rank_run import context

PLAN = "dp_shard=2 zero=2"


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """A run folder after its first start, with two sources of data."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = load_config(None, [f"plan={PLAN}", f"run.dir={tmp_path}", "run.name=run", "train.global_batch=8"]).config
    (folder / "config.toml").write_text(format_config(config))
    files = {"tokens-00000.bin": [10, "ab" * 32]}
    source = {"name": "books", "counts": {"files": files}}
    (folder / "data.json").write_text(json.dumps({"train": [source], "eval": []}))
    event = {
        "time": 1.7e9, "event": "start", "step": 0, "plan": PLAN, "world_size": 2,
        **context(RunFolder(folder), config),
    }  # fmt: skip
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    return folder


def changes(capsys, *words: str) -> list[list[str]]:
    code = run(["resume-diff", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == int(bool(found))
    return [[one["key"], one["started"], one["now"]] for one in found]


def test_nothing_changed(started, capsys):
    assert run(["resume-diff", str(started)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "nothing changed since"
    assert changes(capsys, str(started), "plan=zero=2 dp_shard=*", "launch.timeout=5m") == []


def test_settings_plan_data_and_versions(started, capsys, monkeypatch):
    assert changes(capsys, str(started), "optimizer.lr=0.5") == [["config.optimizer.lr", "0.001", "0.5"]]
    assert changes(capsys, str(started), "plan=dp_replicate=*") == [["plan", PLAN, "dp_replicate=2"]]
    monkeypatch.setattr("weft.train.rank_run.platform.python_version", lambda: "3.99.0")
    monkeypatch.setattr("weft.train.rank_run.platform.node", lambda: "elsewhere")
    text = (started / "data.json").read_text()
    (started / "data.json").write_text(text.replace("ab", "cd"))
    found = {key: now for key, _, now in changes(capsys, str(started))}
    assert found.keys() == {"python", "machine.host", "data.train.books"}
    assert (found["python"], found["machine.host"]) == ("3.99.0", "elsewhere")
    assert run(["resume-diff", str(started)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_run_of_an_older_version_has_its_versions_compared(started, capsys):
    event = {"time": 1.7e9, "event": "start", "step": 0, "plan": PLAN, "world_size": 2, "weft": "0.0.1"}
    (started / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert run(["resume-diff", str(started)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith(
        "by a version of Weft that did not record config and machine; comparing versions and plan only:"
    )
    assert [line.split()[0] for line in told[2:]] == ["weft"]


def test_mistakes_are_sentences(tmp_path, capsys):
    assert run(["resume-diff", str(tmp_path / "no")]) == 2
    assert "there is no such folder." in capsys.readouterr().err
    assert run(["resume-diff", str(tmp_path)]) == 2
    assert "no run has started in this folder." in capsys.readouterr().err
