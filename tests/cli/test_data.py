from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli.data import app
from weft.errors import DataError


@pytest.fixture
def toml(tmp_path: Path) -> str:
    chat = [
        {"conversations": [{"from": "human", "value": f"question {n} [bold]"}, {"from": "gpt", "value": f"answer {n}"}]}
        for n in range(60)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chat))
    path = tmp_path / "run.toml"
    path.write_text(
        f'[tokenizer]\nkind = "bytes"\n[train]\nseq_len = 128\n'
        f'[data]\npacking = "fit"\nholdout = 0.2\ncache_dir = "{tmp_path}/cache"\n'
        f'[[data.train]]\npath = "{tmp_path}/chat.jsonl"\n'
    )
    return str(path)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_preview_marks_masked_text(toml: str) -> None:
    result = run("preview", toml, "--num", "2", "data.packing=pad")
    assert result.exit_code == 0
    assert "chat.jsonl: messages, column 'conversations' (role='from', content='value')" in result.stdout
    assert result.stdout.count("--- sample") == 2
    assert "\x1b" not in result.stdout
    shown = result.stdout.split("--- sample 0")[1].split("--- sample 1")[0]
    assert "[[<|im_start|>user\nquestion" in shown
    assert "[bold]" in shown
    assert "<|im_start|>assistant\n]]answer" in shown
    assert "<|im_end|>[[\n<|endoftext|>]]" in shown
    # "answer NN" and <|im_end|> are ten tokens, or nine if the number has one digit.
    head = shown.splitlines()[0]
    assert "1 document, " in head
    assert ("10 trained, " in head) or ("9 trained, " in head)


def test_preview_of_evaluation_data_and_of_a_later_sample(toml: str) -> None:
    result = run("preview", toml, "--split", "eval", "--num", "1", "--first", "2", "data.packing=pad")
    assert "eval: " in result.stdout
    assert "--- sample 2: " in result.stdout


def test_preview_without_evaluation_data(toml: str) -> None:
    with pytest.raises(DataError, match="this run has no evaluation data"):
        run("preview", toml, "--split", "eval", "data.holdout=0")
    with pytest.raises(DataError, match=r"split=test: not a split\. Use --split train or --split eval"):
        run("preview", toml, "--split", "test")


def test_prepare_then_verify(toml: str, tmp_path: Path) -> None:
    result = run("prepare", toml)
    folder = Path(result.stdout.splitlines()[-1].removeprefix("stored in "))
    assert (folder / "manifest.json").is_file()
    assert run("verify", toml).stdout.splitlines()[-1].startswith("ok: 2 splits, ")
    shard = folder / "train" / "tokens-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    again = run("verify", toml).stdout.splitlines()
    assert again[-2].endswith(
        "its stored tokens were damaged (tokens-00000.bin does not match its digest), and Weft has written them again"
    )
    assert again[-1].startswith("ok: 2 splits, ")


def test_irreparable_damage_is_reported_with_the_command_to_type(toml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("prepare", toml)
    monkeypatch.setattr(
        "weft.data.store.prepared.verify_split", lambda *_: ["tokens-00000.bin does not match its digest"]
    )
    with pytest.raises(DataError, match=r"Type rm -r (\S+) and run the command again") as caught:
        run("verify", toml)
    assert (Path(str(caught.value).split("rm -r ")[1].split(" ")[0]) / "manifest.json").is_file()


def test_preview_of_instructions_shows_template_and_trained_text(tmp_path: Path) -> None:
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    (tmp_path / "alpaca.json").write_text(json.dumps([record]))
    result = run(
        "preview", f"data.train={tmp_path}/alpaca.json", f"data.cache_dir={tmp_path}/c", "tokenizer.kind=bytes",
        "--num", "1",
    )  # fmt: skip
    assert (
        "instructions as ChatML turns, columns 'instruction' + 'input' -> 'output' (loss on 'output' only)"
        in result.stdout
    )
    assert "[[<|im_start|>user\nAdd.\n\n1 and 2<|im_end|>\n<|im_start|>assistant\n]]3<|im_end|>[[\n" in result.stdout


def test_settings_without_a_file(tmp_path: Path, toml: str) -> None:
    result = run(
        "prepare", f"data.train={tmp_path}/chat.jsonl", f"data.cache_dir={tmp_path}/other", "tokenizer.kind=bytes",
        "data.holdout=0.2",
    )  # fmt: skip
    assert f"stored in {tmp_path}/other/data-" in result.stdout
