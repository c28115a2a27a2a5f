"""The ways of context parallelism: their names in the planner's columns, and in plans."""

from __future__ import annotations

from weft.errors import PlanError, Problem
from weft.planner.columns import CP_MODES
from weft.spec.context import choose_cp_mode
from weft.spec.model import DecoderSpec
from weft.spec.plan import Plan

#: The word of a plan for each of CP_MODES; "auto" in a plan is one of them by the shape.
WORDS = {"ring": "ring", "all_gather": "gather", "ulysses": "ulysses"}


def plan_word(mode: str) -> str:
    """The word for one of CP_MODES in a plan."""
    return WORDS[mode]


def with_way(plan: Plan, mode: str) -> Plan:
    """The plan with its way said, where a plan with context parallelism says it."""
    return plan.replace(cp_mode=WORDS[mode]) if plan.cp > 1 else plan


def read_way(word: str) -> str | None:
    """One of CP_MODES from its name there or in plans; None for "auto". Raises PlanError."""
    known = {**{name: name for name in CP_MODES}, **{name: mode for mode, name in WORDS.items()}}
    if word == "auto":
        return None
    if word not in known:
        rule = f"not one of {', '.join(CP_MODES)}. Use cp_mode={CP_MODES[0]}."
        raise PlanError([Problem("cp_mode", f"cp_mode={word}: {rule}")])
    return known[word]


def way_of(plan: Plan, model: DecoderSpec, seq_len: int) -> str:
    """The way that a plan takes with a model."""
    if plan.cp == 1:
        return CP_MODES[0]
    word = choose_cp_mode(plan.cp_mode, plan.cp, model.num_heads, model.num_kv_heads, seq_len, plan.tp)
    return read_way(word) or CP_MODES[0]
