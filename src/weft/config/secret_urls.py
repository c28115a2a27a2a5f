"""Detection of secrets in URLs. Many services give each customer an address that acts as a password."""

from __future__ import annotations

import re
from urllib.parse import unquote

#: Services whose addresses are secrets, by a part of the URL.
_SERVICES = re.compile(
    r"hooks\.slack\.com|discord(app)?\.com/api/webhooks|webhook\.office\.com|outlook\.office\.com/webhook|"
    r"logic\.azure\.com|powerplatform\.com|open\.feishu\.cn|open\.larksuite\.com|oapi\.dingtalk\.com|qyapi\.weixin|"
    r"api\.telegram\.org/bot|chat\.googleapis\.com|hooks\.zapier\.com|maker\.ifttt\.com|webhook\.site/|ntfy\.sh/|"
    r"\.pipedream\.net",
    re.IGNORECASE,
)
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^/?#]*)(?P<path>[^?#]*)(?P<query>[?#].*)?", re.DOTALL
)
#: A readable part of a path: up to three capitalized terms and a short number.
_WORD = re.compile(r"([A-Z]?[a-z]{2,20}){1,3}\d{0,3}|[A-Za-z]\d{0,4}|[A-Z]{1,5}\d{0,3}|[A-Z]{2,4}[a-z]{1,12}|\d{1,5}|")
_BETWEEN_WORDS = re.compile(r"[-_.~ :,+]")
#: A path part after one of these is a secret, unless it is short and lowercase or one of the names below.
_BEFORE_SECRETS = re.compile(r"(?i)services?|(web)?hooks?|bot|robots?|tokens?|(api)?keys?|secrets?|auth|integrations?")
_PUBLIC = frozenset({"collector", "event", "events", "metrics", "messages", "training", "monitoring"})
_SHORT = 8


def holds_secret(url: str) -> bool:
    """Return True if a URL may hold a secret: user info, a query, a listed service, or an unreadable path."""
    match = _URL.fullmatch(url)
    if match is None:
        return False
    return "@" in match["host"] or bool(match["query"]) or _SERVICES.search(url) is not None or _in_path(match["path"])


def hide_secret(url: str) -> str:
    """Return a URL without user info, path and query if it holds a secret, else the URL."""
    match = _URL.fullmatch(url)
    if match is None or not holds_secret(url):
        return url
    _, at, host = match["host"].rpartition("@")
    hides_path = _SERVICES.search(url) is not None or _in_path(match["path"])
    path = "/(hidden)" if hides_path else match["path"]
    return f"{match['scheme']}://{'(hidden)@' if at else ''}{host}{path}{'?(hidden)' if match['query'] else ''}"


def _in_path(path: str) -> bool:
    before = ""
    for part in unquote(path).split("/"):
        words = _BETWEEN_WORDS.split(part)
        if not all(_WORD.fullmatch(word) for word in words) or sum(word.isdigit() for word in words) > 3:
            return True
        is_short_word = len(part) < _SHORT and part.islower()
        if part and _BEFORE_SECRETS.fullmatch(before) and part not in _PUBLIC and not is_short_word:
            return True
        before = part or before
    return False
