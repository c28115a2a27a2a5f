"""`weft generate`: options, conversations, and folders that cannot be used."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from weft.cli import app as main
from weft.cli.inference.generate import refuse_no_run
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
def test_folders_without_a_trained_run_are_refused(runs, folder, text):
    with pytest.raises(ConfigError) as caught:
        refuse_no_run(Path(folder))
    assert str(caught.value) == text


def test_trained_run_is_accepted(runs):
    refuse_no_run(Path("runs/quickstart"))


class FakeModel:
    """Replaces a loaded model."""

    def __init__(self, is_chat: bool):
        self.is_chat, self.asked = is_chat, []

    def reply(self, turns, section, seed, stop, tools=""):
        self.asked.append(([(turn.role, turn.content) for turn in turns], section.max_tokens, seed, stop, tools))
        return f"answer {len(self.asked)}"

    def continue_text(self, prompt, section, seed, stop):
        self.asked.append((prompt, section.temperature, seed, stop))
        return "..."


@pytest.fixture
def fake_model(runs, monkeypatch):
    from weft.train.tasks import generation

    model, opened = FakeModel(is_chat=True), []
    monkeypatch.setattr(generation, "open_text_model", lambda run, step: opened.append((run, step)) or model)
    return model, opened


def test_options_are_passed_to_the_model(fake_model, capsys):
    model, opened = fake_model
    words = ["generate", "runs/quickstart", "--prompt", "class ", "--max-tokens", "5", "--temperature", "0"]
    words += ["--step", "10", "--stop", "x", "--stop", "y"]
    assert main.run([*words, "--raw"]) == 0
    assert main.run([*words, "--system", "brief"]) == 0
    assert main.run(words) == 0
    model.is_chat = False
    assert main.run(words) == 0
    assert capsys.readouterr().out == "class ...\nanswer 2\nanswer 3\nclass ...\n"
    asked = [("user", "class ")]
    assert model.asked == [
        ("class ", 0.0, 0, ("x", "y")), ([("system", "brief"), *asked], 5, 0, ("x", "y"), ""),
        (asked, 5, 0, ("x", "y"), ""), ("class ", 0.0, 0, ("x", "y")),
    ]  # fmt: skip
    assert opened == [(Path("runs/quickstart"), 10)] * 4


def test_conversation_reads_stdin_line_by_line(fake_model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("more?\n\nbye\n"))
    assert main.run(["generate", "runs/quickstart", "--chat", "--prompt", "hi"]) == 0
    assert capsys.readouterr().out == "answer 1\n> answer 2\n> > answer 3\n> \n"
    roles = [role for role, _ in fake_model[0].asked[-1][0]]
    assert roles == ["user", "assistant"] * 2 + ["user"]


def test_file_of_messages_is_answered_or_refused(fake_model, capsys, tmp_path):
    file = tmp_path / "m.json"
    file.write_text('{"messages": [{"role": "human", "content": "q"}], "tools": [{"name": "add"}]}')
    assert main.run(["generate", "runs/quickstart", "--messages", str(file)]) == 0
    assert fake_model[0].asked[0][0] == [("user", "q")]
    assert fake_model[0].asked[0][-1] == '[{"name": "add"}]'
    for text, why in (
        ("{", "not JSON"), ("[]", "empty"), ('[{"role": "x", "content": ""}]', "unknown role"),
        ('[{"role": "assistant", "content": "a"}]', "its last turn is the assistant's"),
    ):  # fmt: skip
        file.write_text(text)
        assert main.run(["generate", "runs/quickstart", "--messages", str(file)]) == 2
        assert why in capsys.readouterr().err
    assert main.run(["generate", "runs/quickstart", "--raw", "--system", "s"]) == 2
    assert main.run(["generate", "runs/quickstart", "--messages", "none.json"]) == 2


@pytest.mark.parametrize("option", [("--top-k", "0"), ("--max-tokens", "many"), ("--temperature", "-1")])
def test_options_out_of_range_are_refused(runs, capsys, option):
    assert main.run(["generate", "runs/quickstart", *option]) == 2
    assert option[0] in capsys.readouterr().err


def test_run_of_another_task_cannot_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text('[task]\nname = "images.py:ImageTask"\n')
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    assert main.run(["generate", str(tmp_path)]) == 2
    rule = "task.name=images.py:ImageTask does not train a text decoder, so it cannot generate. "
    rule += "Give a run that trains one."
    assert capsys.readouterr().err == f"error: RUN={tmp_path}: {rule}\n"
