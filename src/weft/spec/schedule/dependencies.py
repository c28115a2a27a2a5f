"""What an action of a pipeline needs of others, and what it makes for them."""

from __future__ import annotations

from weft.spec.schedule.action import Action
from weft.spec.schedule.schedule import Schedule


def needs(schedule: Schedule, action: Action) -> list[Action]:
    """Return what must be made before this action, as F and B: see `makes`."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    own = Action("B" if kind == "W" else "F", stage, microbatch)
    is_end = kind == "W" or stage == schedule.num_stages - 1
    return [own] if is_end else [own, Action("B", stage + 1, microbatch)]


def makes(action: Action) -> tuple[Action, ...]:
    """Return what others may need of this action: a whole backward makes B and W."""
    if action.kind != "BW":
        return (action,)
    return action._replace(kind="B"), action._replace(kind="W")
