"""Values of settings that are texts with a grammar: sizes, times, places."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints, WithJsonSchema

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
