"""What the process beside the ranks does: it follows a run's events, judges its alerts, and feeds its sinks.

It only reads events.jsonl. What an alert asks of the run goes through wishes.jsonl, so that every rank does it after
the same step; what alerts found is kept in alerts.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from weft.errors import WeftError
from weft.monitor.alerts.alert_desk import AlertDesk, Notice, rules_of
from weft.monitor.alerts.channels import AlertMessage, Mailroom
from weft.monitor.alerts.wishes import RUN_ACTIONS, Wish, ask
from weft.monitor.events import EventLog
from weft.monitor.hidden import without_secrets
from weft.monitor.sinks import EventFollower, Pump, SinkJob, make_sink
from weft.spec import RunConfig
from weft.units import format_seconds

ALERTS = "alerts.jsonl"
#: Bytes of the past that alerts are judged by at a start, without a word about it.
_PAST_BYTES = 4 << 20


class Companion:
    """One run's alerts and sinks.

    Args:
        folder: of the run.
        config: of the run.
        tell: takes a line for people.
        pause_s: first pause of what is tried again; None: as usual.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        tell: Callable[[str], None] | None = None,
        *,
        pause_s: float | None = None,
    ):
        self._folder, self._config = folder, config
        self._tell = tell or self._tell_run
        pauses = {} if pause_s is None else {"pause_s": pause_s}
        # Trackers keep a copy of the config where others may read it.
        values = without_secrets(config.model_dump(mode="json", by_alias=True, exclude_none=True))
        self._pumps = [
            Pump(one.name or one.kind, make_sink, SinkJob(one, folder, config.run.name, values), self._tell, **pauses)
            for one in config.sink
        ]
        self._rooms = {one.name: Mailroom(one, self._tell, **pauses) for one in config.channel}
        self._desk = AlertDesk(rules_of(config))
        self._follower = EventFollower(folder / "events.jsonl")
        self._factors = {alert.name: alert.factor for alert in config.alert}

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether a config has anything for such a process to do."""
        return bool(config.sink or config.alert or config.alerts != "none")

    def start(self) -> None:
        """Begin: what the run did before is known, and gives no alerts any more."""
        for thread in (*self._pumps, *self._rooms.values()):
            thread.start()
        self._follower.skip_to_tail(_PAST_BYTES)
        while self._read(lambda notice: None):
            pass
        self._desk.begin_anew()

    def look(self) -> None:
        """Judge what is new."""
        while self._read(self._act):
            pass
        for notice in self._desk.tick(time.time()):
            self._act(notice)

    def finish(self, grace_s: float) -> list[str]:
        """Judge and send what is there, for at most `grace_s`; return the names of sinks that have more to send."""
        self.look()
        threads = [*self._pumps, *self._rooms.values()]
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
        """Keep a notice, and do what its alert asks for."""
        try:
            with EventLog(self._folder / ALERTS) as log:
                log.write(notice.as_json())
        except WeftError as full:
            print(full, flush=True)
        if not notice.sends:
            return
        rule = notice.rule
        self._tell_run(f"{rule.severity}: {notice.said}", by=f"alert {rule.name}")
        message = message_of(notice, self._folder, self._config)
        for action in rule.actions:
            if action in RUN_ACTIONS:
                self._ask(Wish(action, notice.said, f"alert {rule.name}", notice.since, rule.factor))
            elif action in self._rooms:
                self._rooms[action].put(message)

    def _tell_run(self, text: str, by: str = "monitor") -> None:
        print(f"{by}: {text}", flush=True)
        self._ask(Wish("tell", text, by))

    def _ask(self, wish: Wish) -> None:
        try:
            ask(self._folder, wish)
        except WeftError as error:
            print(error, flush=True)


def message_of(notice: Notice, folder: Path, config: RunConfig) -> AlertMessage:
    """Return what people are sent: what happened, since when, the last good figures, and the command to go on."""
    rule = notice.rule
    at = f" at step {notice.step}" if notice.step is not None else ""
    lines = [f"Run {config.run.name}{at}: {notice.said}.", f"Alert: {rule.name} ({rule.severity}), when {rule.when}"]
    if notice.since is not None:
        lines.append(f"Since step {notice.since}.")
    lines.append(f"Time: {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(notice.time))}")
    if notice.good:
        figures = ", ".join(f"{name} {value:.5g}" for name, value in notice.good.items())
        lines.append(f"Last good figures: {figures}")
    does = [action for action in rule.actions if action in RUN_ACTIONS]
    if does:
        lines.append(f"The run does: {', '.join(does)}")
    if rule.says:
        lines.append(rule.says.replace("RUN", str(folder)))
    resume = f"weft resume {folder}"
    lines.append(f"To go on: {resume} [key=value ...]" if "hold" in does else f"To hold it: weft ask {folder} hold")
    data = {"run": config.run.name, "folder": str(folder), "good": dict(notice.good), **notice.as_json()}
    if notice.rule.severity == "critical":
        data["resume"] = resume
    return AlertMessage(f"[weft] {rule.severity}: {config.run.name}: {rule.name}", "\n".join(lines), data)


def backtest(folder_events: list[dict[str, object]], config: RunConfig) -> list[str]:
    """Return a line for each time that an alert of the config would have fired or ended, by a run's events."""
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
