"""Lines of the `weft doctor` report, and its test of two ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from weft import env

#: fail: training cannot work here. warn: it works completely or in part, but a change is recommended.
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One fact about the machine. `remedy` is the recommended action if the status is not ok."""

    section: str
    name: str
    text: str
    status: Status = "ok"
    remedy: str = ""


#: A section of the report.
Check = Callable[[], Iterable[CheckLine]]


def examine(section: str, check: Check) -> list[CheckLine]:
    """Return the lines of one check, or one line with the error if the check cannot run."""
    try:
        return list(check())
    # A report about unknown machines must complete, so an error is also a finding.
    except Exception as error:
        text = f"could not be read ({type(error).__name__}: {error})"
        return [CheckLine(section, check.__name__, text, "warn", "Please report this line.")]


# Two ranks on this machine that connect and run an all-reduce, as a minimal test of training on several ranks.

_LIMIT_S = 20.0
_REMEDY = "See the lines about network and limits; GLOO_SOCKET_IFNAME=lo keeps gloo on this machine."


class TwoRanks:
    """Two gloo ranks, started early to run during the other checks."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self._ranks = [self._start(rank, port) for rank in (0, 1)]

    def _start(self, rank: int, port: str) -> subprocess.Popen[str]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        variables = env.child_env(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
        return subprocess.Popen(
            [sys.executable, "-m", "weft.cli.doctor_ranks"],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def two_ranks(self) -> Iterator[CheckLine]:
        """Wait for the result and return its lines."""
        try:
            ends = [
                rank.communicate(timeout=max(0.1, self._begin + _LIMIT_S - time.monotonic())) for rank in self._ranks
            ]
        except subprocess.TimeoutExpired:
            yield CheckLine("network", "two ranks", f"did not connect within {_LIMIT_S:.0f} s", "fail", _REMEDY)
            return
        finally:
            self.close()
        for rank, (process, (out, err)) in enumerate(zip(self._ranks, ends, strict=True)):
            if process.returncode or "sum 3.0" not in out:
                last = (err.strip().splitlines() or ["no output"])[-1]
                yield CheckLine(
                    "network", "two ranks", f"gloo all_reduce failed on rank {rank}: {last}", "fail", _REMEDY
                )
                return
        met_s, sum_s = (float(ends[0][0].split()[index]) for index in (3, 5))
        text = f"gloo: connected in {1e3 * met_s:.0f} ms, all_reduce in {1e3 * sum_s:.1f} ms"
        yield CheckLine("network", "two ranks", text)

    def close(self) -> None:
        """Kill remaining processes."""
        for process in self._ranks:
            if process.poll() is None:
                process.kill()
                process.wait(5)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def main() -> None:
    """Run one of the two ranks. Prints 'sum 3.0 met SECONDS reduced SECONDS'."""
    import torch

    from weft.comm.collectives import all_reduce
    from weft.comm.mesh import build_mesh, join_ranks, leave_ranks
    from weft.config.plan import Plan

    place = env.rank_env()
    if place is None:
        sys.exit("error: this is a part of `weft doctor`. Run: weft doctor.")
    begin = time.perf_counter()
    join_ranks(place, torch.device("cpu"), timeout_s=_LIMIT_S)
    mesh = build_mesh(Plan(dp_replicate=2))
    met = time.perf_counter()
    total = all_reduce(torch.tensor([1.0 + place.rank]), mesh["dp_replicate"])
    print(f"sum {total.item()} met {met - begin:.6f} reduced {time.perf_counter() - met:.6f}", flush=True)
    leave_ranks()


if __name__ == "__main__":
    main()
