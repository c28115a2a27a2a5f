"""`weft ab` on real runs of a small decoder: how much pairing saves, and how often it is wrong.

python benchmarks/ab.py pairs --pairs 8          variance of paired over unpaired differences of two settings
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
from weft.experiments.ab import PairedComparison, Runner
from weft.experiments.run_log import Measure, RunLog

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
    parser.add_argument("--settings", nargs=2, default=["optimizer.lr=1e-3", "optimizer.lr=2e-3"])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("build/ab"), help="finished runs in it are used again")
    args = parser.parse_args()
    if args.what == "pairs":
        name = "-".join(args.settings).replace("optimizer.", "")
        pairs(args.folder / name, args.pairs, args.settings)
    else:
        noise(args.folder / "noise", args.runs)


def pairs(folder: Path, number: int, settings: list[str]) -> None:
    """Compare two settings, and print the variance ratio for the losses of evaluation and training."""
    a, b = (parse_config(CONFIG, "small.toml", [one]).config for one in settings)
    folder.mkdir(parents=True, exist_ok=True)
    comparison = PairedComparison(a, b, Measure.of("eval.loss"), "tokens", number, None, other_seeds=False)
    runner = Runner(comparison, folder, False, lambda line: print(line, file=sys.stderr))
    list(runner.results())
    for measure in (Measure.of("eval.loss"), Measure.of("loss")):
        values: list[list[float]] = []
        for side in ("a", "b"):
            logs = [RunLog.read(folder / runner.run_name(pair, side)) for pair in range(number)]
            values.append([log.value(measure, "tokens", log.total("tokens")) for log in logs])
        estimate = statistics.fixed([right - left for left, right in zip(*values, strict=True)])
        print(
            f"{settings[0]} / {settings[1]}, {measure.name}: B - A = {estimate.mean:+.4f} ± {estimate.half_width:.4f} "
            f"nats, {number} pairs; variance over that of unpaired runs {statistics.variance_ratio(*values):.3f}"
        )


def noise(folder: Path, number: int) -> None:
    """Train one config with `number` seeds, and count the wrong verdicts of 200 comparisons of it with itself."""
    config = parse_config(CONFIG, "small.toml").config
    folder.mkdir(parents=True, exist_ok=True)
    measure = Measure.of("eval.loss")
    comparison = PairedComparison(config, config, measure, "tokens", number // 2, 0.001, other_seeds=True)
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
    print(f"{len(losses)} runs, 200 A/A comparisons, looks after each pair: wrong {wrong['sequential'] / 2} %")
    print(f"with the interval of a single look: {wrong['fixed'] / 2} %")


if __name__ == "__main__":
    main()
