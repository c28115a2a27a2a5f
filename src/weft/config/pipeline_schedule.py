"""Pipeline schedules: each rank's ordered list of actions in one optimizer step, and the transfers between ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from weft.config.plan import SCHEDULES, Plan
from weft.errors import PlanError, Problem

#: F: forward. B: gradient of the input. W: gradient of the weights. BW: both gradients in one backward.
Kind = Literal["F", "B", "W", "BW"]
KINDS: tuple[Kind, ...] = ("F", "B", "W", "BW")


class Action(NamedTuple):
    """Forward or backward of one microbatch on one stage. Stages are counted from the embedding, over all ranks."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a backward on two stages of one rank: one's communication overlaps with the other's compute."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Step = Action | Pair


def parts(step: Step) -> tuple[Action, ...]:
    """Return the actions of a step, one or two."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


class Writer:
    """Appends actions to one rank's list. The n-th forward (or backward) of a stage is for microbatch n.

    num_microbatches: actions of microbatches from this index on are counted but not appended.
    """

    def __init__(self, num_microbatches: int):
        self.steps: list[Step] = []
        self._num_microbatches = num_microbatches
        self._forwards: dict[int, int] = {}
        self._backwards: dict[int, int] = {}
        self._held: deque[Action] = deque()  # delayed weight gradients

    def num_forwards(self, stage: int) -> int:
        """Return the number of forwards of this stage so far."""
        return self._forwards.get(stage, 0)

    def forward(self, stage: int) -> None:
        """Append the forward (F) of the stage's next microbatch."""
        self._append(self._next_forward(stage))

    def backward(self, stage: int) -> None:
        """Append the full backward (BW) of the stage's next microbatch."""
        self._append(self._next_backward(stage, whole=True))

    def input_gradient(self, stage: int) -> None:
        """Append the input gradient (B) of the stage's next microbatch, and delay its weight gradient (W)."""
        action = self._next_backward(stage, whole=False)
        self._append(action)
        self._held.append(Action("W", stage, action.microbatch))

    def pair(self, forward_stage: int, backward_stage: int) -> None:
        """Append a forward on one stage in parallel with a backward on the other."""
        forward = self._next_forward(forward_stage)
        self.steps.append(Pair(forward, self._next_backward(backward_stage, whole=True)))

    def weight_gradient(self, stage: int | None = None) -> None:
        """Append the oldest delayed weight gradient (of `stage`, if given), if there is one."""
        for action in self._held:
            if stage is None or action.stage == stage:
                self._held.remove(action)
                self._append(action)
                return

    def weight_gradients(self, stage: int | None = None, *, but: int = 0) -> None:
        """Append every delayed weight gradient (of `stage`, if given) except the last `but`."""
        held = sum(stage is None or action.stage == stage for action in self._held)
        for _ in range(held - but):
            self.weight_gradient(stage)

    def _next_forward(self, stage: int) -> Action:
        index = self.num_forwards(stage)
        self._forwards[stage] = index + 1
        return Action("F", stage, index)

    def _next_backward(self, stage: int, *, whole: bool) -> Action:
        index = self._backwards.get(stage, 0)
        self._backwards[stage] = index + 1
        return Action("BW" if whole else "B", stage, index)

    def _append(self, action: Action) -> None:
        if action.microbatch < self._num_microbatches:
            self.steps.append(action)


# Looped schedules: stage s is on rank s % p.


def _looped(p: int, m: int, v: int, r: int, *, warmup: int, held: int | None = None) -> list[Step]:
    """Return the steps of rank r of p, with m microbatches and v stages on each rank.

    warmup: forwards before the first backward. held: maximum number of delayed weight gradients, or None for full
    backwards.
    """
    forwards = [chunk * p + r for chunk in _chunks(p, m, v)]
    backwards = [(v - 1 - chunk) * p + r for chunk in _chunks(p, m, v)]
    warmup = min(warmup, len(forwards))
    writer = Writer(m)
    for stage in forwards[:warmup]:
        writer.forward(stage)
    for index, stage in enumerate(backwards):
        if warmup + index < len(forwards):
            writer.forward(forwards[warmup + index])
        if held is None:
            writer.backward(stage)
        else:
            writer.input_gradient(stage)
            writer.weight_gradients(but=held)
    writer.weight_gradients()
    return writer.steps


def _chunks(p: int, m: int, v: int) -> list[int]:
    """Return the chunk of each of a rank's forwards in order: p microbatches through each chunk, then the next p."""
    if v == 1:
        return [0] * m
    return [chunk for _ in range(m // p) for chunk in range(v) for _ in range(p)]


# V-shaped schedules: stages r and 2p - 1 - r are on rank r.


def zb_v(p: int, m: int, v: int, r: int) -> list[Step]:
    """Return the steps of ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6). In flight: p microbatches on each rank.

    The pattern needs 2p - 1 microbatches. With fewer, the steps of the missing ones are omitted.
    """
    down, up = r, 2 * p - 1 - r
    total = max(m, 2 * p - 1)
    writer = Writer(m)
    for _ in range(2 * (p - r) - 1):
        writer.forward(down)
    for _ in range(r):
        writer.forward(up)
        writer.forward(down)
    for _ in range(p - r):
        writer.forward(up)
        _split_backward(writer, up)
    while writer.num_forwards(up) < total:
        if writer.num_forwards(down) < total:
            writer.forward(down)
        _split_backward(writer, down)
        writer.forward(up)
        _split_backward(writer, up)
    # The remaining backwards form a chain over the ranks: weight gradients wait until the chain has passed.
    for _ in range(r):
        writer.input_gradient(down)
        writer.input_gradient(up)
    for _ in range(p - r):
        writer.input_gradient(down)
        writer.weight_gradient(down)
    writer.weight_gradients(up)
    writer.weight_gradients()
    return writer.steps


def _split_backward(writer: Writer, stage: int) -> None:
    writer.input_gradient(stage)
    writer.weight_gradient(stage)


def dualpipe_v(p: int, m: int, v: int, r: int) -> list[Step]:
    """Return the steps of DualPipeV: forwards of one stage overlap with backwards of the other; m is at least 2p.

    In flight: p + 1/2 microbatches. Source: DualPipe (DeepSeek-AI 2024, arXiv 2412.19437), folded in half.
    """
    down, up = r, 2 * p - 1 - r
    writer = Writer(m)
    for _ in range(2 * (p - r - 1)):
        writer.forward(down)
    for _ in range(r + 1):
        writer.forward(down)
        writer.forward(up)
    for _ in range(p - r - 1):
        _split_backward(writer, up)
        writer.forward(up)
    for index in range(m - 2 * p + r + 1):
        if index == 0 and r == p - 1:
            # As a pair, both would start later than this forward alone can.
            writer.forward(down)
            writer.backward(up)
        else:
            writer.pair(down, up)
        writer.pair(up, down)
    for _ in range(p - r - 1):
        writer.backward(up)
        writer.pair(up, down)
    # The last backwards: full ones first. From the middle on, weight gradients are delayed to fill idle time at the
    # end.
    for index in range(2 * (r + 1)):
        stage = (up, down)[index % 2]
        (writer.backward if index <= r else writer.input_gradient)(stage)
    for _ in range(p - r - 1):
        writer.weight_gradient()
        writer.input_gradient(down)
    writer.weight_gradients()
    return writer.steps


# The order of a pipeline: one list of actions per rank of `pp`, for one optimizer step.

Generator = Callable[[int, int, int, int], list[Step]]


@dataclass(frozen=True, slots=True)
class Form:
    """Requirements of a schedule: its generator, stages per rank, and supported numbers of microbatches."""

    generator: Generator
    #: True if stages are placed down the ranks and back up (a V); False if they are placed round-robin.
    is_v: bool = False
    #: Required stages per rank: 1, 2, or None for any number from 2.
    virtual_stages: int | None = 1
    #: True if the number of microbatches must be a multiple of the number of ranks.
    in_groups: bool = False
    #: Minimum number of microbatches per rank.
    least_per_rank: int = 0


FORMS: dict[str, Form] = {
    # All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965). Microbatches in flight: m.
    "gpipe": Form(lambda p, m, v, r: _looped(p, m, 1, r, warmup=m)),
    # Each backward as early as possible (Narayanan et al. 2019, arXiv 1806.03377). Microbatches in flight: min(m, p -
    # r).
    "1f1b": Form(lambda p, m, v, r: _looped(p, m, 1, r, warmup=p - r - 1)),
    # 1F1B with several stages on each rank (Narayanan et al. 2021, arXiv 2104.04473); m is a multiple of p. In flight,
    # in chunks (1/v of a microbatch): 2(p - r - 1) + (v - 1)p + 1.
    "interleaved": Form(
        lambda p, m, v, r: _looped(p, m, v, r, warmup=2 * (p - r - 1) + (v - 1) * p),
        virtual_stages=None,
        in_groups=True,
    ),
    # 1F1B in which a rank delays r weight gradients (ZB-H1, Qi et al. 2023, arXiv 2401.10241). Microbatches in flight:
    # p.
    "zb_h1": Form(lambda p, m, v, r: _looped(p, m, 1, r, warmup=p - r - 1, held=r)),
    # ZB-H1 with several stages on each rank; m is a multiple of p. Microbatches in flight: p.
    "zb_interleaved": Form(
        lambda p, m, v, r: _looped(p, m, v, r, warmup=(v - 1) * p + p - r - 1, held=r),
        virtual_stages=None,
        in_groups=True,
    ),
    "zb_v": Form(zb_v, is_v=True, virtual_stages=2),
    "dualpipe_v": Form(dualpipe_v, is_v=True, virtual_stages=2, least_per_rank=2),
}
assert tuple(FORMS) == SCHEDULES


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of all ranks. Stages are counted from the embedding: num_ranks * virtual_stages stages."""

    name: str
    num_ranks: int
    virtual_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return self.num_ranks * self.virtual_stages

    def owner(self, stage: int) -> int:
        """Return the rank (on the axis pp) that holds a stage."""
        return stage_owner(self.name, self.num_ranks, stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return stages_of(self.name, self.num_ranks, self.virtual_stages, rank)

    def in_flight(self, rank: int) -> int:
        """Return the maximum number of forwards (of one microbatch on one stage) whose activations the rank holds.

        Divide it by `virtual_stages` for a number of microbatches. Activations are freed by W, or by the full backward.
        """
        held = most = 0
        for step in self.ranks[rank]:
            for action in parts(step):
                held += (action.kind == "F") - (action.kind in ("W", "BW"))
                most = max(most, held)
        return most


def stage_owner(name: str, num_ranks: int, stage: int) -> int:
    """Return the rank (on the axis pp) that holds a stage.

    Args:
        name, num_ranks, stage: the schedule, the size of the axis pp, and the stage, counted from the embedding.
    """
    if FORMS[name].is_v:
        return stage if stage < num_ranks else 2 * num_ranks - 1 - stage
    return stage % num_ranks


def stages_of(name: str, num_ranks: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank, ascending.

    Args:
        name, num_ranks, virtual_stages, rank: the schedule, the size of pp, stages per rank, and the rank on pp.
    """
    if FORMS[name].is_v:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(range(rank, num_ranks * virtual_stages, num_ranks))


def build_schedule(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Return the steps of all ranks under the schedule `name`.

    Args:
        name: one of SCHEDULES.
        num_ranks, num_microbatches, virtual_stages: size of the axis pp, number of microbatches, and stages per rank.

    Raises:
        PlanError: if the schedule does not support these numbers.
    """
    problems = schedule_problems(name, num_ranks, num_microbatches, virtual_stages)
    if problems:
        raise PlanError(problems)
    lists = (FORMS[name].generator(num_ranks, num_microbatches, virtual_stages, rank) for rank in range(num_ranks))
    return Schedule(name, num_ranks, virtual_stages, num_microbatches, tuple(map(tuple, lists)))


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan.

    Raises:
        PlanError: if the schedule does not support the plan's numbers.
    """
    return build_schedule(plan.schedule, plan.pp, plan.microbatches, plan.virtual_stages)


def schedule_problems(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int) -> list[Problem]:
    """Return the reasons why a schedule does not support these numbers, in terms of the plan; may be empty."""
    form, found = FORMS[name], list[Problem]()
    legal = form.virtual_stages
    if virtual_stages != legal if legal is not None else virtual_stages < 2:
        wanted = "2 or more" if legal is None else str(legal)
        rule = f"schedule={name} needs {wanted} stages on each rank. Use virtual_stages={wanted}."
        found.append(Problem("virtual_stages", f"virtual_stages={virtual_stages}: {rule}"))
    least, unit = form.least_per_rank * num_ranks, num_ranks if form.in_groups else 1
    if num_microbatches % unit:
        below = num_microbatches // unit * unit
        use = f"{below} or {below + unit}" if below else f"{unit}"
        rule = f"schedule={name} runs microbatches in groups of pp={num_ranks}. Use microbatches={use}."
        found.append(Problem("microbatches", f"microbatches={num_microbatches}: {rule}"))
    if num_microbatches < least:
        rule = f"schedule={name} needs at least {least} with pp={num_ranks}. Use microbatches={least} or more."
        found.append(Problem("microbatches", f"microbatches={num_microbatches}: {rule}"))
    return found


# The actions whose outputs an action needs, and its own outputs.


def needs(schedule: Schedule, action: Action) -> list[Action]:
    """Return the actions (F and B) whose outputs this action reads."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    own = Action("B" if kind == "W" else "F", stage, microbatch)
    is_end = kind == "W" or stage == schedule.num_stages - 1
    return [own] if is_end else [own, Action("B", stage + 1, microbatch)]


def makes(action: Action) -> tuple[Action, ...]:
    """Return the actions that this action performs: itself, or B and W for BW."""
    if action.kind != "BW":
        return (action,)
    return action._replace(kind="B"), action._replace(kind="W")


# Transfers: the steps of a rank with its sends and receives.


class Transfer(NamedTuple):
    """A send or receive of one microbatch. peer: the other rank (on the axis pp).

    content: "activation" for the input of `stage`, or "gradient" for the gradient of its output.
    """

    way: Literal["send", "receive"]
    content: Literal["activation", "gradient"]
    stage: int
    microbatch: int
    peer: int

    def __str__(self) -> str:
        arrow = ">" if self.way == "send" else "<"
        return f"{arrow}{'x' if self.content == 'activation' else 'g'}{self.stage}.{self.microbatch}@{self.peer}"


#: A rank's actions and transfers in order. A pair is listed as its forward and then its backward.
Program = list[Action | Transfer]


def with_transfers(schedule: Schedule) -> list[Program]:
    """Return the ranks' steps with transfers: each action after its receives and before its sends.

    A receive is inserted at the position in the receiver's list at which the send happens, if all steps take equally
    long.

    Raises:
        ValueError: if the ranks wait for each other in a cycle.
    """
    programs: list[Program] = [[] for _ in schedule.ranks]
    place, done = [0] * schedule.num_ranks, set[Action]()
    remaining = sum(map(len, schedule.ranks))
    while remaining:
        # All ranks that can take one step. They send their outputs after it.
        ready = [
            (rank, steps[place[rank]])
            for rank, steps in enumerate(schedule.ranks)
            if place[rank] < len(steps)
            and done.issuperset(need for action in parts(steps[place[rank]]) for need in needs(schedule, action))
        ]
        if not ready:
            waiting = ", ".join(
                str(steps[at]) for steps, at in zip(schedule.ranks, place, strict=True) if at < len(steps)
            )
            raise ValueError(f"schedule {schedule.name}: deadlock, its ranks wait for each other at {waiting}")
        for rank, _ in ready:
            place[rank] += 1
        # The output of a pair's forward is sent before its backward starts.
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
    """Move each receive before the action that runs during its transfer.

    The message has then arrived when that action ends. Use it only if transfers delay neither computations nor messages
    of another content, sender or receiver, since two ranks may both post a receive before they send.
    """
    found: Program = []
    place = 0  # position of the next receives: before the last action
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
    """Return the kinds of transfers of this rank in a step, each once, as (content, sender, receiver)."""
    found: dict[tuple[str, int, int], None] = {}
    for stage in range(1, schedule.num_stages):
        above, below = schedule.owner(stage - 1), schedule.owner(stage)
        if above != below and rank in (above, below):
            found |= {("activation", above, below): None, ("gradient", below, above): None}
    return list(found)


#: Identifies a message by the content, stage and microbatch of its transfer.
Key = tuple[str, int, int]


def arrived_by(programs: list[Program], rank: int) -> dict[Key, list[Key]]:
    """Return, for each message that this rank receives, the messages it sent that must have arrived by then.

    This rank can free their buffers. A message from another rank implies that the inputs of that rank's earlier actions
    have arrived there.
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


def _send(schedule: Schedule, programs: list[Program], rank: int, action: Action) -> None:
    """Add the transfer of the output of `action` to the lists of both ranks, if another rank needs it."""
    kind, stage, microbatch = action
    if kind == "W" or (kind == "F" and stage == schedule.num_stages - 1) or (kind != "F" and stage == 0):
        return
    target = stage + 1 if kind == "F" else stage - 1
    peer = schedule.owner(target)
    if peer != rank:
        content = "activation" if kind == "F" else "gradient"
        programs[rank].append(Transfer("send", content, target, microbatch, peer))
        programs[peer].append(Transfer("receive", content, target, microbatch, rank))
