"""Types of settings: numbers with limits, and text with a rule for its error message."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, Strict, StringConstraints, WithJsonSchema

# TOML has 64-bit integers. Sizes have generous limits that still catch typing errors.
PositiveInt = Annotated[int, Field(gt=0, le=2**63 - 1)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Extent = Annotated[int, Field(gt=0, le=10**9)]
Width = Annotated[int, Field(gt=0, le=10**6)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
            "x-rule": "a name of at most 100 letters, digits, '.', '_' and '-' that starts with a letter or digit",
        }
    ),
]

_SHARE_OR_SIZE = r"^([1-9][0-9]?%|([1-9][0-9]{0,8}(\.[0-9]{1,3})?|0?\.[0-9]{0,2}[1-9])([KMGT]i?|k)B)$"
ShareOrSize = Annotated[
    str,
    StringConstraints(pattern=_SHARE_OR_SIZE),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": _SHARE_OR_SIZE,
            "x-rule": "a size such as 64GiB, or a share of the machine's memory from 1% to 99%",
        }
    ),
]

_CODE = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"
CodeName = Annotated[
    str,
    StringConstraints(pattern=_CODE),
    WithJsonSchema({"type": "string", "pattern": _CODE, "x-rule": "a class as package.module:Class"}),
]
#: Named tasks; `find_task` maps them to classes. These train the model of a Hugging Face folder.
FOLDER_TASKS = ("masked_lm", "classify_text", "classify_tokens", "seq2seq", "embed")
#: These train the text decoder by another loss.
TEXT_TASKS = ("prefer", "distill")
#: These train networks for pictures, sound and text, from new weights or a folder's.
MEDIA_TASKS = ("classify", "classify_images", "classify_audio", "caption", "transcribe", "contrast")
TASK_NAMES = (*FOLDER_TASKS, *TEXT_TASKS, *MEDIA_TASKS)
#: The goal of each named task on preferences and tables.
TRAINS = {**dict.fromkeys(FOLDER_TASKS, "folder"), **dict.fromkeys(TEXT_TASKS, "decoder")}
_TASK = rf"^(({'|'.join(TASK_NAMES)})|([A-Za-z_][A-Za-z0-9_.]*|[^:]+\.py):[A-Za-z_][A-Za-z0-9_]*)$"
_TASK_RULE = f"{', '.join(TASK_NAMES)}, or a class as package.module:Class or path/to/file.py:Class"
TaskName = Annotated[
    str,
    StringConstraints(pattern=_TASK),
    WithJsonSchema({"type": "string", "pattern": _TASK, "x-rule": _TASK_RULE}),
]
OptionValue = Annotated[
    bool | int | float | str | Annotated[tuple[float, ...], Strict(False)],
    WithJsonSchema({"x-rule": "true, false, a number, a string or a list of numbers"}),
]
_PLACE = r"^([^:?#@]|:[^/?#@])[^?#@]*$"
StoreOrFolder = Annotated[
    str,
    StringConstraints(pattern=_PLACE),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": _PLACE,
            "x-rule": "a folder, or a URL of bucket and prefix alone (credentials belong in the environment)",
        }
    ),
]

_DURATION = "^(" + "|".join(
    "[1-9][0-9]{0,5}" + unit + "".join(f"([0-9]{{1,5}}{smaller})?" for smaller in "dhms"["dhms".index(unit) + 1 :])
    for unit in "dhms"
) + ")$"  # fmt: skip
Duration = Annotated[
    str,
    StringConstraints(pattern=_DURATION),
    WithJsonSchema({"type": "string", "pattern": _DURATION, "x-rule": "a time such as 3h30m, 90s or 1d12h"}),
]

_HOST_PORT = r"^[^\s:/]([^\s/]{0,250}[^\s:/])?:[1-9][0-9]{0,4}$"
HostPort = Annotated[
    str,
    StringConstraints(pattern=_HOST_PORT),
    WithJsonSchema(
        {"type": "string", "pattern": _HOST_PORT, "x-rule": "the name or address of a machine and a port: HOST:PORT"}
    ),
]

_SECRET_REF = r"env:[A-Za-z_][A-Za-z0-9_]{0,99}|file:/?[^/\x00][^\x00]{0,3999}"
_SECRET = rf"^({_SECRET_REF})$"
SecretRef = Annotated[
    str,
    StringConstraints(pattern=_SECRET),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": _SECRET,
            "x-secret": True,
            "x-rule": "env:NAME or file:PATH, with the secret (a config must not contain it)",
        }
    ),
]
_ADDRESS = rf"^(https?://[^/?#@\s]+(/[^?#@\s]*)?|{_SECRET_REF})$"
Address = Annotated[
    str,
    StringConstraints(pattern=_ADDRESS),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": _ADDRESS,
            "x-secret": True,
            "x-rule": "an http(s) URL without user, password and query, or env:NAME or file:PATH where a secret one is",
        }
    ),
]

ColumnPart = Literal[
    "text", "messages", "role", "content", "instruction", "input", "output", "system", "prompt", "completion", "ids",
    "mask", "tools", "chosen", "rejected", "label",
]  # fmt: skip


# What differs between two configs, by dotted key.


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
