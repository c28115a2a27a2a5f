"""`weft plan CLUSTER --tables FILE`: output, files that cannot be used, and options that do not belong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from weft.cli.app import run
from weft.cli.planning.plan import NOTHING_FITS
from weft.config.fields.layout import Layout
from weft.errors import ConfigError
from weft.planner.report.table_plan import plan_tables

FILE = """
optimizer = "adagrad"
[[table]]
name = "user"
rows = 100_000_000
width = 128
[[table]]
name = "seen.items"
rows = 1_000_000
width = 64
ids = 20
sorted = false
[[table]]
name = "genre"
rows = 20
width = 16
style = "one"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tables.toml"
    path.write_text(FILE)
    return path


def test_text_has_bytes_reasons_and_a_layout(file, capsys):
    assert run(["plan", "8xh100", "--tables", str(file), "--global-batch", "16384"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "3 tables on 8xh100: 8 ranks of 2048 samples, adagrad; all figures are predictions for the busiest rank"
    )
    row = next(line for line in lines if line.startswith("user "))
    assert row.split()[:2] == ["user", "columns"]
    assert row.count("5.96 GiB") == 2  # weights and states
    assert any(line.startswith("user=columns: frequent ids are neighbors, so the busiest rank would") for line in lines)
    assert "genre=one: set by the layout" in lines
    assert Layout.parse(lines[-1].removeprefix('layout = "').removesuffix('"')).match("seen.items") == "rows"


def test_json_has_the_same_plan(file, capsys):
    assert run(["plan", "8xh100", "--tables", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["layout"] == "user=columns seen.items=rows genre=one"
    assert set(found["tables"][0]["others"]) == {"rows", "columns", "replicate", "host"}


def test_tables_move_to_the_host_or_do_not_fit(file, capsys):
    assert run(["plan", "8xrtx4090", "--tables", str(file)]) == 0
    assert "user=columns" in capsys.readouterr().out
    assert plan_tables(file, "4xrtx4090", None).choices[0].cost.style == "host"
    assert run(["plan", "rtx4090", "--tables", str(file)]) == NOTHING_FITS
    assert capsys.readouterr().out.endswith("No choice of styles fits. Use more devices.\n")


def test_no_torch_is_loaded(file):
    words = ["plan", "8xh100", "--tables", str(file)]
    code = f"import sys; from weft.cli.app import run; run({words!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "it has no table. Write entries [[table]] with name, rows and width."),
        ("speed = 3", "speed is not a key. Use optimizer, cache and [[table]]."),
        ("optimizer = 'adam'", "optimizer=adam is not one of sgd, adagrad, rowwise_adagrad, lazy_adamw."),
        ("cache = 2", "cache=2: a share of the rows is above 0 and at most 1. Use 0.05."),
        ("[[table]]\nname = 'a'\nrows = 3", "table 1: width is missing. Write name, rows and width."),
        ("[[table]]\nname = 'a'\nrows = 0\nwidth = 2", "table 1: rows=0: it is an integer from 1 to 1e+12."),
        ("[[table]]\nname = 'a'\nrows = 2\nwidth = 2\nzipf = 'x'", "table 1: zipf=x: it is a number from 0 to 10."),
        ("[[table]]\nname = 'a'\nrows = 2\nwidth = 2\nstyle = 'row'",
         "table 1: style=row: not one of rows, columns, one, host, replicate. Did you mean 'rows'?"),
        ("[[table]]\nname = 'a'\nrows = 2\nwidth = 2\nidx = 2",
         "table 1: idx is not a key. Use name, rows, width, ids, zipf, sorted, style. Did you mean 'ids'?"),
    ],
)  # fmt: skip
def test_unusable_files_are_refused(text, message, tmp_path):
    path = tmp_path / "tables.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        plan_tables(path, "8xh100", None)
    assert str(caught.value) == f"{path}: {message}"


def test_other_options_and_batches_are_refused(file, capsys):
    assert run(["plan", "8xh100", "--tables", str(file), "--tune", "lora"]) == 2
    assert "tune=lora: --tables takes CLUSTER, --device and --global-batch. Leave it out." in capsys.readouterr().err
    assert run(["plan", "8xh100", "--tables", str(file), "--global-batch", "9"]) == 2
    assert "global_batch=9: 8 ranks need equal shares. Use 8." in capsys.readouterr().err
    assert run(["plan", "--tables", str(file)]) == 2
    assert "weft plan --tables needs CLUSTER." in capsys.readouterr().err
