"""Type of rules between the keys of one config. `config_rules.py` and its neighbours have the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.config.fields.layout import Layout
from weft.config.fields.plan_text import is_auto
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import LayoutError, PlanError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRule:
    """A constraint on a config.

    Attributes:
        keys: the dotted keys that the rule reads; the first one is reported as the problem.
        reason: one sentence that explains the rule for every config.
        predicate: True if the config breaks the rule.
        message: `<value>: <rule with the limit>. <what to type instead>.`, without the key and the equals sign.
    """

    name: str
    keys: tuple[str, ...]
    reason: str
    predicate: Callable[[RunConfig], bool]
    message: str | Callable[[RunConfig], str]

    def check(self, config: RunConfig) -> Problem | None:
        """Return the problem, or None if the config satisfies the rule."""
        if not self.predicate(config):
            return None
        message = self.message if isinstance(self.message, str) else self.message(config)
        return Problem(self.keys[0], f"{self.keys[0]}={message}")


def shards_tables(config: RunConfig) -> bool:
    """Return True if the layout shards embedding tables over the data ranks."""
    try:
        return bool(config.layout) and Layout.read(config.layout).is_of_tables
    except LayoutError:
        return False


def plan_of(config: RunConfig) -> tuple[Plan, str | None] | None:
    """Return the plan and its open axis, or None if the planner chooses the plan or it cannot be read."""
    try:
        return None if is_auto(config.plan) else Plan.read_open(config.plan)
    except PlanError:
        return None
