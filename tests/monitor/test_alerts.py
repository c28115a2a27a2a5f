"""Alerts: when each condition fires and ends, the content of a notice, and the standard set on synthetic runs."""

from __future__ import annotations

import math

import pytest

from tests.monitor.alert_curves import FAULTS, Score, SyntheticRun, scored
from weft.config.run_config import RunConfig
from weft.monitor.alerts import AlertDesk, AlertRule, backtest, rules_of


def step(number, at=None, **metrics):
    return {"event": "step", "time": 1000.0 + (number if at is None else at), "step": number, **metrics}


def losses(*values):
    return [step(number, loss=value if math.isfinite(value) else str(value)) for number, value in enumerate(values, 1)]


def evals(*values, name="loss"):
    return [{"event": "eval", "time": 1000.0 + number, "step": number * 10, "loss": 1.0, name: float(value)}
            for number, value in enumerate(values, 1)]  # fmt: skip


def metrics(*values, name="gpu.temperature", every=10.0):
    return [{"event": "figures", "time": 1000.0 + every * number, "step": number,
             "figures": {name: [value - 5, value - 2, value, "rank 0", "rank 3"]}}
            for number, value in enumerate(values, 1)]  # fmt: skip


def fired(when, events, **rule):
    """Return (step or time - 1000, state) of each notice."""
    desk = AlertDesk([AlertRule("one", when, **rule)])
    return [(notice.step if notice.step else notice.time - 1000, notice.state) for event in events
            for notice in desk.see(event)]  # fmt: skip


NORMAL = [2.0 + 0.01 * math.sin(number) for number in range(1, 101)]
STEADY = [1000.0] * 60


@pytest.mark.parametrize(
    "when, events, found",
    [
        ("loss > 3", losses(2, 4, 4, 2, 5), [(2, "fired"), (4, "ended"), (5, "fired")]),
        ("loss >= 4", losses(3.9, 4), [(2, "fired")]),
        ("loss < 1", losses(2, 0.5), [(2, "fired")]),
        ("loss <= 1", losses(1.1, 1.0), [(2, "fired")]),
        ("loss > 3", losses(2, math.nan, math.inf), [(3, "fired")]),
        ("loss > 3 for 3 steps", losses(4, 4, 2, 4, 4, 4, 4), [(6, "fired")]),
        ("loss > 3 for 5s", [step(n, at=2 * n, loss=4.0) for n in range(1, 6)], [(4, "fired")]),
        ("loss is nan", losses(2, math.nan, 2), [(2, "fired"), (3, "ended")]),
        ("loss is inf", losses(math.nan, math.inf), [(2, "fired")]),
        ("loss is not finite", losses(2, math.inf), [(2, "fired")]),
        ("loss is nan for 2 steps", losses(math.nan, 2, math.nan, math.nan), [(4, "fired")]),
        ("loss > 6 sigma over 50 steps", losses(*NORMAL, 2.5, 2.0), [(101, "fired"), (102, "ended")]),
        ("loss > 6 sigma over 50 steps", losses(*NORMAL), []),
        ("loss > 6 sigma over 50 steps", losses(*NORMAL[:10], 9.0), []),
        ("loss < 6 sigma over 50 steps", losses(*NORMAL, 1.5), [(101, "fired")]),
        ("loss > 1.5 of median over 50 steps", losses(*NORMAL, 2.9, 3.1), [(102, "fired")]),
        ("loss > 1.5 of median over 20 steps for 2 steps", losses(*NORMAL, 4, 2, 4, 4), [(104, "fired")]),
        # A level that lasts longer than the window becomes the new baseline.
        ("loss > 1.5 of median over 20 steps", losses(*NORMAL, *[4.0] * 50), [(101, "fired"), (122, "ended")]),
        ("eval.loss no better for 3 evaluations", evals(3, 2, 2, 2.5, 2.1), [(50, "fired")]),
        ("eval.loss no better for 3 evaluations", evals(3, 2, 2, 2.5, 1.9, 2, 2), []),
        ("eval.loss no better for 2 evaluations by 10%", evals(3, 2.9, 2.8, 2.75), [(30, "fired")]),
        ("eval.loss no better for 2 evaluations by 0.1", evals(3, 2.85, 2.7, 2.5), []),
        ("eval.accuracy no higher for 2 evaluations", evals(0.1, 0.2, 0.2, 0.2, name="accuracy"), [(40, "fired")]),
        ("loss no lower for 3 steps", losses(3, 2, 2, 2, 2, 1), [(5, "fired"), (6, "ended")]),
        ("loss no better for 4s", [step(n, at=2 * n, loss=4.0) for n in range(1, 6)], [(3, "fired")]),
        ("gpu.temperature > 87 for 60s", metrics(*[90] * 8), [(70, "fired")]),
        ("gpu.temperature > 87 for 60s", metrics(90, 90, 90, 80, *[90] * 6), []),
        ("gpu.temperature > 87", metrics(86, 88), [(20, "fired")]),
        ("gpu.temperature < 82", metrics(88, 86), [(20, "fired")]),  # the minimum over ranks counts
        ("rank.lag > 1.5", metrics(1.4, 1.6, name="rank.lag"), [(20, "fired")]),
        ("disk.free < 20GiB", metrics(30 * 2**30, 20 * 2**30, name="disk.free_bytes"), [(20, "fired")]),
        ("phase_s{data} > 0.5", metrics(0.6, name="phase_s{data}"), [(10, "fired")]),
        ("phase_s{data} > 0.5", metrics(0.6, name="phase_s{forward}"), []),
        ("exposed_s > 0.5", metrics(0.6, name="exposed_s{tp}"), [(10, "fired")]),  # any of the axes
        ("tokens_per_s < 0.8 of plan", [step(1, tokens_per_s=1.0)], []),  # no plan was given
        ("tokens_per_s < 0.8 of plan", [{"event": "plan", "time": 1000.0, "figures": {"tokens_per_s": 1000.0}},
                                        step(1, tokens_per_s=900.0), step(2, tokens_per_s=700.0)], [(2, "fired")]),
        ("tokens_per_s < 0.7 of median over 50 steps",
         [step(n, tokens_per_s=v) for n, v in enumerate([*STEADY, 650.0], 1)], [(61, "fired")]),
        ("process.memory_bytes rises by 20% over 10m",
         metrics(*[1000 + 5 * n for n in range(120)], name="process.memory_bytes"), [(600, "fired")]),
        ("process.memory_bytes rises by 20% over 10m",
         metrics(*[1000 + 200 * (n % 2) for n in range(120)], name="process.memory_bytes"), []),
        ("process.memory_bytes rises by 20% over 10m",  # a jump is no leak
         metrics(*[1000] * 60, *[1500] * 60, name="process.memory_bytes"), []),
        ("tokens_per_s falls by 10% over 60 steps",
         [step(n, tokens_per_s=1000.0 - 3 * n) for n in range(1, 80)], [(60, "fired")]),
        ("event failure", [{"event": "failure", "time": 1005.0}, {"event": "start", "time": 1006.0}],
         [(5, "fired"), (6, "ended")]),
        ("event held", [{"event": "held", "time": 1005.0}], [(5, "fired")]),
        ("no step for 10m", [step(1), step(2, at=700, loss=1.0)], [(1, "fired"), (2, "ended")]),
        ("no step for 10m", [step(1), {"event": "end", "time": 1002.0}, step(2, at=900)], []),
        ("no step for 10m", [{"event": "start", "time": 1000.0}, step(1, at=900)], []),  # the first step compiles
        ("loss > 3 and grad_norm > 3", [step(1, loss=4.0, grad_norm=1.0), step(2, loss=4.0, grad_norm=4.0)],
         [(2, "fired")]),
        ("loss > 3 or grad_norm > 3", [step(1, loss=2.0, grad_norm=4.0)], [(1, "fired")]),
        ("failures > 0", [{"event": "failure", "time": 1001.0}], [(1, "fired")]),
    ],
)  # fmt: skip
def test_condition_fires_and_ends(when, events, found):
    assert fired(when, events) == found


def test_until_condition_ends_alert():
    events = losses(2, 4, 2.9, 3.1, 2.9, 2.4, 4)
    assert fired("loss > 3", events, until="loss < 2.5") == [(2, "fired"), (6, "ended"), (7, "fired")]


def test_steps_before_after_step_are_ignored():
    assert fired("loss > 3", losses(9, 9, 2, 9), after_step=4) == [(4, "fired")]


def test_quiet_time_records_without_sending():
    desk = AlertDesk([AlertRule("one", "loss > 3", quiet_s=10)])
    events = [step(n, at=4 * n, loss=4.0 if n % 2 else 1.0) for n in range(1, 8)]
    sends = [notice.sends for event in events for notice in desk.see(event) if notice.state == "fired"]
    assert sends == [True, False, True, False]


def test_notice_has_value_start_step_and_last_good_step():
    desk = AlertDesk([AlertRule("one", "loss > 3 for 3 steps", "critical")])
    events = [step(n, loss=2.0 if n < 5 else 4.0, grad_norm=1.0, lr=0.1) for n in range(1, 9)]
    (notice,) = [notice for event in events for notice in desk.see(event)]
    assert (notice.step, notice.since, notice.said) == (7, 5, "loss is 4")
    assert notice.good == {"step": 4, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1}
    assert notice.as_json()["state"] == "fired"
    (hot,) = [
        notice for event in metrics(90) for notice in AlertDesk([AlertRule("a", "gpu.temperature > 87")]).see(event)
    ]
    assert hot.said == "gpu.temperature is 90 C on rank 3"


def test_malformed_events_are_ignored():
    desk = AlertDesk(rules_of(RunConfig(alerts="standard")))
    for event in ({}, {"event": "damaged", "line": 3}, {"event": "step", "time": "x"},
                  {"event": "step", "time": 1.0, "step": "y"}, {"event": "figures", "time": 2.0, "figures": [1]},
                  {"event": "eval", "time": 3.0, "loss": {}}):  # fmt: skip
        assert desk.see(event) == []


def test_own_alert_replaces_standard_one_and_channels_get_the_set():
    config = RunConfig.model_validate(
        {"alerts": "standard", "alert": [{"name": "disk-short", "when": "disk.free < 1TiB", "actions": ["hold"]}],
         "channel": [{"name": "ops", "kind": "command", "command": ["true"]},
                     {"name": "quiet", "kind": "command", "command": ["true"], "standard": False}]}
    )  # fmt: skip
    rules = {rule.name: rule for rule in rules_of(config)}
    assert rules["disk-short"].actions == ("hold",)
    assert rules["loss-spike"].actions == ("ops",)


def check_fault(fault, seed):
    score = Score()
    score.add(SyntheticRun(seed, fault))
    assert (score.found, score.wrong) == (1, 0), score.messages


@pytest.mark.parametrize(
    "fault", [fault if fault in ("spike", "nan") else pytest.param(fault, marks=pytest.mark.full) for fault in FAULTS]
)
def test_fault_is_found(fault):
    check_fault(fault, 7)


def test_healthy_run_raises_no_alarm():
    score = Score()
    score.add(SyntheticRun(1))
    assert (score.right, score.wrong, score.num_clean) == (0, 0, 1), score.messages


@pytest.mark.full
def test_200_faults_are_found_and_50_healthy_runs_raise_no_alarm():
    score = scored()
    assert score.found + score.late == 200
    assert score.num_clean == 50
    assert (score.recall, score.precision) == (1.0, 1.0), score.messages


def test_backtest_reports_time_and_reason():
    config = RunConfig.model_validate(
        {"alert": [{"name": "high", "when": "loss > 3", "actions": ["hold"], "severity": "critical"}]}
    )
    lines = backtest(losses(2, 4, 2), config)
    assert [line.split() for line in lines] == [
        [
            "1.00",
            "s",
            "step",
            "2",
            "fired",
            "critical",
            "high:",
            "loss",
            "is",
            "4,",
            "since",
            "step",
            "2",
            "->",
            "hold",
        ],
        ["2.00", "s", "step", "3", "ended", "critical", "high:", "no", "longer:", "loss", ">", "3"],
    ]
