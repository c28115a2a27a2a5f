"""Calibration of this machine: runs the most valuable measurements for the planner within a time budget."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from weft.calibrate.compute import MESSAGES, POINTS, WINDOWS, this_machine
from weft.calibrate.links import COLLECTIVES, DTYPES, Chapter, joined, measure
from weft.devices import access
from weft.errors import ConfigError
from weft.planner.measured.machine_profile import Machine, Measurement, Profile
from weft.units import counted
from weft.verify.rank_pool import RankPool

#: report(what, done, total).
Report = Callable[[str, int, int], None]
#: Maximum and minimum length (s) of one window, and the overhead of a measurement in units of one window.
_LONGEST_S, _SHORTEST_S, _BESIDE = 0.06, 0.001, 2.0
#: Number of rounds over all measurements: a machine may be slow for minutes, which a second, later round detects.
ROUNDS = 2
#: The first round may take this many times the budget before dtypes other than fp32 are omitted.
_PATIENCE = 2.0
MOST_BUDGET_S = 600.0


def calibrate(
    budget_s: float = 90.0,
    ranks: Sequence[int] = (),
    device: str = "auto",
    dtypes: Sequence[str] = ("fp32", "bf16"),
    report: Report = lambda what, done, total: None,
) -> Profile:
    """Measure this machine. Return the profile without writing a file.

    Args:
        budget_s: approximate time limit, at least 1 s. With a short budget windows become shorter, and the least
            valuable measurements are omitted.
        ranks: numbers of concurrent ranks, such as (1, 2, 4). By default powers of two up to the number of GPUs, or of
            cores (at least 4), and at most 16.
        device: "cpu", "cuda", or "auto".
        dtypes: number formats; fp32 is always included.
        report: called with (current measurement, number done, total).

    Raises:
        ConfigError: if `budget_s` is not from 1 s to 600 s, or `ranks` or `dtypes` cannot be measured here.
        CommError: if ranks fail.
    """
    if not 1.0 <= budget_s <= MOST_BUDGET_S:
        raise ConfigError(f"budget={budget_s:g}s: from 1 s to {MOST_BUDGET_S / 60:.0f} min. Use e.g. --budget 90s.")
    start = time.monotonic()
    machine = this_machine(device)
    counts = _counts(machine, ranks)
    chapters = [chapter for chapter in _chapters(machine, counts) if chapter.dtype in ("fp32", *_dtypes(dtypes))]
    most = max(counts)
    samples: list[Measurement] = []
    report("starting ranks", 0, len(chapters))
    with RankPool(most, timeout_s=MOST_BUDGET_S, backend=access.group_backend(torch.device(machine.kind))) as pool:
        left = ROUNDS * sum(len(chapter.points) for chapter in chapters)
        pool.run(_nothing)  # wait for the ranks to start
        for place, chapter in enumerate(chapters * ROUNDS):
            report(chapter.name, place, len(chapters) * ROUNDS)
            spent = time.monotonic() - start
            # The first round may take up to twice the budget to complete: the planner cannot use a dtype with missing
            # measurements.
            limit = _PATIENCE * budget_s if place < len(chapters) else budget_s
            # Windows are as long as the remaining time allows: a slow measurement shortens the next ones instead of
            # ending the run.
            window_s = min(_LONGEST_S, max(_SHORTEST_S, (budget_s - spent) / (left * (WINDOWS + _BESIDE))))
            left -= len(chapter.points)
            if chapter.dtype != "fp32" and spent > limit:
                continue
            samples += joined(pool.run(measure, chapter, most, window_s, machine.kind))
    report("done", len(chapters) * ROUNDS, len(chapters) * ROUNDS)
    made = datetime.datetime.now().isoformat(timespec="seconds")
    return Profile(machine=machine, samples=typical(samples), made=made, took_s=time.monotonic() - start)


def _nothing() -> None:
    """Do nothing. The call returns once all ranks have started."""


def typical(samples: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return the median time and the largest spread of repeated measurements, in the order of first occurrence.

    The median represents a training step better than the minimum: steps run under the machine's usual load, and wait
    for other ranks.
    """
    alike: dict[tuple[object, ...], list[Measurement]] = {}
    for sample in samples:
        key = (sample.op, sample.size, sample.dtype, sample.ranks, sample.group)
        alike.setdefault(key, []).append(sample)
    return tuple(
        replace(
            each[0],
            seconds=float(f"{statistics.median(one.seconds for one in each):.4g}"),
            spread=max(one.spread for one in each),
        )
        for each in alike.values()
    )


def _counts(machine: Machine, ranks: Sequence[int]) -> list[int]:
    most = max(4, machine.cores) if machine.kind == "cpu" else machine.count
    wanted = sorted(set(ranks)) or [1 << place for place in range(most.bit_length()) if 1 << place <= min(most, 16)]
    limit = 8 * machine.cores if machine.kind == "cpu" else most
    for count in wanted:
        if not 1 <= count <= limit or count & (count - 1):
            rule = f"powers of two from 1 to {limit} can be measured here"
            raise ConfigError(f"ranks={count}: {rule}. Use e.g. --ranks 1,2.")
    return wanted


def _dtypes(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in DTYPES:
            raise ConfigError(f"dtypes={name}: not one of {', '.join(DTYPES)}. Use e.g. --dtypes fp32.")
    return names


def _chapters(machine: Machine, counts: Sequence[int]) -> list[Chapter]:
    """Return the groups of measurements, most valuable first. On a CPU, bf16 changes only the rate of matmuls."""
    points = {
        name: tuple((op, size) for ops, found in parts for op in ops for size in found)
        for name, parts in POINTS[machine.kind].items()
    }
    moved = tuple((op, (size,)) for op in COLLECTIVES for size in MESSAGES[machine.kind])
    chapters: list[Chapter] = []
    for dtype in ("fp32", "bf16"):
        for count in counts:
            crowd = counted(count, "rank")
            chapters += [
                Chapter(name=f"{name}, {crowd}", points=each, ranks=count, dtype=dtype)
                for name, each in points.items()
                if name.endswith("bf16") == (dtype == "bf16")
            ]
            if count > 1 and dtype == "fp32":
                chapters.append(Chapter(name=f"collectives of {crowd}", points=moved, ranks=count, group=count))
    return chapters
