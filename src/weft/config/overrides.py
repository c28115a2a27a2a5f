"""Command line overrides, `optimizer.lr=1e-4`, applied to the tables of a config file."""

from __future__ import annotations

import tomllib
from typing import cast

from weft.config.expected_values import is_container, keys_of, node_at, takes_text
from weft.config.parsing import COMMAND_LINE, split_key
from weft.config.plan_text import split_plan
from weft.config.run_config import RunConfig
from weft.config.toml_values import KeyPath, dotted, shown
from weft.errors import Problem, did_you_mean


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
    path = _indexed(parts)
    if path == ("task",):
        path = ("task", "name")  # options that the file gives stay
    parsed = override_value(path, value)
    if path[0] == "plan" and len(path) > 1:
        _open_plan(tables)
    return path if _put(tables, path, parsed, problems) else None


def override_value(path: KeyPath, text: str) -> object:
    """The value of an override: as TOML reads it, else the text itself. A key that takes text needs no quotes."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    if set(read) != {"value"} or (takes_text(node_at(path)) and path != ("plan",) and text.strip()[:1] not in "\"'"):
        return text
    return read["value"]


def _example(parts: tuple[str, ...]) -> str:
    hint = did_you_mean(parts[0], keys_of(node_at(()) or {})) if parts else ""
    return hint.strip() if hint and parts[0] not in keys_of(node_at(()) or {}) else "Write e.g. optimizer.lr=1e-4."


def _problem(key: str, message: str) -> Problem:
    return Problem(key, message, COMMAND_LINE)


def _indexed(parts: tuple[str, ...]) -> KeyPath:
    """Return the path with numbers as indices of arrays: data.train.0.path."""
    path: KeyPath = ()
    for part in parts:
        is_index = part.isascii() and part.isdigit() and len(part) < 9
        inside_array = (node_at(path) or {}).get("type") == "array"
        path = (*path, int(part) if is_index and inside_array else part)
    return path


def _open_plan(tables: dict[str, object]) -> None:
    """Turn the plan's text into a table, so that an override can reach one field."""
    text = tables.get("plan", RunConfig().plan)
    if isinstance(text, str):
        table, wrong = split_plan(text)
        if not wrong:  # else the text stays, and is refused with the line it was typed on
            tables["plan"] = table


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
    """Return the initial value that an override changes: the default's elements of an array, else an empty table."""
    schema = node_at(path)
    if schema is None or schema.get("type") == "object" or path == ("plan",):
        return {}
    if schema.get("type") != "array":
        return None  # a value with nothing inside
    default: object = RunConfig().model_dump(by_alias=True, exclude_none=True)
    for part in path:
        default = cast(dict[str, object], default)[str(part)]
    return list(cast(tuple[object, ...], default))


def _no_inside(path: KeyPath) -> str:
    schema = node_at(path)
    key = dotted(path)
    if schema is not None and schema.get("type") == "array":
        return f"{key} is a list; address its elements by number. Use e.g. {key}.0."
    if schema is not None and is_container(schema):
        return f"{key} must be a table, and has another value. Correct {key} first."
    return f"{key} is a single value with no keys inside. Use {key}=..."
