from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.sections import ScheduleSection
from weft.optim.schedule import lr_factor

schedules = st.builds(
    ScheduleSection,
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup_steps=st.none() | st.integers(0, 50),
    decay_steps=st.none() | st.integers(1, 50),
    final=st.floats(0, 1),
)


@given(schedules, st.integers(100, 300))
@settings(max_examples=100, deadline=None)
def test_schedule_warms_up_to_one_then_decays_to_final(schedule, num_steps):
    factors = [lr_factor(step, num_steps, schedule) for step in range(num_steps)]
    warm = schedule.warmup(num_steps)
    assert all(a < b for a, b in itertools.pairwise(factors[:warm]))
    assert warm == 0 or factors[warm - 1] == 1.0
    after = factors[warm:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[-1] == pytest.approx(1.0 if schedule.kind == "constant" else schedule.final, abs=1e-9)


def test_cosine_is_halfway_in_the_middle():
    schedule = ScheduleSection(kind="cosine", warmup_steps=0, final=0.2)
    assert lr_factor(49, 100, schedule) == pytest.approx(0.2 + 0.8 * 0.5)
    assert lr_factor(24, 100, schedule) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_wsd_is_constant_until_its_decay():
    schedule = ScheduleSection(kind="wsd", warmup_steps=10, decay_steps=20, final=0.0)
    assert [lr_factor(step, 100, schedule) for step in (9, 10, 50, 79)] == [1.0] * 4
    assert lr_factor(80, 100, schedule) == pytest.approx(0.95)
    assert lr_factor(89, 100, schedule) == pytest.approx(0.5)


def test_default_warmup_depends_on_the_number_of_steps():
    assert [ScheduleSection().warmup(steps) for steps in (5, 300, 100_000)] == [0, 15, 1000]
    assert ScheduleSection(warmup_steps=7).warmup(300) == 7
    assert lr_factor(14, 300, ScheduleSection()) == 1.0
