"""Run benchmarks and keep their ratios as data, with the commit, the machine and the versions.

    python tools/record_benchmarks.py overhead tables    # run these, and write benchmarks/results/MACHINE/NAME.json
    python tools/record_benchmarks.py --list             # their names and commands
    python docs/generate.py                              # docs/reference/benchmarks.md of all results

A ratio that moved by more than 5 % from the last record of the same machine is printed. Copy the folder of your machine
into a pull request to add it to the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MOVED = 0.05
PACKAGES = ("torch", "accelerate", "deepspeed", "jax", "opacus", "transformers")
NUMBER = r"([\d.]+)"


class Benchmark(NamedTuple):
    """A command of the repository's root, and the ratios to find in its output.

    title: what the ratios compare. pattern: finds one ratio, or its name and the ratio.
    """

    title: str
    command: str
    pattern: str


BENCHMARKS = {
    "overhead": Benchmark(
        "time of a step over a hand-written loop",
        "benchmarks/overhead.py --steps 15",
        rf'"median_of_pair_ratios": {NUMBER}',
    ),
    "data_parallel": Benchmark(
        "time of a step over DDP, 2 ranks, 10 M parameters",
        "benchmarks/data_parallel.py --variants ddp,weft-zero0,weft-zero1,weft-zero2,weft-zero3 --steps 20",
        rf'"variant": "(weft[^"]+)".*"ratio": {NUMBER}',
    ),
    "tensor_parallel": Benchmark(
        "time of a step over torch's parallelize_module, 2 ranks",
        "benchmarks/model_parallel.py --ranks 2",
        rf"^(weft\S*) +[\d.]+ ms +{NUMBER}",
    ),
    "pipeline": Benchmark(
        "time of a step over torch.distributed.pipelining, 2 ranks",
        "benchmarks/pipeline.py steps --ranks 2",
        rf"^(\S+) +\d+ +[\d.]+ +[\d.]+ +{NUMBER}",
    ),
    "compiled_memory": Benchmark(
        "time of a compiled layer over torch.compile",
        "benchmarks/compiled_memory.py",
        rf"^\| (weft[^|]*?) \|.*\| {NUMBER} \|$",
    ),
    "tables": Benchmark(
        "time of a step with sharded tables over DDP with dense gradients, 2 ranks",
        "benchmarks/tables.py",
        rf"^DDP with dense gradients: .* over it {NUMBER},",
    ),
    "monitoring": Benchmark(
        "time of a step with metrics and alerts over one without",
        "benchmarks/monitoring.py --rounds 3 --steps 100",
        rf"median ratio {NUMBER}",
    ),
    "jax": Benchmark(
        "time of a captured step over a hand-written jit loop",
        "benchmarks/jax_engine.py --no-compile",
        rf"^(\w+): engine / by hand {NUMBER}",
    ),
}


def machine_name() -> str:
    """Return the processor's model and the number of cores, such as amd_epyc_9b14_2_cores."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    model = models[0] if models else platform.processor() or platform.machine()
    model = re.sub(r"\(\w+\)|\d+-Core|Processor|CPU|@.*", " ", model)
    return "_".join([*re.findall(r"[a-z0-9]+", model.lower()), str(os.cpu_count()), "cores"])


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that benchmarks compare."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def ratios_in(output: str, pattern: str) -> dict[str, float]:
    """Return the ratios by name. One without a name has the name "ratio"."""
    found = {}
    for match in re.finditer(pattern, output, re.MULTILINE):
        *name, value = match.groups()
        found["".join(name).strip() or "ratio"] = float(value)
    return found


def moved(old: Mapping[str, float], new: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each ratio that changed by more than 5 %."""
    for name, value in new.items():
        if name in old and abs(value / old[name] - 1) > MOVED:
            yield f"{name}: {old[name]:.3f} before, {value:.3f} now ({value / old[name] - 1:+.0%})"


def record(name: str) -> list[str]:
    """Run a benchmark and add its ratios to its file. Returns the lines of ratios that moved.

    Raises:
        SystemExit: if the benchmark fails, or its output has no ratio.
    """
    one = BENCHMARKS[name]
    start, load = time.monotonic(), os.getloadavg()[0]
    words = one.command.split()
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # noqa: TID251 (a child's environment)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: python {one.command} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    ratios = ratios_in(done.stdout, one.pattern)
    if not ratios:
        raise SystemExit(f"error: python {one.command} printed no ratio:\n{done.stdout[-2000:]}")
    git = ("git", "-C", str(ROOT))
    commit = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True).stdout.strip()
    entry = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit + ("+changes" if changed else ""),
        "seconds": round(time.monotonic() - start),
        "load_before": round(load, 1),
        "versions": versions(),
        "ratios": ratios,
    }
    file = RESULTS / machine_name() / f"{name}.json"
    entries = json.loads(file.read_text())["entries"] if file.exists() else []
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"command": one.command, "entries": [*entries, entry]}, indent=1) + "\n")
    return list(moved(entries[-1]["ratios"] if entries else {}, ratios))


def page() -> str:
    """Return the Markdown page of all results: the newest ratios of each machine, and those that moved."""
    lines = [
        "# Benchmarks as data",
        "Each ratio is the median over the rounds of one run in which the variants alternate. Below 1, Weft is faster.",
        "`load` is the load of the machine before the run: above 0.5, other programs used it too.",
        "[`benchmarks/results`](../../benchmarks/results) has a file for each benchmark and machine, with the versions",
        "of packages. `python tools/record_benchmarks.py NAME` adds a record.",
    ]
    for folder in sorted(path for path in RESULTS.glob("*") if path.is_dir()):
        lines += ["", f"## {folder.name.replace('_', ' ')}"]
        lines += ["| benchmark | ratios | before | load | date, commit |", "|---|---|---|---|---|"]
        for file in sorted(folder.glob("*.json")):
            lines.append(_row(file.stem, json.loads(file.read_text())))
    return "\n".join(lines) + "\n"


def _row(name: str, kept: Mapping[str, Any]) -> str:
    *older, last = kept["entries"]
    before = older[-1]["ratios"] if older else {}
    shown = ", ".join(f"{'' if key == 'ratio' else f'{key} '}**{value:.3g}**" for key, value in last["ratios"].items())
    changes = "; ".join(moved(before, last["ratios"])) or ("within 5 %" if older else "first record")
    title = f"{BENCHMARKS[name].title}: `python {kept['command']}`" if name in BENCHMARKS else name
    return f"| {title} | {shown} | {changes} | {last['load_before']:.1f} | {last['date']}, {last['commit']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    given = parser.parse_args()
    if given.list or not given.names:
        for name, one in BENCHMARKS.items():
            print(f"{name:16} python {one.command}\n{'':16} {one.title}")
    if unknown := [name for name in given.names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmark {unknown[0]!r}. Known: {', '.join(BENCHMARKS)}.")
    for name in given.names:
        print(f"{name} ...", flush=True)
        for line in record(name):
            print(f"  moved: {line}")


if __name__ == "__main__":
    main()
