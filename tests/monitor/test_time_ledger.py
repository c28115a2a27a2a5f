"""TimeLedger: every second of a run has one cause, over failures, pauses and stops; and the run's price."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.monitor.accounting import Price, TimeLedger

WORLD = {"world_size": 4, "plan": "dp_shard=4 compile=on"}


def step(time: float, number: int, total: float = 1.0, data: float = 0.0, **more: object):
    return {"event": "step", "time": time, "step": number, "seconds": {"total": total, "data": data}, **more}


def ledger_seconds(events):
    ledger = TimeLedger().feed_all(events)
    return {cause: round(seconds, 6) for cause, seconds in ledger.seconds().items() if seconds}, ledger


def test_start_compilation_data_evaluation_and_saves_are_separated():
    events = [
        {"event": "start", "time": 0.0, "step": 0, **WORLD},
        step(15.0, 1, total=9.0),
        step(16.0, 2, data=0.25),
        step(17.0, 3),
        step(18.0, 4),
        {"event": "figures", "time": 18.2, "figures": {}},
        {"event": "eval", "time": 21.0, "step": 4, "loss": 1.0},
        {"event": "checkpoint", "time": 21.5, "step": 4, "stall_s": 0.5, "durable_s": 2.0},
        step(23.0, 5),
        {"event": "end", "time": 23.5, "reason": "finished"},
    ]
    found, ledger = ledger_seconds(events)
    assert found == {
        "productive": 4.75,
        "start": 6.0,
        "compile": 8.0,
        "data": 0.25,
        "evaluation": 3.0,
        "checkpoint": 0.5,
        "other": 1.0,
    }
    assert (ledger.wall_s, ledger.device_s, ledger.failures, ledger.starts) == (23.5, 94.0, 0, 1)
    assert ledger.share == pytest.approx(4.75 / 23.5)


def test_slow_first_step_without_compilation_counts_as_start():
    events = [
        {"event": "start", "time": 0.0, "step": 0},
        step(5.0, 1, 4.0),
        *(step(5.0 + n, 1 + n) for n in range(1, 6)),
    ]
    assert ledger_seconds(events)[0] == {"productive": 6.0, "start": 4.0}


def test_failure_costs_repeated_steps_and_restart():
    events = [
        {"event": "start", "time": 0.0, "step": 0, **WORLD},
        *(step(float(n), n) for n in range(1, 8)),
        {"event": "failure", "time": 8.0, "cause": "died"},
        {"event": "resume", "time": 14.0, "step": 4},
        {"event": "start", "time": 14.0, "step": 4, "world_size": 2},
        *(step(10.0 + n, n) for n in range(5, 9)),
    ]
    found, ledger = ledger_seconds(events)
    assert found == {"productive": 8.0, "lost work": 3.0, "restart": 7.0}
    assert (ledger.failures, ledger.starts) == (1, 2)
    assert ledger.device_s == 14 * 4 + 4 * 2


def test_pause_is_no_failure_and_time_after_a_stop_is_not_counted():
    events = [
        {"event": "start", "time": 0.0, "step": 0},
        step(1.0, 1),
        {"event": "action", "time": 1.2, "action": "hold"},
        {"event": "end", "time": 2.0, "reason": "asked to hold"},
        {"event": "held", "time": 2.5},
        {"event": "go_on", "time": 100.0},
        {"event": "start", "time": 104.0, "step": 1},
        step(105.0, 2),
        {"event": "end", "time": 105.0, "reason": "asked to stop"},
        {"event": "resume", "time": 90_000.0, "step": 2},
        {"event": "start", "time": 90_000.0, "step": 2},
        step(90_001.0, 3),
    ]
    found, ledger = ledger_seconds(events)
    assert found == {"productive": 3.0, "held": 97.5, "restart": 4.0, "other": 1.5}
    assert (ledger.failures, ledger.wall_s) == (0, 106.0)


def test_step_without_update_is_lost_work():
    events = [{"event": "start", "time": 0.0, "step": 0}, step(1.0, 1), step(2.0, 2, skipped="nan")]
    assert ledger_seconds(events)[0] == {"productive": 1.0, "lost work": 1.0}


def test_tracing_of_a_bad_step_has_its_own_cause():
    events = [
        {"event": "start", "time": 0.0, "step": 0},
        step(1.0, 1),
        step(2.0, 2, skipped="loss is nan"),
        {"event": "trace", "time": 5.0, "step": 2},
        step(6.0, 3),
    ]
    assert ledger_seconds(events)[0] == {"productive": 2.0, "lost work": 1.0, "tracing": 3.0}


_TIMES = st.one_of(st.floats(0, 1e6), st.floats(), st.none(), st.sampled_from(["nan", "x", ""]))
_EVENTS = st.fixed_dictionaries(
    {
        "event": st.sampled_from(
            ["start", "step", "eval", "trace", "end", "failure", "checkpoint", "held", "go_on", "action", "x"]
        )
    },
    optional={
        "time": _TIMES,
        "step": st.one_of(st.integers(-5, 50), st.none()),
        "stall_s": _TIMES,
        "world_size": st.integers(0, 9),
        "seconds": st.one_of(st.none(), st.fixed_dictionaries({}, optional={"total": _TIMES, "data": _TIMES})),
        "action": st.sampled_from(["hold", "stop"]),
    },
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_EVENTS, max_size=25))
def test_ledger_of_any_events_adds_up_to_wall_time(events):
    ledger = TimeLedger().feed_all(events)
    seconds = ledger.seconds()
    assert sum(seconds.values()) == pytest.approx(ledger.wall_s, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("text, an_hour", [("2.5usd/h", 2.5), ("$60/d", 2.5), (".5EUR / min", 30.0), ("2.5€/h", 2.5)])
def test_prices_are_parsed(text, an_hour):
    assert Price.parse(text).of(3600.0) == pytest.approx(an_hour)


@pytest.mark.parametrize("text", ["", "2.5", "usd/h", "2.5usd", "-1usd/h", "2.5usd/week", "1e3usd/h"])
def test_invalid_price_is_reported(text):
    with pytest.raises(ConfigError, match="a price is a number, a currency and a time") as ledger_seconds:
        Price.parse(text)
    assert "Use such as 2.5usd/h." in str(ledger_seconds.value)
