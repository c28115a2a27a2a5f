"""What an event says in figures: every reader of events.jsonl (sinks, alerts, the page) asks here.

| event | figures |
|---|---|
| step | loss, lr, grad_norm, update_ratio, loss_scale, step, step_s, tokens_per_s, samples_per_s, mfu |
| eval | eval.loss, eval.metric by name |
| figures | what ranks and machines have, folded: `"figures": {series: value or [min, median, max, who, who]}`; |
| | beside them `"by_rank": {"busy_s": [seconds of each rank, null where it is silent]}`, and "ranks", "over_s" |
| checkpoint | checkpoint.stall_s, checkpoint.durable_s |
| failure | failures |
| actual | plan.drift, by part: `"ratios": {"over dp": 1.3}` |
| plan | planned, by the figure's name: `"figures": {"step_s": 0.12}` |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from weft.monitor.events import number
from weft.spec.figures import FIGURES, series, split_series

#: What an evaluation says beside its loss and metrics.
_OF_EVALUATION = frozenset({"event", "time", "step", "loss"})


@dataclass(frozen=True, slots=True)
class FigureReading:
    """A figure at a moment.

    name, label: which series. value: the number; over ranks the median. low, high: over ranks the least and greatest,
    else the value too. at_low, at_high: whose these are, such as "rank 3"; "" for a figure of the run. step: of the
    event, None where it has none. time: seconds since 1970.
    """

    name: str
    label: str
    value: float
    low: float
    high: float
    at_low: str = ""
    at_high: str = ""
    step: int | None = None
    time: float = 0.0

    @property
    def series(self) -> str:
        """The text that names its series."""
        return series(self.name, self.label)


def readings(event: Mapping[str, Any]) -> Iterator[FigureReading]:
    """Yield what an event says in figures; nothing for events without any. Unknown figures are left out."""
    step, time = event.get("step"), number(event.get("time"))
    at = (step if type(step) is int else None, time)
    for text, value in _values(event):
        try:
            name, label = split_series(text)
        except ValueError:
            continue
        if name not in FIGURES:
            continue
        if isinstance(value, list):
            if len(parts := cast(list[Any], value)) == 5:
                low, middle, high = (number(one) for one in parts[:3])
                yield FigureReading(name, label, middle, low, high, str(parts[3]), str(parts[4]), *at)
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            found = number(value)
            if not math.isnan(found) or value == "nan":
                yield FigureReading(name, label, found, found, found, "", "", *at)


def _values(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pairs of (series, value)."""
    kind = event.get("event")
    if kind == "step":
        yield from _of_step(event)
    elif kind == "eval":
        yield "eval.loss", event.get("loss")
        yield from ((series("eval.metric", key), value) for key, value in event.items() if _is_metric(key, value))
    elif kind == "figures":
        yield from _table(event.get("figures")).items()
    elif kind == "checkpoint":
        yield "checkpoint.stall_s", event.get("stall_s")
        yield "checkpoint.durable_s", event.get("durable_s")
    elif kind == "failure":
        yield "failures", event.get("count", 1)
    elif kind == "plan":
        yield from ((series("planned", key), value) for key, value in _table(event.get("figures")).items())
    elif kind == "actual":
        yield from ((series("plan.drift", key), value) for key, value in _table(event.get("ratios")).items())


def _of_step(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    seconds = _table(event.get("seconds"))
    yield "step", event.get("step")
    for name in ("loss", "lr", "grad_norm", "update_ratio", "loss_scale", "mfu", "samples_per_s"):
        yield name, event.get(name)
    # Counts are called by their unit: tokens_per_s, points_per_s.
    speed = next((key for key in event if key.endswith("_per_s") and key != "samples_per_s"), "samples_per_s")
    yield "tokens_per_s", event.get(speed)
    yield "step_s", seconds.get("total")


def _table(value: object) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _is_metric(key: str, value: object) -> bool:
    # A whole number is what was counted, called by its unit.
    return key not in _OF_EVALUATION and (isinstance(value, float) or value in ("nan", "inf", "-inf"))
