"""What differs between two configs, by dotted key."""

from __future__ import annotations

from typing import Any, cast


def value_at(tables: Any, key: str) -> Any:
    """Return the value under a dotted key."""
    for part in key.split("."):
        tables = tables[part]
    return tables


def changed_keys(key: str, old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Return (old, new) by dotted key, of all values below `key` that differ.

    Args:
        key: dotted key of both values.
        old: a value, or nested dicts of them.
        new: the same; what only one of them has counts as None in the other.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {key: (old, new)}
    before, now = cast(dict[str, Any], old), cast(dict[str, Any], new)
    found: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*before, *now]):
        found |= changed_keys(f"{key}.{name}", before.get(name), now.get(name))
    return found
