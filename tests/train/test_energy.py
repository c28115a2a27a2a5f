"""Energy of whole runs, with an engine without torch whose steps advance a fake RAPL counter."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from tests.energy.fakes import rapl
from tests.train.fake_engine import FakeEngine
from weft.config.files import load_config
from weft.errors import ActionAsked, ConfigError
from weft.files import replace_text
from weft.monitor.accounting import TimeLedger
from weft.monitor.events import read_events
from weft.train.loop import energy_hook
from weft.train.loop.energy_hook import joules_of_earlier_starts
from weft.train.preparation import prepare_run
from weft.train.rank_run import Start, run_rank

ENGINE = "tests.train.fake_engine:FakeEngine"
STEP_J, EVALUATION_J = 3.0, 40.0


def advance(counter: Path, joules: float) -> None:
    """Advance a counter, unless it is missing."""
    if counter.exists():
        replace_text(counter, f"{int(counter.read_text()) + int(1e6 * joules)}\n")


@pytest.fixture
def counter(tmp_path, monkeypatch) -> Path:
    """A counter that advances with steps and evaluations. Readings may follow each other at any interval."""
    counter = rapl(tmp_path / "sys")
    monkeypatch.setenv("WEFT_SYSFS", str(tmp_path / "sys"))
    monkeypatch.setattr(energy_hook, "_LEAST_S", 0.0)
    step, evaluate = FakeEngine.step, FakeEngine.evaluate

    def counted_step(engine, *args):
        advance(counter, STEP_J)
        time.sleep(0.005)
        return step(engine, *args)

    def counted_evaluation(engine):
        advance(counter, EVALUATION_J)
        time.sleep(0.005)  # events have times in milliseconds
        return evaluate(engine)

    monkeypatch.setattr(FakeEngine, "step", counted_step)
    monkeypatch.setattr(FakeEngine, "evaluate", counted_evaluation)
    return counter


def train(tmp_path: Path, *settings: str):
    words = ["task=tests.train.fake_engine:LineTask", f"run.dir={tmp_path}", "run.name=line", "eval.every=4",
             "train.steps=12", "train.global_batch=8", "checkpoint.every=3", *settings]  # fmt: skip
    folder, terminal = prepare_run(load_config(None, words).config, world_size=1), io.StringIO()
    run_rank(folder, None, terminal, Start(engine=ENGINE))
    return folder, terminal.getvalue()


def test_energy_of_steps_and_evaluations_is_separate(tmp_path, counter):
    folder, text = train(tmp_path, "energy.pue=2", "energy.price=0.5eur", "energy.grid=100")
    ledger = TimeLedger().feed_all(read_events(folder.events))
    found = ledger.joules()
    assert found["evaluation"] == pytest.approx(3 * EVALUATION_J)
    assert ledger.energy.total_j == pytest.approx(12 * STEP_J + 3 * EVALUATION_J)
    assert ledger.energy.num_items == 12 * 8
    # 156 J x 2 / 96 points
    assert "energy  86.7 mWh (measured), 3.25 J per point, 4.33e-05 EUR, 0.00867 g CO2" in text
    readings = [event for event in read_events(folder.events) if event["event"] == "energy"]
    assert readings[0]["devices"] == [{"name": "package-0", "label": "measured", "basis": "RAPL counter"}]
    assert readings[-1]["figures"]["energy.kwh"] == pytest.approx(156 * 2 / 3.6e6, rel=1e-4)


def test_budget_pauses_the_run_over_all_its_starts(tmp_path, counter):
    budget = f"energy.budget={4 * STEP_J / 3.6e6 * 0.9}"
    with pytest.raises(ActionAsked, match=r"has used 3.33 mWh of energy.budget=3e-06 kWh; to continue, add") as paused:
        train(tmp_path, budget, "train.steps=600", "monitor.every=1s", "eval.every=0")
    assert paused.value.action == "hold"


def test_energy_of_earlier_starts_counts(tmp_path, counter):
    folder, _ = train(tmp_path, "train.steps=4")
    used = joules_of_earlier_starts(folder.events)
    assert used == pytest.approx(4 * STEP_J + EVALUATION_J)
    folder, _ = train(tmp_path, "train.steps=8", f"energy.budget={2 * used / 3.6e6 + 1}")
    assert read_events(folder.events)[-2]["reason"] == "finished"
    with pytest.raises(ActionAsked, match=r"energy.budget"):
        train(tmp_path, "train.steps=600", f"energy.budget={used / 3.6e6 * 1.1}")


def test_counter_that_disappears_is_a_warning(tmp_path, counter, monkeypatch):
    step = FakeEngine.step

    def losing_step(engine, batches, number, lr_factor, following=None):
        if number == 6:
            counter.unlink()
        return step(engine, batches, number, lr_factor, following)

    monkeypatch.setattr(FakeEngine, "step", losing_step)
    folder, _ = train(tmp_path)
    events = read_events(folder.events)
    warnings = [event["text"] for event in events if event["event"] == "warning"]
    assert warnings == [
        f"energy: package-0 cannot be read: {counter}: No such file or directory; its energy is missing until it can."
    ]
    assert events[-2]["reason"] == "finished"


def test_run_without_counter_says_so_and_a_budget_is_refused(tmp_path, counter):
    counter.unlink()
    folder, text = train(tmp_path)
    assert f"energy  unmeasured: packages: {counter}: No such file or directory. energy.cpu_watts makes an" in text
    assert TimeLedger().feed_all(read_events(folder.events)).energy_summary().kwh is None
    with pytest.raises(ConfigError, match=r"energy.budget=1: the energy of this run cannot be measured here \("):
        train(tmp_path, "energy.budget=1", "run.name=other")


def test_estimate_is_labelled(tmp_path, counter):
    counter.unlink()
    _, text = train(tmp_path, "energy.cpu_watts=100")
    assert "(estimated)" in text
    assert "packages: estimate: 100 W x (0.3 + 0.7 x CPU utilization)" in text


def test_meter_can_be_turned_off(tmp_path, counter):
    folder, text = train(tmp_path, "energy.meter=false")
    assert not [event for event in read_events(folder.events) if event["event"] == "energy"]
    assert "energy" not in text
