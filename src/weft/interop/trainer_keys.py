"""Keys of axolotl, LLaMA-Factory and TRL configs, and the outcome of importing each key.

`trainer_keys.toml` lists the keys of each tool. A key without an entry is reported, like a key of a feature that Weft
lacks.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from weft.config.expected_values import node_at, types_of
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.env import is_secret
from weft.errors import PlanError, did_you_mean
from weft.interop.deepspeed import nested
from weft.interop.deepspeed_keys import BECAME, NOT_BUILT, NOTHING, TYPO, Outcome, number_text, value_text

TOOLS = ("axolotl", "llamafactory", "trl")
#: Values that request nothing.
_OFF = (False, None, "", 0, "none", "no")
#: Largest number of steps, ranks or sequences.
_LARGEST = 10**9


@dataclass(frozen=True)
class Tool:
    """The keys of one tool. The top of trainer_keys.toml describes the tables."""

    name: str
    title: str
    fills: Mapping[str, object]
    sets: Mapping[str, str]
    adapter: Mapping[str, str]
    words: Mapping[str, Mapping[str, Any]]
    code: Mapping[str, str]
    types: Mapping[str, str]
    columns: Mapping[str, str]
    nothing: Mapping[str, str]
    missing: Mapping[str, tuple[str, tuple[object, ...]]]

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """All keys that the tool has."""
        return frozenset({*self.sets, *self.adapter, *self.words, *self.code, *self.nothing, *self.missing})


@functools.cache
def tools() -> Mapping[str, Tool]:
    """Return the tools by name."""
    text = resources.files("weft.interop").joinpath("trainer_keys.toml").read_text(encoding="utf-8")
    tables: dict[str, Any] = tomllib.loads(text)

    def made(name: str) -> Tool:
        found = [tables[base] for base in (tables[name].get("base"), name) if base]
        joined = {
            part: {key: value for table in found for key, value in table.get(part, {}).items()}
            for part in ("fills", "sets", "adapter", "words", "code", "types", "columns")
        }
        words = {key: tables[value] if isinstance(value, str) else value for key, value in joined["words"].items()}
        lists = {part: [group for table in found for group in table.get(part, [])] for part in ("nothing", "missing")}
        return Tool(
            name=name,
            title=tables[name]["title"],
            nothing={key: group["text"] for group in lists["nothing"] for key in group["keys"]},
            missing={key: (one["text"], tuple(one.get("off", ()))) for one in lists["missing"] for key in one["keys"]},
            **{**joined, "words": words},
        )

    return {name: made(name) for name in TOOLS}


class TrainerReading:
    """State of importing one file. Like `Reading` of DeepSpeed's configs, for flat keys.

    Attributes:
        plan: fields of the plan.
        settings: dotted settings of a RunConfig.
        open: settings that depend on the ranks.
        folder: folder of the file, for the files that it names.
    """

    def __init__(self, tool: Tool, values: Mapping[str, object], folder: Path, world_size: int | None):
        self.tool, self.values, self.folder, self.world_size = tool, values, folder, world_size
        self.lines: dict[str, Outcome] = {}
        self.plan: dict[str, object] = {}
        self.settings: dict[str, Any] = {}
        self.open: list[str] = []
        self.notes: list[str] = []
        self.has_adapter = False

    def note(self, key: str, kind: str, text: str, fields: tuple[str, ...] = (), value: object = None) -> None:
        shown: Any = self.values.get(key) if value is None else value
        parts = cast(list[object], shown) if isinstance(shown, list) else []
        if isinstance(shown, dict) or any(isinstance(one, list | dict) for one in parts):
            text_of = "{...}" if isinstance(shown, dict) else "[...]"
        else:
            is_hidden = isinstance(shown, str) and is_secret(key.rpartition(".")[2])
            text_of = "[redacted]" if is_hidden else value_text(cast(object, shown))
        self.lines[key] = Outcome(key, text_of, kind, text, fields)

    def assign(self, key: str, settings: Mapping[str, object]) -> None:
        """Set settings from a key, and record the outcome. A value that a setting does not accept is reported."""
        if not self.has_adapter and any(name.startswith("adapter.") for name in settings):
            self.note(key, NOTHING, "the file trains no adapter")
            return
        precision = settings.get("plan.precision")
        if precision in ("tf32", "fp32") and self.plan.get("precision") in ("bf16", "fp16", "fp8"):
            self.note(key, NOTHING, f"plan.precision is {self.plan['precision']}")
            return
        accepted: dict[str, object] = {}
        for name, given in settings.items():
            value = _converted(name, given)
            if problem := setting_problem(name, value):
                self.note(key, NOT_BUILT, problem)
                return
            accepted[name] = value
        for name, value in accepted.items():
            self._store(name, value)
        text = ", ".join(f"{name}={number_text(value)}" for name, value in accepted.items())
        self.note(key, BECAME if accepted else NOTHING, text or "Weft does the same", tuple(accepted))

    def _store(self, name: str, value: object) -> None:
        section, _, rest = name.partition(".")
        if section == "plan":
            self.plan[rest] = value
        elif name.startswith("optimizer.betas."):
            pair = list(self.settings.get("optimizer.betas", self.tool.fills.get("optimizer.betas", (0.9, 0.999))))
            pair[int(name[-1])] = value
            self.settings["optimizer.betas"] = pair
        else:
            self.settings[name] = value

    def number(self, key: str) -> float | None:
        """Return a number, which may be quoted, or None. A value that is no number is reported."""
        value = _as_number(self.values.get(key))
        if value is None or (isinstance(value, int | float) and abs(value) <= _LARGEST):
            return value
        self.note(key, NOT_BUILT, "the value is not a number of usual size. Write one")
        return None

    def count(self, key: str, default: int) -> int:
        """Return a whole number above 0, or the default."""
        value = self.number(key)
        if value is None or value is True or value is False or (value >= 1 and value == int(value)):
            return int(value or default)
        self.note(key, NOT_BUILT, f"the value is not a whole number above 0. Write one; {default} is used")
        return default

    def is_on(self, key: str) -> bool:
        return self.values.get(key) not in _OFF

    def read_tables(self) -> None:
        """Read the keys that need only the tables of trainer_keys.toml."""
        tool = self.tool
        for key in [*tool.words, *tool.sets, *tool.adapter]:
            if key not in self.values:
                continue
            value = self.values[key]
            if value is None:
                self.note(key, NOTHING, "null, as if it were not there")
            elif key in tool.words:
                self._read_choice(key, value)
            else:
                self.assign(key, {tool.sets.get(key) or tool.adapter[key]: value})
        for key, value in self.values.items():
            if key in tool.nothing:
                self.note(key, NOTHING, tool.nothing[key])
            elif key in tool.missing:
                text, off = tool.missing[key]
                is_off = value in _OFF or value in off or value in ([], {})
                self.note(key, *((NOTHING, "switched off") if is_off else (NOT_BUILT, text)))
            elif key not in tool.keys:
                hint = did_you_mean(str(key), sorted(tool.keys)).strip() or "It is left out."
                self.note(str(key), TYPO, f"no such key in {tool.title}. {hint}", value=value)

    def _read_choice(self, key: str, value: object) -> None:
        entries = self.tool.words[key]
        if isinstance(value, list) and len(cast(list[object], value)) == 1:
            value = cast(list[object], value)[0]  # TRL's loss_type
        word = str(value).lower() if isinstance(value, bool) else str(cast(object, value))
        entry = entries.get(word, entries.get("*", "the value has no counterpart. Leave it out"))
        if word != "off" and word in entries and isinstance(entry, Mapping):
            self.assign(key, cast(Mapping[str, object], entry))
        elif value in entries.get("off", _OFF):
            self.note(key, NOTHING, "switched off")
        else:
            self.note(key, NOT_BUILT, str(entry))


def _as_number(value: object) -> object:
    """Return a number that YAML reads as text (2e-5), and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return number if abs(number) < 1e300 else value


def _converted(name: str, value: object) -> object:
    if name.startswith("plan."):
        return value
    if name.startswith(("task.options.", "optimizer.betas.")):
        number = _as_number(value)
        return float(number) if isinstance(number, int) and not isinstance(number, bool) else number
    types = types_of(node_at(tuple(name.split("."))) or {})
    if not {"number", "integer"} & {*types}:
        return value
    number = _as_number(value)
    return int(number) if isinstance(number, float) and "integer" in types and number.is_integer() else number


def setting_problem(name: str, value: object) -> str:
    """Return the reason why a setting does not accept a value, or ""."""
    section, _, rest = name.partition(".")
    if section == "plan":
        try:
            Plan.read_open({rest: value})
        except PlanError as error:
            return f"plan {error.problems[0].message}"
        return ""
    if name.startswith("optimizer.betas."):
        is_share = isinstance(value, float) and 0 <= value < 1
        return "" if is_share else "optimizer.betas has numbers from 0 and below 1. Use e.g. 0.9"
    if node_at(tuple(name.split("."))) is None and not name.startswith("task.options."):
        return f"Weft has no setting {name}"
    try:
        RunConfig.model_validate(nested({name: value}))
    except ValidationError as error:
        return f"{name}: {error.errors()[0]['msg'][:1].lower()}{error.errors()[0]['msg'][1:]}"
    return ""
