"""`weft config`: shows a config with and without origins, prints the schema, and imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

from weft.cli.app import run
from weft.config.files import load_config
from weft.config.run_config import RunConfig


def test_show_prints_a_loadable_file(capsys, tmp_path):
    assert run(["config", "show", "train.steps=50"]) == 0
    path = tmp_path / "shown.toml"
    path.write_text(capsys.readouterr().out)
    assert load_config(path).config == load_config(None, ["train.steps=50"]).config


def test_show_with_origins(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nsteps = 40\n")
    assert run(["config", "show", str(path), "seed=3", "--origin"]) == 0
    rows = dict(line.split("  # ") for line in capsys.readouterr().out.splitlines())
    rows = {key.strip(): origin for key, origin in rows.items()}
    assert rows["train.steps = 40"] == f"{path}:2"
    assert rows["seed = 3"] == "command line"
    assert rows["log.every = 10"] == "default"
    assert tomllib.loads("\n".join(key for key in rows if ".0." not in key))["train"]["steps"] == 40


def test_schema(capsys):
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(RunConfig.model_fields)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimizer.lerning_rate=3"], "unknown key 'optimizer.lerning_rate'. Did you mean 'optimizer.lr'?"),
        (["plan=sp=on", "train.steps=0"], "plan.sp=on: sequence parallelism needs tp of at least 2"),
        (["none.toml"], "there is no such file"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(capsys, words, expected):
    assert run(["config", "show", *words]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""


def test_config_needs_no_torch():
    code = (
        "import sys\nfrom weft.cli.app import run\nassert run(['config', 'show', '--origin']) == 0\n"
        "assert run(['config', 'schema']) == 0\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"
