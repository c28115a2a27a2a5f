"""The page's index of a log: equal for incremental and full reading, and bounded in memory."""

from __future__ import annotations

import itertools
import json
import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.watch.synthetic_run import SyntheticRun
from weft.errors import ConfigError
from weft.monitor.dashboard.history import BoundedSeries, RankHeat, StepColumns, bucket_edges, thinned
from weft.monitor.dashboard.routes import config_of, curves, heat, marks, planned_and_measured, run_line
from weft.monitor.dashboard.run_index import RunCatalog, RunIndex

MADE = SyntheticRun(
    steps=400, ranks=6, slow_rank=4, slow_from=200, fails_at=170, save_every=50, eval_every=40, spike_at=90, end=1e9
)


def all_views(run: RunIndex):
    line = {key: value for key, value in run_line(run).items() if key != "version"}
    curve = {key: value for key, value in curves(run, -1, 2**62, 50).items() if key != "version"}
    return line, curve, heat(run), marks(run), planned_and_measured(run), config_of(run)


def test_growing_log_gives_the_same_index_as_a_complete_one(tmp_path):
    text = (MADE.write(tmp_path / "whole") / "events.jsonl").read_bytes()
    complete = RunIndex(tmp_path / "whole", "run")
    while complete.refresh():
        pass
    grown = tmp_path / "grown"
    grown.mkdir()
    part, rng, at = RunIndex(grown, "run"), random.Random(3), 0
    while at < len(text):  # in parts that end within lines
        more = rng.randrange(1, 40_000)
        with open(grown / "events.jsonl", "ab") as file:
            file.write(text[at : at + more])
        at += more
        assert part.refresh()
    assert not part.refresh()
    assert all_views(part) == all_views(complete)
    assert part.state()[0] == "finished"
    assert complete.steps.steps.tolist() == list(range(1, 401))  # repeated steps are listed once
    assert (complete.ledger.failures, complete.ledger.starts) == (1, 2)
    slowest = complete.heat.slowest()
    assert slowest is not None
    assert slowest[0] == 4
    assert slowest[1] == pytest.approx(1.2, abs=0.05)


def test_recreated_file_is_read_from_its_start(tmp_path):
    run = RunIndex(MADE.write(tmp_path / "run"), "run")
    while run.refresh():
        pass
    (tmp_path / "run" / "events.jsonl").unlink()
    assert run.refresh()
    assert (run.step, len(run.steps)) == (0, 0)
    SyntheticRun(steps=50, ranks=2, end=1e9).write(tmp_path / "run")
    while run.refresh():
        pass
    assert (run.step, run.heat.num_ranks) == (50, 2)


def test_damaged_line_is_the_only_loss(tmp_path):
    folder = MADE.write(tmp_path / "run")
    lines = (folder / "events.jsonl").read_bytes().split(b"\n")
    lines[5:5] = [b"\x00\xff{", b"[1, 2]", b'"step"', b'{"event": "step", "step": "x"}', b"[" * 10_000]
    (folder / "events.jsonl").write_bytes(b"\n".join(lines))
    run = RunIndex(folder, "run")
    while run.refresh():
        pass
    assert len(run.steps) == 400


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from(["nan", "inf", "x", ""]),
    lambda inside: (
        st.lists(inside, max_size=4) | st.dictionaries(st.sampled_from(["total", "busy_s", "a"]), inside, max_size=3)
    ),
    max_leaves=8,
)
_EVENT = st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            ["start", "resume", "step", "eval", "figures", "plan", "actual", "alert", "end", "held", "zz"]
        )
    },
    optional=dict.fromkeys(
        (
            "time",
            "step",
            "loss",
            "lr",
            "seconds",
            "tokens_per_s",
            "figures",
            "by_rank",
            "config",
            "parts",
            "world_size",
            "plan",
            "text",
            "severity",
            "stall_s",
            "memory_bytes",
            "drift",
            "step_s",
        ),
        _JSON,
    ),
)


@pytest.mark.full
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_EVENT, max_size=12))
def test_any_events_give_valid_views(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("run")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = RunIndex(folder, "run")
    while run.refresh():
        pass
    json.dumps(all_views(run), allow_nan=False)


def test_event_with_invalid_values_in_all_fields_is_shown(tmp_path):
    odd = ["nan", "x", None, True, -1, 2**70, 1e308, [], [1.5], [None], {"a": [1]}, [[1, "x"], None]]
    names = (
        "time",
        "step",
        "loss",
        "seconds",
        "figures",
        "by_rank",
        "config",
        "world_size",
        "plan",
        "parts",
        "step_s",
        "drift",
    )
    events = [
        {"event": kind, **dict.fromkeys(names, value)}
        for kind in ("start", "resume", "step", "eval", "figures", "plan", "actual", "alert", "held", "end")
        for value in odd
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = RunIndex(folder, "run")
    while run.refresh():
        pass
    json.dumps(all_views(run), allow_nan=False)


_VALUES = st.lists(st.floats(-1e6, 1e6, width=32) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=300)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_VALUES, st.integers(1, 80))
def test_thinned_curve_keeps_its_extremes(values, points):
    column = np.asarray(values, np.float32)
    mean, low, high = thinned(column, points)
    edges = [*bucket_edges(len(values), points).tolist(), len(values)]
    assert len(mean) == min(points, len(values))
    for at, (first, last) in enumerate(itertools.pairwise(edges)):
        finite = [one for one in values[first:last] if math.isfinite(one)]
        if not finite:
            assert (mean[at], low[at], high[at]) == (None, None, None)
            continue
        assert low[at] == pytest.approx(min(finite), rel=1e-5)
        assert high[at] == pytest.approx(max(finite), rel=1e-5)
        assert min(finite) - 1e-3 - abs(min(finite)) * 1e-5 <= mean[at] <= max(finite) + 1e-3 + abs(max(finite)) * 1e-5


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=9), max_size=12))
def test_columns_have_the_last_value_of_each_step(batches):
    columns, expected = StepColumns(), {}
    for number, batch in enumerate(batches):
        for step in batch:
            expected = {known: value for known, value in expected.items() if known < step} | {step: number}
        columns.append(batch, [float(number)] * len(batch), {"loss": [number] * len(batch)})
    assert columns.steps.tolist() == sorted(expected)
    assert columns.values("loss").tolist() == [expected[step] for step in sorted(expected)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=200))
def test_bounded_series_keeps_minimum_and_maximum(values):
    series = BoundedSeries(places=8)
    for step, value in enumerate(values):
        series.add(step, float(step), (value, value, value), ("", ""))
    picture = series.picture()
    assert len(picture["step"]) <= 8
    assert min(picture["low"]) == pytest.approx(min(values), rel=1e-4, abs=1e-6)
    assert max(picture["high"]) == pytest.approx(max(values), rel=1e-4, abs=1e-6)
    assert picture["step"][-1] == len(values) - 1


def test_rank_heat_map_is_bounded_and_shows_slow_and_silent_ranks():
    ranks = RankHeat(places=16)
    for step in range(1000):
        ranks.add(step, [1.0, 1.0, 1.3 if step >= 500 else 1.0, None if step >= 750 else 1.0, 1.0])
    steps, picture = ranks.picture()
    assert picture.shape[0] == 5
    assert len(steps) == picture.shape[1] <= 16
    assert steps[-1] == 999
    assert picture[2, 0] == 100
    assert picture[2, -1] == 130
    assert picture[3, -1] == 0
    assert ranks.slowest() == (2, 1.3)


def test_folder_without_runs_is_reported(tmp_path):
    with pytest.raises(ConfigError) as caught:
        RunCatalog(tmp_path)
    assert str(caught.value) == (
        f"{str(tmp_path)!r}: there is no run in it (no events.jsonl). Give a run folder, such as runs/quickstart, or "
        "the folder of your runs; `weft train` writes both."
    )


def test_runs_are_found_one_and_two_folders_deep_and_later(tmp_path):
    SyntheticRun(steps=3, end=1e9).write(tmp_path / "a")
    SyntheticRun(steps=3, end=1e9).write(tmp_path / "group" / "b")
    shelf = RunCatalog(tmp_path)
    assert set(shelf.runs) == {"a", "group/b"}
    first = shelf.get("a")
    SyntheticRun(steps=3, end=1e9).write(tmp_path / "c")
    shelf.scan()
    assert set(shelf.runs) == {"a", "group/b", "c"}
    assert shelf.get("a") is first
    assert shelf.get("../a") is None
