"""Secrets of sinks and channels: read where they are used, from the environment or a file, and never written."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from weft import env
from weft.errors import ConfigError
from weft.monitor.events import open_regular

_LONGEST = 64 * 1024


def secret_of(reference: str | None, key: str) -> str | None:
    """Return what env:NAME or file:PATH stands for, or None for None.

    Args:
        reference: as the config has it.
        key: of the config, for the error.

    Raises:
        ConfigError: if there is no secret there.
    """
    if reference is None:
        return None
    kind, _, place = reference.partition(":")
    if kind == "env":
        if not (value := env.get(place).strip()):
            raise ConfigError(f"{key}={reference}: this variable is not set. Set it where `weft train` starts.")
    else:
        value = _file_text(Path(place).expanduser(), f"{key}={reference}")
        if not value:
            raise ConfigError(f"{key}={reference}: this file is empty. Write the secret into it.")
    if not value.isprintable():
        raise ConfigError(f"{key}={reference}: the secret has more than one line. Leave one line without blanks.")
    return value


def _file_text(path: Path, setting: str) -> str:
    try:
        with open_regular(path) as file:
            return file.read(_LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(f"{setting}: this file cannot be read ({reason}). Check its path.") from None


def address_of(reference: str, key: str) -> str:
    """Return the URL that a config holds, or the one that env:NAME or file:PATH stands for.

    Raises:
        ConfigError: if there is none.
    """
    if not reference.startswith(("env:", "file:")):
        return reference
    found = secret_of(reference, key)
    assert found is not None
    return found


def http_address_of(reference: str, key: str) -> tuple[str, str | None]:
    """Return an http or https URL without user info, and "user:password" if it has any. Errors show no part of it.

    Args:
        reference: as the config has it.
        key: of the config, for the error.

    Raises:
        ConfigError: if it is no such URL.
    """
    url = address_of(reference, key)
    shown = reference if reference.startswith(("env:", "file:")) else "..."
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        fits, parts = False, None
    if not fits or parts is None or not url.isascii() or any(one.isspace() for one in url) or "#" in url:
        raise ConfigError(
            f"{key}={shown}: this is not an http or https address of ASCII letters without blanks. Use one such as "
            "https://example.com/hook."
        )
    user, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl(), unquote(user) if at else None
