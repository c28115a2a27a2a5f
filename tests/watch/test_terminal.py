"""The page in a terminal, and the time ledger as text."""

from __future__ import annotations

import io
import json
import math

from tests.watch.synthetic_run import SyntheticRun
from weft.cli.app import run
from weft.monitor.dashboard.top import show_top, sparkline


def test_show_one_run(tmp_path):
    folder = SyntheticRun(steps=300, until=200, ranks=8, slow_rank=5, slow_from=60).write(tmp_path / "one")
    out = io.StringIO()
    show_top(folder, out, once=True)
    text = out.getvalue()
    assert "one  running  dp_shard=4 tp=2" in text
    assert "step 200 of 300" in text
    assert "against the plan" in text
    assert "slowest: rank 5, 1.2" in text
    assert "alert: slow rank rank 5 is busy" in text
    assert "productive" in text


def test_show_a_folder_as_a_table(tmp_path):
    SyntheticRun(steps=60, ranks=2).write(tmp_path / "one")
    SyntheticRun(steps=60, until=30, ranks=2, end=1e9).write(tmp_path / "two")
    out = io.StringIO()
    show_top(tmp_path, out)
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["run", "state", "step", "loss", "eval", "rate", "goodput", "loss", "curve"]
    assert any(line.startswith("one  finished  60 of 60") for line in lines)
    assert any(line.startswith("two  silent") for line in lines)


def test_list_a_folder_with_its_price(tmp_path, capsys):
    SyntheticRun(steps=100, ranks=4, fails_at=70, save_every=25, eval_every=50).write(tmp_path / "one")
    SyntheticRun(steps=50, ranks=2).write(tmp_path / "two")
    assert run(["runs", "list", str(tmp_path), "--price", "2.5usd/h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines[:3]) == ["one", "run", "two"]
    total = next(line for line in lines if line.startswith("all runs: "))
    assert "made steps that count, 1 failure, " in total
    assert any(line.split()[:2] == ["lost", "work"] for line in lines)
    assert any(line.split()[:1] == ["restart"] for line in lines)
    assert run(["runs", "list", str(tmp_path), "--price", "2.5usd/h", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one, two, total = found["runs"]["one"], found["runs"]["two"], found["total"]
    assert one["seconds"]["lost work"] > 9  # steps 51 to 70, half a second each
    assert math.isclose(sum(one["seconds"].values()), one["wall_s"], abs_tol=0.05)
    assert math.isclose(total["cost"], (4 * one["wall_s"] + 2 * two["wall_s"]) / 3600 * 2.5, rel_tol=0.01)


def test_sparkline():
    assert sparkline([3.0, 2.0, 1.0, math.nan], 8) == "█▅▁"
    assert sparkline([], 8) == ""
    assert sparkline([1.0] * 100, 5) == "▁▁▁▁▁"
