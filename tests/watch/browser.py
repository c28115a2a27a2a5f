"""A real browser: the system's chromium, driven by playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


def missing_requirement() -> str:
    """Return a message about a missing program or package, or ""."""
    if shutil.which("chromium") is None:
        return "there is no chromium here: apt-get install chromium"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "there is no playwright here: pip install playwright"
    return ""


needs_browser = pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement() or "-")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser. Script errors and policy violations of its pages fail the test."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def watched(page: Any) -> list[str]:
    """Return a list that collects the page's errors."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return errors
