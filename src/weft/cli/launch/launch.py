"""Launch of the ranks of one machine: number of ranks, threads, signals, and failures."""

from __future__ import annotations

import functools
import glob
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from weft import env
from weft.cli.launch.failure import Failure, first_failure, log_path
from weft.cli.launch.start import Started, Starter
from weft.cli.launch.switchboard import switchboard
from weft.config.fields.plan_text import is_auto
from weft.config.plan import Plan
from weft.devices.kinds import driver_files, noun
from weft.errors import LaunchError, WeftError
from weft.train.loop.signals import heeded_signals

if TYPE_CHECKING:
    from weft.config.run_config import RunConfig


def count_ranks(config: RunConfig, gpus: int, cores: int, *, of_one_replica: bool = False) -> int:
    """Return the number of ranks that the plan needs on this machine.

    Args:
        config: a config with plan, launch.device and launch.ranks.
        gpus: number of accelerators that launch.device selects.
        cores: number of usable cores.
        of_one_replica: whether this machine starts only one replica of the plan.

    Raises:
        LaunchError: if the machine has too few devices, or launch.ranks is not the number that the plan needs.
        PlanError: if a '*' does not divide evenly.
    """
    device, wanted = config.launch.device, config.launch.ranks
    if device not in ("auto", "cpu") and gpus == 0 and config.launch.engine == "torch":
        raise LaunchError(
            f"launch.device={device}: torch sees no {noun(device)} on this machine. "
            "Use launch.device=cpu, or run `weft doctor` to see why."
        )
    on_gpus = device != "cpu" and gpus > 0
    room = gpus if on_gpus else min(2, cores)
    stands_for = room if wanted == "all" else wanted
    if is_auto(config.plan):
        num_ranks = stands_for
    else:
        plan = Plan.parse(config.plan, stands_for)
        num_ranks = plan.world_size // plan.dp_replicate if of_one_replica else plan.world_size
    if wanted not in ("all", num_ranks):
        raise LaunchError(
            f"launch.ranks={wanted}: the plan {config.plan!r} needs {num_ranks} ranks. "
            f"Use launch.ranks={num_ranks}, or leave it out."
        )
    if on_gpus and num_ranks > gpus:
        cause = f"plan={config.plan}" if wanted == "all" else f"launch.ranks={wanted}"
        raise LaunchError(
            f"{cause}: {num_ranks} ranks need {num_ranks} {noun(device)}s, and torch sees {gpus} here. "
            f"Use a plan for {gpus}, launch.device=cpu, or start the ranks on more machines with torchrun or srun."
        )
    return num_ranks


def process_age_s() -> float:
    """Return the seconds since this process was started, for time limits."""
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())


def threads_variables(num_ranks: int, cores: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each rank: its share of the cores, unless the user has set it."""
    if env.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // num_ranks))}


def visible_devices(name: str) -> int:
    """Return the number of accelerators that a launch.device selects, without initializing them in this process.

    Variables such as CUDA_VISIBLE_DEVICES limit them. If the system has no file of such a device, return 0 without
    importing torch. Raises PlanError if the kind is unknown or not installed.
    """
    files = driver_files(name) if sys.platform == "linux" else None
    if name == "cpu" or (files is not None and not any(glob.glob(pattern) for pattern in files)):
        return 0
    from weft.devices.access import count_devices

    return count_devices(name)


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # a machine without cgroups, or no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


@contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Handle stop signals during a block, and restore the former handlers."""
    old = {signum: signal.signal(signum, handler) for signum in heeded_signals()}
    try:
        yield
    finally:
        for signum, former in old.items():
            signal.signal(signum, former)


# Starting the ranks of one machine, forwarding signals, and reporting the rank that failed first.

#: A wrapper (make, uv) may forward a Ctrl-C that the terminal already sent. Two within this time (s) count as one.
_SAME_KEYPRESS_S = 0.5
#: Seconds until other ranks are killed after a signal killed one. They cannot save without it.
_AFTER_CRASH_S = 1.0
#: Signals that end a rank because another one failed. The record of that one may arrive later.
_CONSEQUENCES = (signal.SIGTERM, signal.SIGABRT)


class RankFailed(WeftError):
    """A rank failed. The message describes the failure; `traceback` is empty for expected errors."""

    def __init__(self, failure: Failure, log: Path):
        super().__init__(failure.sentence())
        self.failure = failure
        self.log = log
        self.traceback = "" if failure.expected else failure.traceback
        self.exit_code = failure.exit_code if failure.exit_code > 0 else 1

    @property
    def whereabouts(self) -> str:
        """The rank, and the path of its output."""
        return f"rank {self.failure.rank}; its output is in {self.log}"


class Stopped(WeftError):
    """A signal ended the run as requested.

    Args:
        signum: the signal.
        text: message for the user.
        saved: whether the ranks saved and ended. The exit code is then 0, else 128 + signum.
    """

    def __init__(self, signum: int, text: str, *, saved: bool = False):
        super().__init__(text)
        self.exit_code = 0 if saved else 128 + signum


def launch_ranks(
    starter: Starter,
    num_ranks: int,
    logs: Path,
    *,
    cores: int | None = None,
    settings: bytes = b"",
    lock: int | None = None,
    notice: Callable[[str], None] | None = None,
    grace_s: float = 600.0,
    peer_grace_s: float = 5.0,
) -> None:
    """Run one process per rank and return when all of them succeeded.

    Args:
        starter: starts the processes.
        num_ranks: number of ranks.
        logs: folder in which ranks write rank_N.log and, on failure, rank_N.error.json.
        cores: number of this machine's cores, which the ranks share; None to not set their number of threads.
        settings: bytes that each rank receives.
        lock: descriptor of a locked file that each rank receives and keeps open, or None.
        notice: called with one line when a signal asks the ranks to stop.
        grace_s: seconds from the first signal to SIGKILL, which must suffice for a step and a large checkpoint.
        peer_grace_s: seconds until SIGKILL after another rank has failed; at most 1 s if a signal killed that rank.

    Raises:
        RankFailed: if a rank failed.
        Stopped: if a signal stopped the run.
        LaunchError: if the ranks could not be started.
    """
    watch = _Watch(grace_s, peer_grace_s, notice)
    with switchboard(settings, lock) as board:
        threads = threads_variables(num_ranks, cores) if cores is not None else {}
        children = {**threads, "WEFT_LAUNCHED": str(os.getpid()), "WEFT_LINE": board.address}
        with stop_signals(watch.on_signal):
            try:
                started = starter.start(dict.fromkeys(range(num_ranks), children))
            except (OSError, RuntimeError) as error:
                raise LaunchError(
                    f"the ranks could not be started: {error}. `weft doctor` checks what they need."
                ) from error
            try:
                watch.begin(started)
                watch.wait()
            finally:
                watch.end()
                started.close()
    _judge({rank: code for rank, code in watch.codes.items() if code}, watch, logs, board.failures)


def _judge(exit_codes: dict[int, int], watch: _Watch, logs: Path, told: Mapping[int, Failure]) -> None:
    """Raise the error that describes the ranks' exit codes to the user, if a rank failed.

    `told` has the records that ranks sent.
    """
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


class _Watch:
    """Waits for the ranks' processes, forwards signals, and kills ranks that do not end in time.

    `codes` maps ranks to exit codes, negative for the number of a signal. `ended` maps ranks to the end time in seconds
    since the epoch.
    """

    def __init__(self, grace_s: float, peer_grace_s: float, notice: Callable[[str], None] | None):
        self.grace_s = grace_s
        self.peer_grace_s = peer_grace_s
        self.notice = notice
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self._sent: set[tuple[int, int]] = set()
        self.first_signal: int | None = None
        self._first_signal_at = 0.0
        self._timers: list[threading.Timer] = []
        self._threads: list[threading.Thread] = []

    def begin(self, started: Started) -> None:
        """Begin to wait for the processes of `started`."""
        self.pids = dict(started.pids)
        for rank in self.pids:
            watch = functools.partial(self._record_end, rank, started)
            thread = threading.Thread(target=watch, name=f"weft-watch-{rank}", daemon=True)
            self._threads.append(thread)
            thread.start()
        if self.first_signal is not None:
            self._send(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until all processes have ended."""
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """Kill the processes that are still running."""
        for timer in self._timers:
            timer.cancel()
        self._send(signal.SIGKILL)

    def has_sent(self, rank: int, signum: int) -> bool:
        """Return True if this launcher sent `signum` to that rank."""
        return (rank, signum) in self._sent

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: forward the first signal to the ranks, which save and stop. A second SIGINT kills them."""
        now = time.monotonic()
        if self.first_signal is None:
            self.first_signal, self._first_signal_at = signum, now
            if self.notice is not None:
                again = " (Ctrl-C again stops without saving)" if signum == signal.SIGINT else ""
                self.notice(f"stopping after this step{again}")
            self._send(signal.SIGTERM)
            self._kill_after(self.grace_s)
        elif signum == signal.SIGINT and now - self._first_signal_at > _SAME_KEYPRESS_S:
            self._send(signal.SIGKILL)

    def _record_end(self, rank: int, started: Started) -> None:
        code = started.wait(rank)
        self.codes[rank], self.ended[rank] = code, time.time()
        if code:
            self._send(signal.SIGTERM)
            crashed = code < 0 and -code not in _CONSEQUENCES
            self._kill_after(min(self.peer_grace_s, _AFTER_CRASH_S) if crashed else self.peer_grace_s)

    def _kill_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._send, args=(signal.SIGKILL,))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _send(self, signum: int) -> None:
        for rank, pid in list(self.pids.items()):
            if rank not in self.ended:
                self._sent.add((rank, signum))
                # Each rank leads a process group, which includes its helper processes.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signum)
