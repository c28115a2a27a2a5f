"""The rules of plans that come from one model, whose modules allow some values of a field, and from one device."""

from __future__ import annotations

from weft.spec.divisors import nearest
from weft.spec.plan import Plan
from weft.spec.rules.rule import Facts, Rule, alternatives

#: Fields that a model may narrow, and what dividing it along them needs.
_NEEDS = {
    "tp": "Tensor parallelism divides heads and features of the layers, so tp must divide their numbers.",
    "cp": "Context parallelism needs a sequence, and attention that the runtime can replace.",
    "sp": "Sequence parallelism needs a sequence.",
    "ep": "Expert parallelism must know which modules are experts.",
    "pp": "A pipeline cuts one chain of blocks, so the model must have one.",
}


def _breaks(plan: Plan, facts: Facts, field: str) -> bool:
    limit = facts.limits.get(field)
    return limit is not None and facts.open_axis != field and getattr(plan, field) not in limit.values


def _rule(field: str) -> Rule:
    def words(facts: Facts) -> list[object]:
        values = facts.limits[field].values
        return ["on" if value else "off" for value in values] if field == "sp" else list(values)

    return Rule(
        name=f"model-allows-{field}",
        field=field,
        reason=_NEEDS[field],
        predicate=lambda plan, facts: _breaks(plan, facts, field),
        finding=lambda plan, facts: facts.limits[field].reason,
        remedy=lambda plan, facts: alternatives(words(facts), field),
        fix=lambda plan, facts: plan.replace(
            **{field: False if field == "sp" else nearest(facts.limits[field].values, getattr(plan, field))}
        ),
    )


LIMIT_RULES: tuple[Rule, ...] = tuple(_rule(field) for field in _NEEDS)


def _precision_choices(facts: Facts) -> list[str]:
    return ["fp32", *(name for name in ("fp16", "bf16") if facts.device.peak_flops(name) is not None)]


PRECISION_ON_DEVICE = Rule(
    name="precision-on-device",
    field="precision",
    reason="The device must support the precision of the plan.",
    predicate=lambda plan, facts: (
        plan.precision in ("bf16", "fp16", "fp8", "tf32") and facts.device.peak_flops(plan.precision) is None
    ),
    finding=lambda plan, facts: f"{facts.device.title} has no {plan.precision} arithmetic",
    remedy=lambda plan, facts: alternatives(_precision_choices(facts), "precision"),
    fix=lambda plan, facts: plan.replace(
        precision="fp32" if plan.precision == "tf32" else _precision_choices(facts)[-1]
    ),
)
