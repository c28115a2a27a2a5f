"""What Weft's loop costs over a hand-written one: same model, data, optimizer, interleaved in one run.

    python benchmarks/overhead.py                       one process
    python benchmarks/overhead.py --ranks 2             beside DistributedDataParallel
    python benchmarks/overhead.py --device cuda --model gpt2 --precision bf16

Weft's side is the whole loop of `weft train`: prefetching loader, TrainStep, meter, event log, progress lines. The
hand-written side samples windows from one memory-mapped file of tokens, and does forward, mean cross-entropy,
backward, clip_grad_norm_, fused AdamW, zero_grad(set_to_none). Prints medians and the ratio of medians, and the
median of the ratios of neighbouring pairs, which drifts of the machine's speed do not touch.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from weft.config.machine_sections import LaunchSection
from weft.config.plan import Plan
from weft.config.run_config import DataSection, ModelSection, RunConfig, TrainSection
from weft.config.shapes.model_spec import resolve_decoder
from weft.data.store.prepare import prepare_data
from weft.models.registry import build_decoder
from weft.monitor.live import make_display
from weft.train.batches.data_share import Share
from weft.train.engine import EngineJob
from weft.train.engines.torch_engine import TorchEngine
from weft.train.folder import RunFolder
from weft.train.loop.observers import RunRecorder
from weft.train.loop.trainer import Trainer
from weft.train.tasks.decoder import DecoderTask
from weft.verify.rank_pool import RankPool


class _Prepared(DecoderTask):
    """The decoder on data that is prepared already, without a run folder."""

    def __init__(self, config: RunConfig, data: Any):
        self.config = config
        self.text.prepared = data

    def open(self, folder: RunFolder) -> None:
        pass

    def eval_batches(self, share: Share) -> None:
        return None


def weft_steps(config: RunConfig, data: Any, folder: Path) -> Any:
    """A generator that does one step of Weft's loop at each `next`."""
    task, run = _Prepared(config, data), RunFolder(folder)
    engine = TorchEngine(EngineJob(run, config, task, Plan.parse(config.plan), None, print))
    engine.build()
    display = make_display(io.StringIO(), total_steps=config.train.steps, every=config.log.every, is_tty=False)
    hooks = [RunRecorder(run, task, display, {})] if engine.rank == 0 else []
    trainer = Trainer(task=task, engine=engine, hooks=hooks)
    with engine.batches.iterate(0, config.train.steps) as steps:
        for batches in steps:
            trainer._train_step(batches)
            yield trainer.progress.step


def plain_steps(config: RunConfig, data: Any, options: argparse.Namespace, ranks: int) -> Any:
    """A generator that does one step of the loop that people write by hand at each `next`."""
    tokens = token_file(data)
    model: nn.Module = make_model(config, data).to(options.device)
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": section.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=section.lr,
        betas=section.betas,
        fused=True,
    )
    seq_len, rows = config.train.seq_len, config.train.global_batch // ranks
    draw = np.random.default_rng(rank)
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
    while True:
        starts = draw.integers(0, len(tokens) - seq_len - 1, rows)
        window = torch.from_numpy(np.stack([tokens[s : s + seq_len + 1] for s in starts]).astype(np.int64))
        window = window.to(options.device, non_blocking=True)
        with torch.autocast(torch.device(options.device).type, dtype=autocast, enabled=autocast is not None):
            logits = wrapped(window[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def make_model(config: RunConfig, data: Any) -> nn.Module:
    return build_decoder(resolve_decoder(config.model, data.vocab_size), seed=config.seed)


def token_file(data: Any) -> np.ndarray:
    """The largest file of tokens that Weft prepared: both sides train on the same text."""
    files = sorted(data.train[0].folder.rglob("*.bin"), key=lambda file: file.stat().st_size)
    return np.memmap(files[-1], dtype=np.uint16, mode="r")


def measure(options: argparse.Namespace, ranks: int = 1) -> dict[str, list[float]]:
    """Seconds of each step, both loops in turn; the order within a pair alternates."""
    torch.set_num_threads(options.threads)
    config = RunConfig(
        plan=f"dp_replicate={ranks} precision={options.precision}",
        model=ModelSection(name=options.model),
        data=DataSection(packing="concat", borders=False),
        train=TrainSection(steps=options.steps + 3, global_batch=options.batch, seq_len=options.seq_len),
        launch=LaunchSection(device=options.device),
    )
    data = prepare_data(config)
    seconds: dict[str, list[float]] = {"weft": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            "weft": weft_steps(config, data, Path(folder)),
            "plain": plain_steps(config, data, options, ranks),
        }
        for index in range(options.steps + 2):
            order = ("weft", "plain") if index % 2 else ("plain", "weft")
            for name in order:
                if ranks > 1:
                    torch.distributed.barrier()
                start = time.perf_counter()
                next(loops[name])
                if options.device == "cuda":
                    torch.cuda.synchronize()
                if index >= 2:
                    seconds[name].append(time.perf_counter() - start)
        loops["weft"].close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.ranks == 1:
        seconds = measure(options)
    else:
        with RankPool(options.ranks, timeout_s=3600) as pool:
            seconds = pool.run(measure, options, options.ranks)[0]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    pairs = [a / b for a, b in zip(seconds["weft"], seconds["plain"], strict=True)]
    print(
        json.dumps(
            {
                "model": options.model,
                "ranks": options.ranks,
                "precision": options.precision,
                "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
                "steps": options.steps,
                "weft_ms": round(medians["weft"] * 1e3, 2),
                "plain_ms": round(medians["plain"] * 1e3, 2),
                "ratio_of_medians": round(medians["weft"] / medians["plain"], 4),
                "median_of_pair_ratios": round(statistics.median(pairs), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
