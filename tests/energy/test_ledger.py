"""Energy by cause: readings are attributed to the same causes as the time between them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.monitor.accounting import TimeLedger

CONFIG = {"energy": {"pue": 1.5, "grid": "100", "price": "0.2eur"}}
PACKAGE = {"name": "package-0", "label": "measured", "basis": "RAPL counter"}


def start(time: float, step: int = 0, **more: object):
    return {"event": "start", "time": time, "step": step, "config": CONFIG, **more}


def first_reading(time: float, **more: object):
    return {"event": "energy", "time": time, "step": 0, "energy_j": 0.0, "num_hosts": 1, "devices": [PACKAGE], **more}


def reading(time: float, joules: float, **more: object):
    return {"event": "energy", "time": time, "step": 0, "energy_j": joules, **more}


def step(time: float, number: int, total: float = 1.0, data: float = 0.0, **more: object):
    seconds = {"total": total, "data": data}
    return {
        "event": "step",
        "time": time,
        "step": number,
        "tokens": 100,
        "tokens_per_s": 1.0,
        "seconds": seconds,
    } | more


def joules_of(events) -> tuple[dict[str, float], TimeLedger]:
    ledger = TimeLedger().feed_all(events)
    return {cause: round(one, 6) for cause, one in ledger.joules().items()}, ledger


def test_steps_evaluation_saves_and_data_are_separated():
    events = [
        start(0.0),
        first_reading(0.0),
        step(1.0, 1),
        step(2.0, 2, data=0.25),
        reading(2.0, 400.0),
        {"event": "eval", "time": 5.0, "step": 2, "loss": 1.0},
        reading(5.0, 700.0),
        step(6.5, 3),
        {"event": "checkpoint", "time": 6.6, "step": 2, "stall_s": 0.5},
        reading(6.5, 850.0),
        {"event": "end", "time": 7.0, "reason": "finished"},
        reading(7.0, 900.0),
    ]
    found, ledger = joules_of(events)
    assert found == {"productive": 450.0, "data": 50.0, "evaluation": 300.0, "checkpoint": 50.0, "other": 50.0}
    assert ledger.energy.total_j == pytest.approx(900.0)
    summary = ledger.energy_summary()
    assert summary.kwh == pytest.approx(900 * 1.5 / 3.6e6)
    assert summary.j_per_item == pytest.approx(900 * 1.5 / 300)
    assert summary.cost == pytest.approx(0.2 * summary.kwh)
    assert summary.co2_g == pytest.approx(100 * summary.kwh)
    assert summary.text("tokens") == "375 mWh (measured), 4.5 J per token, 7.5e-05 EUR, 0.0375 g CO2"


def test_repeated_steps_are_lost_work_and_time_without_reading_is_unmeasured():
    events = [
        start(0.0),
        first_reading(0.0),
        *(step(float(n), n) for n in range(1, 5)),
        reading(4.0, 400.0),
        step(5.0, 5),  # no reading follows before the kill
        start(8.0, step=2),
        first_reading(8.0),
        step(9.0, 3),
        step(10.0, 4),
        reading(10.0, 300.0),
    ]
    found, ledger = joules_of(events)
    assert found == {"productive": 500.0, "lost work": 200.0}
    assert ledger.energy.num_items == 400
    assert ledger.energy.unmeasured_s == {"lost work": 1.0, "restart": 3.0}
    assert ledger.seconds()["lost work"] == 3.0


def test_step_that_is_forgotten_before_its_reading_is_lost_work():
    events = [start(0.0), first_reading(0.0), step(1.0, 1), step(2.0, 2), step(3.0, 2), reading(3.0, 300.0)]
    assert joules_of(events)[0] == {"productive": 200.0, "lost work": 100.0}


def test_skipped_step_is_lost_work():
    events = [start(0.0), first_reading(0.0), step(1.0, 1, skipped="nan"), step(2.0, 2), reading(2.0, 100.0)]
    assert joules_of(events)[0] == {"productive": 50.0, "lost work": 50.0}


def test_slow_first_step_is_divided_as_its_time():
    events = [start(0.0, plan="compile=on"), first_reading(0.0), step(9.0, 1, total=9.0), reading(9.0, 900.0)]
    events += [event for n in range(2, 6) for event in (step(8.0 + n, n), reading(8.0 + n, 900.0 + 100.0 * (n - 1)))]
    found, ledger = joules_of(events)
    assert found == {"compile": 800.0, "productive": 500.0}
    assert {cause: one for cause, one in ledger.seconds().items() if one} == {"compile": 8.0, "productive": 5.0}


def test_other_machines_are_added_from_their_own_readings():
    events = [
        start(0.0),
        first_reading(0.0, num_hosts=2),
        step(1.0, 1),
        reading(1.0, 100.0),
        {"event": "eval", "time": 2.0, "step": 1, "loss": 1.0},
        reading(2.0, 110.0),
        {"event": "figures", "time": 2.1, "energy_others": [1, 2], "energy_others_j": 60.0, "estimated_others_j": 60.0},
        step(3.0, 2),
        reading(3.0, 210.0),
        {"event": "figures", "time": 3.1, "energy_others_j": 110.0, "estimated_others_j": 110.0},
    ]
    found, ledger = joules_of(events)
    assert found == {"productive": 200.0 + 30.0 + 50.0, "evaluation": 10.0 + 30.0}
    assert ledger.energy_summary().label == "34% estimated"
    assert ledger.energy_summary().notes == ("other machines: 2 devices unmeasured (weft energy meters, on each)",)


def test_other_machines_without_a_reading_are_named():
    events = [start(0.0), first_reading(0.0, num_hosts=3), step(1.0, 1), reading(1.0, 5.0)]
    notes = joules_of(events)[1].energy_summary().notes
    assert notes == ("2 other machines: no reading (they report every monitor.every)",)


def test_meter_that_starts_later_counts_only_its_steps():
    events = [start(0.0), *(step(float(n), n) for n in (1, 2, 3)), start(10.0, step=3), first_reading(10.0)]
    events += [step(11.0, 4), reading(11.0, 70.0), start(20.0, step=1), first_reading(20.0), step(21.0, 2)]
    events += [reading(21.0, 30.0)]
    found, ledger = joules_of(events)
    assert found == {"productive": 30.0, "lost work": 70.0}
    assert ledger.energy.num_items == 100


def test_run_without_meter_is_unmeasured_not_zero():
    missing = {"name": "packages", "label": "unmeasured", "basis": "no counter"}
    event = {"event": "energy", "time": 0.0, "step": 0, "num_hosts": 1, "devices": [missing]}
    _, ledger = joules_of([start(0.0), event, step(1.0, 1)])
    summary = ledger.energy_summary()
    assert (summary.kwh, summary.label) == (None, "unmeasured")
    assert summary.lines("tokens") == ["energy  unmeasured: packages: no counter"]
    assert summary.as_json()["kwh"] is None


def test_counter_that_does_not_advance_is_unmeasured_not_zero():
    _, ledger = joules_of([start(0.0), first_reading(0.0), step(1.0, 1), reading(1.0, 0.0)])
    assert ledger.energy_summary().lines("tokens") == ["energy  unmeasured: the counters have not advanced"]


def test_damaged_events_are_ignored():
    events = [start(0.0), first_reading(0.0, devices="x"), reading(1.0, "nan"), reading(1.0, None), step(1.0, 1)]
    events += [reading(1.0, 5.0), reading(1.0, 2.0), {"event": "energy", "time": 2.0, "devices": [3, {}]}]
    events[0]["config"] = {"energy": {"pue": "x", "grid": 3, "price": []}}
    ledger = joules_of(events)[1]
    assert ledger.energy.total_j == 5.0
    assert ledger.energy_summary().cost is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_energy_is_conserved_over_any_run(data):
    """All joules that were read are attributed, and steps are kept or lost as their time is."""
    time, number, joules, total = 0.0, 0, 0.0, 0.0
    events = [start(0.0), first_reading(0.0)]
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["step", "eval", "read", "start", "checkpoint", "skip"]))
        time += 1.0
        if kind in ("step", "skip"):
            number += 1
            events.append(step(time, number, **({"skipped": "nan"} if kind == "skip" else {})))
        elif kind == "eval":
            events.append({"event": "eval", "time": time, "step": number, "loss": 1.0})
        elif kind == "read":
            grown = data.draw(st.floats(0, 1000))
            joules, total = joules + grown, total + grown
            events.append(reading(time, joules))
        elif kind == "checkpoint":
            events.append({"event": "checkpoint", "time": time, "step": number, "stall_s": 0.25})
        else:
            number = data.draw(st.integers(0, number))
            events += [start(time, step=number), first_reading(time)]
            joules = 0.0
    ledger = TimeLedger().feed_all(events)
    assert sum(ledger.joules().values()) == pytest.approx(total, abs=1e-6)
    assert ledger.energy.total_j == pytest.approx(total, abs=1e-6)
