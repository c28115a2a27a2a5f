"""Config files, overrides and where each setting came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "KeyPath",
    "as_toml",
    "by_place",
    "config_schema",
    "dotted",
    "format_config",
    "load_config",
    "origin_of",
    "parse_config",
    "run_name",
    "show_origins",
    "shown",
]

if TYPE_CHECKING:
    from weft.spec.files.config_file import load_config, parse_config, run_name
    from weft.spec.files.config_text import config_schema, format_config
    from weft.spec.files.expect import as_toml, shown
    from weft.spec.files.loaded import by_place, show_origins
    from weft.spec.files.origins import origin_of
    from weft.spec.files.toml_lines import KeyPath, dotted

__getattr__ = loads(
    __name__,
    {
        "KeyPath": ".toml_lines",
        "as_toml": ".expect",
        "by_place": ".loaded",
        "config_schema": ".config_text",
        "dotted": ".toml_lines",
        "format_config": ".config_text",
        "load_config": ".config_file",
        "origin_of": ".origins",
        "parse_config": ".config_file",
        "run_name": ".config_file",
        "show_origins": ".loaded",
        "shown": ".expect",
    },
)
