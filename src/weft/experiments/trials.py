"""One trial of a sweep: `weft train` up to a step, in a worker of a pool."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weft.monitor.accounting import TimeLedger
from weft.monitor.events import last_per_step, read_events

#: Exit codes of `weft train` that the same command would give again: refused, halted, out of memory.
_LASTING = (2, 3, 4)
#: Seconds to wait for ranks of a killed command, which still hold the run's lock.
_LOCK_WAIT_S = 60.0
_LOCKED = "is training in"


def train_trial(item: dict[str, Any]) -> dict[str, Any]:
    """Train a trial up to a step, and return its evaluations.

    An interrupted trial continues from its newest checkpoint.

    Args:
        item: "config" and "overrides" of the command, the "folder", the "step", and the "metric".

    Returns:
        {"value": metric at the step, "curve": [[step, value], ...], "seconds": s, "devices": n, "kwh": energy so far or
        None}, or {"failed": reason}.

    Raises:
        RuntimeError: if the run crashed, and may succeed next time.
    """
    folder, began = Path(item["folder"]), time.monotonic()
    words = [*item["overrides"], f"run.dir={folder.parent}", f"run.name={folder.name}", f"train.stop_at={item['step']}"]
    code, error = _run([sys.executable, "-m", "weft", "train", item["config"], *words])
    while code == 2 and _LOCKED in error and time.monotonic() - began < _LOCK_WAIT_S:
        time.sleep(0.5)
        code, error = _run([sys.executable, "-m", "weft", "train", item["config"], *words])
    if code in _LASTING and _LOCKED not in error:
        return {"failed": error, "seconds": time.monotonic() - began}
    if code:
        raise RuntimeError(f"weft train ended with exit code {code}: {error}")
    events = read_events(folder / "events.jsonl")
    curve = [[one["step"], one.get(item["metric"])] for one in last_per_step(events, "eval")]
    curve = [[step, value] for step, value in curve if step <= item["step"]]
    if not curve or not isinstance(curve[-1][1], float | int) or not math.isfinite(curve[-1][1]):
        known = sorted({key for one in last_per_step(events, "eval") for key in one} - {"time", "event", "step"})
        reason = (
            f"its last evaluation has no finite {item['metric']!r}. Evaluations have: {', '.join(known) or 'nothing'}."
        )
        return {"failed": reason, "seconds": time.monotonic() - began}
    start = next((one for one in reversed(events) if one.get("event") == "start"), {})
    seconds = round(time.monotonic() - began, 3)
    finite = [[step, value] for step, value in curve if isinstance(value, float | int) and math.isfinite(value)]
    kwh = TimeLedger().feed_all(events).energy_summary().kwh
    devices = start.get("world_size", 1)
    return {"value": curve[-1][1], "curve": finite, "seconds": seconds, "devices": devices, "kwh": kwh}


def _run(words: list[str]) -> tuple[int, str]:
    """Run a command, and return its exit code and the last error on stderr."""
    with tempfile.TemporaryFile() as errors:
        code = subprocess.run(words, stdin=subprocess.DEVNULL, stderr=errors).returncode
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
        lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-1:]
    return code, " ".join(found)[:1000] if found else "no message"
