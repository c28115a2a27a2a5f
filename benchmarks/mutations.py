"""Do the parity tests see it? Deliberate faults in communication and parallelism, one at a time, in a copy of the tree.

    python benchmarks/mutations.py                    # all faults of faults.toml
    python benchmarks/mutations.py 'zero3*' --list    # those whose name fits
    python benchmarks/mutations.py --log done.jsonl   # what this file knows of the same sources is not run again

First the tests without a fault: where they fail, nothing can be said of the faults. Then each fault: its own tests,
and all of tests/parity where they do not see it. One line each: caught (a test failed), hung (a rank gave no answer in
time), too slow (nothing known: raise --limit) or SURVIVED. A fault whose text is no longer in the source is an error:
mend it in faults.toml. Not part of the gate.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "docs", "benchmarks")
EVERYTHING = ["tests/parity"]
CONTROL = "control"
#: So long a rank may keep silent: in a tree with a fault some wait for ever, on a busy machine all are slow.
PATIENCE = ("src/weft/verify/rank_pool.py", "timeout_s: float = 120.0", "timeout_s: float = 240.0")


#: Of one fault and the tests that were run: its name, the tests, the outcome, who said it, the seconds, the sources.
Result = dict[str, Any]


class Fault(NamedTuple):
    """`before` stands exactly once in `file`; `after` is the fault. tests: what pytest runs first."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def read_faults() -> list[Fault]:
    """All faults; every one still fits the source."""
    known = tomllib.loads((ROOT / "benchmarks/faults.toml").read_text())
    faults = [Fault(**{**one, "tests": tuple(known["tests"][one["tests"]])}) for one in known["fault"]]
    for fault in faults:
        count = (ROOT / fault.file).read_text().count(fault.before)
        if count != 1:
            sys.exit(f"{fault.name}: its text stands {count} times in {fault.file}. Mend it in faults.toml.")
    return faults


def control_of(tests: tuple[str, ...]) -> Fault:
    """No fault at all."""
    return Fault(f"{CONTROL} {' '.join(tests)}", "src/weft/optim/build.py", "if max_norm > 0", "if max_norm > 0", tests)


def sources_digest() -> str:
    """Of all that is copied, so that results of other sources are not taken for these."""
    digest = hashlib.sha256()
    for path in sorted(path for name in ("src", "tests") for path in (ROOT / name).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def try_fault(fault: Fault, tests: list[str], limit_s: float) -> Result:
    """Run tests in a copy of the tree that has the fault, up to the first that fails."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weft-mutation-") as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for file, before, after in (PATIENCE, fault[1:4]):
            path = copy / file
            path.write_text(path.read_text().replace(before, after))
        output, code = run_tests(copy, tests, limit_s)
    failed = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    outcome = {0: "SURVIVED", 1: "caught", None: "too slow"}.get(code, f"error {code}")
    if outcome == "caught" and re.search(r"no answer within \d", output):
        outcome = "hung"
    by = failed[0].removeprefix("FAILED ") if failed else ""
    seconds = round(time.perf_counter() - start, 1)
    return {"fault": fault.name, "tests": tests, "outcome": outcome, "by": by, "seconds": seconds}


def run_tests(copy: Path, tests: list[str], limit_s: float) -> tuple[str, int | None]:
    """What pytest prints and its exit code; None where it took too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    variables = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=copy, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=limit_s)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], None
    finally:
        if process.poll() is None:  # this program is being ended: its ranks end with it
            os.killpg(process.pid, signal.SIGKILL)


def is_good(control: Result) -> bool:
    """Whether the tests pass without a fault."""
    return control["outcome"] == "SURVIVED"


class Runs:
    """Results so far, in a file of one JSON object a line where there is one."""

    def __init__(self, log: Path | None, limit_s: float):
        self._log, self._limit_s = log, limit_s
        self._sources = sources_digest()
        self._known: dict[tuple[object, ...], Result] = {}
        if log and log.exists():
            for line in log.read_text().splitlines():
                self._keep(json.loads(line))

    def _keep(self, result: Result) -> None:
        key = (result["fault"], *[str(test) for test in result["tests"]], result["sources"])
        self._known[key] = result

    def of(self, fault: Fault, tests: list[str]) -> Result:
        """The result of a fault; run where it is not known."""
        key = (fault.name, *tests, self._sources)
        if key not in self._known:
            result = {**try_fault(fault, tests, self._limit_s), "sources": self._sources}
            self._keep(result)
            print("{outcome:<9} {seconds:>6} s  {fault:<50} {by}".format(**result), flush=True)
            if self._log and (is_good(result) or not fault.name.startswith(CONTROL)):
                with self._log.open("a") as file:
                    file.write(json.dumps(result) + "\n")
        return self._known[key]

    def judge(self, fault: Fault, tests: list[str]) -> Result:
        """What these tests say of a fault; their control before."""
        control = self.of(control_of(tuple(tests)), tests)
        if not is_good(control):
            sys.exit(f"without a fault: {control['outcome']} {control['by']}. Mend that, or raise --limit.")
        return self.of(fault, tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["*"], help="patterns of names; all by default")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for one run of the tests")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    parser.add_argument("--log", type=Path, help="add the results to this file, and run nothing that it knows")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faults = read_faults()
    chosen = [fault for fault in faults if any(fnmatch.fnmatch(fault.name, name) for name in options.names)]
    if options.list:
        print("\n".join(fault.name for fault in chosen))
        return
    runs = Runs(options.log, options.limit)
    survivors = survived(runs, [(fault, list(fault.tests)) for fault in chosen])
    survivors = survived(runs, [(fault, EVERYTHING) for fault in survivors])
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} were seen")
    sys.exit(f"survived: {', '.join(fault.name for fault in survivors)}" if survivors else 0)


def survived(runs: Runs, trials: list[tuple[Fault, list[str]]]) -> list[Fault]:
    """The faults that their tests do not see."""
    return [fault for fault, tests in trials if runs.judge(fault, tests)["outcome"] == "SURVIVED"]


if __name__ == "__main__":
    main()
