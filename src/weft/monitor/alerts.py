"""Alerts, user requests to a run, and files of a paused run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from weft.config.files import format_config, parse_config
from weft.config.metrics import STANDARD, parse_condition
from weft.config.run_config import RunConfig
from weft.config.sections import AlertSection
from weft.errors import ConfigError, WeftError, did_you_mean
from weft.monitor.alert_conditions import Judge, judge_of
from weft.monitor.channels import AlertMessage, NotificationSender
from weft.monitor.events import EventLog, number
from weft.monitor.metrics import readings
from weft.monitor.sinks.base import SinkJob
from weft.monitor.sinks.pump import EventFollower, Pump
from weft.monitor.sinks.registry import make_sink
from weft.units import format_seconds, parse_seconds

#: Created by `touch` or `weft runs resume` to continue a paused run. Contains settings to change, one per line.
GO_ON = "go_on"
#: Exists while the run is paused.
HELD = "held.json"


class PauseFiles:
    """The files in the run folder by which the launcher and the user communicate about a paused run."""

    def __init__(self, folder: Path):
        self._word, self._note = folder / GO_ON, folder / HELD

    @property
    def is_paused(self) -> bool:
        """True if the folder has the note (HELD) of a waiting launcher."""
        return self._note.is_file()

    def begin(self, why: str, step: int | None) -> None:
        """Write the note (HELD) that the run is paused, and delete an earlier answer (GO_ON) of the user.

        Errors of writing the note are ignored.
        """
        self._word.unlink(missing_ok=True)
        note = {"since": round(time.time(), 3), "step": step, "why": why, "pid": os.getpid()}
        with contextlib.suppress(OSError):  # the disk may be full, and the run waits all the same
            self._note.write_text(json.dumps(note, indent=1) + "\n")

    def take_answer(self) -> list[str] | None:
        """Read and delete the user's answer (GO_ON) and return its settings, or None if there is no answer yet."""
        try:
            text = self._word.read_text(errors="replace")
        except FileNotFoundError:
            return None
        self._word.unlink(missing_ok=True)
        return [line.strip() for line in text.splitlines() if line.strip()]

    def write_answer(self, settings: Sequence[str]) -> None:
        """Write the user's answer atomically."""
        draft = self._word.with_name(f".{GO_ON}.{os.getpid()}")
        draft.write_text("".join(f"{one}\n" for one in settings))
        os.replace(draft, self._word)

    def end(self) -> None:
        """Delete the note."""
        self._note.unlink(missing_ok=True)


def with_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Return the config with settings applied, checked like command-line settings.

    Raises:
        ConfigError: if a setting violates a rule.
    """
    return parse_config(format_config(config), "", settings).config if settings else config


# wishes.jsonl: requests to a run from the user, an alert or the dashboard. Write access to the run folder permits them.

WISHES = "wishes.jsonl"
RunAction = Literal["checkpoint", "hold", "stop", "lower_lr", "skip_data", "roll_back", "tell"]
#: Actions that a run accepts. "tell" only shows a line.
RUN_ACTIONS: tuple[str, ...] = get_args(RunAction)
#: Default factor of lower_lr for the learning rate.
_USUAL_FACTOR = 0.5


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request to a training run.

    Attributes:
        action: one of `RUN_ACTIONS`.
        why: the reason, for the user.
        by: the origin, such as "alert NAME" or "a person".
        since: the first step of the problem, counted from 1, or None for the last one.
        factor: factor on the learning rate, for lower_lr.
    """

    action: str
    why: str = ""
    by: str = "a person"
    since: int | None = None
    factor: float = _USUAL_FACTOR

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> RunRequest:
        """Read a request that `ask` wrote. Unknown keys are ignored.

        Raises:
            ValueError: if the action, `since` or `factor` is invalid.
            TypeError: if there is no action.
        """
        request = cls(**{field.name: found[field.name] for field in fields(cls) if field.name in found})
        since_fits = request.since is None or (type(request.since) is int and request.since >= 0)
        factor_fits = isinstance(request.factor, int | float) and 0 < request.factor <= 1
        if request.action not in RUN_ACTIONS or not since_fits or not factor_fits:
            raise ValueError("not a request")
        return request


def ask(folder: Path, request: RunRequest) -> None:
    """Send a request to the run in a folder. A training run receives it within a second.

    Raises:
        ConfigError: for an unknown action, or if the folder cannot be written.
    """
    if request.action not in RUN_ACTIONS:
        hint = did_you_mean(request.action, RUN_ACTIONS)
        raise ConfigError(f"action={request.action}: a run cannot do this.{hint} Use one of {', '.join(RUN_ACTIONS)}.")
    line = json.dumps({"time": round(time.time(), 3), **asdict(request)}) + "\n"
    try:
        mode = folder.stat().st_mode & 0o666  # the permissions of its folder
        handle = os.open(folder / WISHES, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot send a request to this run ({error.strerror}). Check the path.") from error


class RequestQueue:
    """Reads the requests to one run, each only once over all starts. A second file stores the offset read so far.

    Args:
        folder: the run's folder.
        since: requests before this time (s since 1970) are ignored, because they were meant for an earlier command.
    """

    def __init__(self, folder: Path, since: float = 0.0):
        self._path, self._offset_file = folder / WISHES, folder / f".{WISHES}.heard"
        self._since = since
        try:
            self._offset = min(int(self._offset_file.read_text()), self._size())
        except (OSError, ValueError):
            self._offset = 0

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def new(self) -> list[RunRequest]:
        """Return the requests that no earlier call returned, in this or an earlier start. Invalid lines are ignored."""
        if self._size() <= self._offset:
            return []
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        with contextlib.suppress(OSError):  # with a full disk, the next start reads these requests again
            self._offset_file.write_text(f"{self._offset}\n")
        requests: list[RunRequest] = []
        for line in complete.splitlines():
            with contextlib.suppress(ValueError, TypeError):
                found = json.loads(line)
                if isinstance(found, dict) and found.get("time", self._since) >= self._since:
                    requests.append(RunRequest.from_json(cast(Mapping[str, Any], found)))
        return requests


def action_line(step: int, request: RunRequest) -> str:
    """Return the line that the terminal shows for a request, once all ranks have received it."""
    does = {
        "checkpoint": "saves a checkpoint",
        "hold": "saves and pauses",
        "stop": "saves and stops",
        "lower_lr": f"continues with the learning rate times {request.factor:g}",
        "skip_data": "goes back, and leaves out the data of the steps since",
        "roll_back": "goes back to an older checkpoint",
    }
    why = f": {request.why}" if request.why else ""
    if request.action == "tell":
        return f"{request.by}{why}"
    return f"step {step}: the run {does[request.action]}, as {request.by} asks{why}"


# All alerts of a run. Its events make them fire and end.

#: Number of steps that are searched for the last good metric values.
_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class AlertRule:
    """Settings of one alert.

    Attributes:
        when: the condition of the alert.
        actions: names of channels, and actions of `RUN_ACTIONS`.
        until: condition that ends the alert. By default it ends when `when` is no longer true.
        quiet_s: minimum seconds between two messages.
        after_step: the alert does not fire before this step.
        factor: factor on the learning rate, for lower_lr.
        says: advice that is added to the message.
    """

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
        """Return the rule of an [[alert]] table."""
        values = dict(section)
        return cls(quiet_s=parse_seconds(values.pop("quiet")), **values)


@dataclass(frozen=True, slots=True)
class Notice:
    """An alert that fires or has ended.

    Attributes:
        said: description of the problem.
        step: the run's last step, or None before the first.
        time: time (s since 1970) of the event that triggered it, or at which an event was found missing.
        since: the first step of the problem, or None if unknown.
        good: step and metric values of the last step before the problem with finite metrics, by name.
        sends: True if the alert fires and its quiet time is over.
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
        """Return the values of its line in alerts.jsonl, without those that are None."""
        found: dict[str, object] = {"time": round(self.time, 3), "event": "alert", "name": self.rule.name}
        found |= {"state": self.state, "severity": self.rule.severity, "said": self.said, "when": self.rule.when}
        found |= {"step": self.step, "since": self.since, "actions": [*self.rule.actions], "sends": self.sends}
        return {key: value for key, value in found.items() if value is not None}


def rules_of(config: RunConfig) -> list[AlertRule]:
    """Return a run's alerts: the standard alerts, unless config.alerts is "none", and the config's own.

    Standard alerts go to all channels whose `standard` is true. An alert of the config replaces a standard one of the
    same name.
    """
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
    def __init__(self, rule: AlertRule):
        self.rule = rule
        self.judge = judge_of(parse_condition(rule.when))
        self.until = judge_of(parse_condition(rule.until)) if rule.until else None
        self.fires = False
        self.sent_at = -math.inf


class AlertDesk:
    """Evaluates all alerts of a run on its events, in order."""

    def __init__(self, rules: Sequence[AlertRule]):
        self._alerts = [_Watched(rule) for rule in rules]
        tops = [judge for alert in self._alerts for judge in (alert.judge, alert.until) if judge is not None]
        self._judges = [judge for top in tops for judge in top.all()]
        self._by_metric: dict[str, list[Judge]] = {}
        for judge in self._judges:
            for name in judge.metrics:
                self._by_metric.setdefault(name, []).append(judge)
        self._step = 0
        self._good: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=_REMEMBERED)
        self._evaluated: float | None = None

    def see(self, event: Mapping[str, Any]) -> list[Notice]:
        """Add one event, and return the alerts that fire or end. Events without a finite time are ignored."""
        time = number(event.get("time"))
        if not math.isfinite(time):
            return []
        found = self.tick(time)
        kind = str(event.get("event"))
        for judge in self._judges:
            judge.add_event(kind, time)
        self._remember(kind, event)
        for reading in readings(event):
            for judge in self._by_metric.get(reading.name, ()):
                judge.take(reading)
        return found + self._changed(time)

    def tick(self, now: float) -> list[Notice]:
        """Update the current time (s since 1970) and return the alerts that fire or end because no event came."""
        for judge in self._judges:
            judge.tick(now)
        return self._changed(now)

    def reset_sent(self) -> None:
        """End the quiet times of all alerts. Called after past events, whose alerts were not sent."""
        for alert in self._alerts:
            alert.sent_at = -math.inf

    def _changed(self, now: float) -> list[Notice]:
        found: list[Notice] = []
        for alert in self._alerts:
            if alert.fires:
                if alert.until.holds if alert.until else not alert.judge.holds:
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
        said = judge.message
        if state == "ended":
            said = alert.until.message if alert.until else f"no longer: {rule.when}"
        before = ({"step": step, **values} for step, values in reversed(self._good))
        good = next((each for each in before if judge.since is None or each["step"] < judge.since), {})
        return Notice(rule, state, said, self._step or None, now, judge.since, good, sends)

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


# The monitor process: it reads a run's events as they are written, evaluates its alerts, and feeds its sinks.

ALERTS = "alerts.jsonl"
#: Bytes of past events on which alerts are evaluated at a start, without sending them.
_PAST_BYTES = 4 << 20


class Companion:
    """Alerts and sinks of one run, for its monitor process.

    Args:
        folder: the run's folder.
        config: the run's config.
        pause_s: first pause between retries, or None for the default.
    """

    def __init__(self, folder: Path, config: RunConfig, *, pause_s: float | None = None):
        self._folder, self._config = folder, config
        pauses = {} if pause_s is None else {"pause_s": pause_s}
        jobs = [SinkJob.of(sink, folder, config) for sink in config.sink]
        self._pumps = [
            Pump(job.settings.name or job.settings.kind, make_sink, job, self._notify_run, **pauses) for job in jobs
        ]
        self._senders = {each.name: NotificationSender(each, self._notify_run, **pauses) for each in config.channel}
        self._desk = AlertDesk(rules_of(config))
        self._follower = EventFollower(folder / "events.jsonl")

    @staticmethod
    def is_needed(config: RunConfig) -> bool:
        """Return True if a config has sinks or alerts."""
        return bool(config.sink or config.alert or config.alerts != "none")

    def start(self) -> None:
        """Start the threads, and read the run's past events without sending alerts."""
        for thread in (*self._pumps, *self._senders.values()):
            thread.start()
        self._follower.skip_to_tail(_PAST_BYTES)
        while self._read(lambda notice: None):
            pass
        self._desk.reset_sent()

    def look(self) -> None:
        """Read new events and check all alerts on them."""
        while self._read(self._act):
            pass
        for notice in self._desk.tick(time.time()):
            self._act(notice)

    def finish(self, grace_s: float) -> list[str]:
        """Check alerts on new events, and wait up to `grace_s` seconds for sinks and channels to send their queues.

        Return the names of sinks that have unsent events.
        """
        self.look()
        threads = [*self._pumps, *self._senders.values()]
        for thread in threads:
            thread.finish()
        end = time.monotonic() + grace_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [pump.name.removeprefix("weft-sink-") for pump in self._pumps if not pump.is_done]

    def _read(self, act: Callable[[Notice], None]) -> bool:
        events, after = self._follower.read()
        if after == self._follower.offset:
            return False
        self._follower.offset = after
        for event in events:
            for notice in self._desk.see(event):
                act(notice)
        return True

    def _act(self, notice: Notice) -> None:
        try:
            with EventLog(self._folder / ALERTS) as log:
                log.write(notice.as_json())
        except WeftError as full:
            print(full, flush=True)
        if not notice.sends:
            return
        rule = notice.rule
        self._notify_run(f"{rule.severity}: {notice.said}", by=f"alert {rule.name}")
        message = message_of(notice, self._folder, self._config)
        for action in rule.actions:
            if action in RUN_ACTIONS:
                self._ask(RunRequest(action, notice.said, f"alert {rule.name}", notice.since, rule.factor))
            elif action in self._senders:
                self._senders[action].put(message)

    def _notify_run(self, text: str, by: str = "monitor") -> None:
        print(f"{by}: {text}", flush=True)
        self._ask(RunRequest("tell", text, by))

    def _ask(self, request: RunRequest) -> None:
        try:
            ask(self._folder, request)
        except WeftError as error:
            print(error, flush=True)


def message_of(notice: Notice, folder: Path, config: RunConfig) -> AlertMessage:
    """Return the message of an alert.

    It contains the problem, its first step, the last good metric values, and the command to pause the run, or to
    continue it if the alert pauses it.
    """
    rule = notice.rule
    at = f" at step {notice.step}" if notice.step is not None else ""
    lines = [f"Run {config.run.name}{at}: {notice.said}.", f"Alert: {rule.name} ({rule.severity}), when {rule.when}"]
    if notice.since is not None:
        lines.append(f"Since step {notice.since}.")
    lines.append(f"Time: {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(notice.time))}")
    if notice.good:
        metrics = ", ".join(f"{name} {value:.5g}" for name, value in notice.good.items())
        lines.append(f"Last good metrics: {metrics}")
    does = [action for action in rule.actions if action in RUN_ACTIONS]
    if does:
        lines.append(f"The run does: {', '.join(does)}")
    if rule.says:
        lines.append(rule.says.replace("RUN", str(folder)))
    resume = f"weft runs resume {folder}"
    pause = f"To pause it: weft runs pause {folder}"
    lines.append(f"To continue: {resume} [key=value ...]" if "hold" in does else pause)
    data = {"run": config.run.name, "folder": str(folder), "good": dict(notice.good), **notice.as_json()}
    if notice.rule.severity == "critical":
        data["resume"] = resume
    return AlertMessage(f"[weft] {rule.severity}: {config.run.name}: {rule.name}", "\n".join(lines), data)


def backtest(folder_events: list[dict[str, object]], config: RunConfig) -> list[str]:
    """Return a line for each time that one of the config's alerts (`rules_of`) fires or ends in a run's events."""
    desk, lines = AlertDesk(rules_of(config)), list[str]()
    began = next((float(str(event["time"])) for event in folder_events if "time" in event), 0.0)
    for event in folder_events:
        for notice in desk.see(event):
            after = format_seconds(max(0.0, notice.time - began))
            step = f"step {notice.step}" if notice.step is not None else "-"
            since = f", since step {notice.since}" if notice.since is not None and notice.state == "fired" else ""
            does = f" -> {', '.join(notice.rule.actions)}" if notice.state == "fired" and notice.rule.actions else ""
            quiet = " (quiet)" if notice.state == "fired" and not notice.sends else ""
            lines.append(
                f"{after:>9}  {step:<12} {notice.state:<6} {notice.rule.severity:<9} {notice.rule.name}: "
                f"{notice.said}{since}{does}{quiet}"
            )
    return lines
