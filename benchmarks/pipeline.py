"""Pipelines: the bubble of each schedule with blocks that sleep, and step times beside torch.distributed.pipelining's.

    python benchmarks/pipeline.py bubble                       p=4, m=4, 8, 16: measured beside the formula
    python benchmarks/pipeline.py bubble --pass-ms 60 --schedules zb_h1 zb_v
    python benchmarks/pipeline.py steps --ranks 2 4            a small decoder, both runtimes in turn on the same ranks

`bubble` prints the step beside the formula with the length that passes were told to take; and the bubble, which is what
the rank that waits least waits, beside the formula with the lengths that they took: a pass that sleeps 50 ms takes a
millisecond more. It needs no idle machine, for a sleeping rank takes no CPU. `steps` prints the median of each, their
ratio, and the ratio of the processor time of all ranks. The two take turns. On a busy machine read the processor time:
other programs change it least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft.comm.mesh import build_mesh
from weft.config.pipeline_schedule import build_schedule
from weft.config.plan import SCHEDULES, Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.monitor.step_times import Meter
from weft.parallel.parallelize import parallelize
from weft.parallel.pipeline.runtime import Pipeline, StepWork, pipeline_of
from weft.parallel.state.gradients import data_parallel
from weft.planner.cost.pipeline import Durations, simulate
from weft.verify.rank_pool import RankPool

#: torch's class of the same schedule.
THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_interleaved": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


def virtual_stages(name: str) -> int:
    return 1 if name in ("gpipe", "1f1b", "zb_h1") else 2


def least_microbatches(name: str, num_ranks: int, wanted: int) -> int:
    return max(wanted, 2 * num_ranks) if name == "dualpipe_v" else wanted


class _Sleeps(torch.autograd.Function):
    """Sleeps in forward, for the input's gradient, and for the weight's, which may wait."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, block: Any) -> torch.Tensor:
        ctx.block = block
        block.clock.sleep()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        block = ctx.block
        block.clock.sleep()
        product = _SleepingProduct(block.weight, block.clock)
        if block.held.is_open:
            block.held.store(product)
            return grads[0], None, None
        return grads[0], product.multiply(), None


class _SleepingProduct:
    def __init__(self, weight: nn.Parameter, clock: Clock):
        self.weight, self._clock = weight, clock

    def multiply(self) -> torch.Tensor:
        self._clock.sleep()
        return torch.zeros_like(self.weight)


class Clock:
    """Sleeps for one pass."""

    def __init__(self, pass_s: float):
        self.pass_s = pass_s

    def sleep(self) -> None:
        time.sleep(self.pass_s)


class SleepingBlock(nn.Module):
    """A layer whose three passes take the same, known time and no CPU."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.weight, self.clock, self.held = nn.Parameter(torch.ones(2)), clock, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleeps.apply(x, self.weight, self)  # pyright: ignore[reportReturnType]


class SleepingModel(nn.Module):
    def __init__(self, num_blocks: int, clock: Clock):
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock(clock) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sum_of(output: torch.Tensor, batch: torch.Tensor, microbatch: int) -> tuple[torch.Tensor, int]:
    return output.sum(), len(batch)


class SleptStep(NamedTuple):
    """took_s: until the slowest rank was done. waited_s: of it, for other ranks. actions: (kind, seconds)."""

    took_s: float
    waited_s: float
    actions: list[tuple[str, float]]


def sleeping_step(plan_text: str, pass_s: float, repeats: int) -> list[SleptStep]:
    """Steps of a pipeline that sleeps, on this rank. pass_s: of a whole rank."""
    mesh = build_mesh(Plan.parse(plan_text))
    clock = Clock(0.001)
    model = SleepingModel(mesh.plan.pp * mesh.plan.virtual_stages, clock)
    parallelize(model, mesh)
    pipeline = pipeline_of(model)
    assert pipeline is not None
    for block in model.modules():
        if isinstance(block, SleepingBlock):
            block.held = pipeline._held
    batches = [torch.ones(1, 2) for _ in range(mesh.plan.microbatches)]

    def step() -> None:
        one_step(model, pipeline, batches, lambda model, x: model(x), sum_of)

    timed(step, 0)  # shapes are told in the first
    clock.pass_s = pass_s / mesh.plan.virtual_stages
    found, waits = [], Waits(pipeline)
    for _ in range(repeats):
        waits.seconds = 0.0
        dist.barrier()
        start = time.perf_counter()
        step()
        ended = time.perf_counter()
        dist.barrier()
        took = time.perf_counter() - start
        waited = waits.seconds + start + took - ended
        found.append(SleptStep(took, waited, [(one.kind, end - start) for one, start, end in pipeline.events]))
    return found


class Waits:
    """Adds up what a pipeline waits for messages."""

    def __init__(self, pipeline: Pipeline):
        self.seconds = 0.0
        self._take = pipeline._boundary.take
        pipeline._boundary.take = self.take  # pyright: ignore[reportAttributeAccessIssue]

    def take(self, *which: Any) -> torch.Tensor:
        start = time.perf_counter()
        try:
            return self._take(*which)
        finally:
            self.seconds += time.perf_counter() - start


def one_step(model: nn.Module, pipeline: Pipeline, batches: list[Any], forward: Any, loss: Any) -> None:
    engine = data_parallel(model)
    engine.begin_step()
    totals = torch.zeros(3, dtype=torch.float64)
    with engine.microbatch(last=True):
        pipeline.step(StepWork(batches, forward, forward, loss, 1.0, totals), Meter())


class Seconds(NamedTuple):
    """Time of a step, begun together and ended by the slowest rank, and processor time of this rank."""

    wall: float
    processor: float


def timed(step: Callable[[], None], repeats: int) -> list[Seconds]:
    """Time each repeat. The first is left out."""
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        step()
        used = time.process_time() - used
        dist.barrier()
        found.append(Seconds(time.perf_counter() - start, used))
    return found[1:]


def bubbles(options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    pass_s, p = options.pass_ms / 1000, options.ranks[0]
    print(f"p={p}, F = B = W = {options.pass_ms} ms on a rank; seconds")
    print(f"{'schedule':16} {'m':>3} {'step':>8} {'formula':>8} {'off':>7} {'bubble':>8} {'formula':>8} {'off':>7}")
    with RankPool(p, timeout_s=300) as pool:
        for name in options.schedules:
            for wanted in options.microbatches:
                m, v = least_microbatches(name, p, wanted), virtual_stages(name)
                plan = f"pp={p} microbatches={m} virtual_stages={v} schedule={name}"
                per_rank = pool.run(sleeping_step, plan, pass_s, options.repeats)
                one = pass_s / v
                schedule = build_schedule(name, p, m, v)
                told = simulate(schedule, Durations(one, one, one)).makespan_s
                # The best of the repeats.
                ranks = min(zip(*per_rank, strict=True), key=lambda ranks: max(one.took_s for one in ranks))
                found, bubble = max(one.took_s for one in ranks), min(one.waited_s for one in ranks)
                formula = simulate(schedule, mean_durations([one for rank in ranks for one in rank.actions])).bubble_s
                print(
                    f"{name:16} {m:3} {found:8.3f} {told:8.3f} {found / told - 1:+7.1%} "
                    f"{bubble:8.3f} {formula:8.3f} {bubble / formula - 1:+7.1%}",
                    flush=True,
                )
                rows.append({"schedule": name, "m": m, "step_s": found, "formula_s": told, "bubble_s": bubble})
    return rows


def mean_durations(actions: list[tuple[str, float]]) -> Durations:
    """What each kind of action took."""
    mean = {kind: statistics.mean(s for name, s in actions if name == kind) for kind, _ in actions}
    # A whole backward is an input gradient and a weight gradient, of the same length here.
    half = mean.get("BW", 0.0) / 2
    return Durations(mean["F"], mean.get("B", half), mean.get("W", half))


SPEC = DecoderSpec(vocab_size=512, dim=128, num_layers=8, num_heads=4, num_kv_heads=4, ffn_dim=384, max_seq_len=128)


class _Part(nn.Module):
    """torch's stage: blocks of the same decoder, with the embedding before or the head after them."""

    def __init__(self, model: Any, first: int, stop: int):
        super().__init__()
        self.embed = model.embed if first == 0 else None
        self.blocks = nn.ModuleList(model.blocks[first:stop])
        self.norm, self.head = (model.norm, model.head) if stop == len(model.blocks) else (None, None)
        self.spec = model.spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from weft.models.attention import rotation, see_causally

        positions = torch.arange(x.shape[1])[None]
        x = self.embed(x) if self.embed is not None else x
        turn = rotation(positions, self.spec.head_dim, self.spec.rope_theta, self.spec.rope_scale, torch.float32)
        visible = see_causally(positions, None, 0, x.dtype)
        for block in self.blocks:
            x = block(x, visible, turn, None)
        return self.head(self.norm(x)) if self.head is not None else x


def theirs(name: str, num_ranks: int, microbatches: int, batch: torch.Tensor) -> Callable[[], None] | None:
    """A step of torch's runtime; None where it has no such schedule."""
    if name not in THEIRS:
        return None
    import torch.distributed.pipelining as pipelining
    from torch.distributed.pipelining import schedules

    v, rank = virtual_stages(name), dist.get_rank()
    num_stages = num_ranks * v
    size = SPEC.num_layers // num_stages
    own = [rank, 2 * num_ranks - 1 - rank] if name.endswith("_v") else list(range(rank, num_stages, num_ranks))
    model = build_decoder(SPEC)
    parts = [_Part(model, index * size, (index + 1) * size) for index in own]
    stages = [
        pipelining.PipelineStage(part, index, num_stages, torch.device("cpu"))
        for part, index in zip(parts, own, strict=True)
    ]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")

    kind = getattr(schedules, THEIRS[name])
    schedule = kind(stages if v > 1 else stages[0], microbatches, loss_fn=loss, scale_grads=False)

    def step() -> None:
        for part in parts:
            part.zero_grad(set_to_none=True)
        if 0 in own and num_stages - 1 in own:
            schedule.step(batch, target=batch, losses=[])
        elif 0 in own:
            schedule.step(batch)
        elif num_stages - 1 in own:
            schedule.step(target=batch, losses=[])
        else:
            schedule.step()

    return step


def ours(name: str, num_ranks: int, microbatches: int, batch: torch.Tensor) -> Callable[[], None]:
    """The same step here."""
    v = virtual_stages(name)
    size = SPEC.num_layers // (num_ranks * v)
    split = "+".join([str(size)] * num_ranks * v)
    plan = f"pp={num_ranks} microbatches={microbatches} virtual_stages={v} schedule={name} split={split}"
    mesh = build_mesh(Plan.parse(plan))
    model = build_decoder(SPEC)
    parallelize(model, mesh)
    pipeline = pipeline_of(model)
    assert pipeline is not None
    batches = list(batch.chunk(microbatches))

    def loss(output: torch.Tensor, target: torch.Tensor, microbatch: int) -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()

    return lambda: one_step(model, pipeline, batches, lambda model, x: model(x), loss)


def measure_steps(name: str, num_ranks: int, microbatches: int, repeats: int) -> dict[str, list[Seconds]]:
    """Time both runtimes, in turn."""
    batch = torch.randint(512, (2 * microbatches, 64), generator=torch.Generator().manual_seed(0))
    steps = {"weft": ours(name, num_ranks, microbatches, batch)}
    other = theirs(name, num_ranks, microbatches, batch)
    if other is not None:
        steps["torch"] = other
    times: dict[str, list[Seconds]] = {who: [] for who in steps}
    for who in steps:
        timed(steps[who], 1)
    for turn in range(repeats):
        for who in list(steps)[:: 1 if turn % 2 else -1]:
            times[who] += timed(steps[who], 1)[-1:]
    return times


def shown(medians: dict[str, float]) -> str:
    """Return the columns of a row from milliseconds: both runtimes, and the ratios of their times."""
    if "torch" not in medians:
        return f"{medians['weft']:8.1f} {'-':>8} {'-':>10} {'-':>10}"
    wall, processor = (medians[f"weft{kind}"] / medians[f"torch{kind}"] for kind in ("", "_processor"))
    return f"{medians['weft']:8.1f} {medians['torch']:8.1f} {wall:10.2f} {processor:10.2f}"


def compare_steps(options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for num_ranks in options.ranks:
        print(f"{num_ranks} ranks, decoder {SPEC.num_layers} x {SPEC.dim}; median milliseconds of a step")
        print(f"{'schedule':16} {'m':>3} {'weft':>8} {'torch':>8} {'weft/torch':>10} {'processor':>10}")
        compared: list[dict[str, float]] = []
        with RankPool(num_ranks, timeout_s=300) as pool:
            for name in options.schedules:
                m = least_microbatches(name, num_ranks, options.microbatches[-1])
                per_rank = pool.run(measure_steps, name, num_ranks, m, options.repeats)
                medians: dict[str, float] = {}
                for who in per_rank[0]:
                    each = list(zip(*(one[who] for one in per_rank), strict=True))
                    medians[who] = 1000 * statistics.median(max(one.wall for one in ranks) for ranks in each)
                    used = statistics.median(sum(one.processor for one in ranks) for ranks in each)
                    medians[f"{who}_processor"] = 1000 * used
                print(f"{name:16} {m:3} {shown(medians)}", flush=True)
                rows.append({"schedule": name, "ranks": num_ranks, "m": m, **medians})
                compared += [medians] if "torch" in medians else []
        if compared:
            print(f"{'sum':16} {'':3} {shown({key: sum(one[key] for one in compared) for key in compared[0]})}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bubble", "steps"])
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--microbatches", type=int, nargs="+")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--pass-ms", type=float, default=60.0)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    is_bubble = options.what == "bubble"
    options.ranks = options.ranks or ([4] if is_bubble else [2, 4])
    options.microbatches = options.microbatches or ([4, 8, 16] if is_bubble else [8])
    options.repeats = options.repeats or (1 if is_bubble else 9)
    rows = bubbles(options) if is_bubble else compare_steps(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
