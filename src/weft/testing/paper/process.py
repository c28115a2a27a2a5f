"""Processes of their own for the paper device: a process cannot give it back. Nothing here imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft import env
from weft.testing.paper.build import built_stub
from weft.testing.paper.report import Report


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process on paper ended. reports: one a script; of plans one each, in their order."""

    returncode: int
    stdout: str
    stderr: str
    reports: tuple[Report, ...]


def script_on_paper(
    path: str | Path, *arguments: str, ranks: int = 1, rank: int = 0, cwd: Path | None = None, limit_s: float = 600.0
) -> Finished:
    """Run a script in a process that finds one GPU on paper, as one of `ranks`. limit_s: seconds that it may take.

    Raises LaunchError where this machine cannot have one: see `why_not`.
    """
    return _run(("script", f"--ranks={ranks}", f"--rank={rank}", str(path), *arguments), cwd, limit_s)


def plans_on_paper(plans: Sequence[str], *options: str, cwd: Path | None = None, limit_s: float = 600.0) -> Finished:
    """Train some steps under each plan, one rank of it, in one process. options: as `python -m weft.testing.paper`."""
    return _run(("plans", *options, *plans), cwd, limit_s)


def _run(words: Sequence[str], cwd: Path | None, limit_s: float) -> Finished:
    built_stub()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "weft.testing.paper", f"--report={report}", *words],
            cwd=cwd,
            env=env.child_env(OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        found = json.loads(report.read_text()) if report.exists() else []
    return Finished(done.returncode, done.stdout, done.stderr, tuple(Report(**one) for one in found))
