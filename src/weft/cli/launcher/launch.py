"""Start the ranks of one machine through torch's elastic agent, pass signals on, and say which rank failed first.

The agent does rendezvous, environment and supervision. Three things are added, because on its own it
waits up to 30 s for ranks whose peer is gone, passes Ctrl-C on as SIGINT and stops looking, and knows a failure's
time only to the second: a `_Watch` sees each process end at once, forwards signals, and ends what will not end.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from weft import env
from weft.cli.launcher.failure import Failure, first_failure, log_path
from weft.cli.launcher.switchboard import switchboard
from weft.errors import LaunchError, WeftError
from weft.train.run import heeded_signals

#: A wrapper (make, uv) may pass on the Ctrl-C that the terminal already sent us: within this time it is one.
_SAME_KEYPRESS_S = 0.5
_MONITOR_S = 0.05
#: Once a signal has killed a rank, the cause is known and no save of all ranks can end: the others get so long (s).
_AFTER_CRASH_S = 1.0
#: Signals that end a rank because of what another one did, which may still be about to say so.
_CONSEQUENCES = (signal.SIGTERM, signal.SIGABRT)


class RankFailed(WeftError):
    """A rank failed. The text is its sentence; `traceback` is empty for an error raised on purpose."""

    def __init__(self, failure: Failure, log: Path):
        super().__init__(failure.sentence())
        self.failure = failure
        self.log = log
        self.traceback = "" if failure.expected else failure.traceback
        self.exit_code = failure.exit_code if failure.exit_code > 0 else 1

    @property
    def whereabouts(self) -> str:
        """Which rank, and where its output is."""
        return f"rank {self.failure.rank}; its output is in {self.log}"


class Stopped(WeftError):
    """A signal ended the run, as its sender wished.

    Args:
        signum: the signal.
        text: what the user reads.
        saved: whether the ranks ended by themselves, with all saved; the exit code is then 0, else 128 + signum.
    """

    def __init__(self, signum: int, text: str, *, saved: bool = False):
        super().__init__(text)
        self.exit_code = 0 if saved else 128 + signum


def launch_ranks(
    command: list[str],
    num_ranks: int,
    logs: Path,
    *,
    variables: Mapping[str, str] | None = None,
    settings: bytes = b"",
    lock: int | None = None,
    notice: Callable[[str], None] | None = None,
    grace_s: float = 600.0,
    peer_grace_s: float = 5.0,
) -> None:
    """Run `command` once per rank and return when all of them succeeded.

    Args:
        command: the command line of a rank.
        num_ranks: how many are started.
        logs: folder where ranks write rank_N.log and, on failure, rank_N.error.json (see rank.py).
        variables: environment of the ranks, on top of this process's own.
        settings: bytes that each rank gets over its line (see switchboard.py).
        lock: the descriptor of a lock that each rank holds, got over its line; None: there is none.
        notice: called with one line when a signal asks the ranks to stop.
        grace_s: seconds from the first signal to SIGKILL: a step and a large checkpoint fit.
        peer_grace_s: the same once another rank has failed; at most 1 s where a signal killed that one.

    Raises:
        RankFailed: where a rank failed.
        Stopped: where a signal came.
        LaunchError: when the ranks could not be started.
    """
    _silence_torchelastic()
    watch = _Watch(grace_s, peer_grace_s, notice)
    with switchboard(settings, lock) as board:
        children = {
            **(variables or {}),
            "WEFT_LAUNCHED": str(os.getpid()),
            "WEFT_LINE": board.address,
            # No signal for the agent: its handler would raise out of the supervision and leave our ranks half stopped.
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
        }
        with env.lent_to_children(**children), watch.signals():
            exit_codes = _run_agent(command, num_ranks, watch)
    _judge(exit_codes, watch, logs, board.failures)


def _run_agent(command: list[str], num_ranks: int, watch: _Watch) -> dict[int, int]:
    """Exit code of each rank that failed; empty when all succeeded."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    from weft.cli.launcher.private_torch import StartedAgent
    from weft.cli.launcher.rendezvous import OneMachine

    class InheritedStreams(LogsSpecs):
        """Ranks keep our terminal, and redirect themselves: rank 0 needs a real terminal for its display."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            nothing = dict.fromkeys(envs, "")
            return LogsDest(stdouts=nothing, stderrs=dict(nothing), error_files=dict.fromkeys(envs, os.devnull))

        @property
        def root_log_dir(self) -> str:
            return os.devnull

    try:
        spec = WorkerSpec(
            role="weft",
            local_world_size=num_ranks,
            rdzv_handler=OneMachine(f"weft-{os.getpid()}"),
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=0,
            monitor_interval=_MONITOR_S,
        )
        result = StartedAgent(watch.begin, spec, InheritedStreams(), exit_barrier_timeout=5).result()
    except (OSError, RuntimeError) as error:
        raise LaunchError(f"the ranks could not be started: {error}. `weft doctor` checks what they need.") from error
    finally:
        watch.end()
    if result is None:
        raise LaunchError("the rendezvous ended before the ranks started. Run the command again.")
    return {rank: failure.exitcode for rank, failure in result.failures.items()}


def _judge(exit_codes: dict[int, int], watch: _Watch, logs: Path, told: Mapping[int, Failure]) -> None:
    """Turn the ranks' ends into the one error that the user sees, or return. told: what ranks said over their line."""
    failures = [
        told.get(rank) or Failure(rank, exit_code, when=watch.ended.get(rank, time.time()))
        for rank, exit_code in exit_codes.items()
    ]
    true_failures = [
        failure for failure in failures if failure.kind or not watch.has_sent(failure.rank, -failure.exit_code)
    ]
    signum = watch.first_signal
    if signum is None and failures:
        first = first_failure(true_failures or failures)
        raise RankFailed(first, log_path(logs, first.rank))
    if signum is None:
        return
    name = signal.Signals(signum).name
    cause = [failure for failure in true_failures if not failure.lost_peer]
    if cause:
        first = first_failure(cause)
        raise RankFailed(first, log_path(logs, first.rank))
    if not failures:
        raise Stopped(signum, f"stopped by {name}; everything is saved. Run the same command to resume.", saved=True)
    if any(watch.has_sent(rank, signal.SIGKILL) for rank in watch.pids):
        raise Stopped(
            signum,
            f"stopped by {name} before the ranks could save. Run the same command to resume from the last checkpoint.",
        )
    raise Stopped(signum, f"stopped by {name} before training began. Run the same command to start again.")


def _silence_torchelastic() -> None:
    """Its loggers write to stderr by Python's last resort; everything they know is said in our own words."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


class _Watch:
    """Sees each rank's process end, passes signals on, and ends ranks that do not end by themselves.

    ended: rank -> time (s since the epoch) at which its process ended.
    """

    def __init__(self, grace_s: float, peer_grace_s: float, notice: Callable[[str], None] | None):
        self.grace_s = grace_s
        self.peer_grace_s = peer_grace_s
        self.notice = notice
        self.pids: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self._sent: set[tuple[int, int]] = set()
        self.first_signal: int | None = None
        self._first_signal_at = 0.0
        self._timers: list[threading.Timer] = []
        self._threads: list[threading.Thread] = []

    def begin(self, pids: Mapping[int, int], collected: Callable[[int], int | None]) -> None:
        """Take over the processes that the agent has just started.

        Args:
            pids: by rank.
            collected: returns the exit code of a process that the agent has collected before this watch saw its end.
        """
        self.pids = dict(pids)
        for rank in self.pids:
            thread = threading.Thread(
                target=self._await, args=(rank, collected), name=f"weft-watch-{rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        if self.first_signal is not None:
            self._send(signal.SIGTERM)

    def end(self) -> None:
        """Leave no process behind, whatever happened."""
        for timer in self._timers:
            timer.cancel()
        # The agent has collected them by now; let the threads see it too, so that no dead rank is signalled.
        for thread in self._threads:
            thread.join(1.0)
        self._send(signal.SIGKILL)

    def has_sent(self, rank: int, signum: int) -> bool:
        """Whether it was this launcher that sent `signum` to that rank."""
        return (rank, signum) in self._sent

    @contextmanager
    def signals(self) -> Generator[None]:
        """Within the block, a stop signal asks the ranks to save and stop; a second SIGINT kills them."""
        old = {signum: signal.signal(signum, self._on_signal) for signum in heeded_signals()}
        try:
            yield
        finally:
            for signum, handler in old.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first_signal is None:
            self.first_signal, self._first_signal_at = signum, now
            if self.notice is not None:
                again = " (Ctrl-C again stops at once, without saving)" if signum == signal.SIGINT else ""
                self.notice(f"stopping after this step{again}")
            self._send(signal.SIGTERM)
            self._kill_after(self.grace_s)
        elif signum == signal.SIGINT and now - self._first_signal_at > _SAME_KEYPRESS_S:
            self._send(signal.SIGKILL)

    def _await(self, rank: int, collected: Callable[[int], int | None]) -> None:
        """Note when a rank's process ends, and leave its exit code for the agent to collect."""
        code = self._end_of(rank, collected)
        self.ended[rank] = time.time()
        if code:
            crashed = code < 0 and -code not in _CONSEQUENCES
            self._kill_after(min(self.peer_grace_s, _AFTER_CRASH_S) if crashed else self.peer_grace_s)

    def _end_of(self, rank: int, collected: Callable[[int], int | None]) -> int | None:
        """Wait until a rank's process ends and return its exit code: below 0 for a signal, None where it is unknown."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            while _is_running(self.pids[rank]):
                time.sleep(_MONITOR_S)
            return collected(rank)
        try:
            end = os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the agent was faster, and has collected it
            return collected(rank)
        return None if end is None else end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def _kill_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._send, args=(signal.SIGKILL,))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _send(self, signum: int) -> None:
        for rank, pid in list(self.pids.items()):
            if rank not in self.ended:
                self._sent.add((rank, signum))
                # Each rank leads a process group of its own; its helper processes go with it.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signum)


def _is_running(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
