"""Events that a person reads one by one: what each says, and how grave it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from weft.monitor.events import number
from weft.units import format_seconds

#: Newest marks that a run keeps for the page; older ones are in its log.
_MOST = 2000
#: From quiet to loud.
LEVELS = ("quiet", "good", "warning", "critical")
_OF_KIND = {
    "start": "good", "end": "good", "checkpoint": "quiet", "copy": "quiet", "warning": "warning", "drift": "warning",
    "alert": "warning", "failure": "critical", "action": "warning", "held": "warning", "go_on": "good",
    "hang": "critical", "slow_rank": "warning", "trace": "critical",
}  # fmt: skip
_OF_SEVERITY = {"info": "quiet", "warning": "warning", "error": "critical", "critical": "critical"}
#: Events that are columns of numbers, or say what another one says.
_NO_MARKS = frozenset({"step", "eval", "figures", "plan", "actual", "resume"})


class Marks:
    """The newest marks of a run, each {"id", "kind", "time", "step", "level", "text"}."""

    def __init__(self) -> None:
        self._kept: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self._next = 0
        self.counts: dict[str, int] = {}

    def __iter__(self):
        return iter(self._kept)

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep an event, where it is one to be read."""
        kind = str(event.get("event", "")) or "note"
        if kind in _NO_MARKS:
            return
        self.counts[kind] = self.counts.get(kind, 0) + 1
        step = event.get("step", event.get("at_step"))
        level = _OF_SEVERITY.get(str(event.get("severity", "")), _OF_KIND.get(kind, "quiet"))
        if kind == "end" and event.get("reason") != "finished":
            level = "warning"
        if kind in ("hang", "slow_rank") and event.get("state") == "ended":
            level = "good"
        self._kept.append(
            {
                "id": self._next,
                "kind": kind,
                "time": number(event.get("time")) if event.get("time") is not None else 0.0,
                "step": step if type(step) is int and abs(step) < 2**62 else None,
                "level": level,
                "text": _words(kind, event)[:2000],
            }
        )
        self._next += 1


def _words(kind: str, event: Mapping[str, Any]) -> str:
    if kind == "start":
        ranks = event.get("world_size", 1)
        return (
            f"starts at step {event.get('step', 0)} on {ranks} rank{'' if ranks == 1 else 's'}: {event.get('plan', '')}"
        )
    if kind == "end":
        return f"ends: {event.get('reason', '')}"
    if kind in ("checkpoint", "copy"):
        stall, durable = number(event.get("stall_s")), number(event.get("durable_s"))
        what = str(event.get("path") or "copy in memory")
        if not (math.isfinite(stall) and math.isfinite(durable)):
            return what
        return f"{what}: training waited {format_seconds(stall)}, safe after {format_seconds(durable)}"
    if kind == "action":
        why = f": {event['why']}" if event.get("why") else ""
        return f"{event.get('action', '')}, asked by {event.get('by', 'a person')}{why}"
    said = event.get("text") or event.get("message") or event.get("reason") or event.get("why") or ""
    name = event.get("name") or event.get("alert") or event.get("cause") or ""
    state = event.get("state") or ""
    return " ".join(str(word) for word in (name, f"({state})" if state else "", said) if word) or kind
