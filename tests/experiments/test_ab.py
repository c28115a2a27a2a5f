"""`weft ab`: intervals, measures of event logs, refusals, and real pairs of runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.cli.app import run
from weft.config.run_config import RunConfig
from weft.errors import ConfigError
from weft.experiments import statistics
from weft.experiments.ab import PairedComparison, PairResult, Runner, _speed, is_decided, verdict, write_result
from weft.experiments.run_log import Measure, RunLog
from weft.experiments.statistics import fixed, sequential

CONFIG = """
plan = "dp_replicate=1"
run.name = "small"
model = {name = "tiny", num_layers = 1, dim = 32, num_heads = 2, num_kv_heads = 2, ffn_dim = 64}
tokenizer.kind = "bytes"
train = {steps = 20, seq_len = 32, global_batch = 8}
eval = {every = 10, batches = 4}
sample.prompt = ""
launch = {ranks = 1, device = "cpu"}
"""
LOSS = Measure.of("eval.loss")


def write_run(folder: Path, losses: list[float], evals: dict[int, float], tokens: int = 10) -> RunLog:
    """Write the event log of a run whose steps took 2 s each."""
    folder.mkdir(parents=True, exist_ok=True)
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "time": 0.0}]
    for step, loss in enumerate(losses, start=1):
        seconds = {"total": 2.0}
        counts = {"tokens": tokens, "tokens_per_s": tokens / 2}
        events.append({"event": "step", "step": step, "time": 2.0 * step, "loss": loss, "seconds": seconds, **counts})
        if step in evals:
            events.append({"event": "eval", "step": step, "time": 2.0 * step, "loss": evals[step]})
    events.append({"event": "end", "step": len(losses), "time": 99.0, "reason": "finished"})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return RunLog.read(folder)


# Intervals.


def test_interval_is_that_of_the_paired_t_test() -> None:
    from scipy import stats

    differences = [0.3, 0.1, 0.25, 0.4, 0.05, 0.2, 0.31]
    found = fixed(differences)
    expected = stats.ttest_1samp(differences, 0)
    low, high = expected.confidence_interval(0.95)
    assert found.p_t == pytest.approx(expected.pvalue)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx((low, high))
    assert found.p_sign == pytest.approx(2 / 2**7)


def test_looking_after_each_pair_keeps_the_error_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_sign_flips", lambda _: math.nan)  # slow, and not used here
    draw = random.Random(3)
    wrong = {fixed: 0, sequential: 0}
    for _ in range(200):
        differences = [draw.gauss(0, 1) for _ in range(20)]
        for interval in wrong:
            wrong[interval] += any(interval(differences[:num]).is_different for num in range(2, 21))
    assert wrong[sequential] <= 10
    assert wrong[fixed] > 30  # the interval of a single look does not allow it


def test_sequential_interval_shrinks_and_starts_infinite() -> None:
    assert math.isinf(sequential([1.0, 1.1]).half_width)
    widths = [sequential([1.0, 1.2] * num).half_width for num in range(2, 20)]
    assert all(later < earlier for earlier, later in itertools.pairwise(widths))


def test_equal_differences_decide_only_by_their_sign_flips() -> None:
    # Differences of accuracies over ten records, equal up to rounding.
    ties = [0.8 - 0.7, 0.7 - 0.6, 0.6 - 0.5, 0.9 - 0.8, 0.4 - 0.3, 0.5 - 0.4]
    for interval in (fixed, sequential):
        assert not interval([0.0] * 6).is_different
        assert not interval(ties[:5]).is_different
        assert interval(ties).is_different
        assert interval(ties).is_constant


def test_looking_at_few_records_keeps_the_error_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_sign_flips", lambda _: math.nan)
    draw, wrong = random.Random(1), 0
    for _ in range(200):
        right = [[sum(draw.random() < 0.7 for _ in range(10)) / 10 for _ in range(20)] for _ in "ab"]
        differences = [b - a for a, b in zip(*right, strict=True)]
        wrong += any(sequential(differences[:num]).is_different for num in range(2, 21))
    assert wrong <= 10


# Measures.


def test_evaluations_are_compared_at_equal_amounts(tmp_path: Path) -> None:
    log = write_run(tmp_path, [5.0] * 10, {5: 4.0, 10: 3.0})
    assert log.total("tokens") == 100
    assert log.total("time") == 20
    assert log.value(LOSS, "tokens", 100) == 3.0
    assert log.value(LOSS, "tokens", 75) == pytest.approx(3.5)
    assert log.value(LOSS, "time", 15) == pytest.approx(3.5)
    assert math.isnan(log.value(LOSS, "tokens", 40))
    assert log.value(LOSS, "tokens", 99.5) == 3.0  # a run of another seed ended there


def test_training_loss_is_averaged_over_the_last_tenth(tmp_path: Path) -> None:
    log = write_run(tmp_path, [*[9.0] * 18, 1.0, 3.0], {})
    assert log.value(Measure.of("loss"), "steps", 20) == 2.0
    assert log.value(Measure.of("loss"), "steps", 10) == 9.0
    assert log.value(Measure.of("tokens_per_s"), "steps", 20) == 5.0
    assert log.value(Measure.of("step_s"), "steps", 20) == 2.0


@pytest.mark.parametrize("metric, lower", [("eval.loss", True), ("eval.accuracy", False), ("tokens_per_s", False)])
def test_direction_of_known_metrics(metric: str, lower: bool) -> None:
    assert Measure.of(metric).lower_is_better is lower
    assert Measure.of(metric, "lowest").lower_is_better


def test_energy_of_productive_steps(tmp_path: Path) -> None:
    write_run(tmp_path, [5.0] * 10, {10: 3.0})
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    readings = [{"event": "energy", "step": step, "time": 2.0 * step, "energy_j": 100.0 * step} for step in (0, 5, 10)]
    events = sorted([*events, *readings], key=lambda event: (event["time"], event["event"] == "energy"))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    log = RunLog.read(tmp_path)
    assert log.energy_j == pytest.approx(1000, rel=0.1)
    assert log.total("energy") == log.energy_j
    assert log.value(LOSS, "energy", 1000) == 3.0


def test_speed_and_energy_in_the_verdict() -> None:
    clear = [PairResult((1, 2), (1.0, 1.04), (100.0, 98.0)), PairResult((1, 2), (1.0, 1.0402), (100.0, 98.01))]
    assert _speed(clear) == "B is 4 % slower; 2 % less energy"
    slow = [PairResult((1, 2), (1.0, 2.5 + n / 100), None if n else (1.0, 2.0)) for n in range(3)]
    assert _speed(slow) == "B is 150 % slower; energy unmeasured in 2 of 3 pairs"
    rated = [PairResult((1, 2), (1.0, 1.04), (100.0, 98.0), "estimated")] * 2
    assert _speed(rated) == "B is 4 % slower; 2 % less energy (estimated)"
    noisy = [PairResult((1, 2), (1.0, 1.04)), PairResult((1, 2), (1.0, 0.2))]
    assert _speed(noisy) == "speed varies too much to be compared in 2 pairs"


def comparison_of(metric: str, pairs: int = 5, until: float | None = None) -> PairedComparison:
    return PairedComparison(RunConfig(), RunConfig(), Measure.of(metric), "tokens", pairs, until, other_seeds=True)


def test_the_verdict_on_equal_and_on_large_differences() -> None:
    ties = [PairResult((0.7, 0.8), (1.0, 1.0))] * 5
    assert verdict(comparison_of("eval.accuracy"), ties) == (
        "undecided: B - A is +0.1 of eval.accuracy in each of 5 pairs, and equal differences decide from 6 pairs on; "
        "no difference in speed found (+0.0 ± 0.0 %)."
    )
    assert not is_decided(comparison_of("eval.accuracy", until=0.5), sequential([0.0, 0.0]))
    fast = [PairResult((20_000.0, 32_345.0 + n), (1.0, 1.0)) for n in range(3)]
    assert verdict(comparison_of("tokens_per_s"), fast).startswith("B is better by 12,300 ± 2.5")


def test_energy_with_gaps_is_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path, [5.0] * 10, {10: 3.0})
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    readings = [{"event": "energy", "step": step, "time": 2.0 * step, "energy_j": 100.0 * step} for step in (0, 5)]
    restart = {"event": "start", "step": 8, "time": 16.5}  # after a kill; steps 6 to 8 have no reading
    events = sorted([*events, *readings, restart], key=lambda event: (event["time"], event["event"] == "energy"))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    log = RunLog.read(tmp_path)
    assert log.energy_j is None
    with pytest.raises(ConfigError, match="has no complete reading of energy"):
        log.total("energy")


def test_the_number_of_pairs_stays_after_a_verdict(tmp_path: Path) -> None:
    results = [PairResult((1.0, 2.0 + n), (1.0, 1.0)) for n in range(3)]
    write_result(tmp_path, comparison_of("loss", 3), results)
    Runner(comparison_of("loss", 3), tmp_path, keep=False, report=print).refuse_more_pairs()
    Runner(comparison_of("loss", 9, until=0.1), tmp_path, keep=False, report=print).refuse_more_pairs()
    with pytest.raises(ConfigError, match=r"--pairs 9: .* has a verdict of --pairs 3, and the interval"):
        Runner(comparison_of("loss", 9), tmp_path, keep=False, report=print).refuse_more_pairs()
    write_result(tmp_path, comparison_of("loss", 9, until=0.1), results)
    with pytest.raises(ConfigError, match=r"--pairs 3: .* has a verdict of --until"):
        Runner(comparison_of("loss", 3), tmp_path, keep=False, report=print).refuse_more_pairs()


# Refusals.


@pytest.mark.parametrize(
    "words, message",
    [
        (["small.toml"], "two groups of settings"),
        (["small.toml", "small.toml"], "A and B have the same settings"),
        (["small.toml", "--", "optimizer.lr=1"], "two groups of settings"),
        (["small.toml", "--aa", "--pairs", "1"], "--pairs 1: an interval needs 2 to 1000 pairs"),
        (["small.toml", "--aa", "--until", "nan"], "--until nan: it is a difference of the metric, above 0"),
        (["small.toml", "--aa", "--at", "enrgy"], "'enrgy' is not one of 'tokens', 'steps'"),
        (["small.toml", "--aa", "--metric", "evl.loss"], "Did you mean 'eval.loss'?"),
        (["small.toml", "--aa", "--metric", "eval.mine"], "Add --best lowest or --best highest"),
        (["small.toml", "--", "train.seq_len=16", "--", "train.seq_len=8"], "train.seq_len differs"),
        (["small.toml", "--", "tokenizer.kind=bpe", "--", "optimizer.lr=1"], "Use --metric eval.bits_per_byte"),
        (["small.toml", "--", "data.holdout=0.1", "--", "optimizer.lr=1"], "Set the same data.eval in both"),
        (["small.toml", "--", "train.global_batch=16", "--", "optimizer.lr=1"], "reads 64 samples and one of B 32"),
        (["small.toml", "--", "data.max_record_bytes=9", "--", "optimizer.lr=1"], "data.max_record_bytes differs"),
        (["small.toml", "--", "train.stop_at=5", "--", "optimizer.lr=1"], "a run that ends early cannot be compared"),
        (["small.toml", "--", "data.packing=pad", "--", "optimizer.lr=1"], "data.packing differs"),
        (["small.toml", "--metric", "loss", "--", "data.holdout=0.1", "--", "optimizer.lr=1"], "data.holdout differs"),
        (["small.toml", "--", "train.max_time=3h", "--", "optimizer.lr=1"], "a run that ends early cannot be compared"),
        (["small.toml", "--", "seed=1", "--", "optimizer.lr=1"], "seed=1 in A and 0 in B: the runs of a pair share"),
        (["small.toml", "--aa", "--until", "0.1", "--pairs", "2"], "--pairs 2: --until needs at least 3 pairs"),
        (["small.toml", "--", "optimizer.lrr=1", "--", "optimizer.lr=1"], "Did you mean 'optimizer.lr'?"),
    ],
)
def test_refusals(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(CONFIG)
    assert run(["ab", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("runs").exists()


# Real runs.


def weft(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.full
def test_finds_the_better_learning_rate_in_two_pairs(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    words = ("ab", "small.toml", "--pairs", "2", "--", "optimizer.lr=1e-2", "--", "optimizer.lr=1e-5")
    done = weft(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "A is better by" in done.stdout
    assert "p = " in done.stdout
    folder = tmp_path / "runs" / "ab-small"
    assert (folder / "ab.png").stat().st_size > 10_000
    result = json.loads((folder / "ab.json").read_text())
    assert result["settings"] == [{"key": "optimizer.lr", "a": "0.01", "b": "1e-05"}]
    starts = [RunLog.read(folder / f"pair-0{pair}-{side}").start for pair in (1, 2) for side in "ab"]
    assert [start["config"]["seed"] for start in starts] == [0, 0, 1, 1]
    assert starts[0]["time"] < starts[1]["time"] < starts[3]["time"] < starts[2]["time"]  # A B B A
    assert weft(tmp_path, *words).stdout == done.stdout  # nothing is left to run
    other = " ".join(weft(tmp_path, *words[:-1], "optimizer.lr=1e-4").stderr.split())
    assert "it has a comparison of other settings (b.toml differs)" in other


@pytest.mark.full
def test_continues_after_a_kill_as_if_undisturbed(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "small.toml").write_text(CONFIG)
    words = ("ab", "small.toml", "--pairs", "2", "--", "optimizer.lr=1e-2", "--", "optimizer.lr=1e-5")
    assert weft(tmp_path / "whole", *words).returncode == 0
    for seconds in (4.0, 9.0, 12.0):
        with contextlib.suppress(subprocess.TimeoutExpired):  # `run` kills it with SIGKILL
            command = [sys.executable, "-m", "weft", *words]
            subprocess.run(command, cwd=tmp_path / "killed", capture_output=True, timeout=seconds, check=False)
    assert weft(tmp_path / "killed", *words).returncode == 0
    results = [json.loads((tmp_path / name / "runs/ab-small/ab.json").read_text()) for name in ("whole", "killed")]
    assert results[0]["estimate"] == results[1]["estimate"]


@pytest.mark.full
def test_seeds_of_one_config_show_no_difference(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    done = weft(tmp_path, "ab", "small.toml", "--pairs", "3", "--aa")
    assert done.returncode == 0, done.stderr
    assert "no difference found" in done.stdout


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG + "[data]\ntrain = [{path = 'none.txt'}]\n")
    done = weft(tmp_path, "ab", "small.toml", "--", "optimizer.lr=1e-2", "--", "optimizer.lr=1e-5")
    err = " ".join(done.stderr.split())
    assert done.returncode == 3
    assert "training of A in pair 1 failed with exit code 2" in err
    assert "none.txt" in err


def test_curves_of_runs_on_one_plot(tmp_path: Path) -> None:
    for name, loss in (("one", 4.0), ("two", 3.0)):
        write_run(tmp_path / name, [loss] * 10, {5: loss, 10: loss})
    picture = tmp_path / "runs.png"
    run(["runs", "compare", str(tmp_path / "one"), str(tmp_path / "two"), "--plot", str(picture)])
    assert picture.stat().st_size > 10_000
