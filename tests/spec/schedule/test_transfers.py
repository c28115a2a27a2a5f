"""Sends and receives match, complete before they are needed, and never deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.spec.schedule.cases import schedules
from weft.config.pipeline_schedule import (
    Action,
    Schedule,
    Transfer,
    arrived_by,
    build_schedule,
    flows,
    makes,
    needs,
    parts,
    receiving_early,
    with_transfers,
)

EXAMPLES = settings(max_examples=60, deadline=None)


def run_blocking(programs) -> bool:
    """Run programs with blocking sends. Return whether all ranks finish."""
    position = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                step = program[position[rank]]
                if isinstance(step, Transfer):
                    other = programs[step.peer]
                    partner = other[position[step.peer]] if position[step.peer] < len(other) else None
                    if not is_other_end(step, partner, rank):
                        break
                    position[step.peer] += 1
                position[rank] += 1
                moved = True
    return all(at == len(program) for at, program in zip(position, programs, strict=True))


def is_other_end(step: Transfer, partner, rank: int) -> bool:
    return (
        isinstance(partner, Transfer)
        and partner.way != step.way
        and partner.peer == rank
        and (partner.content, partner.stage, partner.microbatch) == (step.content, step.stage, step.microbatch)
    )


@EXAMPLES
@given(schedule=schedules())
def test_blocking_sends_do_not_deadlock(schedule):
    assert run_blocking(with_transfers(schedule))


@EXAMPLES
@given(schedule=schedules())
def test_early_receives_are_one_action_earlier_in_order(schedule):
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
def test_each_flow_has_the_same_order_at_both_ends(schedule):
    """A rank may post receives early because each flow is a separate queue with one order."""

    def along(program, rank, flow):
        transfers = [step for step in program if isinstance(step, Transfer)]
        ends = [(rank, one.peer) if one.way == "send" else (one.peer, rank) for one in transfers]
        return [one[1:4] for one, (a, b) in zip(transfers, ends, strict=True) if (one.content, a, b) == flow]

    programs = with_transfers(schedule)
    known = {flow for rank in range(schedule.num_ranks) for flow in flows(schedule, rank)}
    for flow in known:
        _, sender, receiver = flow
        assert flow in flows(schedule, sender)
        assert flow in flows(schedule, receiver)
        sent = along(receiving_early(programs[sender]), sender, flow)
        assert sent == along(receiving_early(programs[receiver]), receiver, flow)
        assert sent
    for rank, program in enumerate(programs):
        for one in (step for step in program if isinstance(step, Transfer)):
            assert (one.content, *((rank, one.peer) if one.way == "send" else (one.peer, rank))) in known


@EXAMPLES
@given(schedule=schedules())
def test_tensors_are_received_before_use(schedule):
    for rank, program in enumerate(with_transfers(schedule)):
        available: set[Action] = set()
        for step in program:
            if isinstance(step, Transfer):
                forward = step.content == "activation"
                one = Action("F" if forward else "B", step.stage + (-1 if forward else 1), step.microbatch)
                assert (one in available) == (step.way == "send")
                available.add(one)
                continue
            assert all(need in available for need in needs(schedule, step)), (rank, step)
            available.update(makes(step))


@EXAMPLES
@given(schedule=schedules())
def test_released_tensors_were_used_by_the_receiver(schedule):
    """Check that tensors reported as received by a message were used by the receiver before it sent the message."""
    programs = with_transfers(schedule)
    for rank, program in enumerate(programs):
        sends = [step[1:4] for step in program if isinstance(step, Transfer) and step.way == "send"]
        receives = {step[1:4]: step.peer for step in program if isinstance(step, Transfer) and step.way == "receive"}
        found = arrived_by(programs, rank)
        released = [key for keys in found.values() for key in keys]
        assert found.keys() == receives.keys()
        assert len(set(released)) == len(released)
        assert set(released) <= set(sends)
        for key, received in found.items():
            other = programs[receives[key]]
            sent_at = next(
                at for at, one in enumerate(other) if isinstance(one, Transfer) and one[:4] == ("send", *key)
            )
            for content, stage, microbatch in received:
                kinds = ("F",) if content == "activation" else ("B", "BW")
                used = [Action(kind, stage, microbatch) for kind in kinds]
                assert any(step in used for step in other[:sent_at] if isinstance(step, Action))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved", "zb_interleaved", "zb_v", "dualpipe_v"])
def test_pending_sends_do_not_grow_with_microbatches(name):
    """Check all schedules except gpipe, which sends all activations first."""

    def most_pending(num_microbatches):
        virtual = 1 if name in ("1f1b", "zb_h1") else 2
        programs = with_transfers(build_schedule(name, 4, num_microbatches, virtual))
        found = 0
        for rank, program in enumerate(programs):
            arrived, pending = arrived_by(programs, rank), set()
            for step in program:
                if isinstance(step, Transfer) and step.way == "send":
                    pending.add(step[1:4])
                    found = max(found, len(pending))
                elif isinstance(step, Transfer):  # received no earlier than posted
                    pending.difference_update(arrived[step[1:4]])
        return found

    assert most_pending(64) == most_pending(16) <= 20


@EXAMPLES
@given(schedule=schedules())
def test_steps_keep_order_and_each_boundary_is_sent_once(schedule):
    programs = with_transfers(schedule)
    for program, steps in zip(programs, schedule.ranks, strict=True):
        assert [step for step in program if not isinstance(step, Transfer)] == [
            a for step in steps for a in parts(step)
        ]
    sends = [step for program in programs for step in program if isinstance(step, Transfer) and step.way == "send"]
    boundaries = sum(schedule.owner(s) != schedule.owner(s + 1) for s in range(schedule.num_stages - 1))
    assert len(sends) == len(set(sends)) == 2 * boundaries * schedule.num_microbatches


def test_deadlocked_schedules_are_detected():
    ranks = ((Action("F", 0, 0), Action("BW", 0, 0)), (Action("BW", 1, 0), Action("F", 1, 0)))
    with pytest.raises(ValueError, match=r"schedule 1f1b: deadlock, its ranks wait for each other at BW0\.0, BW1\.0"):
        with_transfers(Schedule("1f1b", 2, 1, 1, ranks))


def test_program_text_is_readable():
    assert [" ".join(map(str, program)) for program in with_transfers(build_schedule("1f1b", 2, 2))] == [
        "F0.0 >x1.0@1 F0.1 >x1.1@1 <g0.0@1 BW0.0 <g0.1@1 BW0.1",
        "<x1.0@0 F1.0 <x1.1@0 BW1.0 >g0.0@0 F1.1 BW1.1 >g0.1@0",
    ]
