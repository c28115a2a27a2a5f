"""Software stacks of published runs, by rules on the text of their rows."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.planner.space.shape import Stack

_FEATURES = frozenset(each.name for each in dataclasses.fields(Stack))
_DEFAULTS = {each.name: each.default for each in dataclasses.fields(Stack)}


@dataclass(frozen=True, slots=True)
class StackRule:
    """One rule of stacks.toml.

    Attributes:
        over: less specific rules that it overrides.
    """

    name: str
    words: re.Pattern[str]
    unless: re.Pattern[str] | None
    gpu: re.Pattern[str]
    over: frozenset[str]
    cite: str
    values: tuple[tuple[str, Any], ...]
    factors: tuple[tuple[str, float], ...]

    def holds(self, text: str, gpu: str) -> bool:
        """Return True if the rule applies to a row."""
        if self.unless is not None and self.unless.search(text):
            return False
        return bool(self.words.search(text) and self.gpu.search(gpu))


@functools.cache
def _file() -> dict[str, Any]:
    text = Path(__file__).with_name("stacks.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@functools.cache
def stack_rules() -> tuple[StackRule, ...]:
    """Return the rules, with more specific ones after less specific ones."""
    return tuple(
        StackRule(
            name=rule["name"],
            words=re.compile(rule["words"]),
            unless=re.compile(rule["unless"]) if "unless" in rule else None,
            gpu=re.compile(rule.get("gpu", "")),
            over=frozenset(rule.get("over", ())),
            cite=rule.get("cite", ""),
            values=tuple(rule["set"].items()),
            factors=tuple(rule.get("times", {}).items()),
        )
        for rule in _file()["rule"]
    )


def counts_causal_half(text: str) -> bool:
    """Return True if a table counts only the causal half of attention's FLOPs."""
    rules = [rule for rule in _file()["flops"] if re.search(rule["words"], text)]
    return bool(rules) and rules[-1]["count"] == "causal"


@functools.cache
def _networks() -> tuple[tuple[re.Pattern[str], float], ...]:
    return tuple((re.compile(each["words"]), float(each["gbit_per_node"])) for each in _file()["network"])


def known_network(text: str) -> float | None:
    """Return the bytes/s of one node's network for a machine in stacks.toml, or None."""
    for pattern, gbit in _networks():
        if pattern.search(text):
            return gbit / 8 * 1e9
    return None


def stack_of(text: str, gpu: str, rules: tuple[StackRule, ...] | None = None) -> tuple[Stack, str]:
    """Return the stack of a run, and the meaning of its "selective" recompute: "attention", "selective" or "half".

    Args:
        text: source, table and notes in lower case.
        gpu: name of the device.
        rules: rules to apply; None uses stacks.toml.
    """
    values: dict[str, Any] = dict(_file()["start"])
    factors: dict[str, float] = {}
    for rule in stack_rules() if rules is None else rules:
        if rule.holds(text, gpu):
            values |= dict(rule.values)
            factors |= {name: factors.get(name, 1.0) * factor for name, factor in rule.factors}
    values |= {name: values.get(name, _DEFAULTS[name]) * factor for name, factor in factors.items()}
    selective = str(values.pop("selective", "attention"))
    return Stack(**{name: value for name, value in values.items() if name in _FEATURES}), selective
