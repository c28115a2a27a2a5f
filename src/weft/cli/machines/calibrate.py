"""`weft calibrate`: measure this machine for `weft plan`."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft import env
from weft.cli.console import print_line, progress_report, table
from weft.errors import ConfigError, Problem
from weft.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from weft.planner.measured.links import LinkProfile
    from weft.planner.measured.machine_profile import Profile

#: Devices that can be measured.
_DEVICES = ("auto", "cpu", "cuda")

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
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts",
            help="Measure the links between ranks that torchrun or srun started, on one host or several, for "
            "launch.route=auto.",
        ),
    ] = False,
) -> None:
    """Measure this machine: matmuls, attention, memory-bound kernels, collectives, optimizer step, host-device copies.

    With --hosts, measure the links between ranks for launch.route=auto.

    The profile is written at the end. Ctrl-C before that keeps the previous profile.
    """
    if device not in _DEVICES:
        raise ConfigError([Problem.of("device", device, f"not one of {', '.join(_DEVICES)}. Use auto.")])
    seconds, counts = _seconds(budget), _counts(ranks)
    if hosts:
        _measure_links(seconds, out)
        return
    from weft.calibrate.run import calibrate as measure
    from weft.planner.measured.machine_profile import default_path

    path = out or default_path()
    with progress_report(sys.stderr) as report:
        found = measure(
            seconds, counts, device, dtypes.split(","), lambda what, done, total: report("measuring", done, total)
        )
    found.save(path)
    print("\n".join(_lines(found)))
    for dtype in dtypes.split(","):
        if dtype not in found.formats(max(found.ranks)):
            print_line(
                f"the budget ran out before {dtype} was measured with {max(found.ranks)} ranks. Use e.g. --budget 5m."
            )
    print_line(
        f"{path}: {len(found.samples)} measurements in {found.took_s:.0f} s. To plan with it, run: weft plan MODEL here"
    )


def _measure_links(seconds: float, out: Path | None) -> None:
    """Measure links with the other ranks. The first rank of each host writes the profile, and rank 0 prints it."""
    from weft.calibrate.links import calibrate_links
    from weft.planner.measured.links import LinkProfile

    place = env.rank_env()
    is_first = place is None or place.rank == 0
    with progress_report(sys.stderr) if is_first else contextlib.nullcontext(None) as report:
        found, writes = calibrate_links(
            seconds, lambda what, done, total: report("measuring", done, total) if report is not None else None
        )
    path = out or LinkProfile.default_path()
    if writes:
        found.save(path)
    if is_first:
        print("\n".join(_link_lines(found)))
        print_line(
            f"{path} on each host: {len(found.samples)} measurements in {found.took_s:.0f} s. launch.route=auto "
            + ("reads it." if out is None else f"reads it with: weft train ... launch.links={path}")
        )


def _link_lines(profile: LinkProfile) -> list[str]:
    sizes = sorted({sample.size for sample in profile.samples})
    head = ("all_reduce", "by", *(format_bytes(size) for size in sizes))
    rows: list[tuple[str, ...]] = []
    for hosts, ranks in profile.layouts:
        here = [one for one in profile.samples if (one.hosts, one.ranks, one.op) == (hosts, ranks, "all_reduce")]
        for transport in dict.fromkeys(one.transport for one in here):
            seconds = {one.size: one.seconds for one in here if one.transport == transport}
            told = [format_seconds(seconds[size]) if size in seconds else "-" for size in sizes]
            rows.append((f"{counted(hosts, 'host')} of {counted(ranks, 'rank')}", transport, *told))
    return table([head, *rows], right=tuple(range(2, len(head))))


def _lines(profile: Profile) -> list[str]:
    machine = profile.machine
    lines = [f"machine     {machine.device}, {machine.cores} cores, torch {machine.torch}"]
    for count in profile.ranks:
        here = [sample for sample in profile.samples if sample.ranks == count]
        parts: list[str] = []
        for dtype in ("fp32", "bf16"):
            products = [s for s in here if s.op == "linear_f" and s.dtype == dtype]
            rates = [2 * s.size[0] * s.size[1] * s.size[2] / s.seconds for s in products]
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
        raise ConfigError([Problem.of("budget", text, "a time is needed. Use e.g. --budget 90s or 5m.")])
    return float(match[1]) * (1.0 if match[2] in (None, "s") else 60.0)


def _counts(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise ConfigError([Problem.of("ranks", text, "numbers with commas are needed. Use e.g. --ranks 1,2,4.")])
    return tuple(map(int, text.split(",")))
