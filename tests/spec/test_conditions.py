"""Grammar of alert conditions: accepted texts, and rejected texts with their errors."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.files import format_config, parse_config
from weft.config.metrics import (
    METRICS,
    STANDARD,
    Any_,
    Compare,
    Every,
    Happened,
    Missing,
    NoImprovement,
    RunSpan,
    Series,
    State,
    Trend,
    parse_condition,
)
from weft.errors import ConfigError

STEPS_200, MINUTE = RunSpan(200, "steps"), RunSpan(60, "s")


@pytest.mark.parametrize(
    "text, condition",
    [
        ("loss > 7", Compare(Series("loss"), ">", 7.0)),
        ("loss<=-1.5e-3", Compare(Series("loss"), "<=", -1.5e-3)),
        ("grad_norm is nan", State(Series("grad_norm"), "nan")),
        ("loss is not finite for 3 steps", State(Series("loss"), "not finite", RunSpan(3, "steps"))),
        (
            "eval.loss no better for 3 evaluations",
            NoImprovement(Series("eval.loss"), "lower", RunSpan(3, "evaluations")),
        ),
        ("mfu no better for 2h", NoImprovement(Series("mfu"), "higher", RunSpan(7200, "s"))),
        ("eval.accuracy no higher for 5 evaluations by 1%",
         NoImprovement(Series("eval.metric", "accuracy"), "higher", RunSpan(5, "evaluations"), 0.01, True)),
        ("loss > 3 sigma over 200 steps", Compare(Series("loss"), ">", 3.0, "sigma", STEPS_200)),
        ("loss > 1.5 of median over 200 steps for 2 steps",
         Compare(Series("loss"), ">", 1.5, "median", STEPS_200, RunSpan(2, "steps"))),
        ("gpu.temperature > 87 for 60s", Compare(Series("gpu.temperature"), ">", 87.0, hold=MINUTE)),
        ("tokens_per_s < 0.8 of plan for 5m",
         Compare(Series("tokens_per_s"), "<", 0.8, "plan", None, RunSpan(300, "s"))),
        ("tokens_per_s < 80% of plan", Compare(Series("tokens_per_s"), "<", 0.8, "plan")),
        ("disk.free < 20GiB", Compare(Series("disk.free_bytes"), "<", 20 * 2**30)),
        ("rank.lag > 1.5", Compare(Series("rank.lag"), ">", 1.5)),
        ("step_s > 90s", Compare(Series("step_s"), ">", 90.0)),
        ("phase_s{data} > 0.5", Compare(Series("phase_s", "data"), ">", 0.5)),
        ("process.memory_bytes rises by 10% over 1h",
         Trend(Series("process.memory_bytes"), True, 0.1, True, RunSpan(3600, "s"))),
        ("tokens_per_s falls by 100 over 500 steps",
         Trend(Series("tokens_per_s"), False, 100.0, False, RunSpan(500, "steps"))),
        ("no step for 10m", Missing(Series("step"), RunSpan(600, "s"))),
        ("event failure", Happened("failure")),
        ("loss > 1 and lr > 0 or loss is nan",
         Any_((Every((Compare(Series("loss"), ">", 1.0), Compare(Series("lr"), ">", 0.0))),
               State(Series("loss"), "nan")))),
        ("plan.drift{over dp} > 1.15  and no eval.loss for 1h",
         Every((Compare(Series("plan.drift", "over dp"), ">", 1.15),
                Missing(Series("eval.loss"), RunSpan(3600, "s"))))),
    ],
)  # fmt: skip
def test_valid_conditions_are_parsed(text, condition):
    assert parse_condition(text) == condition


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "a condition is needed. Write e.g. 'eval.loss no better for 3 evaluations' or "
             "'gpu.temperature > 87 for 60s'"),
        ("gpu.temprature > 87", "there is no metric 'gpu.temprature'. Did you mean 'gpu.temperature'?"),
        ("loss", "'loss' is no condition. Write METRIC > VALUE [sigma over 200 steps"),
        ("loss = 3", "'loss = 3' is no condition. Write METRIC > VALUE"),
        ("loss > ", "'loss >' is no condition. Write METRIC > VALUE"),
        ("loss > big", "a number is needed in the place of 'big'"),
        ("loss > nan", "a number is needed in the place of 'nan'"),
        ("disk.free < lots", "a size such as 20GiB is needed in the place of 'lots'"),
        ("loss > 3 sigma",
         "`over` gives the window of sigma and median alone. Write e.g. loss > 6 sigma over 200 steps"),
        ("loss > 3 over 200 steps", "`over` gives the window of sigma and median alone"),
        ("loss > 3 sigma over 200 stepz", "'loss > 3 sigma over 200 stepz' is no condition"),
        ("loss > 3 for 200", "a span is needed in the place of '200'. Write e.g. 200 steps, 3 evaluations or 10m"),
        ("loss > 3 for 0 steps", "0 steps: a whole number from 1 to 100000 is needed"),
        ("loss > 3 for 1000000 steps", "1000000 steps: a whole number from 1 to 100000 is needed"),
        ("lr no better for 3 steps", ("it is unknown whether higher or lower lr is better. Write 'no higher' or 'no "
                                      "lower'")),
        ("loss{tp} > 3", "loss has no label, so {tp} means nothing. Write loss"),
        ("loss > 3 loss > 4", "'loss > 3 loss > 4' is no condition. Write METRIC > VALUE"),
        ("loss > 3 and", "'loss > 3 and' is no condition"),
        ("loss > 1 and (lr > 0 or loss is nan)",
         "a condition has no brackets, and `and` binds first. Write a and (b or c) as a and b or a and c"),
        ("event crash", "there is no event 'crash'. Use one of failure, held, go_on, end, start, warning, checkpoint"),
        ("no step for 3 steps", "3 steps: a missing metric has no readings to count. Write a time, e.g. 10m"),
        ("loss rises by 0% over 1h", "0 is no amount to rise or fall by. Write one above 0"),
        ("__import__", "'__import__' is no condition. Write METRIC > VALUE"),
        ("loss > 3 or " * 200, "a condition has at most 1000 letters. Make several alerts of it"),
    ],
)  # fmt: skip
def test_invalid_conditions_are_rejected(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_condition(text)


@given(st.text(alphabet="losgradnmfe.0123456789 ><=(){}%GiBsh", max_size=60))
def test_any_text_parses_or_raises_value_error(text):
    with contextlib.suppress(ValueError):  # any other error is a defect of the grammar
        assert parse_condition(text)


def test_standard_alerts_parse_and_recommend_an_action():
    assert len({alert.name for alert in STANDARD}) == len(STANDARD) >= 15
    for alert in STANDARD:
        assert parse_condition(alert.when)
        assert alert.says.endswith(".")


def test_figures_have_names_units_and_help():
    for name, metric in METRICS.items():
        assert name == metric.name
        assert metric.help.endswith(".")
        assert metric.unit in ("", "s", "bytes", "bytes/s", "ratio", "W", "C", "Hz", "J", "kWh", "J/item")


BAD = """
alerts = "standard"
[[alert]]
name = "hot"
when = "gpu.temprature > 87 for 60s"
actions = ["hold", "opz"]
[[alert]]
name = "hot"
when = "loss > 3"
until = "loss <"
actions = ["hold", "stop"]
[[channel]]
name = "ops"
kind = "webhook"
url = "https://hooks.slack.com/services/T0/B0/PLANTED"
[[channel]]
name = "stop"
kind = "mail"
password = "env:PASSWORD"
[[channel]]
name = "run"
kind = "command"
[[sink]]
kind = "mlflow"
[[sink]]
kind = "mlflow"
url = "http://127.0.0.1:5000"
"""


def test_alert_mistakes_are_reported_with_lines_and_without_secrets():
    with pytest.raises(ConfigError) as caught:
        parse_config(BAD, "run.toml")
    assert sorted(map(str, caught.value.problems)) == sorted([
        "run.toml:5: alert.0.when=\"gpu.temprature > 87 for 60s\": there is no metric 'gpu.temprature'. Did you mean "
        "'gpu.temperature'?",
        "run.toml:6: alert.0.actions=opz: there is no such action and no such channel. Did you mean 'ops'?",
        "run.toml:8: alert.1.name=hot: another [[alert]] has this name. Use e.g. hot-2.",
        "run.toml:10: alert.1.until=\"loss <\": 'loss <' is no condition. Write METRIC > VALUE [sigma over 200 steps | "
        "of median over 200 steps | of plan] [for 60s], METRIC is nan, METRIC no better for 3 evaluations, METRIC "
        "rises by 20% over 1h, no METRIC for 10m, or event failure, joined by and, or.",
        "run.toml:11: alert.1.actions=hold, stop: only one of these can end training. Keep one of them.",
        "run.toml:15: channel.0.url=***: this address is or may contain a secret, and the run folder stores the "
        'config. Put it into a variable and write url = "env:HOOK_URL".',
        "run.toml:17: channel.1.name=stop: this is the name of a run's action. Use another name, such as ops.",
        'run.toml:16: channel.1.to=[]: mail needs an address. Use e.g. to = ["you@example.org"].',
        "run.toml:16: channel.1.security=none: the password would be sent unencrypted. Use security = "
        '"starttls" or "tls".',
        'run.toml:20: channel.2.command=[]: a program is needed. Use e.g. command = ["/usr/bin/logger"].',
        'run.toml:23: sink.0.url=none: kind=mlflow needs a server. Use e.g. url = "http://localhost:5000".',
        "run.toml:25: sink.1.name=mlflow: another [[sink]] has this name. Use e.g. mlflow-2.",
    ])  # fmt: skip


@pytest.mark.parametrize(
    "line", ['token = "PLANTED"', 'url = "http://user:PLANTED@host/"', 'url = "http://host/?key=PLANTED"',
             'password = "PLANTED"']
)  # fmt: skip
def test_secret_in_a_config_is_rejected_and_not_printed(line):
    with pytest.raises(ConfigError) as caught:
        parse_config(f'[[sink]]\nkind = "http"\n{line}\n', "run.toml")
    assert "PLANTED" not in str(caught.value)
    assert "run.toml:3: sink.0." in str(caught.value)


def test_alert_tables_round_trip():
    text = """
    alerts = "standard"
    [[alert]]
    name = "plateau"
    when = "eval.loss no better for 3 evaluations"
    actions = ["ops", "hold"]
    [[channel]]
    name = "ops"
    kind = "mail"
    to = ["a@b.c"]
    [[sink]]
    kind = "prometheus"
    """
    config = parse_config(text, "run.toml").config
    assert parse_config(format_config(config), "again.toml").config == config
