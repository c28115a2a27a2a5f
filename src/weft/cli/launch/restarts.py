"""What follows a failure: the ranks are started again, the run is held, or the error goes to the user.

torch's agent can restart its ranks too, but always as many, with the same arguments, whatever the cause. Here each
start is an agent of its own: between two of them the cause decides, data can be left out, and fewer ranks get a plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weft.checkpoint.folders import step_in_name
from weft.checkpoint.load import list_checkpoints
from weft.cli.launch.failure import Failure
from weft.cli.launch.launch import RankFailed
from weft.config.plan import Plan
from weft.config.plan_text import is_auto
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, PlanError, TrainingHalted
from weft.monitor.alerts import PauseFiles, with_settings
from weft.monitor.events import EventLog
from weft.train.folder import RunFolder
from weft.train.hooks import leave_out
from weft.units import format_seconds, parse_seconds

_LONGEST_PAUSE_S = 300.0
_LOOK_S = 0.5

#: Starts the ranks and returns when they have ended well: given the settings, and how many ranks.
Attempt = Callable[[RunConfig, int], None]


@dataclass
class Restarts:
    """Whether and how a run goes on after a failure.

    say: shows the user a line. sleep: takes seconds. copied: the step of the newest copy in memory, where there is one.
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
        """Call `attempt` until it ends well.

        Raises:
            RankFailed: once no restart is left.
            PlanError: where no plan exists for the ranks that are left.
        """
        ranks, config = self.num_ranks, self.config
        while True:
            self._saved = self._newest()
            try:
                return attempt(config, ranks)
            except RankFailed as failed:
                if failed.failure.action:
                    config = self._act(failed.failure, config)
                else:
                    ranks, config = self._after(failed, ranks, config)
            except PlanError:
                # Of fewer ranks not every number divides the batch.
                if ranks == self.num_ranks or ranks - 1 < (self.config.launch.min_ranks or ranks):
                    raise
                ranks -= 1
            config = self._next_config(config, ranks)

    def _next_config(self, config: RunConfig, ranks: int) -> RunConfig:
        """What the next start is to train with."""
        step, newest = config.resume.step, self._newest()
        still_to_go_back = step is not None and newest is not None and newest == self._saved and newest > step
        if step is not None and not still_to_go_back:
            # Done: it would go back once more.
            config = config.model_copy(update={"resume": config.resume.model_copy(update={"step": None})})
        return config if ranks == self.num_ranks else for_ranks(config, ranks)

    def _act(self, failure: Failure, config: RunConfig) -> RunConfig:
        """What a person or an alert asked for: the ranks have ended in order, and nothing has failed."""
        if failure.action == "hold":
            return self._hold(failure.sentence(), failure.step, config)
        self.say(failure.sentence())
        return config

    def _after(self, failed: RankFailed, ranks: int, config: RunConfig) -> tuple[int, RunConfig]:
        """The number of ranks of the next start and its settings; raises the failure where there is none."""
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
            config = self._hold(f"{told}. To go on: weft resume {self.folder.path}", failure.step, config)
        if cause in ("bad steps", "data") and self.config.train.on_bad == "leave_out":
            self._leave_out(failure)
        self._culprit = None if twice else failure.rank
        if twice and launch.min_ranks is not None:
            ranks = self._fewer(failed, ranks, launch.min_ranks)
        if self._in_row:
            self._pause(failed)
        return ranks, config

    def _newest(self) -> int | None:
        found = (step_in_name(path.name) for path in list_checkpoints(self.folder.checkpoints))
        return max((step for step in (*found, self.copied()) if step is not None), default=None)

    def _note(self, failure: Failure, cause: str) -> None:
        """Into the run's events, for the report."""
        event = {"event": "failure", "cause": cause, "rank": failure.rank, "text": failure.sentence()}
        self._log(event if failure.step is None else {**event, "at_step": failure.step})

    def _log(self, event: dict[str, object]) -> None:
        """Write an event while no rank does."""
        try:
            with EventLog(self.folder.events) as log:
                log.write(event)
        except TrainingHalted as full:  # the disk may be what failed
            self.say(str(full))

    def _leave_out(self, failure: Failure) -> None:
        last = failure.step or 0
        first = failure.first_bad or last
        if last:
            leave_out(self.folder, range(first, last + 1))
            which = f"step {last}" if first == last else f"steps {first} to {last}"
            self.say(f"the data of {which} is left out (train.on_bad=leave_out)")

    def _fewer(self, failed: RankFailed, ranks: int, least: int) -> int:
        if ranks - 1 < least:
            raise failed
        self.say(f"rank {failed.failure.rank} failed twice in a row: going on with {ranks - 1} of {ranks} ranks")
        return ranks - 1

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

    def _hold(self, told: str, step: int | None, config: RunConfig) -> RunConfig:
        """Wait, without ranks, for the word of a person; the settings that the run then goes on with."""
        place = PauseFiles(self.folder.path)
        self.say(told)
        self._log({"event": "held", "why": told, **({} if step is None else {"step": step})})
        place.begin(told, step)
        while True:
            while (words := place.word()) is None:
                self.sleep(_LOOK_S)
            try:
                config = with_settings(config, words)
                break
            except ConfigError as error:  # of a word that was not checked: `touch` and editors write it too
                self.say(f"{error}\nstill held: weft resume {self.folder.path} key=value")
        place.end()
        self._log({"event": "go_on", "settings": words})
        self._in_row = 0
        return config


def cause_of(failure: Failure) -> str:
    """What kind of failure: "died", "hang", "data", "bad steps", "failed", or "refused", which would come again."""
    if failure.in_data:
        return "data"
    if failure.kind == "TrainingHalted" and failure.first_bad is not None:
        return "bad steps"
    if not failure.kind:
        return "died"
    if failure.lost_peer:
        return "hang"
    # What the user typed and what does not fit into memory is the same at the next start.
    # A disk that was full or a store that was away may be back.
    again = failure.expected and failure.exit_code in (2, 4) and failure.kind != "CheckpointError"
    return "refused" if again else "failed"


def config_for_world_size(config: RunConfig, num_ranks: int) -> RunConfig:
    """Return the config that torchrun's ranks train with: as `for_ranks` where a machine is gone (launch.min_ranks)."""
    least = config.launch.min_ranks
    if least is None or num_ranks < least or is_auto(config.plan):
        return config
    try:
        wanted = Plan.parse(config.plan, num_ranks).world_size
    except PlanError:  # a '*' that does not come out even
        wanted = num_ranks + 1
    return for_ranks(config, num_ranks) if num_ranks < wanted else config


def for_ranks(config: RunConfig, num_ranks: int) -> RunConfig:
    """The config for fewer ranks than it was made for: the planner chooses their plan, and the global batch stays."""
    launch = config.launch.model_copy(update={"ranks": num_ranks})
    return config.model_copy(update={"plan": "auto", "launch": launch})
