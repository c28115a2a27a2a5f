"""`weft calibrate`: measure this machine, so that `weft plan` knows it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import progress_report, say
from weft.errors import ConfigError, Problem
from weft.units import counted

if TYPE_CHECKING:
    from weft.planner.measured import Profile

_BUDGET = re.compile(r"([0-9]*\.?[0-9]+)\s*(s|m|min)?")


def calibrate(
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Approximate duration: 30s, 2m; at most 10m.")
    ] = "90s",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.json", help="File for the profile; by default in the user's cache folder."),
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            metavar="1,2,4",
            help="Numbers of ranks to measure at the same time, such as 1,2,4.",
            show_default=False,
        ),
    ] = "",
    dtypes: Annotated[str, typer.Option("--dtypes", metavar="fp32,bf16", help="Number formats.")] = "fp32,bf16",
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, or auto: the GPUs if there are any, else the CPU.")
    ] = "auto",
) -> None:
    """Measure this machine: matrix products, attention, memory, collectives, calls, the optimizer's step.

    The profile is written at the end; Ctrl-C before that keeps the older one.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError([Problem("device", f"device={device}: not one of auto, cpu, cuda. Use auto.")])
    seconds, counts = _seconds(budget), _counts(ranks)
    from weft.calibrate import calibrate as measure
    from weft.planner.measured import default_path

    path = out or default_path()
    with progress_report(sys.stderr) as report:
        found = measure(
            seconds, counts, device, dtypes.split(","), lambda what, done, total: report("measuring", done, total)
        )
    found.save(path)
    print("\n".join(_lines(found)))
    for dtype in dtypes.split(","):
        if dtype not in found.formats(max(found.ranks)):
            say(f"the budget ran out before {dtype} was measured with {max(found.ranks)} ranks. Use e.g. --budget 5m.")
    say(
        f"{path}: {len(found.samples)} measurements in {found.took_s:.0f} s. To plan with it, run: weft plan MODEL here"
    )


def _lines(profile: Profile) -> list[str]:
    """What was found, for people: the best rates at each number of ranks."""
    machine = profile.machine
    lines = [f"machine     {machine.device}, {machine.cores} cores, torch {machine.torch}"]
    for count in profile.ranks:
        here = [sample for sample in profile.samples if sample.ranks == count]
        parts: list[str] = []
        for dtype in ("fp32", "bf16"):
            rates = [
                2 * s.size[0] * s.size[1] * s.size[2] / s.seconds
                for s in here
                if s.op == "linear_f" and s.dtype == dtype
            ]
            parts += [f"{dtype} {max(rates) / 1e9:.0f} GFLOP/s"] if rates else []
        moved = [8.0 * s.size[0] * s.size[1] / s.seconds for s in here if s.op == "copy" and s.dtype == "fp32"]
        sums = [s.size[0] / s.seconds for s in here if s.op == "all_reduce" and s.group == count]
        parts += [f"memory {max(moved) / 1e9:.1f} GB/s"] if moved else []
        parts += [f"all_reduce {max(sums) / 1e9:.2f} GB/s"] if sums else []
        lines.append(f"{counted(count, 'rank'):<12}{', '.join(parts)} on each")
    return lines


def _seconds(text: str) -> float:
    match = _BUDGET.fullmatch(text.strip())
    if match is None:
        raise ConfigError([Problem("budget", f"budget={text}: a time is needed. Use e.g. --budget 90s or 5m.")])
    return float(match[1]) * (1.0 if match[2] in (None, "s") else 60.0)


def _counts(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise ConfigError([Problem("ranks", f"ranks={text}: numbers with commas are needed. Use e.g. --ranks 1,2,4.")])
    return tuple(map(int, text.split(",")))
