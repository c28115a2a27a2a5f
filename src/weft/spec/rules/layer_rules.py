"""The rules of plans that concern single layers: experts, and cut layers that multiply in pieces."""

from __future__ import annotations

from weft.spec.divisors import common_divisors, nearest
from weft.spec.plan import Plan
from weft.spec.rules.rule import Facts, Rule, alternatives, asks


def _ep_choices(plan: Plan, facts: Facts) -> list[int]:
    """Numbers that divide the experts, and the ranks where these are known."""
    if facts.open_axis in ("dp_shard", "cp", "tp"):
        return common_divisors(facts.model.num_experts)
    return common_divisors(facts.model.num_experts, plan.dp_shard * plan.cp * plan.tp)


LAYER_RULES: tuple[Rule, ...] = (
    Rule(
        name="ep-divides-ranks",
        field="ep",
        reason="Experts are spread over dp_shard x cp x tp, so ep must divide that product.",
        predicate=lambda plan, facts: (
            facts.open_axis not in ("dp_shard", "cp", "tp") and (plan.dp_shard * plan.cp * plan.tp) % plan.ep != 0
        ),
        finding=lambda plan, facts: (
            f"experts are spread over dp_shard x cp x tp = {plan.dp_shard * plan.cp * plan.tp} ranks, "
            f"and that is not a multiple of {plan.ep}"
        ),
        remedy=lambda plan, facts: alternatives(common_divisors(plan.dp_shard * plan.cp * plan.tp), "ep"),
        fix=lambda plan, facts: plan.replace(ep=nearest(common_divisors(plan.dp_shard * plan.cp * plan.tp), plan.ep)),
    ),
    Rule(
        name="ep-needs-experts",
        field="ep",
        reason="Expert parallelism divides the experts of a model, so the model must have some.",
        predicate=lambda plan, facts: plan.ep > 1 and facts.model.num_experts == 0,
        finding=lambda plan, facts: "the model has no experts to divide",
        remedy=lambda plan, facts: "Use ep=1, or a model with experts, such as model.num_experts=8",
        fix=lambda plan, facts: plan.replace(ep=1),
    ),
    Rule(
        name="ep-divides-experts",
        field="ep",
        reason="Every rank of ep holds the same number of experts, so ep must divide their number.",
        predicate=lambda plan, facts: facts.model.num_experts > 0 and facts.model.num_experts % plan.ep != 0,
        finding=lambda plan, facts: (
            f"the model has {facts.model.num_experts} experts, and {facts.model.num_experts} is not a multiple of "
            f"{plan.ep}"
        ),
        remedy=lambda plan, facts: alternatives(_ep_choices(plan, facts), "ep"),
        fix=lambda plan, facts: plan.replace(ep=nearest(_ep_choices(plan, facts), plan.ep)),
    ),
    Rule(
        name="chunks-need-sp",
        field="tp_chunks",
        reason="Pieces of a sequence travel over tp only where sp=on cuts sequences, so tp_chunks needs sp=on.",
        predicate=lambda plan, facts: plan.tp_chunks > 1 and (not plan.sp or not asks(plan, facts, "tp")),
        finding=lambda plan, facts: (
            f"pieces of a sequence travel over tp only where sp=on cuts sequences, and "
            f"{'tp is 1' if plan.sp else 'sp is off'}"
        ),
        remedy=lambda plan, facts: "Use tp_chunks=1, or sp=on with tp=2 or more",
        fix=lambda plan, facts: plan.replace(tp_chunks=1),
    ),
    Rule(
        name="chunks-keep-half",
        field="tp_chunks",
        reason="The ranks agree on a scale of float8 for whole products, so precision=fp8 has no products in pieces.",
        predicate=lambda plan, facts: plan.tp_chunks > 1 and plan.precision == "fp8",
        finding=lambda plan, facts: "with precision=fp8 the ranks agree on scales for whole products",
        remedy=lambda plan, facts: "Use tp_chunks=1, or precision=bf16",
        fix=lambda plan, facts: plan.replace(tp_chunks=1),
    ),
)
