"""`weft calibrate --hosts`: what collectives take over each transport, within hosts and between them, by size.

Ranks that torchrun or srun has started on one host or several measure each layout that an axis of theirs can have: all
ranks of a host or a part of them, over one host or all. The other groups of the same layout are at work at the same
time, since they share the links in training too.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from weft import env
from weft.calibrate.stopwatch import WINDOWS, Stopwatch
from weft.calibrate.this_machine import this_machine
from weft.calibrate.traffic import extra_s
from weft.comm import all_reduce, barrier, join
from weft.errors import CommError, ConfigError
from weft.mesh import Axis, build_mesh, join_ranks, leave_ranks
from weft.planner.measured.link_times import OPS, LinkProfile, LinkSample
from weft.spec.plan import Plan

#: Bytes of the whole buffer, of which shards are parts.
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
#: A size is left out, and with it all larger ones, where one call would take more than this share of the budget.
_MOST_OF_BUDGET = 0.01
#: What a measurement takes besides its windows, in windows.
_BESIDE = 3
#: Transports beside the one that the places of ranks give. The backend's own adds in another order: measured to be
#: looked at, and never taken for sums.
_TRANSPORTS = ("shared memory", "two levels", "gloo exchange", "backend")
ROUNDS = 2
MOST_BUDGET_S = 1800.0

#: report(what, done, total).
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class HostSpan:
    """An axis over `hosts` hosts with `ranks` neighbours on each, of which this rank is a member."""

    hosts: int
    ranks: int
    axis: Axis


def calibrate_links(
    budget_s: float, report: Report = lambda what, done, total: None, timeout_s: float = 600.0
) -> tuple[LinkProfile, bool]:
    """Measure the links between the ranks that were started. A collective: all of them call it.

    Args:
        budget_s: about how long it may take, 5 s and more.
        report: called with what is measured, how many measurements are done, and of how many.
        timeout_s: how long a rank waits for the others.

    Returns:
        The profile, the same on all ranks, and whether this rank is the first of its host: that one writes the file.

    Raises:
        ConfigError: where ranks were not started, or hosts have different numbers of them.
        CommError: where ranks cannot meet.
    """
    if not 5.0 <= budget_s <= MOST_BUDGET_S:
        raise ConfigError(f"budget={budget_s:g}s: links need from 5 s to {MOST_BUDGET_S / 60:.0f} min. Use 90s.")
    place = env.rank_env()
    if place is None or place.world_size == 1:
        raise ConfigError(
            "hosts: links lie between ranks, and this command is not one of several. Start it on each host, e.g.: "
            "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint HOST:29500 --rdzv-backend c10d --no-python "
            "weft calibrate --hosts"
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
    """All samples, the fastest of the rounds; hosts, ranks of each, and whether this rank is the first of its host."""
    crowd = build_mesh(Plan(dp_replicate=size))["dp_replicate"]
    barrier(crowd)  # ranks then know where the others are
    marks = [crowd.hosts[rank] for rank in crowd.ranks]
    numbers = [list(dict.fromkeys(marks)).index(mark) for mark in marks]
    counts = {numbers.count(number) for number in numbers}
    if len(counts) > 1:
        told = ", ".join(str(numbers.count(number)) for number in dict.fromkeys(numbers))
        raise ConfigError(f"hosts: they have {told} ranks. Start as many on each, such as --nproc-per-node 4.")
    (ranks,) = counts
    if any(number != at // ranks for at, number in enumerate(numbers)):
        raise ConfigError("hosts: ranks of one host are no neighbours. Start them by torchrun, or srun in blocks.")
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
    """The axes that ranks on these hosts can have: all or 2^k neighbours of each host, over one host and over all."""
    for inside in dict.fromkeys([*(1 << k for k in range(ranks.bit_length()) if ranks % (1 << k) == 0), ranks]):
        mesh = build_mesh(Plan(dp_replicate=hosts, dp_shard=inside, tp=ranks // inside))
        if inside > 1:
            yield HostSpan(1, inside, mesh["dp_shard"])
        if hosts > 1:
            yield HostSpan(hosts, inside, mesh.data)


def _of_transport(
    layout: HostSpan, transport: str, crowd: Axis, left_s: float, budget_s: float
) -> Iterator[LinkSample]:
    """What a transport takes on this layout, where its ranks can use it. The same on all ranks."""
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
            # A call fills a window at least; what large ones take, the law of smaller ones tells.
            if before and before.seconds * size / before.size > _MOST_OF_BUDGET * budget_s:
                break
            timing = extra_s(watch, layout.axis, op, size)
            seconds = max(timing.seconds, 1e-7)
            before = LinkSample(op=op, transport=transport, hosts=layout.hosts, ranks=layout.ranks, size=size,
                                seconds=float(f"{seconds:.4g}"), spread=round(timing.spread, 3))  # fmt: skip
            yield before
