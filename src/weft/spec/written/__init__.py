"""What people typed: keys and values as TOML writes them, and where each value was typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "BARE_KEY",
    "COMMAND_LINE",
    "DEFAULT",
    "MODEL_CODE",
    "KeyPath",
    "as_toml",
    "dotted",
    "hide_secret",
    "holds_secret",
    "origin_of",
    "shown",
]

if TYPE_CHECKING:
    from weft.spec.written.model_code import MODEL_CODE
    from weft.spec.written.origins import COMMAND_LINE, DEFAULT, origin_of
    from weft.spec.written.secret_urls import hide_secret, holds_secret
    from weft.spec.written.toml_values import BARE_KEY, KeyPath, as_toml, dotted, shown

__getattr__ = loads(
    __name__,
    {
        "BARE_KEY": ".toml_values",
        "COMMAND_LINE": ".origins",
        "DEFAULT": ".origins",
        "KeyPath": ".toml_values",
        "MODEL_CODE": ".model_code",
        "as_toml": ".toml_values",
        "dotted": ".toml_values",
        "hide_secret": ".secret_urls",
        "holds_secret": ".secret_urls",
        "origin_of": ".origins",
        "shown": ".toml_values",
    },
)
