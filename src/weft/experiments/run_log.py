"""Measures of a run, read from its event log: a metric at an equal number of tokens, seconds, joules or steps."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from weft.config.metrics import METRICS
from weft.errors import ConfigError, did_you_mean
from weft.monitor.accounting import PRODUCTIVE, TimeLedger
from weft.monitor.events import last_per_step, number, read_events

#: Quantities by which the progress of two runs can be equal.
Axis = Literal["tokens", "steps", "time", "energy"]
#: A training metric is averaged over this last share of the compared part of a run.
_LAST_SHARE = 0.1
#: Runs whose amounts differ by less than this share are compared at their ends: samples have different sizes.
_SAME_SHARE = 0.01
#: Largest share of the time of productive steps without a reading of energy, such as before a kill.
_MOST_UNREAD = 0.01
#: Metrics of evaluations with a fixed better direction. Others need `--best`.
_LOWER = frozenset({"loss", "bits_per_byte", "perplexity"})
_HIGHER = frozenset({"accuracy", "macro_f1", "top5", "token_accuracy", "reward_accuracy", "reward_margin"})
#: Names of metrics whose key in a step event differs.
_KEYS = {"step_s": ("seconds", "total")}
_UNITS = {"loss": "nats", "eval.loss": "nats", "eval.bits_per_byte": "bits per byte", "step_s": "s"}


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric to compare runs by.

    Attributes:
        name: "eval.NAME" for a metric of evaluations, otherwise the name of a metric of steps.
        unit: unit for texts, such as "nats", or "".
        lower_is_better: direction.
    """

    name: str
    unit: str
    lower_is_better: bool

    @classmethod
    def of(cls, name: str, best: Literal["lowest", "highest"] | None = None) -> Measure:
        """Return the measure of a metric's name.

        Raises:
            ConfigError: if the metric is unknown, or its better direction is, and `best` is None.
        """
        if not name.startswith("eval."):
            return cls._of_steps(name, best)
        key = name.removeprefix("eval.")
        if best is None and key not in _LOWER | _HIGHER:
            raise ConfigError(f"--metric {name}: its better direction is unknown. Add --best lowest or --best highest.")
        return cls(name, _UNITS.get(name, ""), best == "lowest" if best else key in _LOWER)

    @classmethod
    def _of_steps(cls, name: str, best: str | None) -> Measure:
        spec = METRICS.get(name)
        if spec is None or spec.owner != "run" or spec.label:
            known = [one for one, spec in METRICS.items() if spec.owner == "run" and not spec.label]
            hint = did_you_mean(name, known) or " Use loss, eval.loss, tokens_per_s, step_s or eval.NAME."
            raise ConfigError(f"--metric {name}: it is no metric of steps or evaluations.{hint}")
        if best is None and not spec.worse:
            raise ConfigError(f"--metric {name}: its better direction is unknown. Add --best lowest or --best highest.")
        lower = best == "lowest" if best else spec.worse == "high"
        return cls(name, _UNITS.get(name, spec.unit), lower)


@dataclass(frozen=True, slots=True)
class RunLog:
    """Steps and evaluations of a run, without steps that were repeated.

    Attributes:
        folder: the run folder.
        start: the newest "start" event.
        steps, evals: events in the order of steps.
        end: reason of the newest end, or "" if the run has not ended since its newest start.
        energy_j: energy of the productive steps, as `weft runs show` counts it, or None without a reading of nearly all
            of them.
        energy_label: "measured", "estimated", "12 % estimated" or "unmeasured".
    """

    folder: Path
    start: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]
    end: str
    energy_j: float | None = None
    energy_label: str = "unmeasured"

    @classmethod
    def read(cls, folder: Path) -> RunLog:
        """Read the events of a run folder. Without an event log, the run has no steps."""
        events = read_events(folder / "events.jsonl")
        marks = [event for event in events if event.get("event") in ("start", "end")]
        starts = [event for event in marks if event["event"] == "start"]
        last = marks[-1] if marks else {}
        end = str(last.get("reason", "")) if last.get("event") == "end" else ""
        ledger = TimeLedger().feed_all(events)
        joules, label = ledger.joules().get(PRODUCTIVE), ledger.energy_summary().label
        if ledger.energy.unmeasured_s.get(PRODUCTIVE, 0.0) > _MOST_UNREAD * ledger.seconds()[PRODUCTIVE]:
            joules = None
        start = starts[-1] if starts else {}
        return cls(folder, start, last_per_step(events), last_per_step(events, "eval"), end, joules, label)

    @property
    def unit(self) -> str:
        """Name of the items that the loss is averaged over, such as "tokens"."""
        keys = [key.removesuffix("_per_s") for key in (self.steps[-1] if self.steps else {}) if key.endswith("_per_s")]
        return next((key for key in keys if key != "samples"), "samples")

    def amounts(self, axis: Axis) -> list[float]:
        """Return the cumulative amount after each step: items, steps, seconds inside steps, or joules.

        Joules are distributed evenly over the steps, because a meter is read less often than once per step.

        Raises:
            ConfigError: for "energy" if the run has no reading of it.
        """
        if axis == "steps":
            return [float(event["step"]) for event in self.steps]
        if axis == "energy":
            if self.energy_j is None:
                raise ConfigError(
                    f"--at energy: {self.folder} has no complete reading of energy. `weft energy meters` lists the "
                    "reasons; energy.cpu_watts or energy.gpu_watts makes an estimate. Delete the folder to repeat a "
                    "run that was killed, or use --at tokens or --at time."
                )
            return [self.energy_j * (at + 1) / len(self.steps) for at in range(len(self.steps))]
        if axis == "time":
            each = [number((event.get("seconds") or {}).get("total")) for event in self.steps]
        else:
            each = [number(event.get(self.unit)) for event in self.steps]
        return list(accumulate(each))

    def total(self, axis: Axis) -> float:
        """Return the amount of the whole run; 0 without steps."""
        return self.amounts(axis)[-1] if self.steps else 0.0

    def value(self, measure: Measure, axis: Axis, limit: float) -> float:
        """Return the measure at an amount of `axis`; nan if the run has no value there.

        A metric of evaluations is interpolated between two of them; within 1 % of the run's end, it is the last one.
        The loss of training and other metrics of steps are averaged over the last tenth before `limit`; speeds are the
        median of all steps but the first tenth.
        """
        amounts = self.amounts(axis)
        if measure.name.startswith("eval."):
            return self._evaluated(measure.name.removeprefix("eval."), amounts, limit)
        path = _KEYS.get(measure.name, (measure.name,))
        values = [_lookup(event, path) for event in self.steps]
        if measure.name == "step_s" or measure.name.endswith("_per_s"):
            known = [one for one in values[len(values) // 10 :] if math.isfinite(one)]
            return statistics.median(known) if known else math.nan
        chosen = [
            value
            for value, amount in zip(values, amounts, strict=True)
            if (1 - _LAST_SHARE) * limit < amount <= limit * (1 + 1e-9)
        ]
        return statistics.fmean(chosen) if chosen else math.nan

    def _evaluated(self, key: str, amounts: list[float], limit: float) -> float:
        by_step = {int(event["step"]): amount for event, amount in zip(self.steps, amounts, strict=True)}
        points = [(by_step[one["step"]], number(one.get(key))) for one in self.evals if one["step"] in by_step]
        reached = limit * (1 + 1e-9) if limit < (1 - _SAME_SHARE) * amounts[-1] else amounts[-1]
        at = bisect.bisect_right([amount for amount, _ in points], reached)
        if at == 0:
            return math.nan
        if at == len(points):
            return points[-1][1]
        (left, low), (right, high) = points[at - 1], points[at]
        return low + (high - low) * (limit - left) / (right - left) if right > left else low


def _lookup(event: Mapping[str, Any], path: Sequence[str]) -> float:
    value: Any = event
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return number(value)
