"""Launch of replicas with separate process group worlds: one launcher per replica, and their rendezvous server."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO

from weft import env
from weft.cli.launch.launch import Stopped, stop_signals, threads_variables
from weft.cli.launch.spec import LaunchSpec
from weft.comm.replica_rendezvous import RendezvousServer
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.train.engine import ReplicaWorld
from weft.train.folder import run_folder
from weft.units import parse_seconds

# Rendezvous server for replicas on several machines, hosted by the machine of replica 0.


@contextmanager
def rendezvous_server(config: RunConfig, world: ReplicaWorld, say: Callable[[str], None]) -> Generator[None]:
    """Serve replicas on other machines during a block, if this machine starts replica 0.

    At the end of the block, wait until the other replicas have ended or sent nothing for `launch.meeting_timeout`.

    Args:
        config, world: the run's config, and the replica that this machine starts.
        say: called with a line for the user.

    Raises:
        LaunchError: if this machine cannot listen at `launch.meet_at`.
    """
    if world.replica != 0:
        yield
        return
    host, _, port = world.meet_at.rpartition(":")
    replicas = Plan.parse(config.plan).dp_replicate
    timeout_s = parse_seconds(config.launch.meeting_timeout)
    place = RendezvousServer(host.strip("[]"), int(port), replicas, timeout_s, world.key)
    try:
        yield
        if not place.is_over():
            say(f"replica 0 has ended; other replicas still synchronize at {world.meet_at} until they end too")
            place.wait_until_over()
    finally:
        place.close()


# Replicas with separate worlds on one machine: one launcher each, and a common rendezvous server.

_LOOK_S = 0.05


@dataclass
class _Replica:
    """The launcher of one replica."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    begins_at: float = 0.0
    code: int | None = None


class Replicas:
    """The replicas of a run on this machine.

    Args:
        config: the run's config with its full plan.
        gpus, cores: GPUs for the ranks (none: CPU ranks), and number of usable cores.
        command, say: the user's command line, and a function that is called with a line for the user.
    """

    def __init__(self, config: RunConfig, gpus: int, cores: int, command: Sequence[str], say: Callable[[str], None]):
        self._config, self._command, self._say = config, list(command), say
        plan = Plan.parse(config.plan)
        self._ranks = plan.world_size // plan.dp_replicate
        named = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES").split(",") if name.strip()]
        self._gpus = (named or [str(number) for number in range(gpus)])[:gpus]
        self._threads = threads_variables(plan.world_size, cores)
        self._replicas = [_Replica(number) for number in range(plan.dp_replicate)]
        self._first_signal: int | None = None
        self._meet_at, self._key = "", secrets.token_hex(32)

    def run(self) -> int:
        """Start all replicas, and return the exit code once the last has ended, or if the first one could not prepare.

        Raises:
            Stopped: if a signal stopped the run before all replicas could save.
        """
        timeout_s = parse_seconds(self._config.launch.meeting_timeout)
        with ExitStack() as until_over:
            place = RendezvousServer(env.LOOPBACK, 0, len(self._replicas), timeout_s, self._key)
            until_over.callback(place.close)
            self._meet_at = place.address
            until_over.callback(self._kill)
            until_over.enter_context(stop_signals(self._on_signal))
            first, *others = self._replicas
            if not self._start_first(first):
                assert first.process is not None
                code = first.process.wait()  # the launcher has printed the reason
                return code if code >= 0 else 128 - code
            for one in others:
                if self._first_signal is None:
                    self._start(one)
            while any(one.code is None for one in self._replicas):
                for one in self._replicas:
                    self._look_at(one)
                time.sleep(_LOOK_S)
        return self._ended()

    def _start_first(self, one: _Replica) -> bool:
        """Start the first replica, which checks the run and prepares its data. Return True if it succeeded."""
        reads, writes = os.pipe()
        with os.fdopen(reads, "rb") as told:
            try:
                self._start(one, writes)
            finally:
                os.close(writes)
            return bool(told.read(1))

    def _start(self, one: _Replica, writes: int | None = None) -> None:
        """Start the launcher of a replica.

        The first replica writes to the terminal. The others write to launcher.log, and their stderr is printed with the
        replica's number.
        """
        variables = dict(self._threads)
        if self._gpus:
            own = self._gpus[one.number * self._ranks : (one.number + 1) * self._ranks]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        log: IO[bytes] | None = None
        if one.number:
            logs = run_folder(self._config, one.number).logs
            logs.mkdir(parents=True, exist_ok=True)
            log = open(logs / "launcher.log", "ab")  # noqa: SIM115 - closed below, once the child has it
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "weft.cli.train"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=None if log is None else subprocess.PIPE,
                start_new_session=True,  # only this process forwards Ctrl-C
                env=env.child_env(**variables),
                pass_fds=() if writes is None else (writes,),
            )
        finally:
            if log is not None:
                log.close()
        one.process = process
        world = ReplicaWorld(one.number, self._meet_at, self._key)
        spec = LaunchSpec(self._config, self._command, world=world, parent=os.getpid(), prepared=writes)
        assert process.stdin is not None
        with suppress(OSError):  # if it has ended, its exit code is checked later
            process.stdin.write(spec.lines())
            process.stdin.close()
        if process.stderr is not None:
            threading.Thread(target=_pass_on, args=(process.stderr, one.number), daemon=True).start()

    def _look_at(self, one: _Replica) -> None:
        if one.code is not None:
            return
        if one.process is None:
            if self._first_signal is not None:
                one.code = 128 + self._first_signal
            elif time.monotonic() >= one.begins_at:
                self._start(one)
            return
        code = one.process.poll()
        if code is None:
            return
        one.process = None
        launch = self._config.launch
        if code < 0 and self._first_signal is None and one.restarts < launch.restarts:
            one.restarts += 1
            one.begins_at = time.monotonic() + parse_seconds(launch.restart_pause)
            again = f"it is started again in {launch.restart_pause}"
            self._say(f"the launcher of replica {one.number} was killed ({signal.Signals(-code).name}); {again}")
            return
        one.code = code if code >= 0 else 128 - code
        others = [other.number for other in self._replicas if other.code is None]
        if code and others and self._first_signal is None:
            self._say(f"replica {one.number} has failed (exit code {one.code}); {_listed(others)} without it")

    def _ended(self) -> int:
        failed = [one for one in self._replicas if one.code]
        if not failed:
            return 0
        names = ", ".join(str(one.number) for one in failed)
        if self._first_signal is not None:
            name = signal.Signals(self._first_signal).name
            raise Stopped(self._first_signal, f"stopped by {name}; replica {names} could not end in order.")
        if len(failed) < len(self._replicas):
            remedy = "Run the same command to load their model"
            self._say(f"replica {names} failed, and the others have ended. {remedy}")
        return failed[0].code or 1

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._first_signal = self._first_signal or signum
        self._send(signum)

    def _kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        for one in self._replicas:
            if one.process is not None and one.process.poll() is None:
                one.process.send_signal(signum)


def _listed(others: Sequence[int]) -> str:
    one = len(others) == 1
    return f"replica{'' if one else 's'} {', '.join(map(str, others))} {'goes' if one else 'go'} on"


def _pass_on(stream: IO[bytes], number: int) -> None:
    for line in stream:
        text = line.decode(errors="replace").rstrip()
        if text:
            print(f"replica {number}: {text}", file=sys.stderr, flush=True)
