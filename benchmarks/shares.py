"""Time steps of a 10 M decoder on ranks of unequal speed: equal parts and unequal shares, in turn.

    python benchmarks/shares.py                          2 ranks at 1 and 1/k for k = 2, 3, 4, and 4 ranks
    python benchmarks/shares.py --speeds 1 0.5           one set of speeds
    python benchmarks/shares.py --pipeline               4 stages of speeds 1, 1, 1/2, 1/4: every split is run
    python benchmarks/shares.py --annealing 200          annealing and the exact search on random clusters (no ranks)

A rank of speed v computes its part, and then sleeps until a block has taken n * c / v seconds for n samples, forward,
and twice that in backward. So slow ranks need no CPU. c is --pace times the seconds that this machine takes, or
--block-s on a machine that others use too.
Shares are measured like shares=auto: from the time of each rank's own passes with equal parts.
Printed for data ranks: samples/s with shares over the sum of the ranks' speeds (samples over seconds of own passes),
and over samples/s with equal parts. For the pipeline: the best split's step time over that of the chosen split.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.partitioning import fastest_shares, microbatch_samples
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.decoder import Decoder
from weft.monitor.step_times import Meter, own_seconds
from weft.parallel.parallelize import parallelize
from weft.planner.mixed.placement import GridProblem, GroupKind, all_splits, anneal, exact, split_of_one
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep
from weft.verify.rank_pool import RankPool

VOCAB = 512
SPEEDS = ([1.0, 1 / 2], [1.0, 1 / 3], [1.0, 1 / 4], [1.0, 1.0, 1 / 2, 1 / 4])


def spec_of(layers: int, width: int, seq_len: int) -> DecoderSpec:
    return DecoderSpec(
        family="llama", vocab_size=VOCAB, dim=width, num_layers=layers, num_heads=4, num_kv_heads=4,
        ffn_dim=width * 8 // 3 // 64 * 64, max_seq_len=seq_len,
    )  # fmt: skip


class Begin(torch.autograd.Function):
    """Identity whose backward notes the time: the backward of a block begins."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, clock: dict[str, float]) -> Tensor:
        ctx.clock = clock
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clock["backward"] = time.perf_counter()
        return grad, None


class End(torch.autograd.Function):
    """Identity whose backward sleeps until the backward of a block has taken its time."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, clock: dict[str, float], seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sleep_until(ctx.clock["backward"] + ctx.seconds)
        return grad, None, None


def sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.perf_counter()))


def slow_down(block: nn.Module, seconds: float) -> None:
    """Let a block take `seconds` for each sample in forward, and twice that in backward."""
    clocks: list[dict[str, float]] = []

    def before(module: nn.Module, args: Any) -> Any:
        clock = {"forward": time.perf_counter()}
        clocks.append(clock)
        return (End.apply(args[0], clock, 2 * seconds * args[0].shape[0]), *args[1:])

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        clock = clocks.pop()
        sleep_until(clock["forward"] + seconds * output.shape[0])
        return Begin.apply(output, clock)

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)


def decoder_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    labels = batch["labels"]
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def own_batch(options: argparse.Namespace, plan: Plan, rank: int, shares: tuple[int, ...]) -> Microbatches:
    """Return the rank's samples of a global batch."""
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCAB, (options.batch, options.seq_len), generator=draw)
    own = microbatch_samples(options.batch, plan.dp_size, plan.microbatches_per_step, rank, shares)
    rows = [{"input_ids": ids[part.start : part.stop], "labels": ids[part.start : part.stop]} for part in own]
    return Microbatches(rows, own, total=options.batch)


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input_ids"])


def build(options: argparse.Namespace, plan: Plan, speeds: list[float], block_s: float) -> tuple[Any, Any, Meter]:
    """Return the mesh, the step and its meter. Without `block_s`, blocks are not slowed down."""
    torch.manual_seed(0)
    ledger = Ledger()
    mesh, meter = build_mesh(plan, record=ledger.record), Meter(communication=ledger)
    model = Decoder(spec_of(options.layers, options.width, options.seq_len))
    place = mesh["pp"].rank if plan.pp > 1 else mesh.data.rank
    for block in model.blocks if block_s else ():
        slow_down(block, block_s / speeds[place])
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return mesh, TrainStep(model, optimizer, decoder_loss, mesh, forward=forward, meter=meter), meter


def block_seconds(options: argparse.Namespace, num_ranks: int) -> float:
    """Return the seconds of one block for one sample in forward, while all ranks compute."""
    mesh, step, meter = build(options, Plan.parse(f"dp_replicate={num_ranks}"), [1.0] * num_ranks, 0.0)
    batch, found = own_batch(options, mesh.plan, mesh.data.rank, ()), []
    for _ in range(4):
        meter.begin_step()
        step(batch)
        found.append(own_seconds(meter.end_step())["compute"])
    return statistics.median(found[1:]) / 3 / options.layers / (options.batch / num_ranks)


def data_ranks(options: argparse.Namespace, speeds: list[float], block_s: float) -> dict[str, Any]:
    """Time steps with equal parts and with measured shares in turn, on one rank."""
    mesh, step, meter = build(options, Plan.parse(f"dp_replicate={len(speeds)}"), speeds, block_s)
    rank = mesh.data.rank
    equal = own_batch(options, mesh.plan, rank, ())

    def timed(batch: Microbatches) -> tuple[float, float]:
        meter.begin_step()
        start = time.perf_counter()
        step(batch)
        return time.perf_counter() - start, own_seconds(meter.end_step())["compute"]

    timed(equal)
    own_s = statistics.median(timed(equal)[1] for _ in range(2))
    every = torch.zeros(len(speeds), dtype=torch.float64)
    every[rank] = options.batch / len(speeds) / own_s
    torch.distributed.all_reduce(every)
    shares = fastest_shares(options.batch, every.tolist())
    unequal = own_batch(options, mesh.plan, rank, shares)
    timed(unequal)
    found: dict[str, list[float]] = {"equal": [], "shares": []}
    for _ in range(options.rounds):
        found["equal"].append(timed(equal)[0])
        found["shares"].append(timed(unequal)[0])
    return {name: statistics.median(times) for name, times in found.items()} | {
        "division": shares, "speeds": every.tolist()
    }  # fmt: skip


def pipeline(options: argparse.Namespace, speeds: list[float], block_s: float, split: tuple[int, ...]) -> float:
    """Return the median seconds of a step under a split."""
    plan = Plan.parse(f"pp={len(speeds)} microbatches={options.batch} split={'+'.join(map(str, split))}")
    _, step, _ = build(options, plan, speeds, block_s)
    batch, found = own_batch(options, plan, 0, ()), []
    for _ in range(1 + options.rounds):
        start = time.perf_counter()
        step(batch)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def run_pipeline(options: argparse.Namespace) -> None:
    speeds = SPEEDS[-1]
    kinds = tuple(GroupKind(1 / speed) for speed in speeds)
    problem = GridProblem(kinds, (1,) * 4, 4, 1, options.layers, options.batch, options.batch)
    chosen = split_of_one(problem, tuple((kind,) for kind in range(4))).split
    with RankPool(4, timeout_s=600) as pool:
        block_s = options.block_s or options.pace * max(pool.run(block_seconds, options, 4))
        times = {}
        for row in all_splits(options.layers, 4):
            split = tuple(int(size) for size in row)
            times[split] = max(pool.run(pipeline, options, speeds, block_s, split))
            print(f"  split {'+'.join(map(str, split))}: {times[split]:.3f} s", flush=True)
        best = min(times, key=lambda one: times[one])
        # Time both again in turn, because the best of many single measurements is lucky.
        again: dict[tuple[int, ...], list[float]] = {chosen: [], best: []}
        for _ in range(3):
            for split in again:
                again[split].append(max(pool.run(pipeline, options, speeds, block_s, split)))
    ratio = min(1.0, statistics.median(again[best]) / statistics.median(again[chosen]))
    words = ["+".join(map(str, split)) for split in (chosen, best)]
    print(f"pipeline: chosen {words[0]}, best {words[1]} of {len(times)}; best over chosen {ratio:.3f}")


def run_annealing(number: int) -> None:
    within, worst = 0, 1.0
    for seed in range(number):
        draw = random.Random(seed)
        kinds = tuple(GroupKind(1 / draw.uniform(0.2, 1)) for _ in range(draw.randint(2, 4)))
        devices = [draw.randrange(len(kinds)) for _ in range(8)]
        counts = tuple(map(devices.count, range(len(kinds))))
        layers, samples, passes = draw.choice([12, 16, 24, 32]), draw.choice([32, 64, 128]), draw.choice([4, 8])
        problems = [
            GridProblem(kinds, counts, pp, dp, layers, samples, min(passes, samples // dp), 0.2, 0.7)
            for pp, dp in ((1, 8), (2, 4), (4, 2), (8, 1))
        ]
        ratio = min(anneal(one, seed).seconds for one in problems) / min(exact(one).seconds for one in problems)
        within, worst = within + (ratio <= 1.01), max(worst, ratio)
    print(f"annealing: within 1 % of the exact answer in {within} of {number} clusters, at worst {worst - 1:.1%} above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=float, nargs="+", help="relative speed of each rank")
    parser.add_argument("--pipeline", action="store_true", help="run every split of a pipeline of 4 stages")
    parser.add_argument("--annealing", type=int, default=0, metavar="N", help="compare N random clusters of 8 devices")
    parser.add_argument("--batch", type=int, default=24, help="samples of a step")
    parser.add_argument("--layers", type=int, default=12, help="blocks of the decoder")
    parser.add_argument("--width", type=int, default=256, help="width of the decoder")
    parser.add_argument("--seq-len", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=4, help="steps of each kind")
    parser.add_argument("--pace", type=float, default=1.5, help="seconds of a block over those of this machine")
    parser.add_argument("--block-s", type=float, default=0.0, help="seconds c of a block, instead of --pace")
    options = parser.parse_args()
    if options.annealing:
        run_annealing(options.annealing)
        return
    if options.pipeline:
        run_pipeline(options)
        return
    for speeds in [options.speeds] if options.speeds else SPEEDS:
        with RankPool(len(speeds), timeout_s=600) as pool:
            block_s = options.block_s or options.pace * max(pool.run(block_seconds, options, len(speeds)))
            found = pool.run(data_ranks, options, speeds, block_s)[0]
        total = sum(found["speeds"])
        shown = ", ".join(f"{speed:.3g}" for speed in speeds)
        print(
            f"speeds {shown}: shares {'+'.join(map(str, found['division'])) or 'equal'}; "
            f"{options.batch / found['shares'] / total:.3f} of the sum of the ranks' speeds; "
            f"{found['equal'] / found['shares']:.2f} x equal parts "
            f"(ideal {sum(speeds) / len(speeds) / min(speeds):.2f}); "
            f"{found['equal']:.2f} s and {found['shares']:.2f} s a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
