"""Predicted beside measured: steps and peak bytes of many plans on this machine, with a profile of `weft calibrate`.

    python benchmarks/calibration.py all --folder runs                    calibrate, measure, compare: 15 minutes

    python benchmarks/calibration.py measure --ranks 2 --out runs2.json   real steps, all plans in turn, repeated
    python benchmarks/calibration.py measure --ranks 4 --out runs4.json
    python benchmarks/calibration.py measure --ranks 2 --rounds 0 --out bytes2.json
    python benchmarks/calibration.py compare runs2.json runs4.json --profile here.json

`measure` builds every plan once on the same ranks and gives each a step in turn, so that drifts of the machine's speed
touch all alike; a plan's time is the median over its steps of the slowest rank. `all` calibrates a part of its budget
between any two rounds of steps, for the same reason. Peak bytes are those of live tensors: what the model and its
optimizer hold, and the most that a step makes beside it. `compare` predicts the same plans and prints the errors, their
median, and the rank correlations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft.calibrate.compute import TensorPlacement, calls_of
from weft.calibrate.run import calibrate, typical
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.monitor.step_times import Meter
from weft.parallel.parallelize import parallelize
from weft.planner.estimator import estimate
from weft.planner.measured import profile_tables as here
from weft.planner.measured.machine_profile import Profile, load_profile
from weft.planner.search.question import Question
from weft.planner.space.columns import Columns
from weft.train.step.errors import live_bytes
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.rank_pool import RankPool

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.live_memory import peak_of_step

MODEL = DecoderSpec(vocab_size=4096, dim=256, num_layers=8, num_heads=8, num_kv_heads=4, ffn_dim=768, max_seq_len=1024)
EXPERTS = replace(MODEL, num_experts=8, top_k=2, expert_ffn_dim=384, num_layers=4)
SEQ_LEN, GLOBAL_BATCH = 256, 8
#: What the plans of the model with experts begin with.
_WITH_EXPERTS = "experts: "
#: A product that calibration times too: how fast the machine is now, beside then.
REFERENCE, _REPEATS = (512, 512, 512), 24
PLANS = {
    2: (
        "dp_replicate=2",
        "dp_replicate=2 accumulation=4",
        "dp_replicate=2 recompute=full",
        "dp_replicate=2 recompute=selective",
        "dp_shard=2 zero=1 accumulation=2",
        "dp_shard=2 zero=2",
        "dp_shard=2 zero=3",
        "dp_shard=2 zero=3 accumulation=4",
        "tp=2",
        "tp=2 sp=on",
        "tp=2 accumulation=8",
        "tp=2 sp=on accumulation=4 recompute=full",
        "cp=2 cp_mode=gather",
        "cp=2 cp_mode=ring accumulation=4",
        "cp=2 cp_mode=ulysses",
        "pp=2 microbatches=4",
        "pp=2 microbatches=2",
        "pp=2 microbatches=2 schedule=gpipe recompute=full",
        "pp=2 microbatches=4 schedule=interleaved virtual_stages=2",
        "pp=2 microbatches=8 schedule=zb_h1",
        "experts: dp_replicate=2",
        "experts: dp_shard=2 ep=2 zero=1",
        "experts: dp_shard=2 ep=2 zero=1 accumulation=4",
        "experts: tp=2",
    ),
    4: (
        "dp_replicate=4",
        "dp_shard=4 zero=1",
        "dp_shard=4 zero=2 accumulation=2",
        "dp_shard=4 zero=3",
        "dp_replicate=2 dp_shard=2 zero=2 recompute=full",
        "dp_shard=2 tp=2 zero=1",
        "dp_shard=2 tp=2 sp=on zero=3",
        "tp=4",
        "tp=4 sp=on accumulation=4",
        "tp=4 recompute=full accumulation=2",
        "cp=2 dp_shard=2 zero=1",
        "cp=4 cp_mode=ring accumulation=2",
        "pp=2 dp_shard=2 zero=1 microbatches=4",
        "pp=2 tp=2 microbatches=2",
        "pp=4 microbatches=8",
        "pp=4 microbatches=2 schedule=gpipe",
        "experts: dp_shard=4 ep=4 zero=1",
        "experts: dp_shard=4 ep=2 zero=1",
        "experts: dp_shard=2 ep=2 tp=2 zero=1",
        "experts: pp=2 dp_shard=2 ep=2 zero=1 microbatches=4",
    ),
}
#: Seconds of all calibration of `all`.
_BUDGET_S = 120.0


def parted(text: str) -> tuple[DecoderSpec, Plan]:
    """The model and the plan of a row."""
    with_experts = text.startswith(_WITH_EXPERTS)
    return EXPERTS if with_experts else MODEL, Plan.parse(text.removeprefix(_WITH_EXPERTS))


def batch_of(plan: Plan, rank_of_data: int) -> dict[str, torch.Tensor]:
    """This rank's part of a global batch of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(MODEL.vocab_size, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    rows = GLOBAL_BATCH // plan.dp_size
    own = ids[rank_of_data * rows : (rank_of_data + 1) * rows]
    positions = torch.arange(SEQ_LEN).repeat(rows, 1)
    return {"input_ids": own[:, :-1].contiguous(), "labels": own[:, 1:].contiguous(), "positions": positions}


class Running:
    """One plan on this rank, ready to step."""

    def __init__(self, text: str):
        model, plan = parted(text)
        self.mesh = build_mesh(plan)
        self.ledger = Ledger()
        self.meter = Meter("cpu")
        self.model = build_decoder(model, seed=0)
        parallelize(self.model, self.mesh)
        optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.step = TrainStep(
            self.model, optimizer, token_cross_entropy, self.mesh, forward=model_forward, max_grad_norm=1.0,
            meter=self.meter,
        )  # fmt: skip
        self.batch = batch_of(self.mesh.plan, self.mesh["dp_replicate"].rank * self.mesh["dp_shard"].size
                              + self.mesh["dp_shard"].rank)  # fmt: skip


_running: dict[str, Running] = {}


def build(text: str) -> None:
    """Make a plan ready, with one step to warm up."""
    _running[text] = Running(text)
    _running[text].step(_running[text].batch)


def timed_step(text: str) -> dict[str, Any]:
    """Seconds of one step, all and by phase; and of the reference product just before it."""
    one = _running[text]
    calls = calls_of("linear_f", REFERENCE, TensorPlacement(torch.device("cpu"), torch.float32))
    made = calls.first(_REPEATS)
    torch.distributed.barrier()
    start = time.perf_counter()
    for index in range(_REPEATS):
        made[index % len(made)]()
    reference_s = (time.perf_counter() - start) / _REPEATS
    torch.distributed.barrier()
    one.meter.begin_step()
    one.step(one.batch)
    torch.distributed.barrier()
    times = one.meter.end_step()
    return {"total": times.total_s, "phases": times.phases, "reference": reference_s}


def peak_bytes(text: str) -> dict[str, int]:
    """Bytes of live tensors on this rank: the most there are in a step, and those that lie there between steps."""
    one = _running[text]
    held = live_bytes(one.model, one.step.optimizer)
    peak = peak_of_step(one.step, one.batch)
    return {"peak": peak, "params": held.parameters, "grads": held.gradients, "optimizer": held.optimizer}


class Measuring:
    """Plans that are ready on ranks of a pool. Each round gives each of them a step."""

    def __init__(self, pool: RankPool, num_ranks: int, chosen: list[str]):
        self.pool, self.num_ranks = pool, num_ranks
        self.plans = chosen or list(PLANS[num_ranks])
        self.found: dict[str, dict[str, Any]] = {
            text: {"steps": [], "phases": [], "reference": []} for text in self.plans
        }
        start = time.perf_counter()
        for text in self.plans:
            pool.run(build, text)
        print(f"{num_ranks} ranks: built in {time.perf_counter() - start:.0f} s", flush=True)

    def round(self) -> None:
        for text in self.plans:
            ranks, found = self.pool.run(timed_step, text), self.found[text]
            found["steps"].append(max(one["total"] for one in ranks))
            found["reference"].append(max(one["reference"] for one in ranks))
            found["phases"].append([one["phases"] for one in ranks])

    def save(self, out: Path) -> None:
        out.write_text(json.dumps({"ranks": self.num_ranks, "plans": self.found}))

    def bytes(self) -> None:
        for text in self.plans:
            self.found[text]["bytes"] = self.pool.run(peak_bytes, text)

    def show(self) -> None:
        for text in self.plans:
            steps = self.found[text]["steps"]
            if steps:
                print(f"{text:60s} {min(steps):.3f} s, median {statistics.median(steps):.3f}")
            else:
                print(f"{text:60s} {max(one['peak'] for one in self.found[text]['bytes']) / 2**20:.1f} MiB")


@contextmanager
def measuring(num_ranks: int, chosen: list[str]) -> Iterator[Measuring]:
    with RankPool(num_ranks, timeout_s=900.0) as pool:  # a busy machine may stop it for a while
        yield Measuring(pool, num_ranks, chosen)


def measure(num_ranks: int, rounds: int, out: Path, chosen: list[str]) -> None:
    with measuring(num_ranks, chosen) as one:
        for _ in range(rounds):
            one.round()
            one.save(out)
        if rounds == 0:
            one.bytes()
        one.save(out)
        one.show()


def compare(files: list[Path], profile: Path, corrects_drift: bool) -> None:
    """Print predicted beside measured of every plan in the files, the errors and how well the order is kept."""
    known = load_profile(profile)
    memory: list[float] = []
    pairs: list[tuple[float, float]] = []
    print(f"{'plan':58s} predicted  measured")
    for file in files:
        table = json.loads(file.read_text())
        cluster = here.cluster_of(known, f"{table['ranks']}xhere")
        then = reference_of(known, table["ranks"]) if corrects_drift else None
        for text, one in table["plans"].items():
            model, plan = parted(text)
            asked = Question.of(model, cluster, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH)
            asked = replace(asked, profile=known)
            found = estimate(asked.job, asked.cluster, Columns.of([plan], asked.job), asked.tables)
            if one["steps"]:
                pairs.append((float(found.step_s[0]), usual_step(one, then)))
                print(f"{text:58s} {pairs[-1][0]:7.3f} s {pairs[-1][1]:7.3f} s {pairs[-1][0] / pairs[-1][1] - 1:+5.0%}")
            if "bytes" in one:
                told = float(found.allocated_bytes[0]), max(rank["peak"] for rank in one["bytes"])
                memory.append(abs(told[0] / told[1] - 1))
                print(f"{text:58s} {told[0] / 2**20:7.1f}   {told[1] / 2**20:7.1f} MiB {told[0] / told[1] - 1:+6.1%}")
    if pairs:
        errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
        print(
            f"step time of {len(errors)} plans: median error {statistics.median(errors):.1%}, mean "
            f"{statistics.fmean(errors):.1%}, largest {max(errors):.0%}; Spearman {_spearman(pairs):.2f}, "
            f"Kendall {_kendall(pairs):.2f}"
        )
    if memory:
        middle, worst = statistics.median(memory), max(memory)
        print(f"peak bytes of {len(memory)} plans: median error {middle:.2%}, largest {worst:.1%}")


def reference_of(known: Profile, ranks: int) -> float:
    """Seconds of the reference product when the profile was measured."""
    return next(s.seconds for s in known.samples if s.op == "linear_f" and s.size == REFERENCE and s.ranks == ranks)


def usual_step(one: dict[str, Any], then: float | None) -> float:
    """The median step; then: with each brought to the speed at which the reference product took so long."""
    if then is None:
        return statistics.median(one["steps"])
    return statistics.median(s * then / now for s, now in zip(one["steps"], one["reference"], strict=True))


def _kendall(pairs: list[tuple[float, float]]) -> float:
    both = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    return sum((one > 0) - (one < 0) for one in both) / len(both)


def _spearman(pairs: list[tuple[float, float]]) -> float:
    ranks = [[sorted(side).index(value) for value in side] for side in zip(*pairs, strict=True)]
    return statistics.correlation(*ranks)


def everything(folder: Path, rounds: int) -> None:
    """Steps and calibration in turns, then bytes; compare as measured and corrected."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"steps{ranks}.json" for ranks in PLANS]
    bytes_files = [folder / f"bytes{ranks}.json" for ranks in PLANS]
    profiles: list[Profile] = []
    with ExitStack() as open_pools:
        each = [open_pools.enter_context(measuring(ranks, [])) for ranks in PLANS]
        for number in range(rounds):
            for one, file in zip(each, files, strict=True):
                one.round()
                one.save(file)
            profiles.append(calibrate(_BUDGET_S / rounds, (1, 2, 4), "cpu", ("fp32",)))
            print(f"round {number + 1}: calibrated in {profiles[-1].took_s:.0f} s", flush=True)
    samples = typical([sample for one in profiles for sample in one.samples])
    replace(profiles[-1], samples=samples).save(folder / "profile.json")
    for ranks, file in zip(PLANS, bytes_files, strict=True):
        measure(ranks, 0, file, [])
    for corrects_drift in (False, True):
        print("brought to the speed of the profile's reference product" if corrects_drift else "as measured")
        compare(files, folder / "profile.json", corrects_drift)
    compare(bytes_files, folder / "profile.json", False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("measure", help="real steps; with --rounds 0 peak bytes instead")
    one.add_argument("--ranks", type=int, choices=tuple(PLANS), required=True)
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--plan", action="append", default=[])
    two = verbs.add_parser("compare", help="lay the planner's estimates beside them")
    two.add_argument("files", type=Path, nargs="+")
    two.add_argument("--profile", type=Path, required=True)
    two.add_argument("--correct-drift", action="store_true", help="by the reference product beside each step")
    three = verbs.add_parser("all", help="calibrate, measure with 2 and 4 ranks, compare")
    three.add_argument("--folder", type=Path, required=True)
    three.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.verb == "measure":
        measure(options.ranks, options.rounds, options.out, options.plan)
    elif options.verb == "all":
        everything(options.folder, options.rounds)
    else:
        compare(options.files, options.profile, options.correct_drift)


if __name__ == "__main__":
    main()
