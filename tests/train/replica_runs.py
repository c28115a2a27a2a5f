"""Runs of independent replicas, one process each, that can be paused at a step."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.train.conftest import SMALL
from weft.checkpoint.load import load_checkpoint, newest_checkpoint
from weft.comm.replica_rendezvous import RendezvousServer
from weft.config.files import load_config
from weft.monitor.events import read_events
from weft.train.engine import ReplicaWorld
from weft.train.engines.torch_engine import TorchEngine
from weft.train.folder import RunFolder
from weft.train.loop import observers as recorder
from weft.train.preparation import prepare_run
from weft.train.rank_run import Start, run_rank

LIMIT_S, KEY = 60.0, "the key of these replicas"

# Forked from a server that imported torch once, which saves a second per process.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.train.replica_runs", "weft.train.rank_run", "weft.parallel.zero_flat"])


class PausedEngine(TorchEngine):
    """Engine that waits before step N (from 0) while the run folder has a file hold_N. It writes at_N when it waits."""

    def step(self, batches, number, lr_factor, following=None):
        folder = self._job.folder.path
        (folder / f"at_{number}").touch()
        while (folder / f"hold_{number}").exists():
            if self.wants_stop:
                break
            time.sleep(0.005)
        return super().step(batches, number, lr_factor, following)


def run_quietly(path: str, replica: int, address: str) -> None:
    """Run one replica in its own process without output."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    recorder.plot_loss = lambda *words, **more: None  # saves a second of CPU time for the other processes
    train_replica(path, replica, address)


def train_replica(path: str, replica: int, address: str) -> None:
    """Train one replica of one rank to its end."""
    world = ReplicaWorld(replica, address, KEY)
    run_rank(Path(path), None, io.StringIO(), Start(engine="tests.train.replica_runs:PausedEngine", world=world))


class ReplicaRun:
    """The replicas of one run and their rendezvous server."""

    def __init__(self, root: Path, text: Path, name: str, *settings: str, replicas: int = 2, timeout_s: float = 1.0):
        places = [f"data.train={text}", f"run.dir={root}", f"data.cache_dir={root / 'cache'}", f"run.name={name}"]
        plan = f"plan=dp_replicate={replicas} sync=diloco:3 precision=fp64"
        times = ["launch.replicas_apart=true", f"launch.meeting_timeout={round(timeout_s)}s"]
        words = [*SMALL, *places, plan, *times, "sample.prompt=", *settings]
        config = load_config(None, words).config
        self.folders = [prepare_run(config, replicas, replica=number) for number in range(replicas)]
        self.place = RendezvousServer("127.0.0.1", 0, replicas, timeout_s, KEY)
        self.processes: dict[int, Any] = {}

    def start(self, *replicas: int, at_once: bool = True, kind: Any = FORKSERVER.Process) -> None:
        """Start replicas. at_once: no replica steps before all have joined. kind: process or thread."""
        for number in replicas:
            if at_once:
                self.pause(number, self.first_step(number))
            arguments = (str(self.folders[number].path), number, self.place.address)
            target = run_quietly if kind is FORKSERVER.Process else train_replica
            self.processes[number] = kind(target=target, args=arguments, daemon=True)
            self.processes[number].start()
        if at_once:
            for number in replicas:
                self.wait_at(number, self.first_step(number))
            for number in replicas:
                self.release(number, self.first_step(number))

    def first_step(self, number: int) -> int:
        found = newest_checkpoint(self.folders[number].checkpoints, verify=False)
        return 0 if found is None else found.step

    def pause(self, number: int, step: int) -> None:
        folder = self.folders[number].path
        (folder / f"at_{step}").unlink(missing_ok=True)
        (folder / f"hold_{step}").touch()

    def release(self, number: int, step: int) -> None:
        (self.folders[number].path / f"hold_{step}").unlink()

    def wait_at(self, number: int, step: int) -> None:
        self.wait(lambda: (self.folders[number].path / f"at_{step}").exists(), f"replica {number} at step {step}")

    def wait_arrived(self, number: int) -> None:
        """Wait until a replica waits for a rendezvous."""
        replicas = self.place._rounds._replicas
        self.wait(lambda: replicas[number].arrived is not None, f"replica {number} at a meeting")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"timed out waiting for: {what}"
            time.sleep(0.01)

    def waits(self, seconds: float) -> None:
        """Set how long a rendezvous waits for late replicas. Use less than `timeout_s` if a replica is paused."""
        self.place._rounds._timeout_s = seconds

    def signal(self, number: int, signum: int) -> None:
        pid = self.processes[number].pid
        assert pid is not None
        os.kill(pid, signum)

    def end(self) -> list[int | None]:
        """Return the exit codes of all replicas once they have ended."""
        for process in self.processes.values():
            process.join(LIMIT_S)
        return [getattr(process, "exitcode", None) for _, process in sorted(self.processes.items())]

    def close(self) -> None:
        for process in self.processes.values():
            if process.is_alive() and isinstance(process, FORKSERVER.Process):
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
        self.place.close()


def saved_tensors(folder: RunFolder, groups: tuple[str, ...] = ("model", "outer")) -> dict[str, object]:
    """Return the newest checkpoint's tensors by group and name."""
    found = newest_checkpoint(folder.checkpoints)
    assert found is not None
    checkpoint = load_checkpoint(found.path)
    return {f"{group}/{name}": one for group in groups for name, one in checkpoint.tensors(group).items()}


def steps_of(folder: RunFolder) -> list[int]:
    """Return the logged steps, with repeated steps."""
    return [event["step"] for event in read_events(folder.events) if event["event"] == "step"]


def evaluations(folder: RunFolder) -> dict[int, float]:
    """Return evaluation losses by step."""
    return {event["step"]: event["loss"] for event in read_events(folder.events) if event["event"] == "eval"}
