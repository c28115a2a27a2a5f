"""Takes the pictures of the page for docs/how-to/watch.md, in the system's chromium: `python docs/watch_pictures.py`.

Needs playwright (pip) and chromium (apt). The runs are synthetic, from tests/watch/synthetic_run.py.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.watch.browser import chromium, watched  # noqa: E402 (the path comes first)
from tests.watch.synthetic_run import SyntheticRun  # noqa: E402
from tests.watch.test_serving import served  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 200_000
#: Name, address, width, height, pixels per point, theme.
SHOTS = (
    ("watch_run", "#/run/llama-1b-64", 1280, 1560, 1, "light"),
    ("watch_account", "#/run/llama-1b-64", 1280, 1130, 1, "light"),
    ("watch_compare", "#/compare/llama-1b-64/llama-1b-low-lr/llama-1b-high-lr", 1280, 1420, 1, "dark"),
    ("watch_runs", "#/", 1280, 860, 1, "light"),
    ("watch_phone", "#/run/llama-1b-64", 390, 844, 2, "dark"),
)


def main() -> None:
    """Write all pictures."""
    now = time.time()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        trouble = {"slow_rank": 37, "slow_from": 2900, "fails_at": 1610, "spike_at": 2210}
        SyntheticRun(steps=6000, until=4180, ranks=64, end=now, **trouble).write(runs / "llama-1b-64")
        SyntheticRun(steps=6000, ranks=32, seed=2, lr=3e-4, end=now - 90_000).write(runs / "llama-1b-low-lr")
        high = SyntheticRun(steps=3000, until=1400, ranks=16, seed=3, lr=1e-3, spike_at=900, end=now - 200_000)
        high.write(runs / "llama-1b-high-lr")
        with served(runs, "--price", "2.5usd/h") as address, chromium() as browser:
            for shot in SHOTS:
                _take(browser, address, *shot)


def _take(browser, address: str, name: str, where: str, width: int, height: int, scale: int, theme: str) -> None:
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, device_scale_factor=scale, color_scheme=theme)
    page = context.new_page()
    errors = watched(page)
    page.goto(f"{address}/{where}")
    page.wait_for_selector("body[data-ready]", state="attached", timeout=120_000)
    page.wait_for_timeout(1500)
    if name == "watch_account":
        page.evaluate("scrollTo(0, document.querySelector('[aria-label=Goodput]').offsetTop - 70)")
        page.wait_for_timeout(300)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    context.close()
    assert not errors, errors
    path = PICTURES / f"{name}.png"
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")
    assert path.stat().st_size < MOST_BYTES


if __name__ == "__main__":
    main()
