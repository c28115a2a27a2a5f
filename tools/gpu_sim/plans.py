"""Subprocesses for the simulated GPU, which a process cannot remove again, and their reports.

This module does not import torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_sim.stub_library import built_stub
from weft import env


@dataclass(frozen=True, slots=True)
class PaperReport:
    """Report of a simulated process, as JSON. Seconds are simulated with the rates in `clock.py`.

    Attributes:
        kernels: launches of the host. A graph is one launch.
        recorded: kernels that graphs launched.
        num_bytes: bytes that kernels read and wrote.
        products_s: time of matmuls and attention by FLOPs alone, a lower bound of the step.
        line_s: time of kernels by line of Weft.
        syncs: waits of the host by reason and line, including blocking copies.
        behind: waits for the previous step's work, during which the device has work of this step.
        copies, collectives, races: counts by description.
        formats: tensors of collectives by kind and dtype.
        communicators: number of communicators that were used since the process or the plan began.
        busy_s: working time of the default stream.
        idle_s: waiting time of the default stream by reason.
        over_s: for a plan, waiting time for other ranks by axis, from a run's ledger.
        outlived: for a plan with graphs, storages from captures that are still alive, by line.
        mismatch: the error of a tensor on the wrong device, or "".
        name: name of the script or the plan.
        error: error that ended a plan early, or "".
    """

    kernels: int = 0
    recorded: int = 0
    num_bytes: int = 0
    products_s: float = 0.0
    line_s: dict[str, float] = field(default_factory=dict)
    syncs: dict[str, int] = field(default_factory=dict)
    behind: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)
    communicators: int = 0
    races: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    busy_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=dict)
    over_s: dict[str, float] = field(default_factory=dict)
    outlived: dict[str, int] = field(default_factory=dict)
    mismatch: str = ""
    name: str = ""
    error: str = ""

    @property
    def num_syncs(self) -> int:
        """Number of times that the host waited for the device."""
        return sum(self.syncs.values())

    @property
    def num_blocking(self) -> int:
        """Number of copies that the host waits for."""
        return sum(number for name, number in self.copies.items() if ", blocking @" in name)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as text: the totals, then each count by description."""
        graphs = f" and {self.recorded} in graphs" if self.recorded else ""
        told = [
            f"{self.name}: {self.kernels} kernels{graphs}, {self.num_bytes / 1e9:.3f} GB; "
            f"host waits {self.num_syncs} times; "
            f"{sum(self.copies.values())} copies, {self.num_blocking} of them blocking; "
            f"simulated {self.step_s * 1e3:.2f} ms, device busy {self.busy_s * 1e3:.2f} ms, "
            f"products {self.products_s * 1e3:.2f} ms"
        ]
        for title, found in (
            ("wait", self.syncs),
            ("behind", self.behind),
            ("copy", self.copies),
            ("collective", self.collectives),
            ("race", self.races),
            ("outlived", self.outlived),
        ):
            told += [f"  {title:10} {number:5} x {name}" for name, number in sorted(found.items(), key=lambda x: -x[1])]
        told += [f"  idle {seconds * 1e3:8.2f} ms  {why}" for why, seconds in sorted(self.idle_s.items())]
        told += [f"  over {seconds * 1e3:8.2f} ms  {axis}" for axis, seconds in sorted(self.over_s.items())]
        return told + [
            f"  {title}: {text}" for title, text in (("wrong device", self.mismatch), ("ended by", self.error)) if text
        ]


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a simulated process. `reports` has one entry for a script, or one per plan in order."""

    returncode: int
    stdout: str
    stderr: str
    reports: tuple[PaperReport, ...]


def script_on_paper(
    path: str | Path, *arguments: str, ranks: int = 1, rank: int = 0, cwd: Path | None = None, limit_s: float = 600.0
) -> Finished:
    """Run a script in a process with one simulated GPU.

    Args:
        path: path of the script.
        *arguments: arguments of the script.
        ranks: world size.
        rank: rank of the process.
        cwd: working folder of the process; None for the current one.
        limit_s: timeout in seconds.

    Raises:
        LaunchError: if this machine cannot simulate a GPU; see `why_not`.
    """
    return _run(("script", f"--ranks={ranks}", f"--rank={rank}", str(path), *arguments), cwd, limit_s)


def plans_on_paper(plans: Sequence[str], *options: str, cwd: Path | None = None, limit_s: float = 600.0) -> Finished:
    """Train some steps of one rank under each plan, in one process.

    Args:
        plans: the plans, one line each.
        *options: options of `python tools/gpu_sim`.
        cwd: working folder of the process; None for the current one.
        limit_s: timeout in seconds.
    """
    return _run(("plans", *options, *plans), cwd, limit_s)


def _run(words: Sequence[str], cwd: Path | None, limit_s: float) -> Finished:
    built_stub()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent), f"--report={report}", *words],
            cwd=cwd,
            env=env.child_env(OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        found = json.loads(report.read_text()) if report.exists() else []
    return Finished(done.returncode, done.stdout, done.stderr, tuple(PaperReport(**one) for one in found))
