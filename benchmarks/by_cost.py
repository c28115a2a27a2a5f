"""Samples a second of batches by cost, beside fixed batches and batches grouped by length: the same model and samples.

    python benchmarks/by_cost.py FOLDER [--samples 1500] [--rounds 2]

FOLDER: Debian's tuxpaint-stamps-default, unpacked: pictures with captions and spoken captions in many languages.
omni-tiny learns to write the caption after picture and recording, in steps of 64, on one thread; the clock is that of
the processor, so other work on the machine counts less, and the kinds take turns step by step. `fixed` cuts a step
into 4 microbatches of 16 as drawn, filled up to the longest; `grouped` sorts 50 batches of 16 by length first, as the
sampler of transformers does; `cost` is data.batching=cost. Samples are decoded before the clock runs. Of four ranks
each computes its own microbatches, one rank after another, and the slowest counts; what ranks exchange is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.data.order.stream import permutation
from weft.optim.build import build_optimizer
from weft.parallel.parallelize import parallelize
from weft.train.batches.batching_by_cost import costs_of
from weft.train.batches.microbatches import Microbatches
from weft.train.preparation import prepare_run
from weft.train.step.train_step import TrainStep
from weft.train.tasks.registry import find_task

STEP, ROWS, MEGABATCH = 64, 16, 50


def triples(folder: Path, most: int) -> list[dict[str, Any]]:
    """Records of picture, spoken caption and caption in the same language, drawn from all."""
    found: list[dict[str, Any]] = []
    for said in sorted(folder.rglob("*_desc_*.ogg")):
        name, _, language = said.stem.rpartition("_desc_")
        picture, words = said.with_name(f"{name}.png"), said.with_name(f"{name}.txt")
        if not picture.is_file() or not words.is_file():
            continue
        for line in words.read_text("utf-8", "replace").splitlines():
            if line.startswith(f"{language}.utf8="):
                text = line.partition("=")[2].strip()
                found.append({"text": f"<image><audio>{text}", "files": (picture, said)})
    order = permutation(len(found), "by_cost", 0).take(np.arange(len(found)))
    return [found[index] for index in order[:most].tolist()]


def task_of(folder: Path, records: list[dict[str, Any]]) -> Any:
    """The task, its data prepared."""
    path = folder / "x.tar"
    with tarfile.open(path, "w") as tar:
        for number, record in enumerate(records):
            (folder / "text.json").write_text(json.dumps({"text": record["text"]}))
            for file in (*record["files"], folder / "text.json"):
                tar.add(file, f"{number:05d}{file.suffix}")
    options = {"data": str(path), "model": "omni-tiny", "seconds": 30.0, "text_len": 400, "holdout": 0.02}
    made = RunConfig.model_validate(
        {
            "task": {"name": "caption", "options": options},
            "run": {"name": "by_cost", "dir": str(folder / "runs")},
            "train": {"steps": 1, "global_batch": STEP},
            "data": {"cache_dir": str(folder / "cache"), "workers": 0, "batching": "cost"},
            "launch": {"device": "cpu"},
        }
    )
    prepare_run(made, 1)
    task: Any = find_task(made)
    task.prepare(_Nowhere(folder), None)
    return task


class _Nowhere:
    """A run folder without a run."""

    def __init__(self, path: Path):
        self.path = path / "nowhere"


def steps_of(task: Any, kind: str, costs: Any, lengths: np.ndarray, seed: int) -> list[list[list[int]]]:
    """Microbatches of all steps of an epoch on one rank, as indices of samples."""
    drawn = np.random.default_rng(seed).permutation(len(lengths))
    drawn = drawn[: len(drawn) // STEP * STEP]
    if kind == "cost":
        found = [drawn[first : first + STEP] for first in range(0, len(drawn), STEP)]
        return [[one[list(run)].tolist() for run in costs.divide(one, 1)[0] if run] for one in found]
    if kind == "grouped":
        size = MEGABATCH * ROWS
        parts = [drawn[first : first + size] for first in range(0, len(drawn), size)]
        drawn = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    batches = drawn.reshape(-1, ROWS)
    if kind == "grouped":
        batches = batches[np.random.default_rng(seed).permutation(len(batches))]
    return [batches[first : first + STEP // ROWS].tolist() for first in range(0, len(batches), STEP // ROWS)]


def ranks_of(kind: str, step: list[list[int]], costs: Any, num_ranks: int) -> list[list[list[int]]]:
    """Microbatches of each rank: by cost as Weft divides the step, else microbatches in turn, as drawn."""
    if kind == "cost":
        indices = np.concatenate([np.asarray(batch) for batch in step])
        return [[indices[list(run)].tolist() for run in rank if run] for rank in costs.divide(indices, num_ranks)]
    return [step[rank::num_ranks] for rank in range(num_ranks)]


class Clock:
    """Seconds of the processor that a step takes on its slowest rank. The ranks compute one after another."""

    def __init__(self, task: Any, decoded: Sequence[Any]):
        plan = Plan.parse(f"accumulation={STEP // ROWS}")
        self.task, self.decoded = task, decoded
        model = parallelize(task.initial_model(plan), build_mesh(plan))
        optimizer = build_optimizer(model.named_parameters(), task.config.optimizer)
        self.step = TrainStep(model, optimizer, task.loss, build_mesh(plan), forward=task.forward)

    def slowest(self, ranks: Sequence[Sequence[Sequence[int]]]) -> float:
        """Return seconds of a step whose ranks have these microbatches."""
        return max(map(self._seconds, ranks))

    def _seconds(self, own: Sequence[Sequence[int]]) -> float:
        batches = [self.task.collate([self.decoded[index] for index in run]) for run in own]
        start = time.process_time()
        self.step(Microbatches(batches, any_number=True))
        return time.process_time() - start


def main() -> None:
    """Print samples a second of each, on one rank and on several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="tuxpaint-stamps-default, unpacked")
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=2, help="epochs, each in another order")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        task = task_of(Path(made), triples(options.folder, options.samples))
        samples = task.samples("train")
        decoded = [samples[index] for index in range(len(samples))]
        lengths, costs = np.asarray(task.lengths()), costs_of(task, ROWS, STEP // ROWS)
        clock = Clock(task, decoded)
        kinds = ("fixed", "grouped", "cost")
        print(f"{len(samples)} samples of {lengths.min()} to {lengths.max()} tokens, steps of {STEP}")
        for num_ranks in (1, options.ranks):
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(options.rounds):
                seconds = dict.fromkeys(kinds, 0.0)
                epochs = {kind: steps_of(task, kind, costs, lengths, turn) for kind in kinds}
                for number in range(len(epochs["fixed"])):  # whole epochs: steps of grouped batches differ widely
                    for kind in kinds:
                        seconds[kind] += clock.slowest(ranks_of(kind, epochs[kind][number], costs, num_ranks))
                for kind in kinds:
                    rates[kind].append(len(epochs["fixed"]) * STEP / seconds[kind])
            found = {kind: statistics.median(rates[kind]) for kind in kinds}
            print(f"{num_ranks} rank{'s' * (num_ranks > 1)}")
            for kind in kinds:
                print(f"  {kind:8} {found[kind]:7.1f} samples/s, cost is {found['cost'] / found[kind]:.2f} of it")


if __name__ == "__main__":
    main()
