"""A real browser: the system's chromium, driven by playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


def why_not() -> str:
    """What is missing here, in a sentence; "" where nothing is."""
    if shutil.which("chromium") is None:
        return "there is no chromium here: apt-get install chromium"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "there is no playwright here: pip install playwright"
    return ""


needs_browser = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """The browser; its pages fail the test where a script of theirs fails or the policy refuses something."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def watched(page: Any) -> list[str]:
    """Return the list to which the page's errors are added."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return errors
