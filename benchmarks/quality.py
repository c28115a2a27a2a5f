"""Losses of trainings that send less, beside the exact one: the same model, text, batches and steps under each plan.

A byte-level decoder trains on the source of Python's standard library, of which every tenth file is held out. What
counts is its loss on these in the end, in percent of the exact run's of the same seed: plans then differ only in what
travels. Rates fall to zero, so that trainings end at rest and not at a point of chance. Any rounding sends a training
of this size elsewhere, by up to 1 % of a seed's loss: the mean over many seeds and its standard error count, beside
those of the exact training from first weights that are off by a thousandth. What a large model does, it does not say.

    python benchmarks/quality.py [--steps 300] [--seeds 0,1,2,3] [--dim 96] [--only "exact;int8"] [--json found.json]

Two ranks of one thread each; what takes the time is computing, and seconds are not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import weft
from weft.cli.console import table
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.state.gradients import data_parallel
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy

RANKS, BATCH, LENGTH = 2, 8, 64
MODEL = DecoderSpec(
    vocab_size=256, dim=96, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=256, max_seq_len=LENGTH, tied=True
)
#: The second trains exactly from first weights that are off by a thousandth: how far it ends from the first is chance.
NUDGED = "exact, nudged"
#: Steps that warm up, and that powersgd leaves exact.
WARM_UP, EXACT_STEPS = 10, 20
PLANS = {
    "exact": "dp_replicate=2",
    "exact, nudged": "dp_replicate=2",
    "int8": "dp_replicate=2 compress=int8",
    "gather=int8": "dp_shard=2 zero=3 gather=int8",
    "diff4": "dp_shard=2 zero=1 gather=diff4",
    "powersgd:4": "dp_replicate=2 compress=powersgd:4",
    "diloco:10, int8": "dp_replicate=2 sync=diloco:10 compress=int8",
    "diloco:50, int8": "dp_replicate=2 sync=diloco:50 compress=int8",
    "diloco:50/10, int8": "dp_replicate=2 sync=diloco:50/10 compress=int8",
    "average:50, top:0.05": "dp_replicate=2 sync=average:50 compress=top:0.05",
    "fp16": "dp_replicate=2 precision=fp16",
    "int4": "dp_replicate=2 compress=int4",
    "reduce=bf16": "dp_replicate=2 reduce=bf16",
}


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and bytes that are held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, file in enumerate(files):
        parts[number % 10 == 9].append(file.read_bytes())
    trained, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return trained, held_out


def batch_of(data: torch.Tensor, seed: int, number: int) -> dict[str, torch.Tensor]:
    """The global batch of a step: places are drawn by its number alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()]).long()
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:], "positions": positions}


def part_of(batch: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """What one rank reads of a batch."""
    return {name: one.tensor_split(RANKS)[rank] for name, one in batch.items()}


def train(
    plan_text: str, steps: int, seed: int, rank: int, nudge: float = 0.0, dim: int = MODEL.dim
) -> tuple[float, float]:
    """The loss on what is held out, and bytes that this rank sent in a step."""
    plan, ledger = Plan.parse(plan_text), Ledger()
    run = weft.Run(plan, build_mesh(plan, record=ledger.record), ledger, seed=seed)
    spec = dataclasses.replace(MODEL, dim=dim, ffn_dim=dim * MODEL.ffn_dim // MODEL.dim)
    made, generator = build_decoder(spec, seed=seed), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in made.parameters():
            param.mul_(1 + nudge * torch.randn(param.shape, generator=generator))
    model = run.parallelize(made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    step = run.train_step(model, optimizer, token_cross_entropy, forward=model_forward, max_grad_norm=1.0)
    data_parallel(model).coders.exact_steps = EXACT_STEPS
    trained, held_out = text()
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min((number + 1) / WARM_UP, 1.0 - number / steps)
        step(part_of(batch_of(trained, seed, number), rank))
    sent = sum(found.sent_bytes for _, _, found in ledger.rows()) / steps
    batches = [part_of(batch_of(held_out, 0, 10**6 + number), rank) for number in range(40)]
    return run.evaluate(model, batches, token_cross_entropy, forward=model_forward).loss, sent


def rows_of(found: dict[str, list[tuple[float, float]]]) -> list[tuple[str, ...]]:
    """The table: means over seeds, and how far a plan's loss is from the exact one's of the same seed."""
    rows: list[tuple[str, ...]] = [("", "held-out loss", "to exact", "of each seed", "bytes to exact")]
    for name, runs in found.items():
        shares = [100 * (run[0] / exact[0] - 1) for run, exact in zip(runs, found["exact"], strict=True)]
        each = " ".join(f"{share:+.2f}" for share in shares)
        loss = statistics.fmean(run[0] for run in runs)
        rows.append(
            (
                name,
                f"{loss:.4f}",
                f"{statistics.fmean(shares):+.2f}{error_of(shares)} %",
                each,
                f"{runs[0][1] / found['exact'][0][1]:.4f}",
            )
        )
    return rows


def error_of(shares: list[float]) -> str:
    """The standard error of their mean, as the table shows it; nothing of a single one."""
    return f" ± {statistics.stdev(shares) / len(shares) ** 0.5:.2f}" if len(shares) > 1 else ""


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    """What a rank does: all plans, one after another."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in map(int, options.seeds.split(",")):
        for name in options.only.split(";"):
            nudge = 1e-3 * (name == NUDGED)
            one = train(PLANS[name], options.steps, seed, rank, nudge, options.dim)
            found.setdefault(name, []).append(one)
            if rank == 0:
                loss, sent = found[name][-1]
                print(f"seed {seed}, {name}: held-out loss {loss:.5f}, {sent / 1e3:.1f} kB a rank and step", flush=True)
                if options.json:
                    Path(options.json).write_text(json.dumps(found))
    if rank == 0 and "exact" in found:
        print(f"{options.steps} steps of {BATCH} x {LENGTH} bytes, width {options.dim}, seeds {options.seeds}")
        print("\n".join(table(rows_of(found), right=(1, 2, 3, 4))), flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort while models are still alive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0", help="of first weights and batches, with commas between them")
    parser.add_argument("--dim", type=int, default=MODEL.dim, help="width of the model")
    parser.add_argument("--only", default=";".join(PLANS), help="names of the table, with ; between them")
    parser.add_argument("--json", default="", help="file to write the figures to")
    options = parser.parse_args()
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
    spawn(work, (port, options), nprocs=RANKS)


if __name__ == "__main__":
    main()
