"""Data parallelism beside its rivals: the same model, batch and optimizer, all interleaved in one process group.

    python benchmarks/data_parallel.py --ranks 2 --size 10m                      DDP, FSDP2, ... and Weft's stages
    python benchmarks/data_parallel.py --ranks 4 --size 60m --accumulation 4
    python benchmarks/data_parallel.py --variants ddp,weft-zero0,deepspeed-1     any choice; ratios are to the first
    python benchmarks/data_parallel.py --variants all --at-once 7                every rival, in groups that fit in RAM
    python benchmarks/data_parallel.py --mode memory                             peak memory, one variant at a time

Every variant does forward, mean cross-entropy, backward, global-norm clipping and fused AdamW on the same shapes. The
order within a round rotates; with --at-once N the variants run in groups of N, the first one in each. Prints each
variant's median step and the median of its ratios to the first variant, round by round, which drifts of the machine's
speed do not touch; and the CPU time of a rank (mean over ranks, median over steps), which still tells where a machine
is busy with other work. accelerate, deepspeed: pip install -e ".[bench]".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import ModelSpec
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.rank_pool import RankPool

SIZES = {
    "2m": DecoderSpec(
        vocab_size=2048, dim=128, num_layers=6, num_heads=4, num_kv_heads=4, ffn_dim=384, max_seq_len=256, tied=True
    ),
    "10m": DecoderSpec(
        vocab_size=4096, dim=320, num_layers=7, num_heads=5, num_kv_heads=5, ffn_dim=864, max_seq_len=256, tied=True
    ),
    "60m": DecoderSpec(
        vocab_size=8192, dim=640, num_layers=11, num_heads=10, num_kv_heads=10, ffn_dim=1712, max_seq_len=256, tied=True
    ),
}
LR, CLIP = 3e-4, 1.0
DEFAULT_VARIANTS = "ddp,ddp-view,ddp-zero1,fsdp2-keep,fsdp2-reshard,weft-zero0,weft-zero1,weft-zero2,weft-zero3"
#: In an order whose groups of seven hold stages 0 and 1 beside DDP's ways, and stage 3 beside FSDP2 and DeepSpeed.
ALL_VARIANTS = (
    "ddp,ddp-view,accelerate,ddp-zero1,weft-zero0,weft-zero1,weft-zero2,"
    "fsdp2-keep,fsdp2-reshard,deepspeed-1,deepspeed-2,deepspeed-3,weft-zero3"
)

#: One optimizer step on one rank: takes the number of the step.
StepFn = Callable[[int], None]


def local_batch(options: argparse.Namespace, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's ids and labels, (sequences, tokens) each, for all microbatches of a step."""
    generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
    rows = options.rows * options.accumulation
    ids = torch.randint(SIZES[options.size].vocab_size, (rows, options.seq_len + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1, fused=True)


def torch_step(model: Any, optimizer: Any, options: argparse.Namespace, no_sync: Any = None) -> StepFn:
    """The hand-written loop around a wrapped model; no_sync(last) surrounds each microbatch."""

    def step(index: int) -> None:
        ids, labels = local_batch(options, index)
        num_micro = options.accumulation
        for micro, (x, y) in enumerate(zip(ids.chunk(num_micro), labels.chunk(num_micro), strict=True)):
            last = micro == num_micro - 1
            with no_sync(last) if no_sync else contextlib.nullcontext():
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / num_micro
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_floor(options: argparse.Namespace) -> StepFn:
    """Compute only, no exchange: what no data parallelism can beat without a cheaper optimizer step."""
    model = build_decoder(SIZES[options.size])
    return torch_step(model, adamw(model.parameters()), options)


def make_ddp(options: argparse.Namespace, variant: str) -> StepFn:
    from torch.nn.parallel import DistributedDataParallel

    model = build_decoder(SIZES[options.size])
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=variant != "ddp")
    optimizer: Any = None
    if variant == "ddp-zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, weight_decay=0.1, fused=True
        )
    return torch_step(
        wrapped,
        optimizer or adamw(model.parameters()),
        options,
        lambda last: contextlib.nullcontext() if last else wrapped.no_sync(),
    )


def make_fsdp2(options: argparse.Namespace, variant: str) -> StepFn:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = build_decoder(SIZES[options.size])
    settings = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": variant == "fsdp2-reshard",
    }
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)

    @contextlib.contextmanager
    def no_sync(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        yield

    return torch_step(model, adamw(model.parameters()), options, no_sync)


def look_launched() -> None:
    """The variables of a launcher, which DeepSpeed and Accelerate want where the process group is there, too.

    Without them Accelerate takes each rank for a run of its own and exchanges nothing, without a word. Its threads too
    are those of the other variants.
    """
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(dist.get_rank()),
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }


def make_accelerate(options: argparse.Namespace) -> StepFn:
    look_launched()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != dist.get_world_size():
        raise SystemExit(f"accelerate: it sees {accelerator.num_processes} ranks of {dist.get_world_size()}")
    model = build_decoder(SIZES[options.size])
    wrapped, optimizer = accelerator.prepare(model, adamw(model.parameters()))

    def step(index: int) -> None:
        ids, labels = local_batch(options, index)
        num_micro = options.accumulation
        for micro, (x, y) in enumerate(zip(ids.chunk(num_micro), labels.chunk(num_micro), strict=True)):
            last = micro == num_micro - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                accelerator.backward(F.cross_entropy(wrapped(x).flatten(0, 1), y.flatten()) / num_micro)
        accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_deepspeed(options: argparse.Namespace, variant: str) -> StepFn:
    look_launched()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    model = build_decoder(SIZES[options.size])
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": options.rows,
            "gradient_accumulation_steps": options.accumulation,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": int(variant[-1])},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step(index: int) -> None:
        ids, labels = local_batch(options, index)
        num_micro = options.accumulation
        for x, y in zip(ids.chunk(num_micro), labels.chunk(num_micro), strict=True):
            engine.backward(F.cross_entropy(engine(x).flatten(0, 1), y.flatten()))
            engine.step()

    return step


def make_weft(options: argparse.Namespace, variant: str) -> StepFn:
    """variant: weft-zeroK, or weft-zero3-WORD for a value of the plan's reshard."""
    stage, _, reshard = variant.removeprefix("weft-zero").partition("-")
    axis = "dp_replicate" if stage == "0" else "dp_shard"
    text = f"{axis}={dist.get_world_size()} zero={stage} accumulation={options.accumulation}"
    mesh = build_mesh(Plan.parse(f"{text} reshard={reshard}" if reshard else text))
    model = build_decoder(SIZES[options.size])
    parallelize(model, mesh)
    step = TrainStep(
        model, adamw(model.parameters()), token_cross_entropy, mesh, forward=model_forward, max_grad_norm=CLIP
    )
    positions = torch.arange(options.seq_len).repeat(options.rows, 1)

    def one(index: int) -> None:
        ids, labels = local_batch(options, index)
        num_micro = options.accumulation
        step(
            Microbatches(
                {"input_ids": x, "labels": y, "positions": positions}
                for x, y in zip(ids.chunk(num_micro), labels.chunk(num_micro), strict=True)
            )
        )

    return one


def make(variant: str, options: argparse.Namespace) -> StepFn:
    if variant == "floor":
        return make_floor(options)
    if variant == "accelerate":
        return make_accelerate(options)
    for prefix, maker in (
        ("weft", make_weft),
        ("ddp", make_ddp),
        ("fsdp2", make_fsdp2),
        ("deepspeed", make_deepspeed),
    ):
        if variant.startswith(prefix):
            return maker(options, variant)
    raise SystemExit(f"unknown variant {variant!r}")


def interleave(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Seconds and this rank's CPU seconds of each step of each variant, round by round."""
    variants = options.variants
    steps = {variant: make(variant, options) for variant in variants}
    seconds: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
    begun = torch.tensor([time.perf_counter()], dtype=torch.float64)
    for index in range(options.steps + options.warmup):
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        dist.broadcast(now, 0)  # one clock decides for all ranks
        if index == 0:
            begun = now
        elif index > options.warmup and float(now - begun) > options.seconds:
            break
        shift = index % len(variants)
        for variant in variants[shift:] + variants[:shift]:
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            steps[variant](index)
            dist.barrier()
            if index >= options.warmup:
                seconds[variant].append((time.perf_counter() - start, time.process_time() - cpu))
    return seconds


def peak_memory(options: argparse.Namespace) -> int:
    """Growth of this rank's peak resident memory over what the interpreter and torch take, in bytes."""
    # A small step first: libraries, thread pools and the communicator are not the variant's.
    F.cross_entropy(nn.Linear(8, 8)(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
    dist.all_reduce(torch.zeros(1))
    before = _status("VmRSS")
    step = make(*options.variants, options)
    for index in range(options.warmup + 2):
        step(index)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="10m", choices=list(SIZES))
    parser.add_argument("--rows", type=int, default=4, help="sequences of one microbatch on one rank")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round of a group after so many")
    parser.add_argument("--variants", default=DEFAULT_VARIANTS, help="a list with commas, or all")
    parser.add_argument("--at-once", type=int, default=99, help="variants in memory at the same time")
    parser.add_argument("--mode", default="time", choices=["time", "memory"])
    options = parser.parse_args()
    if options.at_once < 2:
        parser.error(f"--at-once {options.at_once}: the first variant and one beside it at least. Use e.g. 7.")
    variants = (ALL_VARIANTS if options.variants == "all" else options.variants).split(",")
    head = {
        "ranks": options.ranks,
        "params": ModelSpec.of_decoder(SIZES[options.size]).num_params,
        "tokens_per_rank": options.rows * options.seq_len * options.accumulation,
        "accumulation": options.accumulation,
    }
    print(json.dumps(head), flush=True)
    if options.mode == "memory":
        for variant in variants:
            print(json.dumps({"variant": variant, "peak_mb": memory_of(variant, options)}), flush=True)
        return
    others, size = variants[1:], options.at_once - 1
    for start in range(0, max(1, len(others)), size):
        options.variants = [variants[0], *others[start : start + size]]
        with RankPool(options.ranks, timeout_s=3600) as pool:
            print_times(pool.run(interleave, options), options.variants)


def memory_of(variant: str, options: argparse.Namespace) -> int:
    """Peak memory of the rank that has most, MB, in processes of its own."""
    alone = argparse.Namespace(**{**vars(options), "variants": [variant]})
    with RankPool(options.ranks, timeout_s=900) as pool:
        return round(max(pool.run(peak_memory, alone)) / 1e6)


def print_times(found: list[dict[str, list[tuple[float, float]]]], variants: list[str]) -> None:
    """found: of each rank, what interleave returned."""
    base = [wall for wall, _ in found[0][variants[0]]]
    for variant, values in found[0].items():
        ratios = [ours / theirs for (ours, _), theirs in zip(values, base, strict=True)]
        cpu = [statistics.mean(cpu for _, cpu in ranks) for ranks in zip(*(one[variant] for one in found), strict=True)]
        row = {
            "variant": variant,
            "steps": len(values),
            "median_ms": round(statistics.median(wall for wall, _ in values) * 1e3, 1),
            "ratio": round(statistics.median(ratios), 3),
            "cpu_ms": round(statistics.median(cpu) * 1e3, 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
