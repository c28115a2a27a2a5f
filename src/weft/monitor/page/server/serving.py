"""Starts the page's server."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, LaunchError
from weft.lazy import named_object
from weft.monitor import Price
from weft.monitor.page.index import Shelf
from weft.monitor.page.server.access import AccessRules, is_loopback, read_token


@dataclass(frozen=True, slots=True)
class Serving:
    """How the page is served.

    host, port: where; port 0: one that is free. names: further names by which browsers may call it. token_file: holds
    what visitors must know. certificate, key: PEM files for TLS. price: of one device. go_on: lets the held run of a
    folder go on.
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
        """Return who may look; beyond this machine a token and TLS are a must.

        Raises:
            ConfigError: where they are missing, or a file is.
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
        root: a run folder, or a folder of such.
        serving: how.
        say: shows the user a line.

    Raises:
        ConfigError: where there is no run, or the page would be open to others.
        LaunchError: where the port is taken, or uvicorn is missing.
    """
    access, shelf = serving.access(), Shelf(root)
    try:
        import uvicorn

        make_app: Any = named_object("weft.monitor.page.server.addresses:make_app")
        page: Any = named_object("weft.monitor.page.server.addresses:Page")
        limits: Any = importlib.import_module("weft.monitor.page.server.connections")
    except ImportError as error:
        raise LaunchError(f"weft watch needs {error.name}. Type pip install starlette uvicorn.") from error
    connections = limits.Connections(limits.most_connections())
    listening = limits.CountedListener.of(_socket(serving), connections)
    port = listening.getsockname()[1]
    shown = "localhost" if is_loopback(serving.host) else (serving.names or (serving.host,))[0]
    say(f"{'https' if access.secure else 'http'}://{shown}:{port}   Ctrl-C ends the page, not the run")
    if serving.token_file is not None:
        say(f"the token that it asks for is in {serving.token_file}")
    settings = uvicorn.Config(
        make_app(page(shelf, access, serving.price, serving.go_on, most_streams=max(4, connections.most // 4))),
        log_level="error",  # a client's bad requests are no news
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
            f"--port={serving.port}: {serving.host} cannot be listened on ({why}). "
            f"Use another --port; 0 takes a free one."
        ) from error
    return listening
