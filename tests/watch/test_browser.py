"""The page in a real browser: loading, live updates, reload, phone layout, comparison, and pausing a real run."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.watch.browser import chromium, needs_browser, watched
from tests.watch.synthetic_run import SyntheticRun
from tests.watch.test_serving import served

pytestmark = [pytest.mark.full, needs_browser]

MODEL = [
    "model.vocab_size=260",
    "model.dim=64",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.ffn_dim=128",
    "tokenizer.kind=bytes",
    "train.seq_len=64",
    "train.global_batch=8",
]
#: Timeout for a busy machine, in ms.
LONG = 120_000


def ready(page):
    page.wait_for_selector("body[data-ready]", state="attached", timeout=LONG)


def step_of(page) -> int:
    return int(page.inner_text(".progress b").replace(",", ""))


def until(page, text: str, seconds: float = 120) -> None:
    """Wait until the page shows a text. This polls, because the page's policy forbids evaluated scripts."""
    end = time.monotonic() + seconds
    while text not in page.inner_text("body"):
        assert time.monotonic() < end, f"{text!r} is not in\n{page.inner_text('body')}"
        page.wait_for_timeout(200)


def later(page, step: int) -> None:
    """Wait until the page is beyond a step."""
    end = time.monotonic() + 120
    while step_of(page) <= step:
        assert time.monotonic() < end
        page.wait_for_timeout(200)


def test_comparison_reload_phone_layout_and_both_themes(tmp_path):
    SyntheticRun(steps=600, until=400, ranks=16, slow_rank=9, slow_from=200, spike_at=120).write(tmp_path / "one")
    SyntheticRun(steps=500, ranks=8, seed=2, lr=1e-3, end=1e9).write(tmp_path / "two")
    with served(tmp_path) as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        errors = watched(page)
        page.goto(address)
        ready(page)
        assert page.locator(".runs tbody tr").count() == 2
        for box in page.locator(".runs input[type=checkbox]").all():
            box.check()
        page.click("text=Compare 2")
        page.wait_for_selector("text=2 runs side by side")
        page.wait_for_selector("text=What differs", timeout=LONG)
        assert "optimizer.lr" in page.inner_text("[aria-label='What differs']")
        assert page.locator(".u-over").count() == 6
        page.goto(f"{address}/#/run/one")
        page.wait_for_selector(".heat", timeout=LONG)
        until(page, "rank 9 is the slowest now")
        assert page.inner_text(".pill") == "running"
        steps = step_of(page)
        page.reload()
        ready(page)
        assert step_of(page) == steps
        before = page.evaluate("document.documentElement.dataset.theme")
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") != before
        page.reload()
        ready(page)
        assert page.evaluate("document.documentElement.dataset.theme") != before  # and it is remembered
        # Drag over one half of the loss: the chart zooms in, and out again.
        box = page.locator(".u-over").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=4)
        page.mouse.up()
        page.get_by_role("button", name="Whole run").click()
        # Every button has a name, every chart a text; nothing is wider than a phone.
        assert page.evaluate(
            "[...document.querySelectorAll('button, a')].every(one => (one.innerText || one.ariaLabel || '').trim())"
        )
        assert page.evaluate("[...document.querySelectorAll('[role=img]')].every(one => one.ariaLabel)")
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.goto(f"{address}/#/run/..%2Fthree")
        page.wait_for_selector("text=There is no run of this name here.")
        assert [one for one in errors if "404" not in one] == []


def test_live_run_is_shown_paused_resumed_and_stopped(tmp_path):
    command = [
        sys.executable,
        "-m",
        "weft",
        "train",
        *MODEL,
        "train.steps=100000",
        "eval.every=0",
        "checkpoint.every=0",
        "launch.ranks=1",
        f"run.dir={tmp_path}",
        "run.name=live",
    ]
    with open(tmp_path / "train.log", "w") as log:
        training = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        events = tmp_path / "live" / "events.jsonl"
        end = time.monotonic() + 240
        while not (events.exists() and b'"step",' in events.read_bytes()):
            assert training.poll() is None, (tmp_path / "train.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.5)
        with served(tmp_path / "live") as address, chromium() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            errors = watched(page)
            page.on("dialog", lambda dialog: dialog.accept())
            page.goto(address)
            ready(page)
            first = step_of(page)
            later(page, first + 2)
            page.get_by_role("button", name="Checkpoint").click()
            until(page, "step_0")
            page.get_by_role("button", name="Hold").click()
            page.wait_for_selector(".pill.held", timeout=LONG)
            page.get_by_role("button", name="Resume").wait_for(timeout=LONG)
            end = time.monotonic() + 120
            while not (tmp_path / "live" / "held.json").exists():
                assert time.monotonic() < end
                time.sleep(0.2)
            held = step_of(page)
            page.get_by_role("button", name="Resume").click()
            page.wait_for_selector(".pill.running", timeout=LONG)
            later(page, held)
            page.get_by_role("button", name="Stop").click()
            page.wait_for_selector(".pill.stopped", timeout=LONG)
            assert training.wait(120) is not None
            assert "held" in page.inner_text("[aria-label=Goodput]")
            assert errors == []
        kinds = [json.loads(line)["event"] for line in events.read_text().splitlines()]
        assert kinds.index("held") < kinds.index("go_on")
    finally:
        training.kill()
        training.wait()


def test_a_million_steps_on_a_thousand_ranks_paint_within_a_second(tmp_path):
    """The first paint is while the log is read. After that, answers take at most a tenth of a second."""
    from weft.monitor.dashboard.routes import curves, heat, run_line
    from weft.monitor.dashboard.run_index import RunIndex

    folder = tmp_path / "million"
    made = SyntheticRun(
        steps=1_000_000,
        ranks=1000,
        figures_every=2000,
        eval_every=5000,
        save_every=10_000,
        slow_rank=613,
        slow_from=400_000,
    )
    made.write(folder)
    with served(folder) as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        errors = watched(page)
        page.goto(address)
        page.wait_for_selector(".uplot", timeout=LONG)
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        assert paint < 1000
        until(page, "step 1,000,000 of", seconds=900)
        page.reload()
        until(page, "rank 613 is the slowest now")
        assert page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 1000
        assert errors == []
    run = RunIndex(folder, "million")
    while run.refresh():
        pass
    assert len(run.steps) == 1_000_000
    for view in (run_line, lambda one: curves(one, -1, 2**62, 1200), heat):
        best = min(_timed(view, run) for _ in range(5))
        assert best < 0.25
    with open(folder / "events.jsonl", "a") as file:  # only appended lines are read
        file.write(json.dumps({"event": "step", "time": time.time(), "step": 1_000_001, "loss": 1.0}) + "\n")
    assert _timed(lambda one: one.refresh(), run) < 0.05
    assert run.step == 1_000_001


def _timed(call, *args) -> float:
    began = time.perf_counter()
    call(*args)
    return time.perf_counter() - began
