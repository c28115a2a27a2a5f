"""Do the parity tests see it? Deliberate faults in communication and parallelism, one at a time, in a copy of the tree.

    python benchmarks/mutations.py                    # all of them
    python benchmarks/mutations.py 'zero3*' --list    # those whose name fits
    python benchmarks/mutations.py --tests tests/parity tests/parallel

Prints one line for each fault: caught (a test failed), hung (a rank gave no answer in time), too slow (nothing
known: raise --limit) or SURVIVED. A fault whose
text is no longer in the source is an error: mend it here. Not part of the gate.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: So long a rank may keep silent in a mutated tree.
PATIENCE = ("src/weft/testing/spawn.py", "timeout_s: float = 120.0", "timeout_s: float = 60.0")


#: No fault at all: where its tests do not pass, nothing can be said about the others.
CONTROL = ("control", "src/weft/optim/clip.py", "if max_norm > 0", "if max_norm > 0")


class Fault(NamedTuple):
    """`before` stands exactly once in `file`; `after` is the fault."""

    name: str
    file: str
    before: str
    after: str


FAULTS = (
    Fault(
        "flat-stale-weights",
        "src/weft/parallel/flat.py",
        "pending.append(start_all_gather(own, self.axes.shard, out=bucket.weights))",
        "pass",
    ),
    Fault(
        "flat-buffers-of-each-rank",
        "src/weft/parallel/flat.py",
        "            broadcast(buffer, self.axes.data)\n",
        "            pass\n",
    ),
    Fault("flat-no-bring", "src/weft/parallel/flat.py", "bucket.host.bring(own).wait()", "bucket.host.bring(own)"),
    Fault(
        "reducer-replicas-left-out",
        "src/weft/parallel/reducer.py",
        "        if self._axes.shard.size > 1:\n            for pending",
        "        if False:\n            for pending",
    ),
    Fault(
        "reducer-wrong-axis",
        "src/weft/parallel/reducer.py",
        "pending = start_all_reduce(flat, self._axes.replicate)",
        "pending = start_all_reduce(flat, self._axes.shard)",
    ),
    Fault(
        "reducer-last-bucket",
        "src/weft/parallel/reducer.py",
        "self.buckets[self._next :]",
        "self.buckets[self._next : -1]",
    ),
    Fault("reducer-doubled", "src/weft/parallel/reducer.py", "slot.grad.copy_(grad)", "slot.grad.copy_(grad * 2)"),
    Fault(
        "reducer-unused-keeps-garbage",
        "src/weft/parallel/reducer.py",
        "    if grad is None:\n        slot.grad.zero_()",
        "    if grad is None:\n        slot.grad.fill_(0.25)",
    ),
    Fault(
        "reducer-norm-of-one-rank",
        "src/weft/parallel/reducer.py",
        "totals.copy_(sums[:-2])\n",
        "totals.copy_(sums[:-2])\n        sums[-1] = extra[1]\n",
    ),
    Fault(
        "reducer-totals-of-one-rank",
        "src/weft/parallel/reducer.py",
        "totals.copy_(sums[:-2])",
        "pass",
    ),
    Fault(
        "reducer-scale-forgets-a-bucket",
        "src/weft/parallel/reducer.py",
        "torch._foreach_mul_([shard_of(bucket) for bucket in self.buckets], factor)",
        "torch._foreach_mul_([shard_of(bucket) for bucket in self.buckets[:1]], factor)",
    ),
    Fault(
        "reducer-launch-too-early",
        "src/weft/parallel/reducer.py",
        "if self._launches and slot.fired == slot.expected:",
        "if self._launches and slot.fired == 1:",
    ),
    Fault(
        "step-no-division",
        "src/weft/train/step.py",
        "to_mean = self._nominal / (max(num_tokens, 1.0) * scale)",
        "to_mean = 1.0 / scale",
    ),
    Fault(
        "step-mean-of-means",
        "src/weft/train/step.py",
        "(loss_sum * scale).backward()",
        "(loss_sum / max(int(num_tokens), 1) * scale).backward()",
    ),
    Fault(
        "step-every-microbatch-is-last",
        "src/weft/train/step.py",
        "last=index == len(microbatches) - 1",
        "last=True",
    ),
    Fault(
        "zero3-plain-not-summed",
        "src/weft/parallel/zero3.py",
        "flat = all_reduce(torch.cat([part.reshape(-1).to(self.precision.master) for part in parts]), self._data)",
        "flat = torch.cat([part.reshape(-1).to(self.precision.master) for part in parts])",
    ),
    Fault(
        "zero3-norm-of-one-shard",
        "src/weft/parallel/zero3.py",
        "squares = all_reduce(_square(shards, self._device), self._axis)",
        "squares = _square(shards, self._device)",
    ),
    Fault(
        "zero3-divides",
        "src/weft/parallel/zero3.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
    ),
    Fault(
        "zero3-defers-nothing",
        "src/weft/parallel/zero3.py",
        "self._synchronise(last or not self._defers)",
        "self._synchronise(True)",
    ),
    Fault(
        "zero3-replicas-left-out",
        "src/weft/parallel/zero3_hooks.py",
        "pending = start_all_reduce(sums, self._axis)",
        "pending = Pending(sums)",
    ),
    Fault(
        "zero3-replicas-forget-earlier-passes",
        "src/weft/parallel/zero3_hooks.py",
        "            sums += self._kept\n",
        "",
    ),
    Fault(
        "zero3-no-reduction",
        "src/weft/parallel/zero3_comm.py",
        "reduce_scatter(input_tensor, self._axis, out=output_tensor)",
        "output_tensor.copy_(input_tensor.view(self._axis.size, -1)[self._axis.rank].view_as(output_tensor))",
    ),
    Fault("comm-part-left-out", "src/weft/comm/combine.py", "for part in parts[2:-1]:", "for part in parts[3:-1]:"),
    Fault(
        "comm-wrong-slot",
        "src/weft/comm/routes.py",
        "index = rank - (rank > of)",
        "index = rank - (rank >= of and rank > 0)",
    ),
    Fault(
        "comm-gather-keeps-old-shards",
        "src/weft/comm/routes.py",
        "            if rank != self.rank:\n                self.shards[rank, first:last]",
        "            if rank < self.rank:\n                self.shards[rank, first:last]",
    ),
    Fault(
        "comm-split-reduce-not-collected",
        "src/weft/comm/routes.py",
        "self.out[first + part.start : first + part.stop].copy_(slot[part])",
        "self.out[first + part.start : first + part.stop].copy_(slot[part]) if rank == self.rank else None",
    ),
    Fault(
        "comm-no-meeting",
        "src/weft/comm/shared.py",
        "if number == self._published or self._segment.lowest(PUBLISHED) <= number:",
        "if number == self._published:",
    ),
    Fault("clip-forgotten", "src/weft/optim/clip.py", "if max_norm > 0 else 1.0", "if max_norm > 1e9 else 1.0"),
)


def check_faults() -> None:
    """Every fault still fits the source."""
    for fault in FAULTS:
        count = (ROOT / fault.file).read_text().count(fault.before)
        if count != 1:
            sys.exit(f"{fault.name}: its text stands {count} times in {fault.file}. Mend it in {Path(__file__).name}.")


def try_fault(fault: Fault, tests: list[str], limit_s: float) -> dict[str, object]:
    """Run the tests in a copy of the tree that has the fault."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weft-mutation-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "docs", "benchmarks"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for file, before, after in (PATIENCE, fault[1:]):
            path = copy / file
            path.write_text(path.read_text().replace(before, after))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        variables = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=copy, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s)
            outcome = {0: "SURVIVED", 1: "caught"}.get(process.returncode, f"error {process.returncode}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            outcome = "too slow"
    failed = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if outcome == "caught" and re.search(r"no answer within \d", output):
        outcome = "hung"
    by = failed[0].removeprefix("FAILED ") if failed else ""
    return {"fault": fault.name, "outcome": outcome, "by": by, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["*"], help="patterns of names; all by default")
    parser.add_argument("--tests", nargs="+", default=["tests/parity/test_matrix.py"], help="what pytest runs")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one fault")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    check_faults()
    chosen = [fault for fault in FAULTS if any(fnmatch.fnmatch(fault.name, name) for name in options.names)]
    results: list[dict[str, object]] = []
    if (
        not options.list
        and (control := try_fault(Fault(*CONTROL), options.tests, options.limit))["outcome"] != "SURVIVED"
    ):
        sys.exit(
            f"without a fault: {control['outcome']} after {control['seconds']} s {control['by']}. Mend that first."
        )
    for fault in chosen:
        if options.list:
            print(fault.name)
            continue
        results.append(try_fault(fault, options.tests, options.limit))
        print("{outcome:<9} {seconds:>6} s  {fault:<40} {by}".format(**results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    survivors = [result["fault"] for result in results if result["outcome"] == "SURVIVED"]
    sys.exit(f"{len(survivors)} of {len(results)} survived: {', '.join(map(str, survivors))}" if survivors else 0)


if __name__ == "__main__":
    main()
