"""What the page asks for, as JSON values: a run in one line, its curves, its ranks, what differs between runs."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.monitor import Price, TimeLedger
from weft.monitor.account import PRODUCTIVE
from weft.monitor.events import number
from weft.monitor.hidden import text_without_secrets, without_secrets
from weft.monitor.page.index import RunIndex, StepColumns, bucket_edges, thinned

#: Points of one curve at most: more than pixels are of no use.
MOST_POINTS = 2000
_MOST_RANKS = 4096
_NOW = ("loss", "lr", "grad_norm", "update_ratio", "rate", "mfu")


def run_line(run: RunIndex, price: Price | None = None) -> dict[str, Any]:
    """One run in a list."""
    with run.lock:
        state, reason = run.state()
        step, wanted, step_s = run.step, run.num_steps, run.step_s()
        found = {
            "id": run.name,
            "version": run.version,
            "state": state,
            "reason": text_without_secrets(reason[:1000])[:300],
            "read": round(run.read_share, 3),
            "step": step,
            "steps": wanted,
            "step_s": _short(step_s),
            "left_s": _short((wanted - step) * step_s) if wanted and step_s and state == "running" else None,
            "time": _short(run.last_time, 14),
            "begun": _short(run.ledger.first, 14),
            "model": str(run.start.get("model", "")),
            "plan": str(run.start.get("plan", "")),
            "ranks": _finite(run.start.get("world_size")),
            "device": str(run.start.get("device", "")),
            "unit": run.rate_unit,
            "now": {name: _short(run.steps.last(name)) for name in _NOW},
            "eval": {name: _short(run.evals.last(name)) for name in run.evals.names if name != run.rate_unit},
            "planned": _planned(run),
            "memory": _short(run.steps.last("memory_bytes")),
            "marks": dict(run.marks.counts),
            "spark": thinned(run.steps.values("loss"), 48)[0],
        }
        found["ledger"] = ledger_view(run.ledger, price)
    return found


def ledger_view(ledger: TimeLedger, price: Price | None) -> dict[str, Any]:
    """A ledger: seconds by cause, the share that was productive, failures, device-seconds and what they cost."""
    seconds = ledger.seconds()
    wall = ledger.wall_s
    found: dict[str, Any] = {
        "seconds": {cause: _short(value, 10) or 0.0 for cause, value in seconds.items()},
        "wall_s": _short(wall, 10) or 0.0,
        "share": _short(seconds[PRODUCTIVE] / wall, 4) if wall > 0 else None,
        "failures": ledger.failures,
        "starts": ledger.starts,
        "device_s": _short(ledger.device_s, 10) or 0.0,
    }
    if price is not None:
        found["cost"] = {"total": _short(price.of(ledger.device_s), 8) or 0.0, "currency": price.currency}
    return found


def curves(run: RunIndex, first: float, last: float, points: int) -> dict[str, Any]:
    """A run's curves between two steps, in `points` buckets at most, and what stands beside them.

    Args:
        run: which.
        first: of the steps.
        last: of the steps.
        points: buckets at most.
    """
    points = max(2, min(points, MOST_POINTS))
    with run.lock:
        rows = run.steps.rows(first, last)
        steps, times = run.steps.steps[rows], run.steps.times[rows]
        edges = bucket_edges(len(steps), points)
        ends = np.append(edges[1:], len(steps)) - 1 if len(edges) else edges
        return {
            "id": run.name,
            "version": run.version,
            "unit": run.rate_unit,
            "rows": len(steps),
            "x": steps[ends].tolist(),
            "time": [_short(one, 14) for one in times[ends].tolist()],
            "series": {name: _curve(run.steps, name, rows, points) for name in run.steps.names if " " not in name},
            "phases": {name: thinned(run.phase(name)[rows], points)[0] for name in run.phases},
            "evals": _evaluations(run, first, last, points),
            "figures": {
                name: picture
                for name, one in run.figures.items()
                if (picture := one.picture())["step"] and not name.startswith("planned")
            },
            "last": {name: one.last for name, one in run.figures.items() if one.last},
            "bad": run.bad_steps,
            "planned": _planned(run),
        }


def heat(run: RunIndex) -> dict[str, Any]:
    """Each rank's busy time over the median rank's, as bytes in base64: rows are ranks, columns steps."""
    with run.lock:
        steps, picture = run.heat.picture()
        slowest = run.heat.slowest()
    group = max(1, math.ceil(picture.shape[0] / _MOST_RANKS))
    if group > 1:  # of neighbours the slowest shows
        picture = np.maximum.reduceat(picture, np.arange(0, picture.shape[0], group), axis=0)
    return {
        "ranks": run.heat.num_ranks,
        "rows": picture.shape[0],
        "group": group,
        "steps": steps,
        "cells": base64.b64encode(np.ascontiguousarray(picture).tobytes()).decode(),
        "slowest": {"rank": slowest[0], "ratio": round(slowest[1], 3)} if slowest else None,
    }


def marks(run: RunIndex) -> list[dict[str, Any]]:
    """The newest events that are to be read, oldest first."""
    with run.lock:
        found = list(run.marks)
    return [{**one, "time": _short(one["time"], 14), "text": text_without_secrets(one["text"])} for one in found]


def config_of(run: RunIndex) -> dict[str, str]:
    """A run's settings by dotted name, and where it ran; what looks like a secret is hidden."""
    with run.lock:
        start = run.start
    found: dict[str, str] = {}
    _flatten(without_secrets(start.get("config")), "", found)
    _flatten(without_secrets(start.get("machine")), "machine", found)
    _flatten(without_secrets(start.get("data")), "data digest", found)
    for name in ("plan", "model", "world_size", "device", "weft", "torch", "python"):
        if name in start:
            found[f"run: {name}"] = _text(without_secrets(start[name], name))
    return found


def beside(run: RunIndex) -> dict[str, Any]:
    """What was planned beside what was measured, while it trains from its events, afterwards from measured.json."""
    with run.lock:
        planned, actual, table = dict(run.planned), dict(run.actual), run.measured
    if not actual and isinstance(table.get("measured"), dict):
        actual = table["measured"]
    expected = planned or (table["expected"] if isinstance(table.get("expected"), dict) else {})
    drift = actual.get("drift")
    return {
        "basis": str(expected.get("basis", ""))[:200],
        "unknown": "" if expected else str(table.get("unknown") or "")[:500],
        "planned": _numbers(expected.get("parts")),
        "actual": _numbers(actual.get("parts")),
        "step_s": [_finite(expected.get("step_s")), _finite(actual.get("step_s"))],
        "memory_bytes": [_finite(expected.get("memory_bytes")), _finite(actual.get("memory_bytes"))],
        "drift": [str(one)[:500] for one in drift[:20]] if isinstance(drift, list) else [],
    }


def _curve(columns: StepColumns, name: str, rows: slice, points: int) -> dict[str, Any]:
    values = columns.values(name)[rows]
    mean, low, high = thinned(values, points)
    return {"mean": mean} if low is mean else {"mean": mean, "low": low, "high": high}


def _evaluations(run: RunIndex, first: float, last: float, points: int) -> dict[str, Any]:
    rows = run.evals.rows(first, last)
    steps = run.evals.steps[rows]
    edges = bucket_edges(len(steps), points)
    ends = np.append(edges[1:], len(steps)) - 1 if len(edges) else edges
    return {
        "step": steps[ends].tolist(),
        "time": [_short(one, 14) for one in run.evals.times[rows][ends].tolist()],
        **{
            name: thinned(run.evals.values(name)[rows], points)[0]
            for name in run.evals.names
            if name not in ("step", "time")
        },
    }


def _planned(run: RunIndex) -> dict[str, float]:
    return _numbers(run.planned.get("figures"))


def _numbers(table: object) -> dict[str, float]:
    """What of a table of an event is numbers, 100 of them at most."""
    pairs = list(table.items())[:100] if isinstance(table, Mapping) else []
    return {str(name): found for name, value in pairs if (found := _finite(value)) is not None}


def _finite(value: object) -> float | None:
    found = number(value)
    return found if math.isfinite(found) else None


def _flatten(value: Any, name: str, into: dict[str, str], depth: int = 0) -> None:
    if isinstance(value, Mapping) and value and depth < 8:
        for key, inside in value.items():
            _flatten(inside, f"{name}.{key}" if name else str(key), into, depth + 1)
    elif value is not None and len(into) < 2000:
        into[name] = _text(value)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:1000]


def _short(value: float | None, digits: int = 6) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
