"""Config files: read TOML with overrides, keep the origin of each value, print configs and their schema."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from weft.config.cluster import DeviceSpec
from weft.config.expected_values import first_line, keys_of, node_at, types_of, unknown_key, wrong_value
from weft.config.fields.plan_text import is_auto, split_plan
from weft.config.parsing import (
    COMMAND_LINE,
    DEFAULT,
    KeyPath,
    as_toml,
    dotted,
    error_line,
    key_lines,
    origin_of,
    shown,
    split_key,
)
from weft.config.plan import PLAN_FIELDS, Plan, auto_fields
from weft.config.rules.config_rules import config_problems, in_config
from weft.config.run_config import RunConfig
from weft.config.sections import Section
from weft.errors import ConfigError, PlanError, Problem, did_you_mean, nearest_name

SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config and the origin of each value.

    origins: dotted key of every value -> "default", "train.toml:12" or "command line".
    """

    config: RunConfig
    origins: Mapping[str, str]

    def check(self, *, world_size: int | None = None, device: DeviceSpec | None = None) -> None:
        """Check all rules again, with the number of ranks and the device, if given.

        Raise ConfigError with every problem and its origin.
        """
        problems = config_problems(self.config, origins=self.origins, world_size=world_size, device=device)
        if problems:
            raise ConfigError(sorted(problems, key=by_line))

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (dotted key, value as TOML, origin) of each value, in the order of the sections."""
        return [(dotted(path), as_toml(value), self.origins[dotted(path)]) for path, value in leaves(self.config)]


def leaves(config: RunConfig) -> list[tuple[KeyPath, object]]:
    """Return all values of a config that are not None, with their paths, in the order of the sections."""
    found: list[tuple[KeyPath, object]] = []

    def visit(path: KeyPath, value: object) -> None:
        elements = cast(tuple[object, ...], value) if isinstance(value, tuple) else ()
        if isinstance(value, dict) and value:
            for key, inside in cast(dict[str, object], value).items():
                visit((*path, key), inside)
        elif elements and isinstance(elements[0], dict):
            for index, inside in enumerate(elements):
                visit((*path, index), inside)
        else:
            found.append((path, cast(object, value)))

    visit((), config.model_dump(by_alias=True, exclude_none=True))
    return found


def by_line(problem: Problem) -> tuple[int, int]:
    """Return a key that sorts problems in the order of the file's lines; the command line comes last."""
    line = problem.origin.rpartition(":")[2]
    return (0, int(line)) if line.isdigit() else (1, 0)


# Printing: a config as a TOML file, and the JSON Schema of config files.


def format_config(config: RunConfig, *, only_changes: bool = False) -> str:
    """Return the config as a TOML file that loads back to an equal one.

    only_changes: leave out values that equal Weft's defaults.
    """
    import tomli_w

    tables = _tables(config)
    return tomli_w.dumps(_changes(tables, _tables(RunConfig())) if only_changes else tables)


def _tables(config: RunConfig) -> dict[str, Any]:
    tables = config.model_dump(by_alias=True, exclude_none=True)
    if config.task.name is None and not config.task.options:
        del tables["task"]
    if config.train.epochs is not None:
        del tables["train"]["steps"]  # a file may have only one of steps and epochs; epochs win
    for name in ("train", "eval"):  # a table for each source reads better than one long line
        for source in tables["data"][name]:
            if not source["columns"]:
                del source["columns"]
    return tables


def _changes(tables: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Return the values that differ from the defaults, and the tables that contain one."""
    changed: dict[str, object] = {}
    for name, value in tables.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _changes(cast(dict[str, object], value), cast(dict[str, object], default))
            if value:
                changed[name] = value
        elif value != default:
            changed[name] = value
    return changed


def config_schema() -> dict[str, object]:
    """Return the JSON Schema of a config file, including short forms, for completion and checks in editors."""
    schema = cast(dict[str, object], RunConfig.model_json_schema())
    properties = cast(dict[str, dict[str, object]], schema["properties"])
    plan = properties["plan"]
    fields = {name: {**field.kind.schema(), "description": field.help} for name, field in PLAN_FIELDS.items()}
    table = {"type": "object", "additionalProperties": False, "properties": fields}
    plan["anyOf"] = [{"type": plan.pop("type")}, table]
    properties["task"]["anyOf"] = [{"$ref": properties["task"].pop("$ref")}, _TEXT]
    definitions = cast(dict[str, dict[str, object]], schema["$defs"])
    sources = cast(dict[str, dict[str, object]], definitions["DataSection"]["properties"])
    for name in ("train", "eval"):
        of_tables = {"type": sources[name].pop("type"), "items": {"anyOf": [sources[name].pop("items"), _TEXT]}}
        sources[name]["anyOf"] = [of_tables, _TEXT]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_TEXT = {"type": "string"}


# Reading: a TOML file, dotted overrides that replace its values, and defaults for the rest. All mistakes are reported
# together, with their lines.


_NOT_TOML = (".yaml", ".yml", ".json")


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a config file (None: the built-in defaults) with overrides such as "optimizer.lr=1e-4".

    Raises:
        ConfigError: if there are problems; the message lists all of them.
    """
    if path is None:
        return parse_config("", "", overrides)
    name = shown(str(path), 200)  # one line, whatever the path contains
    return parse_config(_read_text(Path(path), name), name, overrides, Path(path))


def parse_config(text: str, name: str, overrides: Sequence[str] = (), file: Path | None = None) -> LoadedConfig:
    """Read the TOML text of a config file, as `load_config` does.

    Args:
        text: TOML.
        name: name of the file in messages.
        overrides: key=value arguments of the command line, applied in order.
        file: path whose name becomes the name of the run if no setting names it.

    Raises:
        ConfigError: with every problem found, in the order of the file's lines.
    """
    tables, origins = _read_tables(text, name)
    problems: list[Problem] = []
    _expand_short_forms(tables)
    for override in overrides:
        typed = apply_override(tables, override, problems)
        if typed is not None:
            origins = {key: origin for key, origin in origins.items() if key[: len(typed)] != typed}
            origins[typed] = COMMAND_LINE
            _expand_short_forms(tables)
    found = [*_read_plan(tables), *_resolve_steps(tables, origins)]
    _as_integers(tables)
    named = {dotted(key): origin for key, origin in origins.items()}
    if file is not None and _name_run(tables, file):
        named["run.name"] = name
    config, wrong = validated(tables, RunConfig)
    for problem in [*found, *wrong]:
        problems.append(replace(problem, origin=origin_of(named, [problem.field], name)))
    broken = {problem.field for problem in problems}
    if config.train.epochs is not None:
        broken.add("train.steps")  # the steps are known after the data is read; the rules are checked again then
    problems += config_problems(config, broken=broken, origins=named, fallback=name)
    if problems:
        raise ConfigError(sorted(dict.fromkeys(problems), key=by_line))
    typed_at: dict[str, str] = {}
    for key, _ in leaves(config):
        is_typed = _existing(tables, key)[1]
        typed_at[dotted(key)] = origin_of(named, [dotted(key)], DEFAULT) if is_typed else DEFAULT
    return LoadedConfig(config, typed_at)


def _read_text(path: Path, name: str) -> str:
    if path.suffix.lower() in _NOT_TOML and path.is_file():
        raise ConfigError(
            f"config file {name}: only TOML is read. Write its settings as key = value below [section] lines into "
            f"{path.stem}.toml; `weft config show` prints all of them with their defaults."
        )
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(_unreadable(path, name, error)) from None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        rule = f"byte 0x{raw[error.start]:02x} is not valid UTF-8. Save the file as UTF-8."
        raise ConfigError([Problem("", rule, f"{name}:{line}")]) from None


def _unreadable(path: Path, name: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        near = did_you_mean(path.name, sorted(file.name for file in path.parent.glob("*.toml")))
        remedy = near or " Check the path, or leave it out for the default."
        return f"config file {name}: there is no such file.{remedy}"
    if isinstance(error, IsADirectoryError):
        return f"config file {name}: this is a folder. Name a TOML file in it."
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"config file {name}: it cannot be read ({reason}). Check its path and permissions."


def _read_tables(text: str, name: str) -> tuple[dict[str, object], dict[KeyPath, str]]:
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ConfigError([Problem("", "arrays or tables are nested too deeply. Flatten them.", f"{name}:1")]) from None
    except ValueError as error:
        line, reason = error_line(error, text)
        typed = shown(text.split("\n")[line - 1].strip(), 80)
        again = reason.startswith(("Cannot", "Duplicate"))
        remedy = "Keep one of the two." if again else "Write key = value, with text in quotes."
        rule = f"this is not TOML: {reason[:1].lower()}{reason[1:]} in {typed!r}. {remedy}"
        raise ConfigError([Problem("", rule, f"{name}:{line}")]) from None
    return tables, {key: f"{name}:{line}" for key, line in key_lines(text).items()}


def run_name(path: Path) -> str:
    """Return a run name made from a file's name, without characters that folder names should not have; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem).strip("._-")[:100]


def _name_run(tables: dict[str, object], path: Path) -> bool:
    """Name the run after its file if no setting names it, so that two files never use the same run folder.

    Return True if the run got a name.
    """
    section = tables.setdefault("run", {})
    if not isinstance(section, dict) or "name" in section:
        return False
    name = run_name(path)
    if name:
        cast(dict[str, object], section)["name"] = name
    return bool(name)


def _expand_short_forms(tables: dict[str, object]) -> None:
    """Replace short forms by tables: a task given as text, and sources such as "a.txt" and ["a.txt", {path = ...}]."""
    if isinstance(tables.get("task"), str):
        tables["task"] = {"name": tables["task"]}
    data = tables.get("data")
    if not isinstance(data, dict):
        return
    section = cast(dict[str, object], data)
    for name in ("train", "eval"):
        sources = section.get(name)
        if isinstance(sources, str):
            sources = [sources]
        if isinstance(sources, list):
            elements = cast(list[object], sources)
            section[name] = [{"path": source} if isinstance(source, str) else source for source in elements]


def _as_integers(node: object, path: KeyPath = ()) -> object:
    """Return the tables with floats such as 1e3 converted to integers, in the same tables, for integer settings."""
    if isinstance(node, float):
        types = types_of(node_at(path)) if node.is_integer() else []
        return int(node) if "integer" in types and "number" not in types else node
    if isinstance(node, dict) and len(path) < 4:  # no setting is nested deeper
        table = cast(dict[str, object], node)
        for name, value in table.items():
            table[name] = _as_integers(value, (*path, name))
        return table
    return cast(object, node)


def _resolve_steps(tables: dict[str, object], origins: dict[KeyPath, str]) -> list[Problem]:
    """Keep either steps or epochs: the command line wins over the file. Return a problem if one source sets both."""
    train = tables.get("train")
    if not isinstance(train, dict) or not {"steps", "epochs"} <= train.keys():
        return []
    section = cast(dict[str, object], train)
    typed = {name for name in ("steps", "epochs") if origins.get(("train", name)) == COMMAND_LINE}
    if len(typed) == 1:
        del section["epochs" if "steps" in typed else "steps"]
        return []
    both = f"train.epochs={shown(section['epochs'])}: train.steps={shown(section['steps'])} is given too"
    del section["epochs"]
    return [Problem("train.epochs", f"{both}. Keep one of the two.")]


def _read_plan(tables: dict[str, object]) -> list[Problem]:
    """Replace a plan given as a table by its text. Remove a plan that cannot be read, and return its problems."""
    plan = tables.get("plan")
    if not isinstance(plan, str | dict):
        return []  # absent, or of a type that validation rejects
    source = plan if isinstance(plan, str) else cast(dict[str, object], plan)
    try:
        if isinstance(source, str) and is_auto(source):
            auto_fields(source)
            return []
        read, open_axis = Plan.read_open(source)
    except PlanError as error:
        del tables["plan"]
        return [in_config(problem) for problem in error.problems]
    if isinstance(plan, dict):
        tables["plan"] = read.format(open_axis)
    return []


def validated(tables: dict[str, object], kind: type[SectionT]) -> tuple[SectionT, list[Problem]]:
    """Return the tables as a section, with defaults instead of wrong values, and the problems.

    Wrong values are removed from the tables.
    """
    problems: list[Problem] = []
    while True:
        try:
            return kind.model_validate(tables), problems
        except ValidationError as error:
            wrong = _wrong_paths(error, tables)
            problems += [_type_problem(path, why, tables, kind) for path, why in wrong.items()]
            for path in wrong:
                _remove(tables, path)


def _wrong_paths(error: ValidationError, tables: dict[str, object]) -> dict[KeyPath, str]:
    """Return the values that validation rejects: path -> kind of error. A nested path is kept instead of its parent."""
    kinds: dict[KeyPath, str] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        path, is_whole = _existing(tables, detail["loc"])
        kind = detail["type"]
        if kind == "missing" and isinstance(detail["loc"][-1], str):
            path = detail["loc"]
        elif not is_whole or kind == "missing":
            kind = "value"  # a list that is too short, or a value that fits no type of a union
        kinds.setdefault(path, kind)
    parents = {path[:end] for path in kinds for end in range(len(path))}
    return {path: kind for path, kind in kinds.items() if path not in parents}


def _existing(tables: dict[str, object], location: KeyPath) -> tuple[KeyPath, bool]:
    """Return the part of pydantic's location that exists in the config, and True if that is the full location.

    For a union, pydantic appends names of its branches.
    """
    node: object = tables
    for depth, part in enumerate(location):
        if isinstance(node, dict) and part in node:
            node = cast(dict[str | int, object], node)[part]
        elif isinstance(node, list) and isinstance(part, int) and part < len(cast(list[object], node)):
            node = cast(list[object], node)[part]
        else:
            return location[:depth], False
    return location, True


def _type_problem(path: KeyPath, kind: str, tables: dict[str, object], root: type[Section]) -> Problem:
    if kind == "missing":
        example = first_line(path[:-1], str(path[-1]))
        return Problem(dotted(path), f"{dotted(path)}: this key is missing. Add e.g. {example}.")
    if kind == "extra_forbidden" or node_at(path, root) is None:
        return Problem(dotted(path), unknown_key(path, root))
    node: object = tables
    for part in path:
        node = cast(dict[str | int, object], node)[part]
    return Problem(dotted(path), wrong_value(path, node, root))


def _remove(tables: dict[str, object], path: KeyPath) -> None:
    """Remove a rejected value, so that the rest can be checked.

    An array is removed as a unit, so that no index changes.
    """
    node: object = tables
    for depth, part in enumerate(path):
        if not isinstance(node, dict):
            return  # its parent was removed already
        table = cast(dict[str | int, object], node)
        node = table.get(part)
        if depth == len(path) - 1 or isinstance(node, list):
            table.pop(part, None)
            return


def apply_override(tables: dict[str, object], text: str, problems: list[Problem]) -> KeyPath | None:
    """Apply one override to `tables` and return its path, or append to `problems` and return None."""
    key, equals, value = text.partition("=")
    try:
        parts = split_key(key.strip())
    except (ValueError, RecursionError):
        parts = ()
    if not equals or not parts:
        problems.append(_problem(text, f"override {shown(text)!r}: an override is key=value. {_example(parts)}"))
        return None
    path = cast(KeyPath, ())
    for part in parts:  # numbers are indices of arrays: data.train.0.path
        is_index = part.isascii() and part.isdigit() and len(part) < 9
        path = (*path, int(part) if is_index and (node_at(path) or {}).get("type") == "array" else part)
    if path == ("task",):
        path = ("task", "name")  # keep the options that the file sets
    parsed = override_value(path, value)
    plan = tables.get("plan", RunConfig().plan)
    if path[0] == "plan" and len(path) > 1 and isinstance(plan, str):
        table, wrong = split_plan(plan)
        if not wrong:  # a wrong text is kept, so that the error names its line
            tables["plan"] = table
    return path if _put(tables, path, parsed, problems) else None


def override_value(path: KeyPath, text: str) -> object:
    """Return the value of an override, parsed as TOML or else as text. Keys of type text need no quotes."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    is_text = (node_at(path) or {}).get("type") == "string" and path != ("plan",)
    return text if set(read) != {"value"} or (is_text and text.strip()[:1] not in "\"'") else read["value"]


def _example(parts: tuple[str, ...]) -> str:
    known = keys_of(node_at(()) or {})
    hint = did_you_mean(parts[0], known).strip() if parts and parts[0] not in known else ""
    return hint or "Write e.g. optimizer.lr=1e-4."


def _problem(key: str, message: str) -> Problem:
    return Problem(key, message, COMMAND_LINE)


def _put(tables: dict[str, object], path: KeyPath, value: object, problems: list[Problem]) -> bool:
    key = f"{dotted(path)}={shown(value)}"
    node: object = tables
    for depth, part in enumerate(path):
        here = path[:depth]
        is_last = depth == len(path) - 1
        if isinstance(node, list) and isinstance(part, int):
            elements = cast(list[object], node)
            if part > len(elements):
                rule = (
                    f"{dotted(here)} has {len(elements)} elements. Use an index up to {len(elements)}; "
                    f"{len(elements)} itself adds an element."
                )
                problems.append(_problem(dotted(path), f"{key}: {rule}"))
                return False
            if part == len(elements):
                elements.append({})
            if is_last:
                elements[part] = value
            node = elements[part]
        elif isinstance(node, dict) and isinstance(part, str):
            table = cast(dict[str, object], node)
            if is_last:
                table[part] = value
            elif part not in table and (start := _start((*here, part))) is not None:
                table[part] = start
            node = table.get(part)
        else:
            problems.append(_problem(dotted(path), f"{key}: {_no_inside(here)}"))
            return False
        if not is_last and not isinstance(node, dict | list):
            problems.append(_problem(dotted(path), f"{key}: {_no_inside(path[: depth + 1])}"))
            return False
    return True


def _start(path: KeyPath) -> object:
    """Return the initial value of a key that an override sets values in.

    An array starts with the default's elements, a table is empty. None: the key has a single value.
    """
    schema = node_at(path)
    if schema is None or schema.get("type") == "object" or path == ("plan",):
        return {}
    if schema.get("type") != "array":
        return None  # a value without keys inside
    default: object = RunConfig().model_dump(by_alias=True, exclude_none=True)
    for part in path:
        default = cast(dict[str, object], default)[str(part)]
    return list(cast(tuple[object, ...], default))


def _no_inside(path: KeyPath) -> str:
    schema = node_at(path)
    key = dotted(path)
    if schema is not None and schema.get("type") == "array":
        return f"{key} is a list; address its elements by number. Use e.g. {key}.0."
    if schema is not None and schema.get("type") == "object":
        return f"{key} must be a table, and has another value. Correct {key} first."
    return f"{key} is a single value with no keys inside. Use {key}=..."


def read_tables(path: Path, command: str) -> dict[str, Any]:
    """Read the TOML file of a command, such as "sweep".

    Raises:
        ConfigError: if it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        near = nearest_name(path.stem, sorted(file.stem for file in path.parent.glob("*.toml")))
        remedy = f" Did you mean '{near}.toml'?" if near else " Check the path."
        raise ConfigError(f"{command} {shown(str(path))}: it cannot be read ({error.strerror}).{remedy}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: it is not TOML ({error}). Correct that line.") from None
