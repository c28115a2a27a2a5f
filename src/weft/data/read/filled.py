"""Nulls that a table put into tool calls and tool schemas.

A table has the same columns in each row, at every depth. Arguments of different tools become one struct with the keys
of all, and a row has null for keys that it never had. These nulls are dropped. Nulls that someone wrote are kept as far
as they can be told apart: those in JSON text always, those in objects if nothing shows that a table wrote the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Keys of a JSON schema whose value is data, so that null means something.
_DATA_KEYS = ("default", "const", "example", "examples", "enum")
#: Objects that stay if everything in them is dropped.
_KEPT_EMPTY = ("properties", "parameters", "arguments")


class Filled(NamedTuple):
    """What is known of the nulls in a record.

    by_table: whether a table filled its objects. declared: names of the parameters of each tool in the record.
    """

    by_table: bool = False
    declared: Mapping[str, frozenset[str]] = {}


def filled_by_table(messages: Any) -> bool:
    """Return whether messages show that a table wrote them: one that calls no tool has a null for the calls."""
    if not isinstance(messages, list):
        return False
    return any(isinstance(one, dict) and "tool_calls" in one and one["tool_calls"] is None for one in messages)


def schema_filled_by_table(value: Any) -> bool:
    """Return whether a JSON schema has a null where none has a meaning, as for the parameters of another tool."""
    if isinstance(value, list):
        return any(map(schema_filled_by_table, value))
    if not isinstance(value, dict):
        return False
    return any(one is None or schema_filled_by_table(one) for key, one in value.items() if key not in _DATA_KEYS)


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null, at every depth. An object of nothing but nulls is null itself."""
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, one in value.items():
        found = without_nulls(one)
        if found is None and isinstance(one, dict) and key in _KEPT_EMPTY:
            found = {}
        if found is not None:
            kept[key] = found
    return kept if kept or not value else None


def parameters_of(tools: list[dict[str, Any]]) -> dict[str, frozenset[str]]:
    """Return the names of the parameters of each tool that declares them."""
    found = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(function, dict) and isinstance(properties, dict):
            found[str(function.get("name"))] = frozenset(map(str, properties))
    return found


def clean_calls(calls: Any, filled: Filled) -> Any:
    """Return tool calls without the nulls that a table filled in."""
    return [_clean_call(call, filled) for call in calls] if isinstance(calls, list) else calls


def _clean_call(call: Any, filled: Filled) -> Any:
    if not isinstance(call, dict):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        call["function"] = _clean_call(call["function"], filled)
    arguments = call.get("arguments")
    if isinstance(arguments, dict):
        declared = filled.declared.get(str(call.get("name")))
        if filled.by_table:
            call["arguments"] = without_nulls(arguments) or {}
        elif declared is not None:
            call["arguments"] = {key: value for key, value in arguments.items() if value is not None or key in declared}
    return call
