"""Collectives by transport, interleaved in one run: shared memory and gloo exchange beside gloo's own.

    python benchmarks/collectives.py                        2 and 4 ranks
    python benchmarks/collectives.py --ranks 2 --repeats 30 --json figures.json

Prints for each operation and size the median milliseconds of the slowest rank, the ratio to gloo's own call, and the
CPU milliseconds of all ranks together, with their threads: on a busy machine these tell more than the time.
Sizes are bytes of the whole tensor: what all_reduce combines, reduce_scatter takes and all_gather gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from weft.comm.collectives import all_gather, all_reduce, barrier, reduce_scatter
from weft.comm.connect import TRANSPORTS, join
from weft.comm.mesh import Axis, build_mesh
from weft.config.plan import Plan
from weft.verify.rank_pool import RankPool

SIZES = {"64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24, "64 MB": 1 << 26}
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")


def calls(axis: Axis, num_bytes: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The operations on tensors of this size."""
    whole = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype)
    gathered = torch.zeros_like(whole)
    shard = torch.zeros(whole.numel() // axis.size, dtype=dtype)
    return {
        "all_reduce": lambda: all_reduce(whole, axis),
        "reduce_scatter": lambda: reduce_scatter(whole, axis, out=shard),
        "all_gather": lambda: all_gather(shard, axis, out=gathered),
    }


#: (seconds of the slowest rank, CPU seconds of all ranks) by (size, operation, transport).
Figures = dict[tuple[str, str, str], tuple[float, float]]


def measure(num_ranks: int, repeats: int, dtype: torch.dtype) -> Figures:
    """On each rank: medians."""
    axes = {}
    for transport in TRANSPORTS:
        axes[transport] = build_mesh(Plan(dp_replicate=num_ranks)).data
        join(axes[transport], "cpu", transport)
    meeting = axes[TRANSPORTS[0]]
    found = {}
    for size, num_bytes in SIZES.items():
        ready = {transport: calls(axis, num_bytes, dtype) for transport, axis in axes.items()}
        times: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        for turn in range(repeats + 2 if num_bytes < 1 << 24 else max(repeats // 3, 5) + 1):
            for operation in OPERATIONS:
                # Each goes first in turn: who comes after whom changes what is in the caches.
                for transport in TRANSPORTS[turn % 3 :] + TRANSPORTS[: turn % 3]:
                    barrier(meeting)
                    dist.barrier()
                    start, cpu = time.perf_counter(), time.process_time()
                    ready[transport][operation]()
                    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                    barrier(meeting)  # gloo's threads may still be sending
                    cpu_seconds = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
                    all_reduce(seconds, meeting, "max")
                    all_reduce(cpu_seconds, meeting)
                    if turn:
                        times.setdefault((size, operation, transport), []).append((float(seconds), float(cpu_seconds)))
        for key, pairs in times.items():
            walls, cpus = zip(*pairs, strict=True)
            found[key] = statistics.median(walls), statistics.median(cpus)
    return found


def table(found: Figures, num_ranks: int) -> str:
    """Markdown."""
    lines = [
        f"| {num_ranks} ranks: ms (ratio to gloo's own), CPU ms | " + " | ".join(TRANSPORTS) + " |",
        "|---" * (len(TRANSPORTS) + 1) + "|",
    ]
    for operation in OPERATIONS:
        for size in SIZES:
            own, _ = found[size, operation, TRANSPORTS[-1]]
            cells = []
            for transport in TRANSPORTS:
                wall, cpu = found[size, operation, transport]
                cells.append(f"{wall * 1e3:.3g} ({wall / own:.2f}), {cpu * 1e3:.3g}")
            lines.append(f"| {operation} {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = {}
    for num_ranks in options.ranks:
        with RankPool(num_ranks, timeout_s=600) as pool:
            found = pool.run(measure, num_ranks, options.repeats, getattr(torch, options.dtype))[0]
        print(table(found, num_ranks), end="\n\n", flush=True)
        figures[num_ranks] = {" / ".join(key): pair for key, pair in found.items()}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
