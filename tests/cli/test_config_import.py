"""`weft config import`: the report, the config and the exit codes. No file content may cause a traceback."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.cli import app as main
from weft.config.files import load_config

DS_CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 500, "warmup_num_steps": 50}},
    "zero_optimization": {"stage": 0, "overlap_comm": True},
}


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DS_CONFIG))
    return path


def test_stdout_is_a_config_with_the_report_in_comments(file, tmp_path, capsys):
    assert main.run(["config", "import", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "# bf16.enabled = true: became plan precision=bf16\n" in out
    assert "# zero_optimization.overlap_comm = true: has no effect in Weft: communication always overlaps" in out
    assert "# Left to you; Weft's defaults apply:\n#   optimizer.weight_decay\n" in out
    assert "Refused" not in out
    assert "\x1b" not in out
    saved = tmp_path / "weft.toml"
    saved.write_text(out)
    config = load_config(saved).config
    assert config.plan == "dp_replicate=4 accumulation=2 precision=bf16"
    assert (config.train.global_batch, config.train.steps, config.optimizer.max_grad_norm) == (32, 500, 0.5)
    assert (config.schedule.kind, config.schedule.warmup_steps, config.schedule.final) == ("cosine", 50, 1e-4)


def test_out_writes_the_printed_text(file, tmp_path, capsys):
    out = tmp_path / "weft.toml"
    assert main.run(["config", "import", str(file)]) == 0
    # Each run is named after its file.
    printed = capsys.readouterr().out.replace('name = "ds_config"', 'name = "weft"')
    assert 'name = "weft"' in printed
    assert main.run(["config", "import", str(file), "--out", str(out)]) == 0
    assert out.read_text() == printed
    assert f"weft: wrote {out}." in capsys.readouterr().err
    assert main.run(["config", "show", str(out)]) == 0
    capsys.readouterr()
    assert main.run(["config", "import", str(file), "--out", str(out)]) == 2
    assert f"--out {out}: the file exists. Give another name, or delete it." in capsys.readouterr().err
    assert main.run(["config", "import", str(file), "--out", str(tmp_path / "no" / "x.toml")]) == 2
    assert "it cannot be written (No such file or directory)" in capsys.readouterr().err


def test_json(file, capsys):
    assert main.run(["config", "import", str(file), "--world-size", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plan"] == "dp_replicate=4 accumulation=2 precision=bf16"
    assert report["settings"]["optimizer.lr"] == 2e-5
    assert report["open"] == ["optimizer.weight_decay"]
    assert report["refused"] == []
    (clipping,) = [line for line in report["keys"] if line["key"] == "gradient_clipping"]
    assert clipping == {
        "key": "gradient_clipping",
        "value": "0.5",
        "outcome": "became",
        "text": "optimizer.max_grad_norm=0.5",
        "sets": ["optimizer.max_grad_norm"],
    }
    assert tomllib.loads(report["toml"])["plan"] == report["plan"]


def test_values_refused_by_a_rule_are_reported(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(
        '{"pipeline": {"stages": 2}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 900}}}'
    )
    assert main.run(["config", "import", str(path), "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "# Refused today:\n" in out
    assert "#   schedule.warmup_steps=900: warm-up must end before train.steps=300." in out


def test_typos_are_warnings_and_errors_when_strict(file, capsys):
    file.write_text('{"bf16": {"enabled": true}, "gradient_cliping": 1.0, "xyzzy": 1}')
    for words, code in (([], 0), (["--strict"], 2)):
        assert main.run(["config", "import", str(file), *words]) == code
        out, err = capsys.readouterr()
        assert "weft: warning: 2 keys are unknown to DeepSpeed and ignored: gradient_cliping, xyzzy." in err
        assert (
            "# Warning: typos:\n#   gradient_cliping: No such key in DeepSpeed. Did you mean 'gradient_clipping'?"
            in out
        )
    file.write_text('{"bf16": {"enabled": true}}')
    assert main.run(["config", "import", str(file), "--strict"]) == 0


def test_table_on_a_terminal(file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    assert main.run(["config", "import", str(file)]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    head, _, config = out.partition("\n\nLeft to you")
    assert head.splitlines()[0].split() == ["key", "value", "outcome"]
    assert "train_batch_size " in head
    assert "became train.global_batch=32" in head
    assert 'plan = "dp_replicate=4 accumulation=2 precision=bf16"' in config


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"bf16": {"enabled": True}}', "this is not JSON: expecting value"),
        (
            '{"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}',
            "train_batch_size=3: it must be a multiple of 2",
        ),
        ("[]", "a DeepSpeed config is a JSON object, but this is a list."),
    ],
)
def test_invalid_file_is_reported_in_one_line(file, capsys, text, message):
    file.write_text(text)
    assert main.run(["config", "import", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("error:") == err.count("\n") == 1
    assert err.startswith(f"error: {file}:1: ")
    assert message in err


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 600), st.integers(0, 10), st.binary(max_size=4))
def test_no_file_causes_a_traceback(tmp_path_factory, at, length, put):
    raw = json.dumps(DS_CONFIG).encode()
    path = tmp_path_factory.getbasetemp() / "broken.json"
    path.write_bytes(raw[:at] + put + raw[at + length :])
    assert main.run(["config", "import", str(path)]) in (0, 2)
