"""Time a training step of a recommender: sharded tables, and DistributedDataParallel with dense gradients, in turn.

    python benchmarks/tables.py                          26 tables of 10 k to 1 M rows of 32, 2 ranks, style rows
    python benchmarks/tables.py --ranks 4 --layout columns --optimizer rowwise_adagrad
    python benchmarks/tables.py --shrink 10              tables of a tenth of the rows
    python benchmarks/tables.py --rival torchrec         TorchRec with FBGEMM's kernels instead, if it is installed
    python benchmarks/tables.py --rival apart            Weft with one exchange per table
    python benchmarks/tables.py --host FOLDER memory     one table of 10 M rows of 64 in mapped files of FOLDER, in
                                                         host memory, and without a cache, in turn on one rank

Ids follow a Zipf distribution with exponent 1.05. Both sides train with Adagrad, or Weft's tables with --optimizer.
Printed: seconds of a step on rank 0 as median and minimum, CPU seconds of all threads, and their ratios; bytes sent
over bytes of unique rows on other ranks (both ways), and peak bytes of live tensors over this rank's share of weights
and states.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from tools.live_memory import LiveTensors
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.state.gradients import data_parallel
from weft.verify.rank_pool import RankPool

ZIPF = 1.05


def sizes(options: argparse.Namespace) -> list[int]:
    """Return the rows of the tables, spaced evenly on a logarithmic scale."""
    low, high, last = 10_000 / options.shrink, 1_000_000 / options.shrink, options.tables - 1
    return [round(low * (high / low) ** (number / last)) for number in range(options.tables)]


class Recommender(nn.Module):
    """A sum of rows per sample and a small network, as far as tables are concerned."""

    def __init__(self, rows: list[int], width: int, is_joined: bool = True, hidden: int = 128):
        super().__init__()
        self.is_joined = is_joined
        self.tables = nn.ModuleList(nn.Embedding(number, width) for number in rows)
        self.top = nn.Sequential(nn.Linear(len(rows) * width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids: Tensor) -> Tensor:
        found = []
        for number, table in enumerate(self.tables):
            rows = table(ids[:, number])
            found.append(rows if self.is_joined else rows.contiguous())  # the first use fetches the rows
        return self.top(torch.cat(found, 1)).squeeze(1)


def batches(rows: list[int], rank: int, samples: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's batches of ids, (samples, tables), and labels."""
    rng = torch.Generator().manual_seed(rank)
    tails = [(torch.arange(1, number + 1, dtype=torch.float64) ** -ZIPF).cumsum(0) for number in rows]
    found = []
    for _ in range(number):
        draws = torch.rand(samples, len(rows), generator=rng, dtype=torch.float64)
        columns = [
            torch.searchsorted(tail, draws[:, number] * tail[-1]).clamp_(max=len(tail) - 1)
            for number, tail in enumerate(tails)
        ]
        found.append((torch.stack(columns, 1), torch.randint(2, (samples,), generator=rng).float()))
    return found


def loss_fn(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.binary_cross_entropy_with_logits(output, batch[1], reduction="sum"), len(output)


class Dense:
    """A step of DistributedDataParallel with dense gradients."""

    def __init__(self, rows: list[int], options: argparse.Namespace):
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Recommender(rows, options.width))
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.02)

    def __call__(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        loss_sum, number = loss_fn(self.model(batch[0]), batch)
        (loss_sum / number).backward()
        self.optimizer.step()


class TorchRec:
    """A step of TorchRec with FBGEMM's fused Adagrad, and all tables sharded in one way."""

    KINDS = ("row_wise", "column_wise", "table_wise")

    def __init__(self, rows: list[int], options: argparse.Namespace, kind: str):
        import torchrec
        from torchrec.distributed import sharding_plan
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import ShardingEnv, ShardingPlan
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        self.names, self.batch_type, ranks = (
            [f"t{number}" for number in range(len(rows))],
            KeyedJaggedTensor,
            options.ranks,
        )
        configs = [
            torchrec.EmbeddingBagConfig(
                name=name, embedding_dim=options.width, num_embeddings=count, feature_names=[name]
            )
            for name, count in zip(self.names, rows, strict=True)
        ]
        net = nn.Module()
        net.bags = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        net.top = Recommender([1] * len(rows), options.width).top
        net.forward = lambda ids: net.top(net.bags(ids).values()).squeeze(1)
        apply_optimizer_in_backward(torch.optim.Adagrad, net.bags.parameters(), {"lr": 0.02})
        styles = {
            name: {
                "row_wise": sharding_plan.row_wise(),
                "column_wise": sharding_plan.column_wise(ranks=list(range(ranks))),
                "table_wise": sharding_plan.table_wise(rank=number % ranks),
            }[kind]
            for number, name in enumerate(self.names)
        }
        sharder = EmbeddingBagCollectionSharder()
        plan = sharding_plan.construct_module_sharding_plan(
            net.bags, styles, sharder=sharder, local_size=ranks, world_size=ranks, device_type="cpu"
        )
        self.model = DistributedModelParallel(
            net, env=ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"),
            plan=ShardingPlan({"bags": plan}), sharders=[sharder],
        )  # fmt: skip
        self.optimizer = torch.optim.Adagrad(net.top.parameters(), lr=0.02)

    def __call__(self, batch: tuple[Tensor, Tensor]) -> None:
        ids = batch[0]
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        jagged = self.batch_type(keys=self.names, values=ids.t().reshape(-1), lengths=lengths)
        self.optimizer.zero_grad()
        loss_sum, number = loss_fn(self.model(jagged), batch)
        (loss_sum / number).backward()
        self.optimizer.step()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time steps of all sides in turn, and count bytes of Weft's last step."""
    rows, ledger = sizes(options), Ledger()
    plan = Plan.parse(f"dp_replicate={options.ranks}")
    run = weft.Run(plan, build_mesh(plan, record=ledger.record), ledger, seed=0)
    data = batches(rows, run.mesh.rank, options.samples, options.rounds + 2)
    torch.manual_seed(0)
    model = run.parallelize(Recommender(rows, options.width), layout=f"tables.*={options.layout}")
    tables = weft.TableOptimizer(options.optimizer, lr=0.02)
    step = run.train_step(model, torch.optim.Adagrad, loss_fn, lr=0.02, tables=tables, check_batch=False)
    sides: dict[str, Any] = {"Weft": step}
    if options.rival == "apart":
        torch.manual_seed(0)
        apart = run.parallelize(Recommender(rows, options.width, False), layout=f"tables.*={options.layout}")
        sides["Weft, one exchange per table"] = run.train_step(
            apart, torch.optim.Adagrad, loss_fn, lr=0.02, tables=tables, check_batch=False
        )
    elif options.rival == "ddp":
        sides["DDP with dense gradients"] = Dense(rows, options)
    else:
        sides |= {f"TorchRec {kind}": TorchRec(rows, options, kind) for kind in TorchRec.KINDS}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for batch in data:
        for name, side in sides.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            side(batch)
            times[name].append((time.perf_counter() - start, time.process_time() - used))
    engine = data_parallel(model)
    kept = [*(one.flat for one in engine.model_slices()), *(one.flat for one in engine.state_slices(step.optimizer))]
    share = sum(one.numel() * one.element_size() for one in kept)
    ledger.clear()
    with LiveTensors([*kept, *model.parameters()]) as live:
        step(data[-1])
    sent = sum(entry.sent_bytes for _, name, entry in ledger.rows() if name in ("all_to_all", "all_gather"))
    remote = 0
    for number, count in enumerate(rows):
        unique = data[-1][0][:, number].unique()
        low, high = count * run.mesh.rank // options.ranks, count * (run.mesh.rank + 1) // options.ranks
        apart = ((unique < low) | (unique >= high)).sum().item() * options.width
        own = options.width * (run.mesh.rank + 1) // options.ranks - options.width * run.mesh.rank // options.ranks
        remote += 4 * (unique.numel() * (options.width - own) if options.layout == "columns" else apart)
    return {"times": times, "sent": sent, "rows": 2 * remote, "peak": live.peak, "share": share}


HOST_ROWS, HOST_WIDTH, HOST_IDS = 10_000_000, 64, 26


class OneTable(nn.Module):
    """The mean of a sample's rows, and a small network."""

    def __init__(self, rows: int):
        super().__init__()
        self.table = nn.EmbeddingBag(rows, HOST_WIDTH, mode="mean")
        self.top = nn.Sequential(nn.Linear(HOST_WIDTH, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.table(ids)).squeeze(1)


def host_side(folder: str, rows: int, options: argparse.Namespace) -> Any:
    """Return the step of a model with a table in a folder, in "memory" with a cache, or as style "rows"."""
    with torch.device("meta"):
        model = OneTable(rows)
    plan = Plan()
    run = weft.Run(plan, build_mesh(plan), Ledger(), seed=0)
    style, folder = "rows" if folder == "rows" else "host", "" if folder in ("rows", "memory") else folder
    run.parallelize(model, layout=f"table={style}", table_folder=folder, table_cache=options.cache)
    tables = weft.TableOptimizer(options.optimizer, lr=0.02)
    return run.train_step(model, torch.optim.Adagrad, loss_fn, lr=0.02, tables=tables, check_batch=False)


def measure_host(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Time steps with a table in several places, in turn. Returns wall and CPU seconds of each step by place."""
    rows = HOST_ROWS // options.shrink
    tail = (torch.arange(1, rows + 1, dtype=torch.float64) ** -ZIPF).cumsum(0)
    rng = torch.Generator().manual_seed(0)
    sides = {folder: host_side(folder, rows, options) for folder in ("rows", *options.host)}
    found: dict[str, list[tuple[float, float]]] = {folder: [] for folder in sides}
    for number in range(options.warmup + options.rounds):
        draws = torch.rand(options.samples, HOST_IDS, generator=rng, dtype=torch.float64)
        ids = torch.searchsorted(tail, draws * tail[-1]).clamp_(max=rows - 1)
        ids = ids * 2_654_435_761 % rows  # frequent rows are not neighbors
        labels = torch.randint(2, (options.samples,), generator=rng).float()
        for folder in sorted(sides, reverse=bool(number % 2)):
            start, used = time.perf_counter(), time.process_time()
            sides[folder]((ids, labels))
            found[folder].append((time.perf_counter() - start, time.process_time() - used))
    return {folder: times[options.warmup :] for folder, times in found.items()}


def print_host(times: dict[str, list[tuple[float, float]]]) -> None:
    """Print median and minimum wall seconds, and median CPU seconds, of each place and over those of style rows."""
    base = (1.0, 1.0, 1.0)
    for folder, pairs in times.items():
        walls, used = zip(*pairs, strict=True)
        own = statistics.median(walls), min(walls), statistics.median(used)
        base = own if folder == "rows" else base
        ratios = ", ".join(f"{one / other:.3f}" for one, other in zip(own, base, strict=True))
        print(f"{folder}: step {own[0]:.4f} s, minimum {own[1]:.4f} s, CPU {own[2]:.4f} s; over style rows {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--samples", type=int, default=2048, help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shrink", type=int, default=1, help="divisor of the tables' rows")
    parser.add_argument("--layout", choices=("rows", "columns", "one"), default="rows")
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--rival", choices=("ddp", "torchrec", "apart"), default="ddp")
    parser.add_argument("--host", metavar="FOLDER", nargs="+", help="time a table in mapped files of these folders")
    parser.add_argument("--cache", type=float, default=0.05, help="with --host: share of the rows that are cached")
    parser.add_argument("--warmup", type=int, default=100, help="with --host: steps before the first that counts")
    options = parser.parse_args()
    if options.host:
        print_host(measure_host(options))
        return
    with RankPool(options.ranks, timeout_s=3600) as pool:
        found = pool.run(measure, options)
    ours = (0.0, 0.0, 0.0)
    for name in found[0]["times"]:
        # The slowest rank of each step.
        walls = [max(each["times"][name][step][0] for each in found) for step in range(2, options.rounds + 2)]
        used = [sum(each["times"][name][step][1] for each in found) for step in range(2, options.rounds + 2)]
        ours = ours if name != "Weft" else (statistics.median(walls), min(walls), statistics.median(used))
        theirs = statistics.median(walls), min(walls), statistics.median(used)
        ratios = ", ".join(f"{one / other:.3f}" for one, other in zip(ours, theirs, strict=True))
        print(
            f"{name}: step {theirs[0]:.3f} s, minimum {theirs[1]:.3f} s, CPU {theirs[2]:.3f} s; Weft over it {ratios}"
        )
    sent, rows = (sum(one[key] for one in found) for key in ("sent", "rows"))
    print(f"sent over unique remote rows, both ways: {sent / max(rows, 1):.3f}")
    for rank, one in enumerate(found):
        print(f"rank {rank}: peak over its share of weights and states: {1 + one['peak'] / one['share']:.3f}")


if __name__ == "__main__":
    main()
