"""Every constraint is one object: name, predicate, reason, fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Facts",
    "LASTING",
    "LIMIT_RULES",
    "NOT_BUILT",
    "ORDER_RULES",
    "RULES",
    "Rule",
    "UnknownFact",
    "Violation",
    "alternatives",
    "check",
    "check_plan",
    "config_problems",
    "in_config",
    "least_vocab",
    "legal_plans",
]

if TYPE_CHECKING:
    from weft.spec.rules.config_rules import config_problems, in_config, least_vocab
    from weft.spec.rules.legal import legal_plans
    from weft.spec.rules.limit_rules import LIMIT_RULES
    from weft.spec.rules.order_rules import ORDER_RULES
    from weft.spec.rules.plan_rules import LASTING, NOT_BUILT, RULES, check, check_plan
    from weft.spec.rules.rule import Facts, Rule, UnknownFact, Violation, alternatives

__getattr__ = loads(
    __name__,
    {
        "Facts": ".rule",
        "LASTING": ".plan_rules",
        "LIMIT_RULES": ".limit_rules",
        "NOT_BUILT": ".plan_rules",
        "ORDER_RULES": ".order_rules",
        "RULES": ".plan_rules",
        "Rule": ".rule",
        "UnknownFact": ".rule",
        "Violation": ".rule",
        "alternatives": ".rule",
        "check": ".plan_rules",
        "check_plan": ".plan_rules",
        "config_problems": ".config_rules",
        "in_config": ".config_rules",
        "least_vocab": ".config_rules",
        "legal_plans": ".legal",
    },
)
