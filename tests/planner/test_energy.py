"""Plans by energy: their order, the front of time against energy, power caps, and refusals."""

from __future__ import annotations

import json

import pytest

from weft.cli.app import run as weft
from weft.config.energy import EnergyPrice, carbon_intensity, drawn_watts, grids
from weft.errors import ConfigError
from weft.planner.report.energy_front import energy_front, grid_of, ranked_by
from weft.planner.report.scenario import change
from weft.planner.search.best_plans import answer
from weft.planner.search.candidate import BUILDING, HOST_WATTS
from weft.planner.search.question import Question


@pytest.fixture(scope="module")
def found():
    return answer(Question.of("gpt2", "2xh100", seq_len=1024, global_batch=64))


def test_plans_are_ordered_by_energy(found):
    ranked = ranked_by(found, "energy")
    kwh = [one.cost().energy_kwh for one in ranked]
    assert kwh == sorted(kwh)
    assert sorted(str(one.plan) for one in ranked) == sorted(str(one.plan) for one in found)
    assert ranked_by(found, "co2").ranked == ranked.ranked
    assert ranked_by(found, "time") is found


def test_energy_of_a_step_follows_the_documented_formula(found):
    best = found.ranked[0]
    watts = best.busy * 700 + (1 - best.busy) * 0.3 * 700 + HOST_WATTS
    assert drawn_watts(700, best.busy) + HOST_WATTS == pytest.approx(watts)
    assert best.cost().energy_kwh == pytest.approx(2 * watts * BUILDING * best.step_s / 3.6e6)


def test_front_trades_time_for_energy_and_no_point_beats_another(found):
    front = energy_front(ranked_by(found, "energy"))
    assert len(front) >= 2
    assert front[0].watts == 700
    assert front[-1].watts < 700
    times, kwh = [one.candidate.step_s for one in front], [one.kwh for one in front]
    assert times == sorted(times)
    assert kwh == sorted(set(kwh), reverse=True)
    for one in front[1:]:  # a cap slows matrix products by (cap / 700) ** 0.85
        same = next(base for base in found if base.plan == one.candidate.plan)
        assert one.candidate.terms["gemm"] == pytest.approx(same.terms["gemm"] * (700 / one.watts) ** 0.85, rel=0.02)


def test_power_is_another_name_of_watts(found):
    question = found.question
    assert change(question, "power=300W") == change(question, "watts=300")
    with pytest.raises(ConfigError, match=r"watts=900: h100 draws 700. Use less."):
        change(question, "power=900W")


def test_cap_of_a_device_without_a_measured_rate_is_refused():
    question = Question.of("gpt2", "2xm4", seq_len=1024, global_batch=64)
    with pytest.raises(ConfigError, match=r"what m4 draws is not known"):
        change(question, "power=10W")
    with pytest.raises(ConfigError, match=r"sort=energy: the power of m4 is not known. Describe it: CLUSTER 8xmine"):
        ranked_by(answer(question), "energy")
    question = Question.of("gpt2", "2xh100-pcie", seq_len=1024, global_batch=64)
    with pytest.raises(ConfigError, match=r"watts=200: the speed of h100-pcie below 350 W is not known"):
        change(question, "power=200W")


@pytest.mark.parametrize(("text", "grams"), [("france", 56), ("France", 56), ("369", 369), ("369g", 369), (".5", 0.5)])
def test_grids(text, grams):
    assert carbon_intensity(text) == grams
    assert min(grids().values()) > 0


@pytest.mark.parametrize("text", ["", "0", "-3", "1e9", "nan", "mars", "369kg"])
def test_unknown_grids_are_refused(text):
    with pytest.raises(ConfigError, match=f"grid={text}: it is neither grams"):
        grid_of(text, "time")
    with pytest.raises(ConfigError, match=r"sort=co2: the carbon intensity of the electricity is needed"):
        grid_of(None, "co2")


@pytest.mark.parametrize("text", ["0.25eur", "$0.25", "0.25 EUR/kWh", "0.25€"])
def test_prices(text):
    found = EnergyPrice.parse(text)
    assert found.per_kwh == 0.25
    assert found.currency in ("EUR", "USD")


def test_command_prints_energy_and_front(capsys):
    options = ["gpt2", "2xh100", "--seq-len", "1024", "--global-batch", "64", "--sort", "co2", "--grid", "france"]
    assert weft(["plan", *options, "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("kWh/B tokens", "kg CO2/B tokens", "time against energy, estimated"))
    assert weft(["plan", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sort"], found["grid_g_per_kwh"]) == ("co2", 56)
    assert found["energy_front"][0]["device_watts"] == 700


def test_command_orders_clusters_by_energy(capsys):
    options = ["gpt2", "2xa100,2xh100", "--seq-len", "1024", "--global-batch", "64", "--json"]
    assert weft(["plan", *options, "--run", "tokens=1B", "--sort", "energy"]) == 0
    rows = json.loads(capsys.readouterr().out)
    kwh = [row["run"]["kwh"] for row in rows]
    assert kwh == sorted(kwh)
    assert weft(["plan", *options, "--run", "tokens=1B", "--sort", "co2"]) == 2
    assert "Add grid=france or grid=369 to --run" in capsys.readouterr().err
