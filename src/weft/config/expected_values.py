"""Error texts for wrong config values, generated from the JSON schema of `RunConfig`."""

from __future__ import annotations

import functools
import math
from typing import cast

from weft.config.other_names import OTHER_NAMES, OTHER_VALUES
from weft.config.plan import PLAN_FIELDS
from weft.config.run_config import RunConfig
from weft.config.toml_values import KeyPath, as_toml, dotted, shown
from weft.errors import did_you_mean, nearest_name

Node = dict[str, object]


@functools.cache
def _schema() -> Node:
    return RunConfig.model_json_schema()


def _resolved(node: Node) -> Node:
    reference = node.get("$ref")
    if not isinstance(reference, str):
        return node
    definitions = cast(dict[str, Node], _schema()["$defs"])
    return definitions[reference.rpartition("/")[2]]


def keys_of(node: Node) -> dict[str, Node]:
    """Return the keys of a table with their schemas; empty if the node is not a table with fixed keys."""
    return cast(dict[str, Node], _resolved(node).get("properties", {}))


def node_at(path: KeyPath) -> Node | None:
    """Return the schema of the value at a path, or None for an unknown key."""
    node: Node | None = _schema()
    for part in path:
        node = _child(_resolved(node), part)
        if node is None:
            return None
    return _resolved(node)


def _child(node: Node, part: str | int) -> Node | None:
    if isinstance(part, str):
        names = cast(dict[str, list[str]], node.get("propertyNames", {})).get("enum", [part])
        more = node.get("additionalProperties")
        return keys_of(node).get(part) or (cast(Node, more) if isinstance(more, dict) and part in names else None)
    elements = cast(list[Node], node.get("prefixItems", []))
    if part < len(elements):
        return elements[part]
    return cast(Node | None, node.get("items"))


def takes_text(node: Node | None) -> bool:
    """Return True if the key accepts text only, so that an override needs no quotes."""
    return node is not None and node.get("type") == "string"


def takes_integers(node: Node | None) -> bool:
    """Whether the key takes whole numbers, and none with a fraction."""
    kinds = [branch.get("type") for branch in _branches(node or {})]
    return "integer" in kinds and "number" not in kinds


def is_container(node: Node) -> bool:
    """Whether there is something inside: a table or an array."""
    return node.get("type") in ("object", "array")


def wrong_value(path: KeyPath, value: object) -> str:
    """The whole message for a value that its key does not take."""
    node = node_at(path)
    if node is None:
        return unknown_key(path)
    # "0.1" in quotes must not look like the number 0.1.
    is_quoted = isinstance(value, str) and _unquoted(value, _branches(node)) != ""
    text = "***" if _is_secret(node) else f'"{value}"' if is_quoted else shown(value)
    return f"{dotted(path)}={text}: {_description(node)} is needed. {_remedy(path, node, value)}"


def _is_secret(node: Node) -> bool:
    """Return True if the value may be a secret, which is not printed."""
    return any(bool(branch.get("x-secret")) for branch in _branches(node))


def missing_key(path: KeyPath) -> str:
    """The message for a key that must be given and is not."""
    return f"{dotted(path)}: this key is missing. Add e.g. {_first_line(path[:-1], str(path[-1]))}."


def unknown_key(path: KeyPath) -> str:
    """The message for a key that no section has."""
    parent, name = path[:-1], str(path[-1])
    text = f"unknown key {shown(dotted(path), 120)!r}."
    node = node_at(parent) or {}
    names = cast(dict[str, list[str]], node.get("propertyNames", {})).get("enum", [])
    siblings = [*keys_of(node), *names]
    near = nearest_name(name, siblings)
    meant = dotted((*parent, near)) if near else _setting_like(name)
    if "=" in meant:
        return f"{text} Write {meant}."
    if meant:
        return f"{text} Did you mean '{meant}'?"
    place = f"[{dotted(parent)}]" if parent else "A config"
    return f"{text} {place} has {', '.join(siblings)}."


def _setting_like(name: str) -> str:
    """Return the setting that matches a key of another section or another tool, or ""."""
    if name in PLAN_FIELDS:
        return f"plan.{name}"
    meanings = {
        key: f"{section}.{key}" for section, node in reversed(keys_of(_schema()).items()) for key in keys_of(node)
    }
    meanings.update(OTHER_NAMES)
    near = nearest_name(name.lower(), meanings)
    return meanings[near] if near else ""


def _branches(node: Node) -> list[Node]:
    """The kinds of value that a key takes, without "nothing"."""
    options = cast(list[Node], node.get("anyOf", [node]))
    return [_resolved(option) for option in options if option.get("type") != "null"]


def _description(node: Node) -> str:
    return " or ".join(_kind(branch) for branch in _branches(node))


def _kind(node: Node) -> str:
    if "x-rule" in node:
        return str(node["x-rule"])
    names = _names(node)
    if names:
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    elements = cast(list[Node], node.get("prefixItems", []))
    match node.get("type"):
        case "integer":
            return f"a whole number {_range(node, whole=True)}"
        case "number":
            return f"a number {_range(node, whole=False)}".rstrip()
        case "boolean":
            return "true or false"
        case "array" if elements:
            return f"a list of {len(elements)} values, each {_kind(_resolved(elements[0]))},"
        case "array":
            return "a list of at least one table" if node.get("minItems") else "a list of tables"
        case "object":
            return "a table"
        case _:
            return "a string"


def _names(node: Node) -> list[str]:
    if "const" in node:
        return [str(node["const"])]
    return cast(list[str], node.get("enum", []))


def _range(node: Node, *, whole: bool) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    start = f"above {_plain(above)}" if above is not None else f"from {_plain(low)}"
    if whole and above is not None:
        start = f"from {int(cast(float, above)) + 1}"
    if high is not None:
        return f"{start} to {_plain(high)}"
    if below is not None:
        return f"{start} and below {_plain(below)}"
    return start if above is not None or low is not None else ""


def _plain(number: object) -> str:
    return (
        "2**63 - 1" if number in (2**63 - 1, 2**63) else f"{number:.12g}" if isinstance(number, float) else str(number)
    )


def _remedy(path: KeyPath, node: Node, value: object) -> str:
    key = dotted(path)
    names = [name for branch in _branches(node) for name in _names(branch)]
    if isinstance(value, str):
        meant = OTHER_VALUES.get(key, {}).get(value.lower())
        if meant:
            return f"Write {meant}."
        hint = did_you_mean(value, names)
        if hint:
            return hint.strip()
        if names and not any(branch.get("type") == "integer" for branch in _branches(node)):
            return f"Use {key}={names[0]}."
        unquoted = _unquoted(value, _branches(node))
        if unquoted:
            return f"Write it without quotes: {path[-1]} = {unquoted}."
    if isinstance(value, float) and not math.isfinite(value):
        return f"Use a finite number, e.g. {key}={_example(path, node)}."
    match node.get("type"):
        case "object" if isinstance(path[-1], int):
            return f"Write [[{dotted(path[:-1])}]] and below it {_first_line(path)}."
        case "object":
            inside = next(iter(keys_of(node)), "key")
            return f"Write its keys below a line [{key}], or {key}.{inside}=..."
        case "array" if "prefixItems" not in node:
            return f"Write [[{key}]] and below it {_first_line((*path, 0))}."
        case _:
            return f"Use e.g. {key}={_example(path, node)}."


def _first_line(table: KeyPath, name: str = "") -> str:
    """A line of TOML for a key that a table cannot do without."""
    node = node_at(table) or {}
    name = name or cast(list[str], node.get("required", ["key"]))[0]
    examples = cast(list[object], keys_of(node).get(name, {}).get("examples", ["..."]))
    return f"{name} = {as_toml(examples[0])}"


def _unquoted(value: str, branches: list[Node]) -> str:
    """The text as the number or switch that was meant, or ''."""
    text = value.strip().lower()
    if len(text) > 40 or not text.isprintable():
        return ""
    kinds = {str(branch.get("type")) for branch in branches}
    if "boolean" in kinds and text in ("true", "false"):
        return text
    try:
        number = float(text)
    except ValueError:
        return ""
    if "number" in kinds and math.isfinite(number):
        return text
    return text if "integer" in kinds and text.isascii() and text.isdigit() else ""


def _example(path: KeyPath, node: Node) -> str:
    if examples := cast(list[object], node.get("examples")):
        return as_toml(examples[0])
    default = node.get("default")
    if default is not None:
        return shown(default)
    if isinstance(path[-1], int):
        return _example((*path[:-1], "element"), {**node, "default": 0.9}) if node.get("type") == "number" else "..."
    kind = _branches(node)[0]
    names = _names(kind)
    return (
        names[0] if names else {"integer": "8", "number": "0.5", "boolean": "true"}.get(str(kind.get("type")), '"..."')
    )
