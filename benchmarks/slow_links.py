"""Training steps over slow links: Weft's routes and wires beside torch's DDP and its hooks, on one machine.

Hosts are network and process namespaces. Each has one interface, limited to a rate by a token bucket, and a bridge
joins them; ranks of one host reach each other over its own loopback interface or shared memory. What leaves a host is
read from its interface, so bytes are exact however busy the machine is. Seconds are those of the slowest rank.
Figures are medians. Those of plans with sync= weigh steps that meet as often as they come: give as many --turns as lie
between meetings, or more. What `alone` sends is what the benchmark itself sends to time a step.

    sudo python benchmarks/slow_links.py [--rates 100mbit,1gbit] [--hosts 2] [--ranks 2] [--turns 7] [--only ddp,weft]

It needs root, iproute2 and util-linux, and says so where it has none.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from benchmarks.tables import Recommender, batches, loss_fn
from weft.cli.console import table
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.data.order.next_batches import with_next
from weft.parallel.parallelize import parallelize
from weft.parallel.state.gradients import data_parallel
from weft.train.step.train_step import TrainStep

NET, WIDTH, LAYERS, ROWS = "10.78.0", 1024, 10, 16
#: Turns that are not counted: the first gradients, and PowerSGD's exact steps.
WARM_UP = 3
LIMIT_S = 1800
#: What is timed: a word, and what it stands for: a hook of torch's DDP, or a plan with the route that its mesh takes.
MODES = {
    "alone": "",
    "ddp": "fp32",
    "ddp_fp16": "fp16",
    "ddp_powersgd4": "powersgd:4",
    "weft_flat": "route=flat dp_replicate={ranks}",
    "weft": "route=auto dp_replicate={ranks}",
    "weft_bf16": "route=auto dp_replicate={ranks} reduce=bf16",
    "weft_hsdp": "route=auto dp_replicate={hosts} dp_shard={local} zero=1",
    "weft_int8": "route=auto dp_replicate={hosts} dp_shard={local} zero=1 compress=int8",
    "weft_int4": "route=auto dp_replicate={hosts} dp_shard={local} zero=1 compress=int4",
    "weft_powersgd4": "route=auto dp_replicate={ranks} compress=powersgd:4",
    "weft_int8_zero3": "route=auto dp_replicate={hosts} dp_shard={local} zero=3 compress=int8",
    "weft_diloco6": "route=auto dp_replicate={hosts} dp_shard={local} zero=1 sync=diloco:6",
    "weft_diloco6_int8": "route=auto dp_replicate={hosts} dp_shard={local} zero=1 sync=diloco:6 compress=int8",
    "weft_never": "route=auto dp_replicate={hosts} dp_shard={local} zero=1 sync=diloco:999999",
    "weft_diloco50_10_int8": "route=auto dp_replicate={hosts} dp_shard={local} zero=1 sync=diloco:50/10 compress=int8",
    "weft_diloco50_int8": "route=auto dp_replicate={hosts} dp_shard={local} zero=1 sync=diloco:50 compress=int8",
    "tables": "route=auto dp_replicate={ranks}",
    "tables_prefetch": "route=auto dp_replicate={ranks}",
}
#: Rows of the tables, samples of a rank, and hidden units of the network behind them.
TABLE_ROWS, SAMPLES, HIDDEN = [10_000, 30_000, 100_000, 300_000] * 6, 1024, 512


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def ddp_step(hook: str) -> Callable[[torch.Tensor], object]:
    """A step of torch's DDP."""
    # One bucket for PowerSGD: with two, callbacks of buckets call collectives in another order on each rank.
    wrapped = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=200 if ":" in hook else 25)
    name, _, rank = hook.partition(":")
    if name == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(rank), start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()

    return step


def alone_step() -> Callable[[torch.Tensor], object]:
    """The same with nobody to talk to."""
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        own(x).square().mean().backward()
        optimizer.step()

    return step


def weft_step(route: str, plan: str) -> Callable[[torch.Tensor], object]:
    """A step of Weft."""
    mesh = build_mesh(Plan.parse(plan), route=route)
    own = parallelize(model(), mesh)
    data_parallel(own).coders.exact_steps = 2
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
    step = TrainStep(own, optimizer, lambda out, batch: (out.square().sum(), out.numel()), mesh)
    return lambda x: step(x)


def table_step(plan: str, turns: int, prefetch: bool) -> Callable[[torch.Tensor], object]:
    """A step of a recommender with tables of style rows, on a new batch in each turn."""
    mesh = build_mesh(Plan.parse(plan))
    run = weft.Run(mesh.plan, mesh, Ledger(), seed=0)
    torch.manual_seed(0)
    own = run.parallelize(Recommender(TABLE_ROWS, 32, hidden=HIDDEN), layout="tables.*=rows", table_prefetch=prefetch)
    rule = weft.TableOptimizer("adagrad", lr=0.02)
    step = run.train_step(own, torch.optim.Adagrad, loss_fn, lr=0.02, tables=rule, check_batch=False)
    pairs = with_next(batches(TABLE_ROWS, mesh.rank, SAMPLES, WARM_UP + turns))

    def take(_: torch.Tensor) -> None:
        batch, following = next(pairs)
        step(batch, next_batch=following)

    return take


def left() -> int:
    """Bytes that left this host so far."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def run_rank(modes: list[str], turns: int, out: Path) -> None:
    """What each rank does: all modes in turns, and the figures on the first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    steps: dict[str, Callable[[torch.Tensor], object]] = {}
    for mode in modes:
        words = MODES[mode].format(ranks=ranks, hosts=ranks // local, local=local)
        if mode == "alone":
            steps[mode] = alone_step()
        elif mode.startswith("ddp"):
            steps[mode] = ddp_step(words)
        elif mode.startswith("tables"):
            steps[mode] = table_step(words.partition(" ")[2], turns, mode == "tables_prefetch")
        else:
            route, _, plan = words.partition(" ")
            steps[mode] = weft_step(route.partition("=")[2], plan)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    sent: dict[str, list[int]] = {mode: [] for mode in modes}
    for turn in range(-WARM_UP, turns):
        for mode, step in steps.items():
            dist.barrier()
            time.sleep(0.05)
            before, start = left(), time.perf_counter()
            step(x)
            took = torch.tensor(time.perf_counter() - start)
            dist.barrier()
            time.sleep(0.05)
            after = left()
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn >= 0:
                seconds[mode].append(float(took))
                sent[mode].append(after - before)
    if rank == 0:
        found = {mode: (typical(mode, seconds[mode]), typical(mode, sent[mode])) for mode in modes}
        out.write_text(json.dumps(found))
    del steps
    gc.collect()
    dist.barrier()
    os._exit(0)  # gloo aborts on some hooks of DDP that are still alive


def typical(mode: str, turns: Sequence[float]) -> float:
    """The median; of replicas that meet rarely medians of steps that meet and that do not, as often as each comes."""
    plan = MODES[mode].partition("sync=")[2]
    if not plan:
        return statistics.median(turns)
    rarely = Plan.parse(f"dp_replicate=2 sync={plan}")
    every = rarely.sync_every
    if rarely.sync_fragments or every > len(turns) + WARM_UP:  # in about each step a part, or nothing at all
        return statistics.fmean(turns)
    meets = [found for turn, found in enumerate(turns) if (turn + WARM_UP + 1) % every == 0]
    rest = [found for turn, found in enumerate(turns) if (turn + WARM_UP + 1) % every]
    if not meets:
        raise SystemExit(f"slow_links: no step of {mode} met within --turns {len(turns)}. Use --turns {every}.")
    return statistics.median([*rest, *([] if rest else meets)]) * (1 - 1 / every) + statistics.median(meets) / every


def ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def bed(hosts: int, rate: str) -> Iterator[list[str]]:
    """Names of network namespaces behind one bridge, each with an interface of that rate in both directions."""
    start = f"weft{os.getpid()}"
    switch, names = f"{start}-s", [f"{start}-{number}" for number in range(hosts)]
    shape = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "200ms")
    try:
        for name in (switch, *names):
            ip("ip", "netns", "add", name)
            ip("ip", "-n", name, "link", "set", "lo", "up")
        ip("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        ip("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ip("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            ip("ip", "-n", name, "addr", "add", f"{NET}.{number + 1}/24", "dev", "eth0")
            ip("ip", "-n", name, "link", "set", "eth0", "up")
            if rate != "none":
                ip("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", *shape)
                ip("ip", "netns", "exec", switch, "tc", "qdisc", "replace", "dev", port, *shape)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def measure(rate: str, options: argparse.Namespace, modes: list[str]) -> dict[str, Any]:
    """Figures of all modes at one rate."""
    with bed(options.hosts, rate) as names, tempfile.TemporaryDirectory() as folder:
        out, port = Path(folder) / "found.json", str(20000 + random.randrange(20000))
        own = [sys.executable, __file__, "--inside", str(out), "--turns", str(options.turns), "--only", ",".join(modes)]
        hosts: list[subprocess.Popen[bytes]] = []
        for number, name in enumerate(names):
            script = (
                f"hostname {name}; for ((l = 0; l < {options.ranks}; l++)); do "
                f'RANK=$(({number} * {options.ranks} + l)) LOCAL_RANK=$l "$@" & done; '
                f"code=0; for ((l = 0; l < {options.ranks}; l++)); do wait -n || code=$?; done; exit $code"
            )
            environment = {
                **os.environ,
                "MASTER_ADDR": f"{NET}.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(options.hosts * options.ranks),
                "LOCAL_WORLD_SIZE": str(options.ranks),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            apart = ["unshare", "--pid", "--uts", "--mount-proc", "--fork", "--kill-child"]
            words = ["ip", "netns", "exec", name, *apart, "bash", "-c", script, "bed", *own]
            hosts.append(subprocess.Popen(words, env=environment))
        try:
            codes = [host.wait(LIMIT_S) for host in hosts]
        finally:
            for host in hosts:
                host.kill()
                host.wait()
        if any(codes):
            raise SystemExit(f"slow_links: ranks ended with codes {codes}.")
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,1gbit", help="of each host's interface; none: as fast as it goes")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default=",".join(MODES))
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    modes = options.only.split(",")
    if options.inside:
        run_rank(modes, options.turns, options.inside)
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        print("slow_links: skipped, because network namespaces need root, iproute2 and util-linux.")
        return
    for rate in options.rates.split(","):
        found = measure(rate, options, modes)
        base = found.get("ddp")
        rows = [
            (mode, f"{sent / 1e6:.3f} MB", f"{sent / base[1]:.4f}" if base else "-", f"{step:.3f} s",
             f"{step / base[0]:.2f}" if base else "-")
            for mode, (step, sent) in found.items()
        ]  # fmt: skip
        head = ("mode", "left a host", "to DDP", "step", "to DDP")
        print(f"{options.hosts} hosts of {options.ranks} ranks, {rate}, medians of {options.turns} turns")
        print("\n".join(table([head, *rows], right=(1, 2, 3, 4))), flush=True)


if __name__ == "__main__":
    main()
