"""POST requests by urllib: with a limit on time, without redirects, and without secrets in what goes wrong."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from weft.monitor.sinks.secret import address_of, secret_of
from weft.monitor.sinks.sink import SinkTrouble
from weft.spec.config import SinkSection
from weft.units import parse_seconds

#: Bytes of an answer that are read at most.
_MOST_ANSWER = 1 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A token that was meant for one server goes to no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Poster:
    """Posts to one server.

    Args:
        url: of the server, without a slash at its end.
        headers: of every request.
        timeout_s: of one request.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float):
        self._url, self._headers, self._timeout_s = url.rstrip("/"), dict(headers), timeout_s
        self._opener = urllib.request.build_opener(_NoRedirects)

    @classmethod
    def of(cls, settings: SinkSection) -> Poster:
        """Return the poster of a sink with a URL.

        Raises:
            ConfigError: where a secret is not where the config says.
        """
        key = f"sink {settings.name or settings.kind}"
        assert settings.url is not None
        headers: dict[str, str] = {}
        if (token := secret_of(settings.token, f"{key}: token")) is not None:
            headers["Authorization"] = f"Bearer {token}"
        elif (password := secret_of(settings.password, f"{key}: password")) is not None:
            login = base64.b64encode(f"{settings.user}:{password}".encode()).decode()
            headers["Authorization"] = f"Basic {login}"
        return cls(address_of(settings.url, f"{key}: url"), headers, parse_seconds(settings.timeout))

    def post(
        self, path: str, body: bytes | Mapping[str, Any] | None, *, method: str = "POST", kind: str = "application/json"
    ) -> Any:
        """Send a request and return the JSON of its answer, None for an empty one.

        Args:
            path: below the server's URL.
            body: bytes, or a table sent as JSON.
            method: of HTTP.
            kind: the body's media type.

        Raises:
            SinkTrouble: where the server is away, slow, or refuses; `status` is its answer's, 0 without one.
        """
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": kind, "User-Agent": "weft"}
        try:
            request = urllib.request.Request(self._url + path, data, headers, method=method)
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                text = answer.read(_MOST_ANSWER)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace").strip().replace("\n", " ")
            trouble = SinkTrouble(f"the server answered {error.code} {error.reason}: {self._without_secrets(said)}")
            trouble.__dict__["status"] = error.code
            raise trouble from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise SinkTrouble(f"the server cannot be reached ({self._without_secrets(str(reason))})") from None
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return None

    def _without_secrets(self, text: str) -> str:
        """A server may give back what it was sent."""
        secrets = [word for value in self._headers.values() for word in value.split()[1:]]
        for secret in (*secrets, self._url):
            text = text.replace(secret, "***")
        return text
