"""The order of a pipeline: for each rank of `pp`, what it does in one optimizer step, as a list.

`build_schedule("1f1b", num_ranks=4, num_microbatches=8)` gives it; `schedule_of(plan)` that of a plan. The runtime
executes a rank's list, the planner simulates all of them, and a picture of them is drawn from the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import PlanError, Problem
from weft.spec.plan import SCHEDULES, Plan
from weft.spec.schedule.action import Step, parts
from weft.spec.schedule.looped import gpipe, interleaved, one_f_one_b, zb_h1, zb_interleaved
from weft.spec.schedule.vshape import dualpipe_v, zb_v

Generator = Callable[[int, int, int, int], list[Step]]


@dataclass(frozen=True, slots=True)
class Form:
    """What a schedule asks for: its generator, stages on each rank, and which numbers of microbatches it can order."""

    generator: Generator
    #: Stages go down the ranks and up again; otherwise around.
    is_v: bool = False
    #: One stage on each rank, two, or (None) any number from two.
    virtual_stages: int | None = 1
    #: Microbatches come in groups of the number of ranks.
    in_groups: bool = False
    #: At least so many microbatches for each rank.
    least_per_rank: int = 0


FORMS: dict[str, Form] = {
    "gpipe": Form(gpipe),
    "1f1b": Form(one_f_one_b),
    "interleaved": Form(interleaved, virtual_stages=None, in_groups=True),
    "zb_h1": Form(zb_h1),
    "zb_interleaved": Form(zb_interleaved, virtual_stages=None, in_groups=True),
    "zb_v": Form(zb_v, is_v=True, virtual_stages=2),
    "dualpipe_v": Form(dualpipe_v, is_v=True, virtual_stages=2, least_per_rank=2),
}
assert tuple(FORMS) == SCHEDULES


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lists of all ranks. Stages are counted from the embedding: num_ranks * virtual_stages of them."""

    name: str
    num_ranks: int
    virtual_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.num_ranks * self.virtual_stages

    def owner(self, stage: int) -> int:
        """Return the rank (on the axis pp) that holds a stage."""
        return stage_owner(self.name, self.num_ranks, stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return stages_of(self.name, self.num_ranks, self.virtual_stages, rank)

    def in_flight(self, rank: int) -> int:
        """Return the most forwards of which the rank keeps activations at once, counted in stages of one microbatch.

        Divided by `virtual_stages` it is in microbatches. They are let go by W, or by the whole backward.
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
        name: of the schedule.
        num_ranks: size of the axis pp.
        stage: counted from the embedding, from 0.
    """
    if FORMS[name].is_v:
        return stage if stage < num_ranks else 2 * num_ranks - 1 - stage
    return stage % num_ranks


def stages_of(name: str, num_ranks: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    """Return the stages of a rank, ascending.

    Args:
        name: of the schedule.
        num_ranks: size of the axis pp.
        virtual_stages: stages that each rank holds; schedules in the form of a V have two.
        rank: on the axis pp.
    """
    if FORMS[name].is_v:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(range(rank, num_ranks * virtual_stages, num_ranks))


def build_schedule(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Return the lists of all ranks.

    Args:
        name: one of SCHEDULES.
        num_ranks: size of the axis pp.
        num_microbatches: of one rank, in one step.
        virtual_stages: stages that each rank holds.

    Raises:
        PlanError: where the schedule cannot order these numbers.
    """
    problems = schedule_problems(name, num_ranks, num_microbatches, virtual_stages)
    if problems:
        raise PlanError(problems)
    lists = (FORMS[name].generator(num_ranks, num_microbatches, virtual_stages, rank) for rank in range(num_ranks))
    return Schedule(name, num_ranks, virtual_stages, num_microbatches, tuple(map(tuple, lists)))


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule that a plan asks for.

    Raises:
        PlanError: where the schedule cannot order the plan's numbers.
    """
    return build_schedule(plan.schedule, plan.pp, plan.microbatches, plan.virtual_stages)


def schedule_problems(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int) -> list[Problem]:
    """Why a schedule cannot be, in the words of plans; empty where it can."""
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
        rule = f"schedule={name} takes microbatches in groups of pp={num_ranks}. Use microbatches={use}."
        found.append(Problem("microbatches", f"microbatches={num_microbatches}: {rule}"))
    if num_microbatches < least:
        rule = f"schedule={name} needs at least {least} with pp={num_ranks}. Use microbatches={least} or more."
        found.append(Problem("microbatches", f"microbatches={num_microbatches}: {rule}"))
    return found
