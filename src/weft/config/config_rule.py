"""What a rule between the keys of one config is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.config.run_config import RunConfig
from weft.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRule:
    """One thing that a config must not ask for.

    keys: the dotted keys that the rule looks at; the first is the one to blame.
    predicate: True where the config breaks the rule. reason: why, in one sentence that holds for every config.
    message: `<value>: <rule with the limit>. <what to type instead>.`, without the key and its equals sign.
    """

    name: str
    keys: tuple[str, ...]
    reason: str
    predicate: Callable[[RunConfig], bool]
    message: Callable[[RunConfig], str]

    def check(self, config: RunConfig) -> Problem | None:
        """The problem, or None where the config keeps the rule."""
        if not self.predicate(config):
            return None
        return Problem(self.keys[0], f"{self.keys[0]}={self.message(config)}")
