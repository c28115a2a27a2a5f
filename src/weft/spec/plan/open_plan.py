"""A plan of which only some fields are decided, as rules look at it."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

from weft.errors import PlanError
from weft.spec.plan.plan import Plan
from weft.spec.plan.plan_text import split_plan

#: What `OpenPlan.decided` gives for a field that is not decided yet.
MISSING = object()


class Undecided(Exception):
    """A rule asked for a field that is not decided yet."""


class OpenPlan:
    """A plan whose fields are looked up as they are asked for; what Plan derives from its fields is derived from these.

    reads: the decided fields that were asked for. A field that is not decided raises Undecided.
    """

    __slots__ = ("reads",)

    def __init__(self) -> None:
        self.reads = set[str]()

    def decided(self, name: str) -> Any:
        """Return the value of a field, or MISSING."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        value = self.decided(name)
        if value is not MISSING:
            self.reads.add(name)
            return value
        known = vars(Plan).get(name)
        if isinstance(known, property) and known.fget is not None:
            return known.fget(self)
        if isinstance(known, FunctionType):
            return functools.partial(known, self)
        raise Undecided(name)


def auto_fields(text: str) -> dict[str, object]:
    """Return the fields that an auto plan decides, with their values.

    Raises:
        PlanError: where they cannot be read.
    """
    words, problems = split_plan(text.partition("auto")[2])
    if problems:
        raise PlanError(problems)
    plan = Plan.from_mapping(words)
    return {name: getattr(plan, name) for name in words}
