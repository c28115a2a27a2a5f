"""Run the acceptance suite and print one line per case.

    python -m tests.gpu.run all                      on the GPU of this machine, at full size
    python -m tests.gpu.run correct --device cpu     at small size: tests the suite, not the device
    python -m tests.gpu.run speed --out results

Each case has a separate process, since a kernel fault makes the device unusable for its process. The exit code is 1 if
a case failed. --out: folder for results.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.gpu import correct, kinds, precision, ranks, recorded, speed
from tests.gpu.cases import Case, Outcome, Setting, judge

STAGES = {
    "correct": correct.CASES + kinds.CORRECT + recorded.CORRECT + precision.CORRECT,
    "ranks": ranks.CASES + kinds.RANKS,
    "speed": speed.CASES + recorded.SPEED,
}


def run_one(case: Case, options: argparse.Namespace) -> Outcome:
    """Run one case in a separate process, which is killed at its time limit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcome.json"
        words = ["--one", case.name, "--device", options.device, "--size", options.size, "--out", str(path)]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.gpu.run", case.stage, *words],
                capture_output=True,
                text=True,
                timeout=case.limit_s,
            )
        except subprocess.TimeoutExpired:
            return Outcome(case.stage, case.name, "failed", case.limit_s, f"no end within {case.limit_s:.0f} s")
        seconds = round(time.monotonic() - begin, 2)
        if not path.exists():
            return Outcome(case.stage, case.name, "failed", seconds, f"exit {done.returncode}: {done.stderr[-1500:]}")
        return Outcome(**{**json.loads(path.read_text()), "seconds": seconds})


def run_in_process(case: Case, options: argparse.Namespace) -> None:
    """Run one case in this process, and write its outcome as JSON to --out."""
    device = torch.device("cuda:0" if options.device == "cuda" else options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        outcome = judge(case, Setting(device, options.size == "small", Path(folder)))
    Path(options.out).write_text(json.dumps(outcome.as_dict()))


def format_outcome(outcome: Outcome) -> str:
    """Return one line of the table, and a failure's last lines."""
    shown = ", ".join(f"{name} {_short(value)}" for name, value in list(outcome.figures.items())[:6])
    text = outcome.text if outcome.verdict == "skipped" else shown
    line = f"{outcome.verdict:8}{outcome.seconds:7.1f} s  {outcome.stage:8}{outcome.name:36}{text}"
    if outcome.verdict == "failed":
        line += "".join(f"\n    {one}" for one in outcome.text.strip().splitlines()[-6:])
    return line


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Run the requested cases. Return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=["small", "full"], help="small on a CPU unless said otherwise")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--at-once", type=int, default=1, help="cases at a time; speed is always measured alone")
    parser.add_argument("--out", help="folder for results.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = options.size or ("full" if options.device == "cuda" else "small")
    cases = [case for name, found in STAGES.items() if options.stage in (name, "all") for case in found]
    if options.one:
        run_in_process(next(case for case in cases if case.name == options.one), options)
        return 0
    cases = [case for case in cases if (options.only or "") in case.name]
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    for stage in STAGES:
        at_once = 1 if stage == "speed" else options.at_once
        with ThreadPoolExecutor(at_once) as pool:
            for outcome in pool.map(lambda case: run_one(case, options), [one for one in cases if one.stage == stage]):
                print(format_outcome(outcome), flush=True)
                outcomes.append(outcome)
    counts = {verdict: sum(one.verdict == verdict for one in outcomes) for verdict in ("passed", "failed", "skipped")}
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{counts} in {time.monotonic() - begin:.0f} s on {name}, torch {torch.__version__}")
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        record = {"device": name, "torch": torch.__version__, "size": options.size}
        found = {**record, "outcomes": [one.as_dict() for one in outcomes]}
        (folder / "results.json").write_text(json.dumps(found, indent=1))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
