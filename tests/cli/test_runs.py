"""`weft runs`: comparison of runs and settings, requests, and lists."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.monitor.servers import Recorder
from tests.watch.synthetic_run import SyntheticRun
from weft.cli import app as main
from weft.cli.app import run
from weft.config.files import format_config, load_config
from weft.monitor.alerts import RequestQueue, RunRequest
from weft.train.folder import RunFolder, run_lock
from weft.train.rank_run import context

PLAN = "dp_shard=2 zero=2"


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """Create a run folder after its first start, with two data sources."""
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
    code = run(["runs", "compare", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == int(bool(found))
    return [[one["key"], one["started"], one["now"]] for one in found]


def test_compare_without_changes(started, capsys):
    assert run(["runs", "compare", str(started)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "nothing changed since"
    assert changes(capsys, str(started), "plan=zero=2 dp_shard=*", "launch.timeout=5m") == []


def test_compare_shows_settings_plan_data_and_versions(started, capsys, monkeypatch):
    assert changes(capsys, str(started), "optimizer.lr=0.5") == [["config.optimizer.lr", "0.001", "0.5"]]
    assert changes(capsys, str(started), "plan=dp_replicate=*") == [["plan", PLAN, "dp_replicate=2"]]
    monkeypatch.setattr("weft.train.rank_run.platform.python_version", lambda: "3.99.0")
    monkeypatch.setattr("weft.train.rank_run.platform.node", lambda: "elsewhere")
    text = (started / "data.json").read_text()
    (started / "data.json").write_text(text.replace("ab", "cd"))
    found = {key: now for key, _, now in changes(capsys, str(started))}
    assert found.keys() == {"python", "machine.host", "data.train.books"}
    assert (found["python"], found["machine.host"]) == ("3.99.0", "elsewhere")
    assert run(["runs", "compare", str(started)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_run_of_an_older_version_compares_versions_and_plan(started, capsys):
    event = {"time": 1.7e9, "event": "start", "step": 0, "plan": PLAN, "world_size": 2, "weft": "0.0.1"}
    (started / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert run(["runs", "compare", str(started)]) == 1
    output = capsys.readouterr().out.splitlines()
    assert output[0].endswith(
        "by a version of Weft that did not record config and machine; comparing versions and plan only:"
    )
    assert [line.split()[0] for line in output[2:]] == ["weft"]


def test_errors_are_one_line(tmp_path, capsys):
    assert run(["runs", "compare", str(tmp_path / "no")]) == 2
    assert "there is no such folder." in capsys.readouterr().err
    assert run(["runs", "compare", str(tmp_path)]) == 2
    assert "no run has started in this folder." in capsys.readouterr().err


def test_compare_two_runs(tmp_path, capsys):
    one = SyntheticRun(steps=60, ranks=2).write(tmp_path / "one")
    two = SyntheticRun(steps=60, until=30, ranks=4, lr=1e-4, seed=2).write(tmp_path / "two")
    assert run(["runs", "compare", str(one), str(two), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [str(one), str(two)]
    assert found["settings"]["config.optimizer.lr"] == ["0.0006", "0.0001"]
    assert found["figures"]["step"] == [60, 30]
    at_30 = [
        next(event["loss"] for line in (folder / "events.jsonl").read_text().splitlines()
             if (event := json.loads(line)).get("event") == "step" and event["step"] == 30)
        for folder in (one, two)
    ]  # fmt: skip
    assert found["figures"]["loss at step 30"] == pytest.approx(at_30, rel=1e-5)
    assert run(["runs", "compare", str(one), str(two)]) == 1
    output = capsys.readouterr().out
    assert "loss at step 30" in output
    assert any(line.split()[:3] == ["config.optimizer.lr", "0.0006", "0.0001"] for line in output.splitlines())
    again = SyntheticRun(steps=60, ranks=2).write(tmp_path / "again")
    assert run(["runs", "compare", str(one), str(again)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all settings are equal"
    assert run(["runs", "compare", str(one), str(two), "optimizer.lr=1"]) == 2
    assert "other runs and settings cannot be mixed" in capsys.readouterr().err


REQUESTS = [
    (["runs", "save", "{0}"], "ask {0} checkpoint", RunRequest("checkpoint", "", "a person")),
    (["runs", "pause", "{0}", "--why", "odd loss"], "ask {0} hold --why 'odd loss'",
     RunRequest("hold", "odd loss", "a person")),
    (["runs", "stop", "{0}"], "ask --why= {0} stop", RunRequest("stop", "", "a person")),
    (["runs", "lower-lr", "{0}", "--factor", "0.1"], "ask --factor 0.1 {0} lower_lr",
     RunRequest("lower_lr", "", "a person", None, 0.1)),
    (["runs", "rollback", "{0}", "--since", "7"], "ask {0} roll_back --since 7",
     RunRequest("roll_back", "", "a person", 7)),
    (["runs", "rollback", "{0}", "--skip-data"], "ask {0} skip_data", RunRequest("skip_data", "", "a person")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "old", "request_wanted"), REQUESTS, ids=lambda value: str(value)[:30])
def test_requests_and_their_old_forms(started, capsys, words, old, request_wanted):
    queue = RequestQueue(started)
    words = [word.format(started) for word in words]
    with run_lock(started):
        assert run(words) == 0
        assert queue.new() == [request_wanted]
        capsys.readouterr()
        assert run([word.format(started) for word in shlex.split(old)]) == 0
        assert queue.new() == [request_wanted]
    assert f"goes in the next release. Use: weft {shlex.join(words[:2])} " in capsys.readouterr().err


def test_refused_requests(started, capsys):
    assert run(["runs", "pause", str(started)]) == 2
    assert f"no command trains in this folder. Start it: weft runs resume {started}." in capsys.readouterr().err
    assert run(["runs", "lower-lr", str(started), "--factor", "2"]) == 2
    assert "--factor=2: it must be above 0 and at most 1." in capsys.readouterr().err
    assert run(["runs", "rollback", str(started), "--since", "0"]) == 2
    assert "--since=0: steps are counted from 1." in capsys.readouterr().err
    assert run(["ask", str(started), "holdd"]) == 2
    assert "action=holdd: a run cannot do this. Did you mean 'hold'?" in capsys.readouterr().err
    with run_lock(started):
        assert run(["runs", "resume", str(started)]) == 2
    assert f"Run `weft runs pause {started}` to pause it." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("top one", "watch --terminal one"),
        ("top one --once", "runs show one"),
        ("top", "watch --terminal"),
        ("goodput .", "runs list ."),
        ("goodput one --json", "runs show one --json"),
        ("resume-diff one lr=1", "runs compare one lr=1"),
        ("resume one lr=1", "runs resume one lr=1"),
        ("explain one --step 3", "runs explain one --step 3"),
        ("send one", "runs send one"),
        ("ckpt ls one", "ckpt list one"),
        ("ckpt export one out", "export one out"),
    ],
)
def test_old_commands_name_their_new_form(tmp_path, monkeypatch, capsys, old, new):
    SyntheticRun(steps=3, ranks=1).write(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    assert main._current_form(old.split()) == new.split()
    assert f"goes in the next release. Use: weft {new}\n" in capsys.readouterr().err
    assert main._current_form(new.split()) == new.split()
    assert old.split()[0] in ("ckpt",) or old.split()[0] not in main.VERBS


def test_runs_are_listed_and_shown(tmp_path, capsys):
    SyntheticRun(steps=20, ranks=2).write(tmp_path / "one")
    assert run(["runs", "list", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:2]] == ["run", "one"]
    assert run(["runs", "show", str(tmp_path / "one")]) == 0
    assert "step 20 of 20" in capsys.readouterr().out
    assert run(["runs", "show", str(tmp_path / "one"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["one"]["state"] == "finished"
    assert run(["runs", "show", str(tmp_path)]) == 2
    assert "weft runs list FOLDER lists the runs of a folder." in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["mlflow", "http"])
def test_sent_config_has_no_secrets(started, kind):
    answer = {"experiment": {"experiment_id": "7"}, "run": {"info": {"run_id": "abc"}}}
    with Recorder(answer=answer) as server:
        file = started.parent / "sink.toml"
        file.write_text(f'plan = "{PLAN}"\n[[sink]]\nkind = "{kind}"\nurl = "{server.url}"\n')
        config = load_config(
            file, [f"run.dir={started.parent}", "task=my.tasks:Own", "task.options.api_key=PLANTED"]
        ).config
        (started / "config.toml").write_text(format_config(config))
        event = {"time": 1.7e9, "event": "start", "step": 0, **context(RunFolder(started), config)}
        (started / "events.jsonl").write_text(json.dumps(event) + "\n")
        assert run(["runs", "send", str(started)]) == 0
    sent = b" ".join(body for _, _, body, _ in server.got)
    assert b"api_key" in sent
    assert b"PLANTED" not in sent
