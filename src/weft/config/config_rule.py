"""The type of a rule between the keys of one config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.config.run_config import RunConfig
from weft.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRule:
    """A constraint on a config.

    keys: the dotted keys that the rule reads; the first is the one to blame.
    predicate: True if the config breaks the rule. reason: why, in one sentence that holds for every config.
    message: `<value>: <rule with the limit>. <what to type instead>.`, without the key and its equals sign.
    """

    name: str
    keys: tuple[str, ...]
    reason: str
    predicate: Callable[[RunConfig], bool]
    message: Callable[[RunConfig], str]

    def check(self, config: RunConfig) -> Problem | None:
        """Return the problem, or None if the config satisfies the rule."""
        if not self.predicate(config):
            return None
        return Problem(self.keys[0], f"{self.keys[0]}={self.message(config)}")
