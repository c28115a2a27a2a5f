"""When activations and gradients travel: a rank's list with its sends and receives put in their places.

All transfers of a step lie in one order, and each rank posts its own in that order. So no deadlock is possible, even
where a send waits for its receive: the next transfer of the order has both its ends free.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from weft.spec.schedule.action import Action, Step, parts
from weft.spec.schedule.dependencies import makes, needs
from weft.spec.schedule.schedule import Schedule


class Transfer(NamedTuple):
    """One end of a transfer. peer: the other rank (on the axis pp).

    content: "activation", the input of `stage`, or "gradient", of the output of `stage`; of one microbatch.
    """

    way: Literal["send", "receive"]
    content: Literal["activation", "gradient"]
    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        arrow = ">" if self.way == "send" else "<"
        return f"{arrow}{'x' if self.content == 'activation' else 'g'}{self.stage}.{self.microbatch}@{self.peer}"


#: A rank's list with its transfers; of a pair, the forward and then the backward.
Program = list[Action | Transfer]


def with_transfers(schedule: Schedule) -> list[Program]:
    """Return the ranks' lists, action by action, with receives before and sends after what needs and makes them.

    The receive is placed among the receiver's steps at the moment at which the sender sends, when all steps take
    one unit of time.

    Raises:
        ValueError: where the lists wait for each other in a circle.
    """
    programs: list[Program] = [[] for _ in schedule.ranks]
    place, done = [0] * schedule.num_ranks, set[Action]()
    remaining = sum(map(len, schedule.ranks))
    while remaining:
        # All ranks that can, take one step; what they made is sent after all of them have.
        ready = [
            (rank, steps[place[rank]])
            for rank, steps in enumerate(schedule.ranks)
            if place[rank] < len(steps) and done.issuperset(_step_needs(schedule, steps[place[rank]]))
        ]
        if not ready:
            waiting = ", ".join(
                str(steps[at]) for steps, at in zip(schedule.ranks, place, strict=True) if at < len(steps)
            )
            raise ValueError(f"schedule {schedule.name}: deadlock, its ranks wait for each other at {waiting}")
        for rank, _ in ready:
            place[rank] += 1
        # A pair's forward is sent before its backward begins.
        for half in range(2):
            acting = [(rank, parts(step)[half]) for rank, step in ready if half < len(parts(step))]
            for rank, action in acting:
                programs[rank].append(action)
                done.update(makes(action))
            for rank, action in acting:
                _send(schedule, programs, rank, action)
        remaining -= len(ready)
    return programs


def receiving_early(program: Program) -> Program:
    """Post each receive before the action beside which its message travels, and not after it.

    The message is then there when that action ends. Only where none of what travels is in the way of a computation,
    nor of another message, by content, sender and receiver: two ranks may each post a receive before they send.
    """
    found: Program = []
    place = 0  # where receives that come next are posted: before the last action
    for step in program:
        if isinstance(step, Transfer) and step.way == "receive":
            found.insert(place, step)
            place += 1
            continue
        if isinstance(step, Action):
            place = len(found)
        found.append(step)
    return found


def flows(schedule: Schedule, rank: int) -> list[tuple[str, int, int]]:
    """List what this rank sends and receives in a step: content, sender and receiver, each once."""
    found: dict[tuple[str, int, int], None] = {}
    for stage in range(1, schedule.num_stages):
        above, below = schedule.owner(stage - 1), schedule.owner(stage)
        if above != below and rank in (above, below):
            found |= {("activation", above, below): None, ("gradient", below, above): None}
    return list(found)


#: Names a message: content, stage and microbatch of its transfer.
Key = tuple[str, int, int]


def arrived_by(programs: list[Program], rank: int) -> dict[Key, list[Key]]:
    """List what this rank has sent and need not keep: for each message that it receives, those that are surely there.

    A message from another rank says that whatever that rank has worked with before is no longer on its way to it.
    """
    sent = {(step.peer, *step[1:4]) for step in programs[rank] if isinstance(step, Transfer) and step.way == "send"}
    found: dict[Key, list[Key]] = {}
    for peer in {step.peer for step in programs[rank] if isinstance(step, Transfer)}:
        there: list[Key] = []
        for step in programs[peer]:
            if isinstance(step, Action):
                key = ("activation" if step.kind == "F" else "gradient", step.stage, step.microbatch)
                if step.kind != "W" and (peer, *key) in sent:
                    there.append(key)
            elif step.way == "send" and step.peer == rank:
                found[step[1:4]] = there
                there = []
    return found


def _step_needs(schedule: Schedule, step: Step) -> list[Action]:
    return [need for action in parts(step) for need in needs(schedule, action)]


def _send(schedule: Schedule, programs: list[Program], rank: int, action: Action) -> None:
    """Put the transfer of what `action` made into both ranks' lists, where another rank needs it."""
    kind, stage, microbatch = action
    if kind == "W" or (kind == "F" and stage == schedule.num_stages - 1) or (kind != "F" and stage == 0):
        return
    target = stage + 1 if kind == "F" else stage - 1
    peer = schedule.owner(target)
    if peer != rank:
        content = "activation" if kind == "F" else "gradient"
        programs[rank].append(Transfer("send", content, target, microbatch, peer))
        programs[peer].append(Transfer("receive", content, target, microbatch, rank))
