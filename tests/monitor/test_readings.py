"""Figures read from events, and folded over ranks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from weft.config.metrics import METRICS
from weft.monitor.events import StepRecord
from weft.monitor.metrics import fold, readings


def values(event):
    return {reading.series: reading.value for reading in readings(event)}


def test_step_is_read_as_the_recorder_writes_it():
    record = StepRecord(step=3, loss=2.5, lr=0.1, grad_norm=1.5, count=64, count_per_s=640.0, mfu=0.4,
                        seconds={"forward": 0.04, "total": 0.1}, unit="points")  # fmt: skip
    found = values(record.to_event())
    assert found == {"step": 3, "loss": 2.5, "lr": 0.1, "grad_norm": 1.5, "mfu": 0.4, "tokens_per_s": 640.0,
                     "step_s": 0.1}  # fmt: skip


def test_non_finite_loss_is_read_as_such():
    (loss,) = readings({"event": "step", "time": 1.0, "loss": "nan"})
    assert math.isnan(loss.value)
    assert values({"event": "step", "time": 1.0, "loss": "inf"}) == {"loss": math.inf}


def test_evaluation_gives_metrics_without_token_count():
    event = {"event": "eval", "time": 1.0, "step": 4, "loss": 2.0, "accuracy": 0.5, "tokens": 128}
    assert values(event) == {"eval.loss": 2.0, "eval.metric{accuracy}": 0.5}


def test_folded_metrics_name_their_extreme_ranks():
    event = {
        "event": "figures",
        "time": 2.0,
        "step": 8,
        "figures": {"gpu.temperature": [40, 50, 88, "rank 1", "rank 3"], "rank.silent": 0, "unheard": 1},
    }
    hot, silent = readings(event)
    assert (hot.low, hot.value, hot.high, hot.at_low, hot.at_high) == (40, 50, 88, "rank 1", "rank 3")
    assert (silent.value, silent.at_high, silent.step, silent.time) == (0, "", 8, 2.0)


def test_other_events_give_their_values_and_malformed_ones_none():
    assert values({"event": "checkpoint", "time": 1.0, "step": 3, "stall_s": 0.5, "durable_s": 1.0}) == {
        "checkpoint.stall_s": 0.5, "checkpoint.durable_s": 1.0}  # fmt: skip
    assert values({"event": "failure", "time": 1.0}) == {"failures": 1}
    assert values({"event": "plan", "time": 1.0, "figures": {"step_s": 0.1}}) == {"planned{step_s}": 0.1}
    for event in ({}, {"event": "figures", "figures": 7}, {"event": "figures", "figures": {"loss}": 1, "loss": [1]}},
                  {"event": "step", "loss": None, "seconds": "x"}, {"event": "note"}):  # fmt: skip
        assert values(event) == {}


@given(st.dictionaries(st.sampled_from([f"rank {n}" for n in range(9)]), st.floats()))
def test_fold_has_min_and_max_with_their_ranks(by_rank):
    found = fold(by_rank)
    numbers = [value for value in by_rank.values() if not math.isnan(value)]
    if found is None:
        assert not numbers
        return
    assert (found.min, found.max) == (min(numbers), max(numbers))
    assert (by_rank[found.at_min], by_rank[found.at_max]) == (found.min, found.max)


def test_exported_names_are_unique_and_well_formed():
    names = [metric.exported for metric in METRICS.values()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name.islower() and name.startswith("weft_") for name in names)
    assert METRICS["disk.read_bytes_per_s"].exported == "weft_disk_read_bytes_per_second"
    assert METRICS["gpu.xid_errors"].exported == "weft_gpu_xid_errors_total"
    assert METRICS["step_s"].exported == "weft_step_seconds"
