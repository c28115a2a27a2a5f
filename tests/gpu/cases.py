"""What a case of the acceptance suite is, and how one is run and judged."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

#: What a case measured: figures by name.
Figures = Mapping[str, float | int | str]


class Skipped(Exception):
    """A case that cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how large. small: sizes for a CPU, which prove that the suite itself works."""

    device: torch.device
    small: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def need_cuda(self, what: str) -> None:
        """Skip the case where the device is no GPU."""
        if not self.is_cuda:
            raise Skipped(f"{what} needs a GPU")


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that must hold. limit_s: what it may take on a GPU, start of its process included."""

    stage: str
    name: str
    run: Callable[[Setting], Figures]
    limit_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended. verdict: "passed", "failed" or "skipped"; text: why it failed or was skipped."""

    stage: str
    name: str
    verdict: str
    seconds: float
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(case: Case, setting: Setting) -> Outcome:
    """Run a case here. Whatever it raises is its failure, and never the suite's."""
    begin = time.monotonic()
    try:
        figures, verdict, text = dict(case.run(setting)), "passed", ""
    except Skipped as reason:
        figures, verdict, text = {}, "skipped", str(reason)
    except Exception:
        figures, verdict, text = {}, "failed", traceback.format_exc(limit=-6)
    gc.collect()
    return Outcome(case.stage, case.name, verdict, round(time.monotonic() - begin, 2), text, figures)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value, in fp64 on the CPU; NaN where any value is NaN."""
    ours, theirs = ours.detach().double().cpu(), theirs.detach().double().cpu()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300))


def require(found: float, most: float, what: str) -> None:
    """Fail unless found <= most; NaN fails."""
    if not found <= most:
        raise AssertionError(f"{what}: {found:.3g}, at most {most:.3g}")
