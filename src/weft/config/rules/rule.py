"""Types of plan rules: the rule, the facts (context) that it may read, and the violation that it returns.

The rules themselves are in `plan_rules.py` and `technique_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.cluster import DeviceSpec
from weft.config.plan import PLAN_FIELDS, Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.traced_model import Limit
from weft.errors import PlanError


class UnknownFact(Exception):
    """Raised when a rule reads a fact whose value is unknown."""


class Facts:
    """Context of a plan for rules. None means unknown: a rule that reads an unknown fact is skipped.

    Args:
        model, world_size, global_batch, seq_len, device, limits, open_axis: see the attributes.
    """

    model: DecoderSpec
    """The model's shape."""
    world_size: int
    """Number of ranks."""
    global_batch: int
    """Sequences per optimizer step."""
    seq_len: int
    """Tokens per sequence."""
    device: DeviceSpec
    """The device of each rank."""
    limits: Mapping[str, Limit]
    """Values that a traced model allows, by plan field."""
    open_axis: str | None
    """The mesh axis that is `*` and has size 1 in the plan, or None."""

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


#: A text, or a function that returns the text for a plan.
Text = str | Callable[[Plan, Facts], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A constraint on plans.

    Attributes:
        name: for tests and docs.
        field: the plan field, or the dotted config key, that is reported.
        reason: one sentence that explains the rule for every plan.
        predicate: True if the plan breaks the rule.
        finding: the problem of this plan in numbers, without a full stop.
        remedy: what to type instead, without a full stop.
        fix: the fields to change, or a function that returns the nearest legal plan; or None.
    """

    name: str
    field: str
    reason: str
    predicate: Callable[[Plan, Facts], bool]
    finding: Text
    remedy: Text
    fix: Mapping[str, object] | Callable[[Plan, Facts], Plan | None] | None = None

    def is_broken(self, plan: Plan, facts: Facts) -> bool:
        """Return True if the plan breaks the rule, False if not or if a fact is unknown."""
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
                fix = None  # the corrected value would be too large for any plan
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
    """A broken rule: the error message, and the nearest legal plan if there is one."""

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
    """Return True if the plan uses this axis: it has more than one rank, or is `*`."""
    return facts.open_axis == axis or getattr(plan, axis) > 1
