"""Steps and quality of a sweep with halving, next to the same trials in full and to a grid.

    python benchmarks/sweep.py [--steps 160] [--workers 2] [--folder FOLDER]

Trains a small decoder on the source code of Python's standard library. Prints the share of steps that halving trains,
the loss of its best trial over the best of the same 16 trials in full, and over the best of a grid of learning rates.
Takes some minutes. With --folder, the same command continues.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import weft
from weft.experiments.sweep import SweepResult, run_sweep, sweep_folder
from weft.experiments.sweep_config import read_sweep

CONFIG = """
plan = "dp_replicate=1"
model = {dim = 32, num_layers = 1, num_heads = 2, num_kv_heads = 2, ffn_dim = 64}
tokenizer = {kind = "bytes"}
train = {steps = STEPS, seq_len = 64, global_batch = 8}
eval = {every = 0, batches = 8}
checkpoint = {every = 0, keep_best = false}
"""
SEARCH = """
config = "base.toml"
trials = 16
sampler = "random"
seed = 7
[search]
"optimizer.lr" = {low = 1e-5, high = 1e-1, log = true}
"optimizer.weight_decay" = [0.0, 0.1]
"""
GRID = """
config = "base.toml"
trials = 9
sampler = "grid"
[search]
"optimizer.lr" = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
"""


def sweep(home: Path, name: str, text: str, workers: int) -> SweepResult:
    """Run a sweep in a folder, and return its result."""
    file, folder = home / f"{name}.toml", home / name
    file.write_text(text)
    config = read_sweep(file)
    with weft.pool(f"local:{workers}") as pool, sweep_folder(config, folder):
        return run_sweep(config, folder, pool, lambda line: print(f"{name}: {line}", flush=True))


def main() -> None:
    """Run three sweeps, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = options.folder or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        (home / "base.toml").write_text(CONFIG.replace("STEPS", str(options.steps)))
        halved = sweep(home, "halved", SEARCH.replace("[search]", "[halving]\n[search]"), options.workers)
        full = sweep(home, "full", SEARCH, options.workers)
        grid = sweep(home, "grid", GRID, options.workers)
    best = {name: one.ranked()[0].value for name, one in (("halved", halved), ("full", full), ("grid", grid))}
    print(f"steps, halving over all in full: {halved.num_steps / full.num_steps:.3f}")
    print(f"best loss, halving over all in full: {best['halved'] / best['full']:.4f}")
    print(f"best loss, halving over the grid's: {best['halved'] / best['grid']:.4f}")


if __name__ == "__main__":
    main()
