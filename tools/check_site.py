"""Check the built site in a browser: answers to the questions of newcomers, and pages on a phone's width.

    make docs-check

The search words of each question of docs/start/questions.md are typed into the search. The linked page must be one of
the first three pages found. Each page of the site is opened 390 pixels wide: it must not scroll sideways or raise a
script error, and its pictures must load. The browser is the system's chromium or Google Chrome.
"""

from __future__ import annotations

import functools
import re
import shutil
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
QUESTIONS = ROOT / "docs" / "start" / "questions.md"
FIRST_RESULTS = 3


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *values: Any) -> None:
        pass


def questions() -> list[tuple[str, str]]:
    """Return the search words of each question and its page, relative to the site."""
    found = re.findall(r"^- .+ `(.+)` \[[^\]]+\]\(([^)]+)\.md\)$", QUESTIONS.read_text(), flags=re.MULTILINE)
    return [(words, f"{(QUESTIONS.parent / page).resolve().relative_to(ROOT / 'docs')}.html") for words, page in found]


def search_place(page: Any, address: str, words: str, expected: str) -> int:
    """Return the place of the expected page in the results of a search, from 1, or 0 if it is not found."""
    page.goto(f"{address}/index.html")
    page.click("input[name=query]")
    page.fill("input[name=query]", words)
    page.wait_for_selector(".md-search-result__item a", timeout=10_000)
    page.wait_for_timeout(300)  # results are ranked while the query is typed
    links = page.eval_on_selector_all(".md-search-result__item > a", "all => all.map(a => a.href)")
    results = list(dict.fromkeys(re.split("[#?]", link)[0].removeprefix(f"{address}/") for link in links))
    return results.index(expected) + 1 if expected in results else 0


def phone_faults(page: Any, address: str, name: str) -> list[str]:
    """Return the layout faults, script errors and broken pictures of a page at a phone's width."""
    faults: list[str] = []

    def note(error: Any) -> None:
        faults.append(f"script error: {error}")

    page.on("pageerror", note)
    page.goto(f"{address}/{name}")
    page.wait_for_load_state("load")
    width, view = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    if width > view:
        faults.append(f"scrolls sideways: {width} pixels in {view}")
    broken = page.evaluate(
        "[...document.images].filter(i => i.loading !== 'lazy' && !i.naturalWidth).map(i => i.getAttribute('src'))"
    )
    faults += [f"picture {source} does not load" for source in broken]
    page.remove_listener("pageerror", note)
    return faults


def main() -> int:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        print("error: there is no chromium here: apt-get install chromium", file=sys.stderr)
        return 2
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    wrong = 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for words, expected in questions():
            place = search_place(page, address, words, expected)
            good = 1 <= place <= FIRST_RESULTS
            wrong += not good
            print(f"{'ok   ' if good else 'WRONG'} {place or '-':>2}  {words}  {expected}", flush=True)
        phone = browser.new_page(viewport={"width": 390, "height": 844})
        names = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")
        for name in names:
            for fault in phone_faults(phone, address, name):
                wrong += 1
                print(f"WRONG {name}: {fault}", flush=True)
        print(f"{len(questions())} questions, {len(names)} pages on a phone: {wrong} wrong")
        browser.close()
    server.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
