"""Overhead of `weft map` and `weft.pool`, next to ProcessPoolExecutor and a Dask cluster of this machine.

    python benchmarks/pool.py [--repeats 5]

Prints medians (s): ten tasks of 1 s on four warm workers, where 3.00 is ideal; the whole command for the same tasks;
and 1,000 empty tasks on warm workers. Needs the extra `dask`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import weft


def sleep(x: int) -> int:
    time.sleep(1.0)
    return x


def empty(x: int) -> int:
    return x


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def whole_command() -> None:
    """Run `weft map` on ten items."""
    with tempfile.TemporaryDirectory() as home:
        items = Path(home) / "items.jsonl"
        items.write_text("".join(f"{n}\n" for n in range(10)))
        words = ["map", f"{__file__}:sleep", "--over", str(items), "--out", f"{home}/out", "--on", "local:4"]
        subprocess.run([sys.executable, "-m", "weft", *words], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Measure in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        ProcessPoolExecutor(4, get_context("spawn")) as processes,
        weft.pool("local:4") as local,
        weft.pool(f"dask:{cluster.scheduler_address.removeprefix('tcp://')}") as dask,
    ):
        cases: dict[str, Callable[[], object]] = {
            "ten tasks of 1 s: weft.pool local:4": lambda: local.map(sleep, range(10)),
            "ten tasks of 1 s: ProcessPoolExecutor": lambda: list(processes.map(sleep, range(10))),
            "ten tasks of 1 s: whole weft map": whole_command,
            "1,000 empty tasks: weft.pool local:4": lambda: local.map(empty, range(1000)),
            "1,000 empty tasks: ProcessPoolExecutor": lambda: list(processes.map(empty, range(1000))),
            "1,000 empty tasks: weft.pool dask": lambda: dask.map(empty, range(1000)),
            "1,000 empty tasks: Dask's client": lambda: client.gather(client.map(empty, range(1000), pure=False)),
        }
        for call in cases.values():
            call()  # starts the workers
        found = {name: [] for name in cases}
        for _ in range(repeats):
            for name, call in cases.items():
                found[name].append(seconds_of(call))
    for name, times in found.items():
        print(f"{name:<42}{statistics.median(times):8.3f} s   ({min(times):.3f} to {max(times):.3f})")


if __name__ == "__main__":
    main()
