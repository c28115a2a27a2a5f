"""One chapter of the measuring, on all ranks that are joined: some at work at the same time, the others idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.calibrate.compute import Place, calls_of
from weft.calibrate.stopwatch import Stopwatch, Timing
from weft.calibrate.traffic import extra_s
from weft.mesh import Axis, build_mesh
from weft.planner.measured import Measurement
from weft.spec.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """What is measured in one go. points: (operation, size). ranks: at work at the same time.

    group: ranks of a collective, stride: from one of them to the next; 1 and 1 for compute.
    """

    name: str
    points: tuple[tuple[str, tuple[int, ...]], ...]
    ranks: int
    dtype: str = "fp32"
    group: int = 1
    stride: int = 1


def measure(chapter: Chapter, world_size: int, window_s: float, device: str = "cpu") -> list[Measurement]:
    """This rank's measurements; none where it is idle. A collective: all ranks call it."""
    here = torch.device(device, torch.distributed.get_rank() if device == "cuda" and world_size > 1 else 0)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    crowd, meeting = _axis(world_size, chapter.ranks, 1, here), _axis(world_size, chapter.group, chapter.stride, here)
    if 0 not in crowd.ranks:
        return []
    watch = Stopwatch(crowd, here, window_s)
    found: list[Measurement] = []
    for op, size in chapter.points:
        if chapter.group > 1:
            timing = extra_s(watch, meeting, op, *size)
        else:
            timing = watch.time(calls_of(op, size, Place(here, DTYPES[chapter.dtype])))
        found.append(_sample(chapter, op, size, timing))
    return found


def joined(ranks: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """One sample of what the ranks measured at the same time: their mean."""
    at_work = [each for each in ranks if each]
    samples: list[Measurement] = []
    for alike in zip(*at_work, strict=True):
        first = alike[0]
        seconds = sum(each.seconds for each in alike) / len(alike)
        spread = max(each.spread for each in alike)
        samples.append(
            Measurement(op=first.op, size=first.size, seconds=float(f"{seconds:.4g}"), dtype=first.dtype,
                        ranks=first.ranks, group=first.group, stride=first.stride, spread=round(spread, 3))
        )  # fmt: skip
    return samples


def _axis(world_size: int, group: int, stride: int, device: torch.device) -> Axis:
    """An axis of `group` ranks, `stride` apart: all of a mesh with only this one and what is beside it."""
    if stride == 1:
        return build_mesh(Plan(tp=group, dp_replicate=world_size // group), device)["tp"]
    return build_mesh(Plan(dp_replicate=group, tp=world_size // group), device)["dp_replicate"]


def _sample(chapter: Chapter, op: str, size: tuple[int, ...], timing: Timing) -> Measurement:
    return Measurement(
        op=op,
        size=size,
        seconds=timing.seconds,
        dtype=chapter.dtype,
        ranks=chapter.ranks,
        group=chapter.group,
        stride=chapter.stride,
        spread=timing.spread,
    )
