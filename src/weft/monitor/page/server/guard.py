"""Stands before every address: refuses foreign hosts, foreign pages and visitors without the token."""

from __future__ import annotations

import math
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.monitor.page.server.access import COOKIE, HEADERS, AccessRules

_READS = frozenset({"GET", "HEAD"})
#: What a visitor needs to show the token.
_OPEN = frozenset({"/login", "/static/style.css", "/static/icon.svg"})


class Guard:
    """Middleware.

    Args:
        app: what it stands before.
        access: the rules.
    """

    def __init__(self, app: ASGIApp, access: AccessRules):
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or pass the request on; both with the headers that confine the page."""
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

        client = scope.get("client")
        answer = self._refusal(scope["method"], scope["path"], Headers(scope=scope), client[0] if client else "")
        await (answer or self.app)(scope, receive, with_headers)

    def _refusal(self, method: str, path: str, headers: Headers, address: str) -> Response | None:
        access = self.access
        if not access.knows_host(headers.get("host")):
            return PlainTextResponse("This server does not go by this name. Start it with --name NAME.", 421)
        if path not in _OPEN and not access.has_shown_token(_cookie(headers.get("cookie"))):
            refusal = self._without_cookie(path, headers.get("authorization"), address)
            if refusal is not None:
                return refusal
        if method in _READS:
            return None
        if method != "POST":
            return PlainTextResponse("This address is only read.", 405)
        # Signing in comes before the page's secret is known; it changes nothing but the browser's own cookie.
        fits = access.knows_origin(headers) if path == "/login" else access.may_ask(headers)
        return None if fits else PlainTextResponse("Only this server's own page may ask that.", 403)

    def _without_cookie(self, path: str, authorization: str | None, address: str) -> Response | None:
        """Return None for a request with the token in its Authorization header, else the refusal."""
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
    """Return the answer to an address that was wrong too often."""
    seconds = math.ceil(wait_s)
    text = f"There were too many wrong tokens. Try again in {seconds} s."
    return PlainTextResponse(text, 429, headers={"retry-after": str(seconds)})


def _cookie(header: str | None) -> str | None:
    try:
        found = SimpleCookie(header or "").get(COOKIE)
    except CookieError:
        return None
    return found.value if found is not None else None
