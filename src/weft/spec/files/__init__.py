"""Config files, overrides and where each setting came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "by_place",
    "config_schema",
    "format_config",
    "load_config",
    "parse_config",
    "run_name",
    "show_origins",
]

if TYPE_CHECKING:
    from weft.spec.files.config_file import load_config, parse_config, run_name
    from weft.spec.files.config_text import config_schema, format_config
    from weft.spec.files.loaded import by_place, show_origins

__getattr__ = loads(
    __name__,
    {
        "by_place": ".loaded",
        "config_schema": ".config_text",
        "format_config": ".config_text",
        "load_config": ".config_file",
        "parse_config": ".config_file",
        "run_name": ".config_file",
        "show_origins": ".loaded",
    },
)
