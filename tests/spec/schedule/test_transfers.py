"""Sends and receives match, arrive before they are needed, and block nobody for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.spec.schedule.cases import schedules
from weft.spec.schedule import (
    Action,
    Schedule,
    Transfer,
    build_schedule,
    makes,
    needs,
    parts,
    receiving_early,
    with_transfers,
)

EXAMPLES = settings(max_examples=60, deadline=None)


def run_blocking(programs) -> bool:
    """Carry programs out where a send waits until its receive is posted, and a rank does one thing at a time."""
    place = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while place[rank] < len(program):
                step = program[place[rank]]
                if isinstance(step, Transfer):
                    other = programs[step.peer]
                    partner = other[place[step.peer]] if place[step.peer] < len(other) else None
                    if not is_other_end(step, partner, rank):
                        break
                    place[step.peer] += 1
                place[rank] += 1
                moved = True
    return all(at == len(program) for at, program in zip(place, programs, strict=True))


def is_other_end(step: Transfer, partner, rank: int) -> bool:
    return (
        isinstance(partner, Transfer)
        and partner.way != step.way
        and partner.peer == rank
        and (partner.content, partner.stage, partner.microbatch) == (step.content, step.stage, step.microbatch)
    )


@EXAMPLES
@given(schedule=schedules())
def test_no_deadlock_where_sends_block(schedule):
    assert run_blocking(with_transfers(schedule))


@EXAMPLES
@given(schedule=schedules())
def test_early_receives_are_one_action_earlier_and_in_the_same_order(schedule):
    def receives(program):
        actions, found = 0, []
        for step in program:
            if isinstance(step, Transfer) and step.way == "receive":
                found.append((step, actions))
            actions += isinstance(step, Action)
        return found

    for program in with_transfers(schedule):
        early = receiving_early(program)
        is_receive = [isinstance(step, Transfer) and step.way == "receive" for step in early]
        rest = [step for step, one in zip(early, is_receive, strict=True) if not one]
        assert rest == [s for s in program if not (isinstance(s, Transfer) and s.way == "receive")]
        assert receives(early) == [(step, max(0, actions - 1)) for step, actions in receives(program)]


@EXAMPLES
@given(schedule=schedules())
def test_everything_arrives_before_it_is_used(schedule):
    for rank, program in enumerate(with_transfers(schedule)):
        here: set[Action] = set()
        for step in program:
            if isinstance(step, Transfer):
                forward = step.content == "activation"
                one = Action("F" if forward else "B", step.stage + (-1 if forward else 1), step.microbatch)
                assert (one in here) == (step.way == "send")
                here.add(one)
                continue
            assert all(need in here for need in needs(schedule, step)), (rank, step)
            here.update(makes(step))


@EXAMPLES
@given(schedule=schedules())
def test_steps_keep_their_order_and_each_boundary_is_crossed_once(schedule):
    programs = with_transfers(schedule)
    for program, steps in zip(programs, schedule.ranks, strict=True):
        assert [step for step in program if not isinstance(step, Transfer)] == [
            a for step in steps for a in parts(step)
        ]
    sends = [step for program in programs for step in program if isinstance(step, Transfer) and step.way == "send"]
    borders = sum(schedule.owner(s) != schedule.owner(s + 1) for s in range(schedule.num_stages - 1))
    assert len(sends) == len(set(sends)) == 2 * borders * schedule.num_microbatches


def test_lists_that_wait_for_each_other_are_found():
    ranks = ((Action("F", 0, 0), Action("BW", 0, 0)), (Action("BW", 1, 0), Action("F", 1, 0)))
    with pytest.raises(ValueError, match=r"schedule 1f1b: its ranks wait for each other at BW0\.0, BW1\.0"):
        with_transfers(Schedule("1f1b", 2, 1, 1, ranks))


def test_a_program_can_be_read():
    assert [" ".join(map(str, program)) for program in with_transfers(build_schedule("1f1b", 2, 2))] == [
        "F0.0 >x1.0@1 F0.1 >x1.1@1 <g0.0@1 BW0.0 <g0.1@1 BW0.1",
        "<x1.0@0 F1.0 <x1.1@0 BW1.0 >g0.0@0 F1.1 BW1.1 >g0.1@0",
    ]
