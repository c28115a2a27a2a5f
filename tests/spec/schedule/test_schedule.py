"""Every schedule is a legal order of the same work, with the activation memory of its paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.spec.schedule.cases import schedules
from weft.config.pipeline_schedule import Action, Pair, build_schedule, makes, parts, schedule_of
from weft.config.plan import SCHEDULES, Plan
from weft.errors import PlanError

EXAMPLES = settings(max_examples=60, deadline=None)


@EXAMPLES
@given(schedule=schedules())
def test_every_stage_runs_each_microbatch_once_per_pass(schedule):
    for rank, steps in enumerate(schedule.ranks):
        actions = [one for step in steps for action in parts(step) for one in makes(action)]
        expected = {
            Action(kind, stage, microbatch)
            for stage in schedule.stages_of(rank)
            for microbatch in range(schedule.num_microbatches)
            for kind in ("F", "B", "W")
        }
        assert len(actions) == len(expected)
        assert set(actions) == expected


@EXAMPLES
@given(schedule=schedules())
def test_passes_of_a_microbatch_are_in_order(schedule):
    for steps in schedule.ranks:
        index_of = {
            one: index + (one.kind == "W") / 2
            for index, step in enumerate(steps)
            for action in parts(step)
            for one in makes(action)
        }
        for one, index in index_of.items():
            if one.kind != "F":
                before = one._replace(kind="F" if one.kind == "B" else "B")
                assert index_of[before] < index


@EXAMPLES
@given(schedule=schedules())
def test_stages_are_on_their_owner_ranks(schedule):
    every = sorted(stage for rank in range(schedule.num_ranks) for stage in schedule.stages_of(rank))
    assert every == list(range(schedule.num_stages))
    for rank in range(schedule.num_ranks):
        assert all(schedule.owner(stage) == rank for stage in schedule.stages_of(rank))


def chunks_in_flight(schedule, rank: int) -> int:
    """Return the planner's formula for stage activations in flight, with enough microbatches to fill the pipeline."""
    p, v, m = schedule.num_ranks, schedule.virtual_stages, schedule.num_microbatches
    return {
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1),
        "zb_h1": min(m, p),
        "zb_interleaved": v * p,
        "zb_v": 2 * p,
        "dualpipe_v": 2 * p + 1,
    }[schedule.name]


@EXAMPLES
@given(schedule=schedules())
def test_activations_in_flight_match_the_formula(schedule):
    for rank in range(schedule.num_ranks):
        expected = chunks_in_flight(schedule, rank)
        if schedule.name in ("zb_v", "dualpipe_v") and schedule.num_microbatches < 2 * schedule.num_ranks + 1:
            assert schedule.in_flight(rank) <= expected
        else:
            assert schedule.in_flight(rank) == expected


def test_schedule_text_matches_the_papers_figure():
    lists = build_schedule("zb_h1", 3, 3).ranks
    assert [" ".join(map(str, steps)) for steps in lists] == [
        "F0.0 F0.1 F0.2 B0.0 W0.0 B0.1 W0.1 B0.2 W0.2",
        "F1.0 F1.1 B1.0 F1.2 B1.1 W1.0 B1.2 W1.1 W1.2",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 W2.0 W2.1 W2.2",
    ]
    assert str(build_schedule("dualpipe_v", 2, 4, 2).ranks[1][6]) == "F2.2+BW1.0"


def test_dualpipe_overlaps_most_of_its_forwards():
    steps = build_schedule("dualpipe_v", 4, 32, 2).ranks[0]
    assert sum(isinstance(step, Pair) for step in steps) > 50


def test_each_schedule_name_has_a_generator():
    for name in SCHEDULES:
        virtual = 2 if "interleaved" in name or name.endswith("_v") else 1
        plan = Plan(pp=2, schedule=name, microbatches=4, virtual_stages=virtual)
        assert schedule_of(plan).name == name


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            Plan(pp=4, schedule="interleaved", microbatches=6, virtual_stages=2),
            "microbatches=6: schedule=interleaved runs microbatches in groups of pp=4. Use microbatches=4 or 8.",
        ),
        (
            Plan(pp=4, schedule="dualpipe_v", microbatches=6, virtual_stages=2),
            "microbatches=6: schedule=dualpipe_v needs at least 8 with pp=4. Use microbatches=8 or more.",
        ),
        (
            Plan(pp=4, schedule="zb_v", microbatches=6),
            "virtual_stages=1: schedule=zb_v needs 2 stages on each rank. Use virtual_stages=2.",
        ),
        (
            Plan(pp=4, schedule="interleaved", microbatches=4),
            "virtual_stages=1: schedule=interleaved needs 2 or more stages on each rank. Use virtual_stages=2 or more.",
        ),
    ],
)
def test_unsupported_sizes_are_rejected(plan, text):
    with pytest.raises(PlanError) as caught:
        schedule_of(plan)
    assert str(caught.value) == text
