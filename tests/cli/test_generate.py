"""`weft generate`: folders that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli import app as main
from weft.cli.generate import refuse_no_run
from weft.errors import ConfigError


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "empty"):
        Path(f"runs/{name}").mkdir(parents=True)
        Path(f"runs/{name}/config.toml").touch()
    Path("runs/quickstart/checkpoints/step_00000010").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    "folder, text",
    [
        ("runs/quikstart", "RUN=runs/quikstart: there is no such folder. Did you mean 'runs/quickstart'?"),
        ("nowhere", "RUN=nowhere: there is no such folder. Give a run's folder, such as runs/quickstart."),
        (
            "runs",
            "RUN=runs: this folder is not a run; it has no config.toml. Use one of its runs: runs/empty, "
            "runs/quickstart.",
        ),
        (
            "runs/empty",
            "RUN=runs/empty: this run has no checkpoint yet. Train it first: weft train runs/empty/config.toml",
        ),
    ],
)
def test_folders_that_are_no_trained_run(runs, folder, text):
    with pytest.raises(ConfigError) as caught:
        refuse_no_run(Path(folder))
    assert str(caught.value) == text


def test_a_trained_run_is_taken(runs):
    refuse_no_run(Path("runs/quickstart"))


def test_the_options_reach_the_model(runs, monkeypatch, capsys):
    import weft.train

    seen = {}

    def generate_text(run_dir, prompt, **options):
        seen.update(options, run_dir=run_dir, prompt=prompt)
        return "def f(): pass"

    monkeypatch.setattr(weft.train, "generate_text", generate_text, raising=False)
    words = ["runs/quickstart", "--prompt", "class ", "--max-tokens", "5", "--temperature", "0", "--step", "10"]
    assert main.run(["generate", *words]) == 0
    assert capsys.readouterr().out == "def f(): pass\n"
    assert seen == {
        "run_dir": Path("runs/quickstart"), "prompt": "class ", "max_tokens": 5, "temperature": 0.0, "top_k": 50,
        "seed": 0, "step": 10,
    }  # fmt: skip


@pytest.mark.parametrize("option", [("--top-k", "0"), ("--max-tokens", "many"), ("--temperature", "-1")])
def test_values_out_of_range(runs, capsys, option):
    assert main.run(["generate", "runs/quickstart", *option]) == 2
    assert option[0] in capsys.readouterr().err


def test_a_run_of_another_task_writes_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text('[task]\nname = "images.py:ImageTask"\n')
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    assert main.run(["generate", str(tmp_path)]) == 2
    rule = "task.name=images.py:ImageTask does not train a text decoder, so it cannot generate. "
    rule += "Give a run that trains one."
    assert capsys.readouterr().err == f"error: RUN={tmp_path}: {rule}\n"
