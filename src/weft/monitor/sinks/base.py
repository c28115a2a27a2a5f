"""Base of sinks, their secrets, and HTTP requests.

Secrets are read from the environment or a file on use, and are never written.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from weft import env
from weft.config.run_config import RunConfig
from weft.config.sections import SinkSection
from weft.errors import ConfigError
from weft.monitor.events import open_regular
from weft.monitor.metrics import MetricReading, readings
from weft.monitor.redact import without_secrets
from weft.monitor.sinks.request_limit import OpenSockets, OutOfTime, within
from weft.units import format_seconds, parse_seconds

_LONGEST = 64 * 1024


def secret_of(reference: str | None, key: str) -> str | None:
    """Return the secret of env:NAME or file:PATH, or None for None.

    Raises:
        ConfigError: if the secret is missing, unreadable, empty, or has line breaks or other control characters.
    """
    if reference is None:
        return None
    kind, _, place = reference.partition(":")
    if kind == "env":
        if not (value := env.get(place).strip()):
            raise ConfigError(f"{key}={reference}: this variable is not set. Set it where `weft train` starts.")
    else:
        try:
            with open_regular(Path(place).expanduser()) as file:
                value = file.read(_LONGEST).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text"
            raise ConfigError(f"{key}={reference}: this file cannot be read ({reason}). Check its path.") from None
        if not value:
            raise ConfigError(f"{key}={reference}: this file is empty. Write the secret into it.")
    if not value.isprintable():
        raise ConfigError(f"{key}={reference}: the secret has more than one line. Leave one line without blanks.")
    return value


def address_of(reference: str, key: str) -> str:
    """Return the URL in the config, or the one that env:NAME or file:PATH refers to.

    Raises:
        ConfigError: if the variable or file has no URL, or cannot be read.
    """
    if not reference.startswith(("env:", "file:")):
        return reference
    found = secret_of(reference, key)
    assert found is not None
    return found


def http_address_of(reference: str, key: str) -> tuple[str, str | None]:
    """Return an http or https URL without user info, and "user:password" if it has any.

    Error messages do not contain the URL.

    Raises:
        ConfigError: if it is not an http or https URL in ASCII, has blanks or a fragment, or as from `address_of`.
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


# A sink sends batches of a run's events, or raises an error. Its pump (pump.py) calls it and retries.

_UNFIT = re.compile(r"[^A-Za-z0-9_./ -]")


class SinkTrouble(Exception):
    """Raised if an event could not be sent now. The text contains no secret and may be logged."""


@dataclass
class SinkJob:
    """Inputs of a sink.

    Attributes:
        settings: the sink's table in the config.
        folder, run: the run's folder and name.
        config: the run's config as JSON values.
        kept: the sink's state for the next start, such as the id of its run; it is saved after each batch.
    """

    settings: SinkSection
    folder: Path
    run: str
    config: Mapping[str, Any]
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: SinkSection, folder: Path, config: RunConfig) -> SinkJob:
        """Return the inputs of a sink of a run. Its config has no secrets, because others may read it in trackers."""
        values = config.model_dump(mode="json", by_alias=True, exclude_none=True)
        return cls(settings, folder, config.run.name, without_secrets(values))


class MetricSink:
    """Base class of all sinks. A sink is called from one thread.

    If `is_current`, the sink shows only newest values: at its start, it gets no events before the log's last 1 MiB.
    """

    is_current = False

    def __init__(self, job: SinkJob):
        self.job = job

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send events, oldest first. If this raises, it is called again later with the same events.

        Raises:
            SinkTrouble: if they could not be sent.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release resources."""


def flat(reading: MetricReading) -> Iterator[tuple[str, float]]:
    """Yield (name, value) pairs for trackers.

    A metric of the run has one, such as "loss". A metric over ranks or machines has three, such as
    "phase_s/forward/min", "phase_s/forward/median" and "phase_s/forward/max".
    """
    name = _UNFIT.sub("_", f"{reading.name}/{reading.label}" if reading.label else reading.name)
    if reading.at_low or reading.at_high:
        yield from ((f"{name}/{end}", value) for end, value in
                    (("min", reading.low), ("median", reading.value), ("max", reading.high)))  # fmt: skip
    else:
        yield name, reading.value


def flat_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Return an event's metrics by the names that `flat` yields."""
    return {name: value for reading in readings(event) for name, value in flat(reading)}


def flat_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value of a nested config."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# HTTP requests by urllib: one time limit for a complete request, no redirects, no secrets in errors.

#: Maximum number of bytes read from a response.
_MOST_ANSWER = 1 << 20
_MOST_QUOTED = 300


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens connections and registers their sockets, so that another thread can close them."""

    def __init__(self, opened: OpenSockets):
        urllib.request.HTTPHandler.__init__(self)
        self._opened, self._tls = opened, ssl.create_default_context()

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Open a connection without TLS."""
        connect: Any = functools.partial(_Connection, opened=self._opened, tls=None)
        return self.do_open(connect, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Open a connection with TLS."""
        connect: Any = functools.partial(_Connection, opened=self._opened, tls=self._tls)
        return self.do_open(connect, req)


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, opened: OpenSockets, tls: ssl.SSLContext | None, timeout: float):
        self.default_port = 443 if tls else 80
        super().__init__(host, timeout=timeout)
        self._opened, self._tls = opened, tls

    def connect(self) -> None:
        super().connect()
        self._opened.add(self.sock)
        if self._tls is not None:
            name = getattr(self, "_tunnel_host", None) or self.host  # the server's name, not the proxy's
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=name, do_handshake_on_connect=False)
            self._opened.add(self.sock)  # registered before the handshake, which may hang
            self.sock.do_handshake()


class Poster:
    """Sends HTTP requests to one server.

    Args:
        url: the server's URL, or env:NAME or file:PATH for a secret one.
        headers: headers of every request.
        timeout_s: limit of one request, from the name lookup to the last byte of the response.
        key: key in the config, for errors.

    Raises:
        ConfigError: if the URL is not an http or https URL.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, key: str = "url"):
        address, login = http_address_of(url, key)
        self._url, self._headers, self._timeout_s = address.rstrip("/"), dict(headers), timeout_s
        if login is not None:
            self._headers.setdefault("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
        #: A server may repeat secrets of the request in any form, so its responses are not quoted.
        self._is_secret = url.startswith(("env:", "file:")) or bool(self._headers)

    @classmethod
    def of(cls, settings: SinkSection) -> Poster:
        """Return the poster of a sink with a URL.

        Raises:
            ConfigError: if a secret is missing or has characters beyond ASCII, or if the URL is no http or https URL.
        """
        key = f"sink {settings.name or settings.kind}"
        assert settings.url is not None
        headers: dict[str, str] = {}
        if (token := secret_of(settings.token, f"{key}: token")) is not None:
            headers["Authorization"] = f"Bearer {token}"
        elif (password := secret_of(settings.password, f"{key}: password")) is not None:
            login = base64.b64encode(f"{settings.user}:{password}".encode()).decode()
            headers["Authorization"] = f"Basic {login}"
        if not all(one.isascii() for one in headers.values()):
            raise ConfigError(
                f"{key}: token: it has letters beyond ASCII, which a header cannot contain. Check the secret."
            )
        return cls(settings.url, headers, parse_seconds(settings.timeout), f"{key}: url")

    def post(
        self, path: str, body: bytes | Mapping[str, Any] | None, *, method: str = "POST", kind: str = "application/json"
    ) -> Any:
        """Send a request and return the JSON value of the response, or None if the response is empty or no JSON.

        Args:
            path: appended to the server's URL.
            body: bytes, a mapping sent as JSON, or None for a request without a body.
            method: HTTP method.
            kind: the body's media type.

        Raises:
            SinkTrouble: if the server is unreachable, does not answer in time, or answers with an error. In the last
                case, its attribute `status` is the HTTP status.
        """
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": kind, "User-Agent": "weft"}
        opened = OpenSockets()
        try:
            text = within(self._timeout_s, lambda: self._sent(path, data, headers, method, opened), opened.end)
        except OutOfTime:
            raise SinkTrouble(f"the server did not answer within {format_seconds(self._timeout_s)}") from None
        try:
            return json.loads(text) if text.strip() else None
        except (ValueError, RecursionError):
            return None

    def _sent(
        self, path: str, data: bytes | None, headers: Mapping[str, str], method: str, opened: OpenSockets
    ) -> bytes:
        """Send one request and return the body of the response. Errors contain no secret."""
        opener = urllib.request.OpenerDirector()
        parts = (urllib.request.ProxyHandler(), _Handler(opened), urllib.request.HTTPDefaultErrorHandler(),
                 urllib.request.HTTPErrorProcessor(), _NoRedirects())  # fmt: skip
        for handler in parts:
            opener.add_handler(handler)
        try:
            request = urllib.request.Request(self._url + path, data, dict(headers), method=method)
            with opener.open(request, timeout=self._timeout_s) as answer:
                return answer.read(_MOST_ANSWER)
        except urllib.error.HTTPError as error:
            with error:
                said = "" if self._is_secret else _body_of(error)
            # The server's phrase may repeat the request, like its body.
            phrase = http.client.responses.get(error.code, "")
            trouble = SinkTrouble(f"the server answered {error.code} {phrase}".rstrip() + (f": {said}" if said else ""))
            trouble.__dict__["status"] = error.code
            raise trouble from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SinkTrouble(f"the server cannot be reached ({_reason(error)})") from None


def _body_of(error: urllib.error.HTTPError) -> str:
    try:
        return one_line(error.read(_MOST_QUOTED).decode(errors="replace"))
    except (OSError, http.client.HTTPException):
        return ""


def _reason(error: Exception) -> str:
    """Return the reason of a failed request. Messages of libraries are not used: they may quote URLs and responses."""
    cause = getattr(error, "reason", error)
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {cause.reason or 'failed'}".replace("_", " ").lower().replace("tls", "TLS", 1)
    if isinstance(cause, TimeoutError):
        return "timed out"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return type(cause).__name__ if isinstance(cause, Exception) else "no connection"


def one_line(text: str) -> str:
    """Return a text as one line: control characters and runs of blanks become single spaces."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())
