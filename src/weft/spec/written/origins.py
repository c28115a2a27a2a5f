"""Where the values of a config were typed: "train.toml:12", "command line", or the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COMMAND_LINE = "command line"
DEFAULT = "default"


def origin_of(origins: Mapping[str, str], keys: Sequence[str], fallback: str = "") -> str:
    """Return where the first of these dotted keys that was typed stands; a key stands where its table does.

    Args:
        origins: dotted key -> origin.
        keys: asked in this order.
        fallback: for keys that were typed nowhere.
    """
    for key in keys:
        origin = _around(origins, key) or _inside(origins, key)
        if origin:
            return origin
    return fallback


def _around(origins: Mapping[str, str], key: str) -> str:
    while key:
        origin = origins.get(key, DEFAULT)
        if origin != DEFAULT:
            return origin
        key = key.rpartition(".")[0]
    return ""


def _inside(origins: Mapping[str, str], key: str) -> str:
    typed = (origin for other, origin in origins.items() if other.startswith(f"{key}.") and origin != DEFAULT)
    return next(typed, "")
