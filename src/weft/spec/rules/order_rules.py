"""The rules of plans that concern the order of the mesh's axes."""

from __future__ import annotations

from weft.spec.plan import AXES, Plan
from weft.spec.rules.rule import Facts, Rule, asks


def _in_use(plan: Plan, facts: Facts) -> list[str]:
    """The axes with more than one rank, in their usual order."""
    return [axis for axis in AXES if asks(plan, facts, axis)]


ORDER_RULES: tuple[Rule, ...] = (
    Rule(
        name="order-names-axes",
        field="order",
        reason="An order names exactly the axes that have more than one rank.",
        predicate=lambda plan, facts: bool(plan.order) and sorted(plan.order) != sorted(_in_use(plan, facts)),
        finding=lambda plan, facts: f"the axes in use are {', '.join(_in_use(plan, facts)) or 'none'}",
        remedy=lambda plan, facts: "Name each of them once, outermost first, or leave order out",
        fix=lambda plan, facts: plan.replace(order=()),
    ),
    Rule(
        name="order-is-another",
        field="order",
        reason="Write the default order by leaving the field out.",
        predicate=lambda plan, facts: bool(plan.order) and list(plan.order) == _in_use(plan, facts),
        finding=lambda plan, facts: "this is the default order of these axes",
        remedy=lambda plan, facts: "Leave order out",
        fix=lambda plan, facts: plan.replace(order=()),
    ),
    Rule(
        name="order-without-ep",
        field="order",
        reason="Experts are spread over dp_shard x cp x tp in their usual order.",
        predicate=lambda plan, facts: bool(plan.order) and plan.ep > 1,
        finding=lambda plan, facts: f"ep={plan.ep} is a view over dp_shard, cp and tp in their usual order",
        remedy=lambda plan, facts: "Leave order out, or use ep=1",
        fix=lambda plan, facts: plan.replace(order=()),
    ),
)
