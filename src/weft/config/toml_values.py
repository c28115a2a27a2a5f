"""Keys and values of a config in TOML notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import cast

#: A path in nested tables and arrays: ("data", "train", 0, "path").
KeyPath = tuple[str | int, ...]

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
#: Parts of a URL that may be a password or a token.
_SECRETS = re.compile(r"(?<=://)[^/]*(?=@)|(?<=\?).+", re.DOTALL)


def dotted(path: KeyPath) -> str:
    """Return the path as it is typed in an override: data.train.0.path; a part that is no bare key is quoted."""
    return ".".join(
        str(part) if isinstance(part, int) or BARE_KEY.fullmatch(part) else json.dumps(part) for part in path
    )


def shown(value: object, limit: int = 60) -> str:
    """Return a value as TOML text, on one line and cut to `limit` characters."""
    text = _plain_toml(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _plain_toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        value = _SECRETS.sub("***", value) if "://" in value else value
        return value if value.isprintable() and value else json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**40 else "(a huge number)"
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, object], value).items()
        return "{" + ", ".join(f"{dotted((key,))} = {as_toml(item)}" for key, item in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(item) for item in cast(list[object], value)) + "]"
    return str(value)


def as_toml(value: object) -> str:
    """Return a value as TOML on one line, texts in quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _plain_toml(value)


#: A model named by its code: module:name, such as timm.models:resnet50.
MODEL_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
