"""How fast the planner is: cold commands, enumeration, estimation, and the whole search, on one core.

    python benchmarks/planner.py                 all of it, five cold starts each
    python benchmarks/planner.py --rounds 1

Cold: a new process from start to exit, as a person types it; wall time, and the processor time of the process, which
other work on the machine does not touch. Rates are of processor time.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from weft.planner import estimate
from weft.planner.search import Question, answer
from weft.planner.space import Space, Tally, enumerate_space
from weft.spec.rules.plan_rules import LASTING

CASES = (("llama3-8b", "8xh100", 1.0), ("llama3-70b", "8x8xh100", 1.0), ("llama3-405b", "2048x8xh100", 3.0))


def cold(words: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one command in a new process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "weft", *words], check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def timed(work: Callable[[], object]) -> tuple[float, object]:
    """Processor seconds of a call, and what it gives."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def rates(model: str, cluster: str) -> None:
    """Enumeration, estimation and the whole search of one question, in this process."""
    question = Question.of(model, cluster, built_only=False)
    found = answer(question)  # warm: tables are read, and the space's width is known
    space = Space.whole(question.job, question.cluster)
    while space.left_out != found.left_out:
        space = space.narrower()

    def enumerate_all() -> list[object]:
        tally = Tally(question.facts)
        blocks = enumerate_space(space, question.job, question.cluster, list(LASTING), tally)
        return [part for block in blocks for part in block.chunks(2**17, tally, question.job)]

    enumerating, parts = timed(enumerate_all)
    tables = question.tables
    count = sum(map(len, parts))
    estimating, _ = timed(lambda: [estimate(question.job, question.cluster, part, tables) for part in parts])
    searching, _ = timed(lambda: answer(question))
    print(
        f"{model} on {cluster}: {found.num_plans:,} plans, {count:,} keep the rules; "
        f"enumeration {count / enumerating / 1e6:.1f} M/s, estimate {count / estimating / 1e6:.2f} M/s, "
        f"both {count / (enumerating + estimating) / 1e6:.2f} M/s, whole search {searching:.2f} s"
    )


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for model, cluster, most in CASES:
        runs = [cold(["plan", model, cluster, "--all-plans"]) for _ in range(rounds)]
        wall, processor = (statistics.median(side) for side in zip(*runs, strict=True))
        best = min(run[0] for run in runs)
        print(
            f"weft plan {model} {cluster} --all-plans: {wall:.2f} s wall (best {best:.2f}), {processor:.2f} s of "
            f"processor; wanted: at most {most:g} s"
        )
    for model, cluster, _ in CASES:
        rates(model, cluster)


if __name__ == "__main__":
    main()
