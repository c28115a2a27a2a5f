"""Access to the dashboard: hosts, origins, tokens, browser restrictions; and its server."""

from __future__ import annotations

import hashlib
import hmac
import importlib
import ipaddress
import math
import os
import secrets
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.errors import ConfigError, LaunchError
from weft.lazy import named_object
from weft.monitor.accounting import Price
from weft.monitor.dashboard.connections import GuessLimit
from weft.monitor.dashboard.run_index import RunCatalog

COOKIE = "weft_watch"
CSRF_HEADER = "x-weft-csrf"
_SHORTEST = 16
#: Response headers: scripts, styles and data may come only from this server, and no other page may frame it.
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
    """Requirements that requests to the server must satisfy.

    Attributes:
        hosts: accepted names in the Host header, without ports. Other names indicate a foreign page whose name resolves
            to this server (DNS rebinding).
        token: required from clients; with None every client that reaches the address has access.
        secure: True with TLS.
        csrf: a secret that the server's page contains and sends back with its requests.
        guesses: counts wrong tokens.
    """

    hosts: frozenset[str]
    token: str | None = field(default=None, repr=False)
    secure: bool = False
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    guesses: GuessLimit = field(default_factory=GuessLimit, repr=False, compare=False)

    @property
    def cookie(self) -> str:
        """Cookie value of a browser. It proves the token without containing it."""
        return hmac.new((self.token or "").encode(), self.csrf.encode(), hashlib.sha256).hexdigest()

    def knows_host(self, header: str | None) -> bool:
        """Return True if a Host header names this server."""
        text = (header or "").strip().lower()
        if text.startswith("["):
            return text[1:].partition("]")[0] in self.hosts
        return (text.rpartition(":")[0] if text.count(":") == 1 else text) in self.hosts

    def knows_origin(self, headers: Mapping[str, str]) -> bool:
        """Return False if the Origin or Sec-Fetch-Site header shows that a page of another server sent the request."""
        site = headers.get("sec-fetch-site")
        if site is not None and site not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        scheme = "https" if self.secure else "http"
        return origin is None or origin == f"{scheme}://{headers.get('host', '')}"

    def is_token(self, said: str, address: str) -> bool:
        """Return True if `said` is the token, and record the guess. Check `guesses.wait_s` first."""
        right = self.token is not None and _same(said, self.token)
        self.guesses.note(address, right=right)
        return right


def is_loopback(host: str) -> bool:
    """Return True if the address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """Return the token in a file. A missing file is created, readable by its owner only.

    Raises:
        ConfigError: if the token is too short, if others may read the file, or if it cannot be read or created.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"--token-file={path}: cannot be written ({error.strerror}). Choose another path.") from error
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


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


# Middleware before every route: rejects foreign hosts, foreign pages and clients without the token.

_READS = frozenset({"GET", "HEAD"})
#: Paths that are needed to enter the token.
_OPEN = frozenset({"/login", "/static/style.css", "/static/icon.svg"})


class Guard:
    """Middleware that enforces the access rules."""

    def __init__(self, app: ASGIApp, access: AccessRules):
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the HTTP request or reject it. In both cases the response gets the security headers.

        Lifespan events are forwarded too. Other protocols, such as WebSockets, are ignored.
        """
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        await (self._refusal(scope) or self.app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        access, request = self.access, Request(scope)
        method, path, headers = request.method, scope["path"], request.headers
        address = request.client.host if request.client else ""
        if not access.knows_host(headers.get("host")):
            return PlainTextResponse("This server does not go by this name. Start it with --name NAME.", 421)
        cookie = request.cookies.get(COOKIE)
        has_access = access.token is None or (cookie is not None and _same(cookie, access.cookie))
        if path not in _OPEN and not has_access:
            refusal = self._without_cookie(path, headers.get("authorization"), address)
            if refusal is not None:
                return refusal
        if method in _READS:
            return None
        if method != "POST":
            return PlainTextResponse("This address is only read.", 405)
        # A login has no CSRF secret yet. It changes only the browser's cookie.
        fits = (
            access.knows_origin(headers)
            if path == "/login"
            else (access.knows_origin(headers) and _same(headers.get(CSRF_HEADER, ""), access.csrf))
        )
        return None if fits else PlainTextResponse("Only this server's own page may send requests.", 403)

    def _without_cookie(self, path: str, authorization: str | None, address: str) -> Response | None:
        """Return None if the Authorization header has the token, else the response that rejects the request."""
        scheme, _, said = (authorization or "").partition(" ")
        if scheme.lower() == "bearer":
            if wait_s := self.access.guesses.wait_s(address):
                return too_many_guesses(wait_s)
            if self.access.is_token(said.strip(), address):
                return None
        if path == "/":
            return RedirectResponse("/login", 303)
        return PlainTextResponse("Show the token at /login first.", 401)


def too_many_guesses(wait_s: float) -> Response:
    """Return the response to an address with too many wrong tokens."""
    seconds = math.ceil(wait_s)
    text = f"There were too many wrong tokens. Try again in {seconds} s."
    return PlainTextResponse(text, 429, headers={"retry-after": str(seconds)})


# Start of the dashboard's server.


@dataclass(frozen=True, slots=True)
class Serving:
    """Settings of the dashboard's server.

    Attributes:
        host, port: its address; port 0 picks a free one.
        names: additional host names for browsers.
        token_file: contains the token.
        certificate, key: PEM files for TLS.
        price: price of one device.
        go_on: continues the paused run of a folder.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    names: tuple[str, ...] = ()
    token_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    price: Price | None = None
    go_on: Callable[[Path], None] | None = None

    def access(self) -> AccessRules:
        """Return the access rules. If other machines can connect, a token and TLS are required.

        Raises:
            ConfigError: if the token, TLS or a file is missing, or as from `read_token`.
        """
        files = {"--tls-cert": self.certificate, "--tls-key": self.key}
        for option, path in files.items():
            if path is not None and not path.is_file():
                raise ConfigError(f"{option}={path}: there is no such file. Check the path.")
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--tls-cert, --tls-key: one is of no use without the other. Give both.")
        if not is_loopback(self.host) and (self.token_file is None or self.certificate is None):
            raise ConfigError(
                f"--host={self.host}: others than this machine would reach the page, and it needs a token and TLS "
                f"then. Add --token-file, --tls-cert and --tls-key, or leave --host out and use ssh -L "
                f"{self.port}:127.0.0.1:{self.port}."
            )
        names = {"localhost", "127.0.0.1", "::1", *(name.lower() for name in self.names)}
        if self.host not in ("0.0.0.0", "::"):
            names.add(self.host.lower().strip("[]"))
        elif not self.names:
            names.add(socket.gethostname().lower())
        token = None if self.token_file is None else read_token(self.token_file)
        return AccessRules(frozenset(names), token, secure=self.certificate is not None)


def serve(root: Path, serving: Serving, say: Callable[[str], None]) -> None:
    """Serve the runs of a folder until Ctrl-C.

    Args:
        root, serving: a run folder or folder of run folders, and the settings.
        say: shows a line to the user.

    Raises:
        ConfigError: if there is no run, or the page would be open to others.
        LaunchError: if the port is in use, or uvicorn is missing.
    """
    access, shelf = serving.access(), RunCatalog(root)
    try:
        import uvicorn

        make_app: Any = named_object("weft.monitor.dashboard.routes:make_app")
        page: Any = named_object("weft.monitor.dashboard.routes:Page")
        limits: Any = importlib.import_module("weft.monitor.dashboard.connections")
    except ImportError as error:
        raise LaunchError(f"weft watch needs {error.name}. Type pip install starlette uvicorn.") from error
    connections = limits.Connections(limits.most_connections())
    listening = limits.CountedListener.of(_socket(serving), connections)
    port = listening.getsockname()[1]
    shown = "localhost" if is_loopback(serving.host) else (serving.names or (serving.host,))[0]
    say(f"{'https' if access.secure else 'http'}://{shown}:{port}   Ctrl-C ends the page, not the run")
    if serving.token_file is not None:
        say(f"the page's token is in {serving.token_file}")
    settings = uvicorn.Config(
        make_app(page(shelf, access, serving.price, serving.go_on, most_streams=max(4, connections.most // 4))),
        log_level="error",  # do not log invalid requests
        loop="asyncio",
        http=limits.protocol_of(connections),
        backlog=min(64, connections.most),
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        ssl_certfile=serving.certificate,
        ssl_keyfile=serving.key,
        ws="none",
        lifespan="off",
    )
    shelf.start()
    try:
        limits.PageServer(settings, connections).run(sockets=[listening])
    finally:
        shelf.close()
        listening.close()


def _socket(serving: Serving) -> socket.socket:
    host = "127.0.0.1" if serving.host == "localhost" else serving.host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, serving.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(128)
        except (OSError, OverflowError):
            listening.close()
            raise
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise LaunchError(
            f"--port={serving.port}: {serving.host} cannot be used for listening ({why}). Use another --port; 0 "
            "selects a free port."
        ) from error
    return listening
