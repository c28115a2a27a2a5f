"""Which software a published run used, by rules over what its row says."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from weft.planner.space import Stack

_FEATURES = frozenset(each.name for each in dataclasses.fields(Stack))


@dataclass(frozen=True, slots=True)
class StackRule:
    """One rule of stacks.toml."""

    words: re.Pattern[str]
    unless: re.Pattern[str] | None
    gpu: re.Pattern[str]
    values: tuple[tuple[str, Any], ...]

    def holds(self, text: str, gpu: str) -> bool:
        """Whether the rule speaks of a row."""
        if self.unless is not None and self.unless.search(text):
            return False
        return bool(self.words.search(text) and self.gpu.search(gpu))


@functools.cache
def _file() -> dict[str, Any]:
    text = resources.files("weft.planner.scoring").joinpath("stacks.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@functools.cache
def stack_rules() -> tuple[StackRule, ...]:
    """The rules, in the order in which they apply."""
    return tuple(
        StackRule(
            words=re.compile(rule["words"]),
            unless=re.compile(rule["unless"]) if "unless" in rule else None,
            gpu=re.compile(rule.get("gpu", "")),
            values=tuple(rule["set"].items()),
        )
        for rule in _file()["rule"]
    )


def counts_causal_half(text: str) -> bool:
    """Whether a table counts attention's floating-point operations over the causal half alone."""
    rules = [rule for rule in _file()["flops"] if re.search(rule["words"], text)]
    return bool(rules) and rules[-1]["count"] == "causal"


@functools.cache
def _networks() -> tuple[tuple[re.Pattern[str], float], ...]:
    return tuple((re.compile(each["words"]), float(each["gbit_per_node"])) for each in _file()["network"])


def known_network(text: str) -> float | None:
    """Bytes per second of one node's network, where the machine is known."""
    for pattern, gbit in _networks():
        if pattern.search(text):
            return gbit / 8 * 1e9
    return None


def stack_of(text: str, gpu: str, rules: tuple[StackRule, ...] | None = None) -> tuple[Stack, str]:
    """The stack of a run, and what its "selective" recompute stands for: "attention", "selective" or "half".

    text: source, table and notes in lower case.
    """
    values: dict[str, Any] = {}
    for rule in stack_rules() if rules is None else rules:
        if rule.holds(text, gpu):
            values |= dict(rule.values)
    selective = str(values.pop("selective", "attention"))
    return Stack(**{name: value for name, value in values.items() if name in _FEATURES}), selective
