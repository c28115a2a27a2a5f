"""Types of plan rules: the rule, the facts that it may read, and the violation that it finds.

The rules themselves are in `plan_rules.py` and `technique_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.cluster import DeviceSpec
from weft.config.decoder_shape import DecoderSpec
from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.traced_model import Limit
from weft.errors import PlanError


class UnknownFact(Exception):
    """Raised when a rule reads a fact without a value."""


class Facts:
    """Facts in addition to the plan. None is unknown. Reading an unknown fact ends the rule that reads it.

    Args:
        model, world_size, global_batch, seq_len, device, limits, open_axis: as described below.
    """

    model: DecoderSpec
    """The model's shape."""
    world_size: int
    """Number of ranks that were started."""
    global_batch: int
    """Sequences in one optimizer step."""
    seq_len: int
    """Tokens in one sequence."""
    device: DeviceSpec
    """The device of each rank."""
    limits: Mapping[str, Limit]
    """Values that a traced model allows, by the plan's fields."""
    open_axis: str | None
    """The mesh axis that is still `*`, and 1 in the plan, or None."""

    def __init__(
        self,
        *,
        model: DecoderSpec | None = None,
        world_size: int | None = None,
        global_batch: int | None = None,
        seq_len: int | None = None,
        device: DeviceSpec | None = None,
        limits: Mapping[str, Limit] | None = None,
        open_axis: str | None = None,
    ):
        given = {"model": model, "world_size": world_size, "global_batch": global_batch, "seq_len": seq_len,
                 "device": device, "limits": limits}  # fmt: skip
        self.__dict__.update((name, value) for name, value in given.items() if value is not None)
        self.open_axis = open_axis

    def __getattr__(self, name: str) -> Any:
        if name in Facts.__annotations__:
            raise UnknownFact(name)
        raise AttributeError(name)

    def divides_ranks(self, count: int) -> bool:
        """Return True if `count` divides the number of ranks, or that number is unknown."""
        return self.__dict__.get("world_size", 0) % count == 0


#: This plan's case or remedy: the text, or a function that returns it.
Text = str | Callable[[Plan, Facts], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A constraint on plans.

    name: for tests and docs. field: the plan's field, or the dotted config key, that is to blame.
    predicate: True if the plan breaks the rule. reason: why, in one sentence that holds for every plan.
    finding: this plan's case in numbers, without a full stop. remedy: the text to type instead, likewise.
    fix: the fields to change, or a function that returns the nearest legal plan; None if no plan can be fixed.
    """

    name: str
    field: str
    reason: str
    predicate: Callable[[Plan, Facts], bool]
    finding: Text
    remedy: Text
    fix: Mapping[str, object] | Callable[[Plan, Facts], Plan | None] | None = None

    def is_broken(self, plan: Plan, facts: Facts) -> bool:
        """Return True if the plan breaks the rule; False if a fact is unknown."""
        try:
            return self.predicate(plan, facts)
        except UnknownFact:
            return False

    def check(self, plan: Plan, facts: Facts) -> Violation | None:
        """Return the violation, or None if the plan satisfies the rule or a fact is unknown."""
        try:
            if not self.predicate(plan, facts):
                return None
            finding, remedy = (
                text if isinstance(text, str) else text(plan, facts) for text in (self.finding, self.remedy)
            )
            message = f"{self.field}={self._value(plan, facts)}: {finding}. {remedy}."
            try:
                fix = self.fix(plan, facts) if callable(self.fix) else plan.replace(**self.fix) if self.fix else None
            except PlanError:
                fix = None  # numbers so large that no plan can hold the corrected one
            return Violation(self.name, self.field, message, fix)
        except UnknownFact:
            return None

    def _value(self, plan: Plan, facts: Facts) -> str:
        if self.field == facts.open_axis:
            return "*"
        described = PLAN_FIELDS.get(self.field)
        if described is None:
            return str(getattr(facts, self.field.rpartition(".")[2]))
        return described.kind.write(getattr(plan, self.field))


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: the message in the error grammar, and the nearest legal plan if there is one."""

    rule: str
    field: str
    message: str
    fix: Plan | None = None


def alternatives(values: Sequence[object], field: str) -> str:
    """Return 'Use tp=1, 2, 4 or 8': the legal values of a field, at most eight of them."""
    shown = [str(value) for value in values[:8]]
    listed = f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else shown[0]
    return f"Use {field}={listed}"


def asks(plan: Plan, facts: Facts, axis: str) -> bool:
    """Return True if the plan uses this axis: more than one rank on it, or `*`."""
    return facts.open_axis == axis or getattr(plan, axis) > 1
