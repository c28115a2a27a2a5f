"""Type of rules between the keys of one config. The rules are in `config_rules.py` and `engine_rules.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.config.run_config import RunConfig
from weft.errors import Problem


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
