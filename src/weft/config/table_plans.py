"""Plans under which a layout may shard embedding tables over the data ranks."""

from __future__ import annotations

from weft.config.plan import PLAN_FIELDS, Plan
from weft.errors import Problem

#: Plan fields that tables support with any value. `zero` and `precision` have limits, and all others their default.
_SUPPORTED = frozenset({"dp_replicate", "dp_shard", "order", "accumulation", "zero", "precision"})
_PRECISIONS = ("fp64", "fp32", "tf32", "bf16")


def table_plan_problems(plan: Plan) -> list[Problem]:
    """Return a problem for each plan field that is not supported with embedding tables."""
    found: list[Problem] = []
    if plan.zero == 3:
        found.append(_problem(plan, "zero", "Use zero=0, 1 or 2"))
    if plan.precision not in _PRECISIONS:
        found.append(_problem(plan, "precision", f"Use {', '.join(f'precision={one}' for one in _PRECISIONS)}"))
    for name, field in PLAN_FIELDS.items():
        if name not in _SUPPORTED and getattr(plan, name) != field.default:
            found.append(_problem(plan, name, f"Leave {name} out"))
    return found


def _problem(plan: Plan, name: str, remedy: str) -> Problem:
    value = PLAN_FIELDS[name].kind.write(getattr(plan, name))
    why = "embedding tables of a layout are not built with it yet"
    return Problem(name, f"{name}={value}: {why}. {remedy}, or leave the tables out of layout.")
