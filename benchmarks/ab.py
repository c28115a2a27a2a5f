"""`weft ab` on real runs of a small decoder: how much pairing saves, and how often it is wrong.

python benchmarks/ab.py pairs --pairs 8          variance of paired over unpaired differences of two learning rates
python benchmarks/ab.py noise --runs 40          wrong verdicts of 200 A/A comparisons that look after each pair

`noise` trains one config with many seeds. Each comparison draws 20 pairs of different runs from them at random, and
stops at the first interval without 0. The same runs occur in many comparisons, so they are not independent.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from weft.config.files import parse_config
from weft.experiments import statistics
from weft.experiments.ab import Comparison, Runner
from weft.experiments.run_log import Measure

CONFIG = """
plan = "dp_replicate=1"
run.name = "small"
model = {name = "tiny", num_layers = 2, dim = 64, num_heads = 2, num_kv_heads = 2, ffn_dim = 128}
tokenizer.kind = "bytes"
train = {steps = 100, seq_len = 64, global_batch = 8}
eval = {every = 0, batches = 20}
checkpoint.every = 0
sample.prompt = ""
launch = {ranks = 1, device = "cpu"}
"""


def main() -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pairs", "noise"))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("build/ab"), help="finished runs in it are used again")
    args = parser.parse_args()
    if args.what == "pairs":
        pairs(args.folder / "pairs", args.pairs)
    else:
        noise(args.folder / "noise", args.runs)


def pairs(folder: Path, number: int) -> None:
    """Compare learning rates 1e-3 and 2e-3, and print the variance ratio."""
    a, b = (parse_config(CONFIG, "small.toml", [f"optimizer.lr={lr}"]).config for lr in ("1e-3", "2e-3"))
    folder.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(a, b, Measure.of("eval.loss"), "tokens", number, None, other_seeds=False)
    results = list(Runner(comparison, folder, False, lambda line: print(line, file=sys.stderr)).results())
    values = [[one.value[side] for one in results] for side in (0, 1)]
    estimate = statistics.fixed([one.difference for one in results])
    print(f"B - A = {estimate.mean:+.4f} ± {estimate.half_width:.4f} nats, {number} pairs")
    print(f"variance of paired over unpaired differences: {statistics.variance_ratio(*values):.3f}")


def noise(folder: Path, number: int) -> None:
    """Train one config with `number` seeds, and count the wrong verdicts of 200 comparisons of it with itself."""
    config = parse_config(CONFIG, "small.toml").config
    folder.mkdir(parents=True, exist_ok=True)
    measure = Measure.of("eval.loss")
    comparison = Comparison(config, config, measure, "tokens", number // 2, 0.001, other_seeds=True)
    results = Runner(comparison, folder, False, lambda line: print(line, file=sys.stderr)).results()
    losses = [value for one in results for value in one.value]
    draw = random.Random(0)
    wrong = {"sequential": 0, "fixed": 0}
    for _ in range(200):
        chosen = draw.sample(losses, min(40, len(losses)))
        differences = [right - left for left, right in zip(chosen[::2], chosen[1::2], strict=True)]
        for name in wrong:
            interval = getattr(statistics, name)
            wrong[name] += any(interval(differences[:num]).is_different for num in range(2, len(differences) + 1))
    print(
        f"{len(losses)} runs, 200 A/A comparisons, looks after each pair: wrong {wrong['sequential'] / 2} %"
    )
    print(f"with the interval of a single look: {wrong['fixed'] / 2} %")


if __name__ == "__main__":
    main()
