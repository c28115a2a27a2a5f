"""Processes of their own for the paper device, which a process cannot give back, and what each says when it ends.

Nothing here imports torch.
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

from weft import env
from weft.gpu_sim.stub_library import built_stub


@dataclass(frozen=True, slots=True)
class PaperReport:
    """What a process on paper says when it ends, as JSON. Seconds are simulated: see `roofline.py` for the guesses.

    kernels: that the host launched, a graph as one. recorded: those that graphs launched. outlived: of a plan with
    graphs, memory that captures made and something still holds, by line. num_bytes: read and written by kernels.
    products_s: what matrix products and attention take by their FLOPs alone, the least that the step can take.
    line_s: of kernels, by line of Weft. syncs: waits of the host, by what and line; a copy that blocks is one.
    behind: waits for what the step before launched; the device has this step's work to do meanwhile. copies,
    collectives, races: how often, by what. formats: tensors of collectives, by kind and number format. communicators:
    over which anything went, since the process or the plan began. mismatch: the error of a tensor on the wrong device,
    or "". busy_s: of the default stream. idle_s: its waiting, by reason. over_s: of a plan, what of that is for other
    ranks, by axis, as a run's ledger has it. name: of the script or the plan. error: what ended a plan early, or "".
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
        """The number of times that the host waited for the device."""
        return sum(self.syncs.values())

    @property
    def num_blocking(self) -> int:
        """Copies that the host waits for."""
        return sum(number for name, number in self.copies.items() if ", blocking @" in name)

    def as_dict(self) -> dict[str, Any]:
        """Return its fields by name."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return what people read of it."""
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
    """How a process on paper ended. reports: one a script; of plans one each, in their order."""

    returncode: int
    stdout: str
    stderr: str
    reports: tuple[PaperReport, ...]


def script_on_paper(
    path: str | Path, *arguments: str, ranks: int = 1, rank: int = 0, cwd: Path | None = None, limit_s: float = 600.0
) -> Finished:
    """Run a script in a process that finds one GPU on paper.

    Args:
        path: of the script.
        *arguments: its command line.
        ranks: size of the world that it finds.
        rank: its place there.
        cwd: the process's working folder; None: this one's.
        limit_s: seconds that it may take.

    Raises:
        LaunchError: where this machine cannot have one: see `why_not`.
    """
    return _run(("script", f"--ranks={ranks}", f"--rank={rank}", str(path), *arguments), cwd, limit_s)


def plans_on_paper(plans: Sequence[str], *options: str, cwd: Path | None = None, limit_s: float = 600.0) -> Finished:
    """Train some steps under each plan, one rank of it, in one process.

    Args:
        plans: one line each.
        *options: as `python -m weft.gpu_sim` takes them.
        cwd: the process's working folder; None: this one's.
        limit_s: seconds that it may take.
    """
    return _run(("plans", *options, *plans), cwd, limit_s)


def _run(words: Sequence[str], cwd: Path | None, limit_s: float) -> Finished:
    built_stub()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "weft.gpu_sim", f"--report={report}", *words],
            cwd=cwd,
            env=env.child_env(OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        found = json.loads(report.read_text()) if report.exists() else []
    return Finished(done.returncode, done.stdout, done.stderr, tuple(PaperReport(**one) for one in found))
