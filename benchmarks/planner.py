"""How fast the planner is: cold commands, enumeration, estimation, and the whole search, on one core.

    python benchmarks/planner.py                 all of it, five cold starts each
    python benchmarks/planner.py --rounds 1
    python benchmarks/planner.py optimum         how far the default search stays behind a long one, on 30 questions
    python benchmarks/planner.py optimum --refine 5 --every 3

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
from functools import partial
from typing import TypeVar

from weft.config.rules.plan_rules import LASTING
from weft.planner.estimator import estimate
from weft.planner.search.best_plans import answer
from weft.planner.search.pipeline_clock import clocked
from weft.planner.search.question import Question
from weft.planner.space.enumerate import Space, Tally, enumerate_space

CASES = (("llama3-8b", "8xh100", 1.0), ("llama3-70b", "8x8xh100", 1.0), ("llama3-405b", "2048x8xh100", 3.0))

Result = TypeVar("Result")
#: What the default search may stay behind.
_BEHIND = 0.01
#: Questions of the optimum: what people train, on what they have.
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b")
CLUSTERS = {
    "llama3-8b": ("1xh100", "4xa100", "8xh100", "8xa100", "2x8xh100", "8x8xh100", "16x8xa100", "64x8xh100", "8xrtx4090",
                  "8xb200"),
    "llama3-70b": ("2x8xh100", "4x8xh100", "8x8xh100", "16x8xa100", "24x8xh100", "32x8xh100", "64x8xh100",
                   "128x8xh100", "256x8xh100", "16x8xb200"),
    "llama3-405b": ("32x8xh100", "48x8xh100", "64x8xh100", "96x8xh100", "128x8xh100", "256x8xh100", "512x8xh100",
                    "1024x8xh100", "2048x8xh100", "64x8xb200"),
}  # fmt: skip


def cold(words: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one command in a new process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "weft", *words], check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Processor seconds of a call, and what it gives."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def rates(model: str, cluster: str) -> None:
    """Enumeration, estimation and the whole search of one question, in this process."""
    question = Question.of(model, cluster, built_only=False)
    found = answer(question)  # warm: tables are read, and the space's width is known
    space = Space.full(question.job, question.cluster)
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


def optimum(refine_s: float, every: int) -> None:
    """Print how much slower the default's best plan is than that of a search with time, question by question."""
    questions = [(model, cluster) for model in MODELS for cluster in CLUSTERS[model]][::every]
    behind: list[float] = []
    for model, cluster in questions:
        seconds, quick = timed(partial(answer, Question.of(model, cluster)))
        long = answer(Question.of(model, cluster, refine_s=refine_s))
        if quick.best is None or long.best is None:
            print(f"{model:12} {cluster:12} no plan fits")
            continue
        # Both on a clock: a closed form may be too good.
        behind.append(clocked(quick.best).step_s / clocked(long.best).step_s - 1)
        print(f"{model:12} {cluster:12} {behind[-1]:+7.2%} behind, {seconds:.2f} s  {quick.best.plan}", flush=True)
        if behind[-1] > _BEHIND:
            print(f"{'':25} the other: {long.best.plan}")
    few = sum(each <= _BEHIND for each in behind)
    print(f"{few} of {len(behind)} questions at most {_BEHIND:.0%} behind; the worst {max(behind):.2%}")


def main() -> None:
    """Print a line for each case, or for each question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("what", nargs="?", choices=("speed", "optimum"), default="speed")
    parser.add_argument("--refine", type=float, default=60.0, help="seconds of the long search")
    parser.add_argument("--every", type=int, default=1, help="ask every n-th question")
    asked = parser.parse_args()
    if asked.what == "optimum":
        optimum(asked.refine, asked.every)
        return
    rounds = asked.rounds
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
