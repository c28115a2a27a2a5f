"""Copies of settings and texts without secrets, for viewers of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from weft.config.sections import hide_secret

HIDDEN = "(hidden)"
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: Keys whose values (with nested ones) are all secret, and keys whose texts are secret, but not numbers such as token
#: counts.
_SECRET = re.compile(
    r"passw|passphrase|secret|api_?key|credential|authorization|private_?key|access_?key|cookie|signature"
)
_SECRET_TEXT = re.compile(r"token(?!i[sz]e)|(^|_)auth($|_)|(^|_)pwd$")
#: Keys whose value may be a secret address, such as apprise's slack://TOKEN/TOKEN.
_ADDRESS = re.compile(r"(^|_)(url|uri|address|endpoint|webhook|hook)s?$")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>\\^`{|}]+")
_REFERENCE = re.compile(r"(env:[A-Za-z_][A-Za-z0-9_]*|file:/?[^/].*)")
_DEEPEST = 20


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a copy of the JSON value of key `name`. Everything that looks like a secret is replaced by "(hidden)"."""
    return _copied(value, name, "", 0)


def text_without_secrets(text: str) -> str:
    """Return a text whose URLs contain no user info, no query and no path that may be a secret."""
    return _URL.sub(lambda match: hide_secret(match[0]), text)


def _copied(value: Any, name: str, hides: str, depth: int) -> Any:
    """Copy a value without secrets. `hides`: "all" or "text" values are hidden (below a secret key), or ""."""
    key = _HUMP.sub("_", name).lower().replace("-", "_")
    if _SECRET.search(key):
        hides = "all"
    elif not hides and _SECRET_TEXT.search(key):
        hides = "text"
    if depth > _DEEPEST:
        return HIDDEN
    if isinstance(value, Mapping):
        table = cast(Mapping[Any, Any], value)
        return {str(one): _copied(inside, str(one), hides, depth + 1) for one, inside in table.items()}
    if isinstance(value, list | tuple):
        return [_copied(inside, name, hides, depth + 1) for inside in cast("list[Any]", value)]
    if not isinstance(value, str):
        return HIDDEN if hides == "all" and value is not None and not isinstance(value, bool) else value
    if hides:
        return value if not value or _REFERENCE.fullmatch(value) else HIDDEN
    scheme, separator, _ = value.partition("://")
    if separator and _ADDRESS.search(key) and scheme.lower() not in ("http", "https"):
        return f"{scheme}://{HIDDEN}"
    return text_without_secrets(value)
