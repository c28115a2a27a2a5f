"""Cases of the acceptance suite, and how one is run and evaluated."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

#: Measured values of a case, by name.
Figures = Mapping[str, float | int | str]


class Skipped(Exception):
    """Raised by a case that cannot run here, with the reason."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Device and size. small: sizes for a CPU, to test the suite itself."""

    device: torch.device
    small: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def need_cuda(self, what: str) -> None:
        """Skip the case if the device is no GPU."""
        if not self.is_cuda:
            raise Skipped(f"{what} needs a GPU")


@dataclass(frozen=True, slots=True)
class Case:
    """One check. limit_s: time limit on a GPU, including the start of its process."""

    stage: str
    name: str
    run: Callable[[Setting], Figures]
    limit_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case. verdict: "passed", "failed" or "skipped". text: the reason of a failure or a skip."""

    stage: str
    name: str
    verdict: str
    seconds: float
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(case: Case, setting: Setting) -> Outcome:
    """Run a case in this process. Any exception is the case's failure."""
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
    """Return the largest difference over the largest value, in fp64 on the CPU; NaN if any value is NaN."""
    ours, theirs = ours.detach().double().cpu(), theirs.detach().double().cpu()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300))


def require(found: float, most: float, what: str) -> None:
    """Fail unless found <= most. NaN fails."""
    if not found <= most:
        raise AssertionError(f"{what}: {found:.3g}, at most {most:.3g}")
