"""Who may look and who may ask: hosts, origins, tokens, and what a browser is allowed to do with the page."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import ConfigError
from weft.monitor.page.server.guesses import GuessLimit

COOKIE = "weft_watch"
CSRF_HEADER = "x-weft-csrf"
_SHORTEST = 16
#: Scripts, styles and data come from this server alone, and no other page may frame it.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class AccessRules:
    """What one server asks of a request.

    hosts: names, without ports, by which it may be called; what else a Host header says is a page of a stranger that
    had its name point here. token: what a visitor must know; None: whoever reaches this address may look. secure: it
    speaks TLS. csrf: what only this server's own page knows. guesses: counts wrong tokens.
    """

    hosts: frozenset[str]
    token: str | None = field(default=None, repr=False)
    secure: bool = False
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    guesses: GuessLimit = field(default_factory=GuessLimit, repr=False, compare=False)

    @property
    def cookie(self) -> str:
        """The value that a visitor's browser keeps: it proves the token and does not hold it."""
        return hmac.new((self.token or "").encode(), self.csrf.encode(), hashlib.sha256).hexdigest()

    def knows_host(self, header: str | None) -> bool:
        """Whether a Host header names this server."""
        return header is not None and _host_of(header) in self.hosts

    def knows_origin(self, headers: Mapping[str, str]) -> bool:
        """Whether a request comes from this server's own page; who sends no Origin is no browser's page."""
        site = headers.get("sec-fetch-site")
        if site is not None and site not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        scheme = "https" if self.secure else "http"
        return origin is None or origin == f"{scheme}://{headers.get('host', '')}"

    def has_shown_token(self, cookie: str | None) -> bool:
        """Return True if no token is asked for, or if the cookie proves that this browser has shown it."""
        return self.token is None or (cookie is not None and _same(cookie, self.cookie))

    def is_token(self, said: str, address: str) -> bool:
        """Return True if this is the token, and record the guess. Ask `guesses.wait_s` before.

        Args:
            said: what the visitor shows.
            address: of the visitor.
        """
        right = self.token is not None and _same(said, self.token)
        self.guesses.note(address, right=right)
        return right

    def may_ask(self, headers: Mapping[str, str]) -> bool:
        """Whether a request that changes something comes from the page, by its Origin and its secret."""
        return self.knows_origin(headers) and _same(headers.get(CSRF_HEADER, ""), self.csrf)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """Return the token that a file holds; a file that is missing is made, for its owner alone.

    Raises:
        ConfigError: where it is too short, or others may read it.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"--token-file={path}: cannot be written ({error.strerror}). Choose another place."
        ) from error
    try:
        mode, token = stat.S_IMODE(path.stat().st_mode), path.read_text(errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"--token-file={path}: cannot be read ({error.strerror}). Check the path.") from error
    if mode & 0o077:
        raise ConfigError(f"--token-file={path}: other users may read it (mode {mode:o}). Type chmod 600 {path}.")
    if len(token) < _SHORTEST:
        raise ConfigError(
            f"--token-file={path}: the token has {len(token)} characters, and {_SHORTEST} is the least. "
            f"Delete the file: the next start makes a good one."
        )
    return token


def _host_of(header: str) -> str:
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if text.count(":") == 1 else text


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
