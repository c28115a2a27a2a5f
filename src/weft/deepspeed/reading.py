"""What has been read of one file so far: the readers take values from it and tell it what each key became."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import cast

from weft.deepspeed.json_source import Source
from weft.deepspeed.keys import Group, known_keys, meant, sections
from weft.deepspeed.outcome import BECAME, FOLLOWS, NOT_BUILT, NOTHING, REMOVED, TYPO, Outcome
from weft.env import is_secret
from weft.errors import Problem, did_you_mean
from weft.spec import RunConfig
from weft.spec.plan import Plan
from weft.spec.written import dotted, shown

AUTO = "auto"
#: As many ranks, passes or sequences as a plan and a config can hold.
MOST = 999_999_999
_KINDS = {"follows": FOLLOWS, "nothing": NOTHING, "not built": NOT_BUILT, "removed": REMOVED}
_COMMENTS = ("comment", "comments", "$schema")


class Reading:
    """plan: fields of the plan. settings: dotted settings of a RunConfig. open: what the file leaves to "auto".

    values: what was typed for the keys that become something; a key is gone from it where the file says null.
    """

    def __init__(self, source: Source):
        self.source = source
        self.values: dict[str, object] = {}
        self.lines: dict[str, Outcome] = {}
        self.order: list[str] = []
        self.problems: list[Problem] = []
        self.plan: dict[str, object] = {}
        self.settings: dict[str, object] = {}
        self.open: list[str] = []
        self.notes: list[str] = []
        self.typed: dict[str, object] = {}
        self._sort((), source.tables, is_off=False)

    def _sort(self, path: tuple[str, ...], table: Mapping[str, object], is_off: bool) -> None:
        """Give each key its outcome from the list of keys, or keep its value for a reader."""
        for name, value in table.items():
            inner = (*path, name)
            key = dotted(inner)
            group = known_keys().get(key)
            self.order.append(key)
            self.typed[key] = value
            if key in sections() and isinstance(value, Mapping):
                self._sort_table(inner, cast(Mapping[str, object], value))
            elif value is None and (group is not None or key in sections()):
                self.nothing(key, "null, as if it were not there")
            elif group is not None:
                self._sort_known(key, value, group, is_off)
            elif key in sections():
                self.wrong(key, "the value must be a table", 'Write e.g. {"enabled": true}')
            elif name.startswith(("_", "//")) or name in _COMMENTS:
                self.nothing(key, "a comment")
            else:
                hint = meant(dotted(path), name) or " It is left out."
                self._say(key, TYPO, f"no such key in DeepSpeed.{hint}")

    def _sort_table(self, path: tuple[str, ...], table: Mapping[str, object]) -> None:
        if table:
            self._sort(path, table, is_off=table.get("enabled") is False)
        else:
            self.nothing(dotted(path), "an empty table")

    def _sort_known(self, key: str, value: object, group: Group, is_off: bool) -> None:
        if group.outcome == "becomes":
            self.values[key] = value
        elif group.outcome == "not built" and (is_off or value in (False, None, "none", "", *group.off)):
            self.nothing(key, "switched off")
        else:
            self._say(key, _KINDS[group.outcome], group.text)

    # What the readers say

    def became(self, key: str, text: str, *fields: str) -> None:
        self._say(key, BECAME, text, fields)

    def follows(self, key: str, text: str) -> None:
        self._say(key, FOLLOWS, text)

    def nothing(self, key: str, text: str) -> None:
        self._say(key, NOTHING, text)

    def missing(self, key: str, text: str, *fields: str) -> None:
        """What DeepSpeed has and Weft does not, even where something near to it was set."""
        self._say(key, NOT_BUILT, text, fields)

    def removed(self, key: str, text: str) -> None:
        self._say(key, REMOVED, text)

    def set(self, key: str, setting: str, value: object) -> None:
        """A key of the file became a setting of the config."""
        self.settings[setting] = value
        self.became(key, f"{setting}={number_text(value)}", setting)

    def plan_word(self, key: str, **fields: object) -> None:
        """A key of the file became fields of the plan."""
        self.plan |= fields
        words = " ".join(f"{name}={'on' if value is True else value}" for name, value in fields.items())
        self.became(key, f"plan {words}", *(f"plan.{name}" for name in fields))

    def wrong(self, key: str, rule: str, remedy: str) -> None:
        """A mistake at a key: `<key>=<value>: <rule>. <remedy>.` A remedy may be a question."""
        end = "" if remedy.endswith("?") else "."
        message = f"{key}={self._value(key)}: {rule}. {remedy}{end}"
        self.problems.append(Problem(key, message, self.source.origin(key)))

    def _say(self, key: str, kind: str, text: str, fields: Sequence[str] = ()) -> None:
        self.lines[key] = Outcome(key, self._value(key), kind, text, tuple(fields))

    def _value(self, key: str) -> str:
        """What was typed, fit to be shown to others: comet.api_key is a key of DeepSpeed."""
        return "[redacted]" if is_secret(key.rpartition(".")[2]) else value_text(self.typed.get(key))

    # What the readers ask: the value, or None where it is absent, "auto" or wrong (then that is said here)

    def is_auto(self, key: str) -> bool:
        return self.values.get(key) == AUTO

    def leave_open(self, key: str) -> None:
        """A key that says "auto": its setting keeps Weft's own value until the user gives one."""
        target = known_keys()[key].target
        if not target:
            self.wrong(key, '"auto" is not a value of this key', "Write the value, or leave the key out")
            return
        self.open.append(target)
        self.follows(key, f"{target} ({default_text(target)} unless you set it)")

    def whole(self, key: str, low: int = 1, high: int = MOST) -> int | None:
        """Return an integer from low to high. 8.0, 5e8 and numbers in quotes are accepted, as in DeepSpeed's files."""
        value = _number_in_quotes(self._given(key))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
            return value
        example = f"{key}={max(low, 1)}" if low < high else f"{key}={low}"
        self.wrong(key, f"the value must be a whole number from {low} to {high}", f"Use e.g. {example}")
        return None

    def number(self, key: str, *, above_zero: bool = False, below: float = math.inf) -> float | None:
        """Return a number from 0 (or above 0) and below a limit. Numbers in quotes are accepted."""
        value = _number_in_quotes(self._given(key))
        if value is None or is_number(value, above_zero=above_zero, below=below):
            return None if value is None else float(cast(float, value))
        low = "above 0" if above_zero else "from 0"
        limit = "" if below == math.inf else f" and below {below:g}"
        self.wrong(key, f"the value must be a number {low}{limit}", f"Use e.g. {key}={'1e-4' if above_zero else '0.1'}")
        return None

    def switch(self, key: str) -> bool | None:
        """true or false; DeepSpeed also reads the texts."""
        value = self._given(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is None or isinstance(value, bool):
            return value
        self.wrong(key, "the value must be true or false", "Write true or false")
        return None

    def choice(self, key: str, known: Sequence[str]) -> str | None:
        """One of `known`, in any case of letters; the spelling of `known` comes back."""
        value = self._given(key)
        if value is None:
            return None
        names = {name.lower(): name for name in known}
        if isinstance(value, str) and value.lower() in names:
            return names[value.lower()]
        hint = did_you_mean(value, known).strip() if isinstance(value, str) else ""
        self.wrong(key, f"DeepSpeed knows {', '.join(known[:12])}", hint or f"Use {known[0]}")
        return None

    def _given(self, key: str) -> object:
        value = self.values.get(key)
        if value == AUTO:
            self.leave_open(key)
            return None
        return value


def _number_in_quotes(value: object) -> object:
    """Return the number that a text holds, or the value unchanged."""
    if not isinstance(value, str) or len(value) > 40 or not re.fullmatch(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", value):
        return value
    return int(value) if value.isdecimal() else float(value)


def is_number(value: object, *, above_zero: bool = False, below: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return False
    return (value > 0 if above_zero else value >= 0) and value < below


def default_text(target: str) -> str:
    """Weft's own value of a setting or of a plan's field."""
    if target.startswith("plan."):
        return str(getattr(Plan(), target.removeprefix("plan.")))
    node: object = RunConfig()
    for part in target.split("."):
        node = getattr(node, part)
    return "worked out from the other settings" if node is None else number_text(node)


def number_text(value: object) -> str:
    """Numbers as people write them: 2e8, not 200000000.0; the rest as TOML."""
    if isinstance(value, float):
        short = f"{value:g}"
        text = short if float(short) == value else repr(value)
        return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    if isinstance(value, list | tuple):
        return f"[{', '.join(number_text(item) for item in cast(list[object], value))}]"
    return shown(value)


def value_text(value: object) -> str:
    """A value of the file in an outcome or an error: on one line, and short."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{...}" if value else "{}"
    shown_whole = number_text(value)
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown_whole)
    return text if len(text) <= 40 else f"{text[:37]}..."
