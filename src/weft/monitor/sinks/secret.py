"""Secrets of sinks and channels: read where they are used, from the environment or a file, and never written."""

from __future__ import annotations

from pathlib import Path

from weft import env
from weft.errors import ConfigError


def secret_of(reference: str | None, key: str) -> str | None:
    """Return what env:NAME or file:PATH stands for; None for none.

    Args:
        reference: as the config has it.
        key: of the config, for the error.

    Raises:
        ConfigError: where there is nothing.
    """
    if reference is None:
        return None
    kind, _, place = reference.partition(":")
    if kind == "env":
        if not (value := env.get(place)):
            raise ConfigError(f"{key}={reference}: this variable is not set. Set it where `weft train` starts.")
        return value
    try:
        value = Path(place).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(f"{key}={reference}: this file cannot be read ({reason}). Check its path.") from None
    if not value:
        raise ConfigError(f"{key}={reference}: this file is empty. Write the secret into it.")
    return value


def address_of(reference: str, key: str) -> str:
    """Return a URL that stands in the config, or the one that env:NAME or file:PATH stands for.

    Raises:
        ConfigError: where there is none.
    """
    if not reference.startswith(("env:", "file:")):
        return reference
    found = secret_of(reference, key)
    assert found is not None
    return found
