"""All alerts of a run: fed with its events, it says what fires and what has ended."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.monitor.alerts.judges import Judge, judge_of
from weft.monitor.events import number
from weft.monitor.figures import readings
from weft.spec.config import AlertSection, RunConfig
from weft.spec.figures import STANDARD, parse_condition
from weft.units import parse_seconds

#: Steps that "the last good figures" are looked for among.
_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class AlertRule:
    """One alert as it is judged. quiet_s: how long it sends nothing after it has. says: advice for its reader."""

    name: str
    when: str
    severity: Literal["info", "warning", "critical"] = "warning"
    actions: Sequence[str] = ()
    until: str | None = None
    quiet_s: float = 1800.0
    after_step: int = 0
    factor: float = 0.5
    says: str = ""

    @classmethod
    def of(cls, section: AlertSection) -> AlertRule:
        """Return the rule of a table [[alert]]."""
        return cls(
            name=section.name,
            when=section.when,
            severity=section.severity,
            actions=section.actions,
            until=section.until,
            quiet_s=parse_seconds(section.quiet),
            after_step=section.after_step,
            factor=section.factor,
            says=section.says,
        )


@dataclass(frozen=True, slots=True)
class Notice:
    """An alert that fires or has ended.

    step, time: of the event that showed it. since: first step of the trouble. said: what was found. good: the last good
    figures before, by name. sends: False while it is quiet.
    """

    rule: AlertRule
    state: Literal["fired", "ended"]
    said: str
    step: int | None
    time: float
    since: int | None = None
    good: Mapping[str, float] = field(default_factory=dict)
    sends: bool = True

    def as_json(self) -> dict[str, object]:
        """Return one line of alerts.jsonl."""
        found: dict[str, object] = {"time": round(self.time, 3), "event": "alert", "name": self.rule.name}
        found |= {"state": self.state, "severity": self.rule.severity, "said": self.said, "when": self.rule.when}
        found |= {"step": self.step, "since": self.since, "actions": [*self.rule.actions], "sends": self.sends}
        return {key: value for key, value in found.items() if value is not None}


def rules_of(config: RunConfig) -> list[AlertRule]:
    """Return the alerts of a run: those of the standard set, which all channels hear of, and its own by name."""
    own = [AlertRule.of(section) for section in config.alert]
    if config.alerts == "none":
        return own
    channels = tuple(channel.name for channel in config.channel if channel.standard)
    names = {rule.name for rule in own}
    standard = [
        AlertRule(one.name, one.when, one.severity, channels, after_step=one.after_step, says=one.says)
        for one in STANDARD
        if one.name not in names
    ]
    return [*standard, *own]


class _Watched:
    """One alert between its rule and its judges."""

    def __init__(self, rule: AlertRule):
        self.rule = rule
        self.judge = judge_of(parse_condition(rule.when))
        self.until = judge_of(parse_condition(rule.until)) if rule.until else None
        self.fires = False
        self.sent_at = -math.inf

    def judges(self) -> list[Judge]:
        return [*self.judge.all(), *(self.until.all() if self.until else ())]


class AlertDesk:
    """Judges a run's events in their order.

    Args:
        rules: the alerts.
    """

    def __init__(self, rules: Sequence[AlertRule]):
        self._alerts = [_Watched(rule) for rule in rules]
        self._judges = [judge for alert in self._alerts for judge in alert.judges()]
        self._by_figure: dict[str, list[Judge]] = {}
        for judge in self._judges:
            for name in judge.figures:
                self._by_figure.setdefault(name, []).append(judge)
        self._step = 0
        self._good: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=_REMEMBERED)
        self._evaluated: float | None = None

    def see(self, event: Mapping[str, Any]) -> list[Notice]:
        """Take one event; return what fires or ends by it."""
        time = number(event.get("time"))
        if not math.isfinite(time):
            return []
        found = self.tick(time)
        kind = str(event.get("event"))
        for judge in self._judges:
            judge.hear(kind, time)
        self._remember(kind, event)
        for reading in readings(event):
            for judge in self._by_figure.get(reading.name, ()):
                judge.take(reading)
        return found + self._changed(time)

    def tick(self, now: float) -> list[Notice]:
        """Hear what time it is (s since 1970); return what fires because nothing came."""
        for judge in self._judges:
            judge.tick(now)
        return self._changed(now)

    def begin_anew(self) -> None:
        """Keep what was seen, and take nothing as sent: what the past gave was told to nobody."""
        for alert in self._alerts:
            alert.sent_at = -math.inf

    def _changed(self, now: float) -> list[Notice]:
        found: list[Notice] = []
        for alert in self._alerts:
            if alert.fires:
                ended = alert.until.holds if alert.until else not alert.judge.holds
                if ended:
                    alert.fires = False
                    found.append(self._notice(alert, "ended", now))
            elif alert.judge.holds and self._step >= alert.rule.after_step:
                alert.fires = True
                found.append(self._notice(alert, "fired", now))
        return found

    def _notice(self, alert: _Watched, state: Literal["fired", "ended"], now: float) -> Notice:
        judge, rule = alert.judge, alert.rule
        sends = state == "fired" and now - alert.sent_at >= rule.quiet_s
        if sends:
            alert.sent_at = now
        said = judge.said if state == "fired" else (alert.until.said if alert.until else f"no longer: {rule.when}")
        return Notice(rule, state, said, self._step or None, now, judge.since, self._good_before(judge.since), sends)

    def _remember(self, kind: str, event: Mapping[str, Any]) -> None:
        step = event.get("step")
        if type(step) is int and kind in ("step", "start", "eval"):
            self._step = step
        if kind == "eval":
            self._evaluated = number(event.get("loss"))
        elif kind == "step":
            values = {name: number(event.get(name)) for name in ("loss", "grad_norm", "lr")}
            if all(map(math.isfinite, values.values())):
                known = self._evaluated is not None and math.isfinite(self._evaluated)
                more = {"eval.loss": self._evaluated} if known and self._evaluated is not None else {}
                self._good.append((self._step, {**values, **more}))

    def _good_before(self, since: int | None) -> Mapping[str, float]:
        for step, values in reversed(self._good):
            if since is None or step < since:
                return {"step": step, **values}
        return {}
