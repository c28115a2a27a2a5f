"""The secret key of draws and noise: a file that only its owner can read, or a fixed key for tests."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from weft.errors import ConfigError

_BYTES = 32


def read_key(key: str) -> bytes:
    """Return the key of `privacy.key`: the content of a file, or a fixed key for "test:N".

    Raises:
        ConfigError: if the file is missing, has another size, or can be read by others.
    """
    if key.startswith("test:"):
        return hashlib.blake2b(key.encode(), digest_size=_BYTES, person=b"weft key").digest()
    path = Path(key)
    try:
        content, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"privacy.key={key}: {error.strerror or error}. Name the key file of this run.") from error
    if mode & 0o077:
        raise ConfigError(f"privacy.key={key}: its mode is {mode:04o}, so others may read it. Run: chmod 600 {key}")
    if len(content) != _BYTES:
        raise ConfigError(
            f"privacy.key={key}: it has {len(content)} bytes, and a key has {_BYTES}. Name another file, which Weft "
            "creates."
        )
    return content


def create_key(key: str) -> None:
    """Create a key file with random bytes and mode 0600, unless it exists or the key is fixed.

    Raises:
        ConfigError: if the file cannot be written.
    """
    if key.startswith("test:") or Path(key).exists():
        return
    try:
        descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(
            f"privacy.key={key}: {error.strerror}. Name a file in a folder that you can write."
        ) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(_BYTES))
