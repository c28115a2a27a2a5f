"""Handling of rank failures: restarting the ranks, pausing the run, or raising the error.

torch's agent can restart ranks too, but always with the same number and arguments, whatever the cause. Here each start
is separate: it depends on the cause of the failure, can skip data, and gets a new plan for fewer ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.checkpoint.folders import step_in_name
from weft.checkpoint.load import list_checkpoints
from weft.cli.launch.failure import Failure
from weft.cli.launch.launch import RankFailed
from weft.config.fields.plan_text import is_auto
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, PlanError, TrainingHalted
from weft.monitor.alerts import PauseFiles, with_settings
from weft.monitor.events import EventLog
from weft.train.folder import RunFolder
from weft.train.hooks import leave_out
from weft.units import format_seconds, parse_seconds

_LONGEST_PAUSE_S = 300.0
_LOOK_S = 0.5

#: Function of the config and the number of ranks that starts the ranks and returns when they have succeeded.
Attempt = Callable[[RunConfig, int], None]


@dataclass
class Restarts:
    """Restart policy of a run.

    Attributes:
        config: the run's config.
        folder: the run's folder.
        num_ranks: number of ranks of the first start.
        say: called with a line for the user.
        sleep: time.sleep, replaced in tests.
        copied: returns the step of the newest in-memory copy, or None.
    """

    config: RunConfig
    folder: RunFolder
    num_ranks: int
    say: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    copied: Callable[[], int | None] = lambda: None
    _in_row: int = 0
    _saved: int | None = None
    _culprit: int | None = None

    def keep(self, attempt: Attempt) -> None:
        """Call `attempt` until it succeeds.

        Raises:
            RankFailed: if the failure would recur or the config stops at it, or no restart is left.
            PlanError: if no plan exists for the first number of ranks, or for any smaller one from launch.min_ranks on.
        """
        ranks, config = self.num_ranks, self.config
        while True:
            self.folder = replace(self.folder, resolved=config)  # a paused run may change checkpoint.dir
            self._saved = self._newest()
            try:
                return attempt(config, ranks)
            except RankFailed as failed:
                if failed.failure.action:
                    config = self._act(failed.failure, config)
                else:
                    ranks, config = self._after(failed, ranks, config)
            except PlanError:
                # Try fewer ranks, because some numbers of ranks do not divide the batch.
                if ranks == self.num_ranks or ranks - 1 < (self.config.launch.min_ranks or ranks):
                    raise
                ranks -= 1
            step, newest = config.resume.step, self._newest()
            still_to_go_back = step is not None and newest is not None and newest == self._saved and newest > step
            if step is not None and not still_to_go_back:
                # The run has resumed from that step. Later starts must not go back to it.
                config = config.model_copy(update={"resume": config.resume.model_copy(update={"step": None})})
            config = config if ranks == self.num_ranks else for_ranks(config, ranks)

    def _act(self, failure: Failure, config: RunConfig) -> RunConfig:
        if failure.action == "hold":
            return self._wait_paused(failure.sentence(), failure.step, config)
        self.say(failure.sentence())
        return config

    def _after(self, failed: RankFailed, ranks: int, config: RunConfig) -> tuple[int, RunConfig]:
        launch, failure = self.config.launch, failed.failure
        cause = cause_of(failure)
        if cause == "refused" or (cause in ("bad steps", "data") and self.config.train.on_bad == "stop"):
            raise failed
        saved = self._newest()
        twice = self._culprit == failure.rank and cause in ("died", "failed") and saved == self._saved
        if saved is not None and saved != self._saved:
            self._in_row = 0
        self._in_row += 1
        self._note(failure, cause)
        if not launch.restarts:
            raise failed
        if self._in_row > launch.restarts:
            if launch.on_failure == "stop":
                raise failed
            told = f"{failed}\n  ({failed.whereabouts})\nheld after {self._in_row} failures"
            config = self._wait_paused(
                f"{told}. To continue: weft runs resume {self.folder.path}", failure.step, config
            )
        if cause in ("bad steps", "data") and self.config.train.on_bad == "leave_out":
            last = failure.step or 0
            first = failure.first_bad or last
            if last:
                leave_out(self.folder, range(first, last + 1))
                which = f"step {last}" if first == last else f"steps {first} to {last}"
                self.say(f"the data of {which} is left out (train.on_bad=leave_out)")
        self._culprit = None if twice else failure.rank
        if twice and launch.min_ranks is not None:
            if ranks - 1 < launch.min_ranks:
                raise failed
            self.say(f"rank {failed.failure.rank} failed twice in a row: going on with {ranks - 1} of {ranks} ranks")
            ranks -= 1
        if self._in_row:
            self._pause(failed)
        return ranks, config

    def _newest(self) -> int | None:
        found = (step_in_name(path.name) for path in list_checkpoints(self.folder.checkpoints))
        return max((step for step in (*found, self.copied()) if step is not None), default=None)

    def _note(self, failure: Failure, cause: str) -> None:
        event = {"event": "failure", "cause": cause, "rank": failure.rank, "text": failure.sentence()}
        self._log(event if failure.step is None else {**event, "at_step": failure.step})

    def _log(self, event: dict[str, object]) -> None:
        """Write an event to the run's log. Called while no rank writes to it."""
        try:
            with EventLog(self.folder.events) as log:
                log.write(event)
        except TrainingHalted as full:  # the disk may be the cause of the failure
            self.say(str(full))

    def _pause(self, failed: RankFailed) -> None:
        first = parse_seconds(self.config.launch.restart_pause)
        seconds = min(_LONGEST_PAUSE_S, first * 2 ** (self._in_row - 1))
        newest = self._newest()
        where = "from the start" if newest is None else f"from step {newest}"
        self.say(
            f"{failed}\n  ({failed.whereabouts})\n"
            f"restart {self._in_row} of {self.config.launch.restarts} in {format_seconds(seconds)}, {where}"
        )
        self.sleep(seconds)

    def _wait_paused(self, told: str, step: int | None, config: RunConfig) -> RunConfig:
        """Wait without ranks until a user resumes the run, and return the config to continue with."""
        place = PauseFiles(self.folder.path)
        self.say(told)
        self._log({"event": "held", "why": told, **({} if step is None else {"step": step})})
        place.begin(told, step)
        while True:
            while (words := place.take_answer()) is None:
                self.sleep(_LOOK_S)
            try:
                config = with_settings(config, words)
                break
            except ConfigError as error:  # users may write the request file directly, unchecked
                self.say(f"{error}\nstill paused: weft runs resume {self.folder.path} key=value")
        place.end()
        self._log({"event": "go_on", "settings": words})
        self._in_row = 0
        return config


def cause_of(failure: Failure) -> str:
    """Return the kind of failure: "died", "hang", "data", "bad steps", "failed", or "refused" if it would recur."""
    if failure.in_data:
        return "data"
    if failure.kind == "TrainingHalted" and failure.first_bad is not None:
        return "bad steps"
    if not failure.kind:
        return "died"
    if failure.lost_peer:
        return "hang"
    # An invalid setting or insufficient memory would fail again at the next start.
    # A full disk or an unavailable store may have recovered.
    again = failure.expected and failure.exit_code in (2, 4) and failure.kind != "CheckpointError"
    return "refused" if again else "failed"


def config_for_world_size(config: RunConfig, num_ranks: int) -> RunConfig:
    """Return the config for torchrun's ranks.

    It has plan=auto if the ranks are fewer than the plan's, and at least launch.min_ranks. Otherwise it is unchanged,
    as with plan=auto or without launch.min_ranks.
    """
    least = config.launch.min_ranks
    if least is None or num_ranks < least or is_auto(config.plan):
        return config
    try:
        wanted = Plan.parse(config.plan, num_ranks).world_size
    except PlanError:  # the number of ranks does not fit the plan's '*'
        wanted = num_ranks + 1
    return for_ranks(config, num_ranks) if num_ranks < wanted else config


def for_ranks(config: RunConfig, num_ranks: int) -> RunConfig:
    """Return the config for fewer ranks. The planner chooses their plan, and the global batch is unchanged."""
    launch = config.launch.model_copy(update={"ranks": num_ranks})
    return config.model_copy(update={"plan": "auto", "launch": launch})
