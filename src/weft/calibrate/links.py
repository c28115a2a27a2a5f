"""Cost of collectives in a step, measured through Weft's communication layer and its transports.

Each collective is measured after a matmul, as in training. The result includes waiting for the slower rank and the
wake-up of threads.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from weft import env
from weft.calibrate.compute import WINDOWS, Call, Stopwatch, TensorPlacement, Timing, calls_of, linear_f, this_machine
from weft.comm.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from weft.comm.connect import join
from weft.comm.mesh import Axis, build_mesh, join_ranks, leave_ranks
from weft.config.plan import Plan
from weft.devices import access
from weft.errors import CommError, ConfigError
from weft.planner.measured.links import OPS, LinkProfile, LinkSample
from weft.planner.measured.machine_profile import Measurement

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
#: Size of the matmul before a collective, which takes about a millisecond on one core.
_BEFORE = (256, 512, 256)


def extra_s(watch: Stopwatch, axis: Axis, op: str, size: int) -> Timing:
    """Measure the time (s) that a collective adds after a matmul.

    size: bytes of the full buffer, before sharding.
    """
    work = linear_f(TensorPlacement(watch.device, torch.float32), *_BEFORE)
    shard = max(1, size // 4 // axis.size)
    full, part = (torch.randn(count, device=watch.device) for count in (shard * axis.size, shard))
    calls: dict[str, Call] = {
        "all_reduce": lambda: all_reduce(full, axis, "max"),  # the maximum, because sums of many calls would overflow
        "all_gather": lambda: all_gather(part, axis, out=full),
        "reduce_scatter": lambda: reduce_scatter(full, axis, out=part),
        "broadcast": lambda: broadcast(full, axis),
    }
    return watch.time_after(work, calls[op])


# One group of measurements on all connected ranks: some ranks work at the same time, the others are idle.

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """Measurements on the same ranks.

    Attributes:
        name: name for progress reports.
        points: operation and size of each measurement.
        ranks: number of ranks that work at the same time.
        dtype: dtype of the tensors, a key of DTYPES.
        group: number of ranks of a collective, or 1 for compute.
    """

    name: str
    points: tuple[tuple[str, tuple[int, ...]], ...]
    ranks: int
    dtype: str = "fp32"
    group: int = 1


def measure(chapter: Chapter, world_size: int, window_s: float, device: str = "cpu") -> list[Measurement]:
    """Return this rank's measurements, or [] if it is idle. Collective: all ranks must call it."""
    here = torch.device(device, torch.distributed.get_rank() if device != "cpu" and world_size > 1 else 0)
    if access.is_accelerator(here):
        access.select(here)
    crowd = build_mesh(Plan(tp=chapter.ranks, dp_replicate=world_size // chapter.ranks), here)["tp"]
    if 0 not in crowd.ranks:
        return []
    watch = Stopwatch(crowd, here, window_s)
    found: list[Measurement] = []
    for op, size in chapter.points:
        if chapter.group > 1:
            timing = extra_s(watch, crowd, op, *size)
        else:
            timing = watch.time(calls_of(op, size, TensorPlacement(here, DTYPES[chapter.dtype])))
        sample = Measurement(op=op, size=size, seconds=timing.seconds, dtype=chapter.dtype, ranks=chapter.ranks,
                             group=chapter.group, spread=timing.spread)  # fmt: skip
        found.append(sample)
    return found


def joined(ranks: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Return concurrent measurements of several ranks: the mean time and the largest spread over the ranks.

    Idle ranks, whose list is empty, are skipped.
    """
    samples: list[Measurement] = []
    for alike in zip(*filter(None, ranks), strict=True):
        seconds = sum(each.seconds for each in alike) / len(alike)
        spread = max(each.spread for each in alike)
        samples.append(replace(alike[0], seconds=float(f"{seconds:.4g}"), spread=round(spread, 3)))
    return samples


# `weft calibrate --hosts`: time of collectives over each transport, within hosts and between them, by size.

#: Bytes of the full buffer, before it is sharded.
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
#: Maximum share of the budget for one call: sizes that take longer, and all larger sizes, are skipped.
_MOST_OF_BUDGET = 0.01
#: Overhead of a measurement, in units of one window.
_BESIDE = 3
#: Transports measured in addition to the default of the ranks' hosts. The backend adds in another order, so it is
#: measured for comparison only and never used for reductions.
_TRANSPORTS = ("shared memory", "two levels", "gloo exchange", "backend")
ROUNDS = 2
MOST_BUDGET_S = 1800.0

#: report(what, done, total).
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class HostSpan:
    """An axis over `hosts` hosts with `ranks` adjacent ranks on each host, which include this rank."""

    hosts: int
    ranks: int
    axis: Axis


def calibrate_links(
    budget_s: float, report: Report = lambda what, done, total: None, timeout_s: float = 600.0
) -> tuple[LinkProfile, bool]:
    """Measure the links between the ranks that were started. Collective: all ranks must call it.

    Args:
        budget_s: approximate time limit, at least 5 s.
        report: called with (current measurement, number done, total).
        timeout_s: maximum time (s) that a rank waits for the others.

    Returns:
        The profile, the same on all ranks, and True if this rank is the first of its host, which writes the file.

    Raises:
        ConfigError: if `budget_s` is out of range, only one rank was started, hosts have different numbers of ranks, or
            the ranks of a host are not neighbors.
        CommError: if ranks cannot connect.
    """
    if not 5.0 <= budget_s <= MOST_BUDGET_S:
        raise ConfigError(f"budget={budget_s:g}s: links need from 5 s to {MOST_BUDGET_S / 60:.0f} min. Use 90s.")
    place = env.rank_env()
    if place is None or place.world_size == 1:
        raise ConfigError(
            "hosts: links are measured between ranks, and this is the only one. Start it on each host, e.g.: "
            "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:29500 --rdzv-backend c10d --no-python weft "
            "calibrate --hosts"
        )
    start = time.monotonic()
    join_ranks(place, torch.device("cpu"), timeout_s)
    try:
        samples, hosts, ranks, is_first = _measured(place.world_size, start, budget_s, report)
    finally:
        leave_ranks()
    made = datetime.datetime.now().isoformat(timespec="seconds")
    took_s = time.monotonic() - start
    machine = this_machine("cpu")
    found = LinkProfile(machine=machine, hosts=hosts, ranks=ranks, samples=samples, made=made, took_s=took_s)
    return found, is_first


def _measured(
    size: int, start: float, budget_s: float, report: Report
) -> tuple[tuple[LinkSample, ...], int, int, bool]:
    """Return (fastest samples, hosts, ranks per host, True if this rank is the first of its host).

    Each measurement is repeated in rounds, and its fastest sample is returned. Raises ConfigError if hosts have
    different numbers of ranks, or the ranks of a host are not neighbors.
    """
    crowd = build_mesh(Plan(dp_replicate=size))["dp_replicate"]
    barrier(crowd)  # after this, ranks know each other's hosts
    marks = [crowd.hosts[rank] for rank in crowd.ranks]
    numbers = [list(dict.fromkeys(marks)).index(mark) for mark in marks]
    counts = {numbers.count(number) for number in numbers}
    if len(counts) > 1:
        told = ", ".join(str(numbers.count(number)) for number in dict.fromkeys(numbers))
        raise ConfigError(f"hosts: they have {told} ranks. Start as many on each, such as --nproc-per-node 4.")
    (ranks,) = counts
    if any(number != at // ranks for at, number in enumerate(numbers)):
        raise ConfigError("hosts: the ranks of one host are not neighbors. Start them by torchrun, or srun in blocks.")
    hosts = size // ranks
    plans = list(_layouts(hosts, ranks))
    best: dict[tuple[object, ...], LinkSample] = {}
    total = ROUNDS * len(plans) * len(_TRANSPORTS)
    for turn in range(ROUNDS):
        spent = float(all_reduce(torch.tensor([time.monotonic() - start]), crowd, "max"))
        if turn and spent > budget_s:
            break
        for number, layout in enumerate(plans):
            for at, transport in enumerate(_TRANSPORTS):
                done = (turn * len(plans) + number) * len(_TRANSPORTS) + at
                report(f"{layout.hosts} hosts of {layout.ranks}, {transport}", done, total)
                left_s = max(0.0, budget_s - (time.monotonic() - start)) / (total - done)
                for one in _of_transport(layout, transport, crowd, left_s, budget_s):
                    key = (one.op, one.transport, one.hosts, one.ranks, one.size)
                    best[key] = min(best.get(key, one), one, key=lambda each: each.seconds)
    report("done", total, total)
    return tuple(best.values()), hosts, ranks, crowd.rank % ranks == 0


def _layouts(hosts: int, ranks: int) -> Iterator[HostSpan]:
    """Yield the rank groups to measure, each within one host and spanning all hosts.

    The groups are blocks of adjacent ranks of a host: powers of two that divide its ranks, and all of its ranks.
    """
    for inside in dict.fromkeys([*(1 << k for k in range(ranks.bit_length()) if ranks % (1 << k) == 0), ranks]):
        mesh = build_mesh(Plan(dp_replicate=hosts, dp_shard=inside, tp=ranks // inside))
        if inside > 1:
            yield HostSpan(1, inside, mesh["dp_shard"])
        if hosts > 1:
            yield HostSpan(hosts, inside, mesh.data)


def _of_transport(
    layout: HostSpan, transport: str, crowd: Axis, left_s: float, budget_s: float
) -> Iterator[LinkSample]:
    """Yield samples of a transport on the ranks of `layout`, or none if a rank cannot use it. All ranks call it.

    Samples are the same on all ranks. Sizes that would take too long are left out.
    """
    try:
        join(layout.axis, "cpu", transport)
        can = 1
    except CommError:
        can = 0
    if not int(all_reduce(torch.tensor([can]), crowd, "min")):
        return
    watch = Stopwatch(crowd, torch.device("cpu"), left_s / (len(OPS) * len(SIZES) * (WINDOWS + _BESIDE)))
    for op in OPS:
        before: LinkSample | None = None
        for size in SIZES:
            # A window has at least one call, so large sizes could take too long. The cost model fitted to smaller sizes
            # predicts them.
            if before and before.seconds * size / before.size > _MOST_OF_BUDGET * budget_s:
                break
            timing = extra_s(watch, layout.axis, op, size)
            seconds = max(timing.seconds, 1e-7)
            before = LinkSample(op=op, transport=transport, hosts=layout.hosts, ranks=layout.ranks, size=size,
                                seconds=float(f"{seconds:.4g}"), spread=round(timing.spread, 3))  # fmt: skip
            yield before
