"""Checkpoints beside torch's distributed ones (DCP) and DeepSpeed's: the same weights and Adam states, fully sharded.

    python benchmarks/checkpoint.py                                  60 M parameters on 2 ranks
    python benchmarks/checkpoint.py --size 500 --ranks 4 --rounds 3 --apart    500 M on 4

--apart: one rival after the other, each in processes of its own; else all hold their model and states at once.
DeepSpeed takes part where it is installed (pip install -e ".[bench]"), as stage 3 without a save in the background.

save_s: until every rank knows that it is durable; DeepSpeed leaves the files to the system, so they are fsynced after
its save. stall_s: how long training waits; `async` of both until a copy is made, of the later saves, whose memory is
there. step_s: a step of training alone, and busy_s while a save goes on. load_s: into a model that trains. verify_s:
digests of all files, which the rivals have none of. Medians over rounds of the slowest rank; the order rotates.
save_MiB, load_MiB: by how much the peak memory of a rank rose, the most of all rounds, the first one too; peak_MiB: its
peak memory with model and states. The second table divides by DCP: stall by its `save`, all else by what is of the same
kind, `async` by `async`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from weft.checkpoint.folders import RankGroup
from weft.checkpoint.load import load_checkpoint, verify_checkpoint
from weft.checkpoint.save import save_slices
from weft.comm.mesh import build_mesh
from weft.comm.store import StoreChannel
from weft.config.plan import Plan
from weft.memory.offload import HostCopies
from weft.parallel.parallelize import parallelize
from weft.train.states.model_state import resume, state_slices
from weft.train.states.state_io import rank_group
from weft.train.step.train_step import TrainStep
from weft.verify.rank_pool import RankPool

LAYERS = 15


def layers(size: int) -> nn.Sequential:
    """`size` million parameters."""
    width = int((size * 1e6 / LAYERS) ** 0.5) // 64 * 64
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def memory(what: str) -> float:
    """MiB of this process: VmRSS now, VmHWM at most since the peak was forgotten."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{what}:")]
    return int(line.split()[1]) / 1024


def measured(act: Callable[[], object], what: str) -> dict[str, float]:
    """Seconds of the slowest rank, by how many MiB a rank's peak rose at most, and that peak."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    act()
    found = torch.tensor([time.perf_counter() - began, memory("VmHWM") - before, memory("VmHWM")])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {f"{what}_s": float(found[0]), f"{what}_MiB": float(found[1]), f"{what}_peak": float(found[2])}


def slowest(seconds: float) -> float:
    """The most of all ranks."""
    found = torch.tensor([seconds])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def train_until(step: Callable[[], object], is_over: Callable[[], bool]) -> dict[str, float]:
    """A step alone, and the mean of those until a save is over; all ranks do as many."""
    found: list[float] = []
    while True:
        over = torch.tensor([float(is_over())])
        dist.all_reduce(over, dist.ReduceOp.MIN)
        if over:
            break
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    began = time.perf_counter()
    step()
    alone = time.perf_counter() - began
    return {"step_s": alone, "busy_s": statistics.mean(found or [alone])}


class Ours:
    """Weft under zero=3."""

    name, waits = "weft", True

    def __init__(self, size: int, root: Path):
        self.root = root / self.name
        self.mesh = build_mesh(Plan.parse(f"dp_shard={dist.get_world_size()} zero=3"))
        self.model = parallelize(layers(size), self.mesh, seed=1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        step = TrainStep(self.model, self.optimizer, lambda out, batch: (out.square().sum(), len(batch)), self.mesh)
        self.step = lambda: step(torch.ones(2, self.model[0].in_features))
        self.step()
        self.copies, talk = HostCopies(self.mesh.device), StoreChannel(self.mesh.rank, self.mesh.world_size)
        self.store_channel = RankGroup(self.mesh.rank, self.mesh.world_size, talk.on_first, talk.gather)

    def save(self, number: int) -> dict[str, float]:
        stall = 0.0

        def act() -> None:
            nonlocal stall
            began = time.perf_counter()
            if self.waits:
                save_slices(self.root, number, state_slices(self.model, self.optimizer), {}, rank_group(self.mesh))
                return
            found = state_slices(self.model, self.optimizer, self.copies)
            thread = Thread(target=save_slices, args=(self.root, number, found, {}, self.store_channel))
            thread.start()
            stall = time.perf_counter() - began
            thread.join()

        found = measured(act, "save")
        return found | {"stall_s": found["save_s"] if self.waits else slowest(stall)}

    def beside(self, number: int) -> dict[str, float]:
        """Steps while a save goes on."""
        found = state_slices(self.model, self.optimizer, self.copies)
        thread = Thread(target=save_slices, args=(self.root, number, found, {}, self.store_channel))
        thread.start()
        return train_until(self.step, lambda: not thread.is_alive())

    def load(self, number: int) -> dict[str, float]:
        path = self.root / f"step_{number:08d}"
        found = measured(lambda: resume(self.model, self.optimizer, load_checkpoint(path, lazily=True)), "load")
        return found | measured(lambda: verify_checkpoint(path, together=rank_group(self.mesh)), "verify")


class OursAsync(Ours):
    """The same, behind training."""

    name, waits = "weft async", False


class Dcp:
    """FSDP2 with torch's distributed checkpoints."""

    name, waits = "dcp", True

    def __init__(self, size: int, root: Path):
        self.root, self.group = root / self.name, dist.new_group(backend="gloo")
        torch.manual_seed(1)
        self.model = layers(size)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step()

    def step(self) -> None:
        self.model(torch.ones(2, self.model[0].in_features)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def beside(self, number: int) -> dict[str, float]:
        """Steps while a save goes on."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        pending = dcp.async_save(
            {"model": model, "optimizer": optimizer}, checkpoint_id=self.root / str(number), process_group=self.group
        )
        return train_until(self.step, pending.done)

    def save(self, number: int) -> dict[str, float]:
        stall = 0.0

        def act() -> None:
            nonlocal stall
            began = time.perf_counter()
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer}
            if self.waits:
                dcp.save(state, checkpoint_id=self.root / str(number))
            else:
                pending = dcp.async_save(state, checkpoint_id=self.root / str(number), process_group=self.group)
                stall = time.perf_counter() - began
                pending.result()

        found = measured(act, "save")
        return found | {"stall_s": found["save_s"] if self.waits else slowest(stall)}

    def load(self, number: int) -> dict[str, float]:
        def act() -> None:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=self.root / str(number))
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

        return measured(act, "load")


class DcpAsync(Dcp):
    """The same, in the background."""

    name, waits = "dcp async", False


class DeepSpeed:
    """DeepSpeed's ZeRO 3."""

    name, waits = "deepspeed", True

    def __init__(self, size: int, root: Path):
        os.environ |= {
            "DS_ACCELERATOR": "cpu",
            "LOCAL_RANK": str(dist.get_rank()),
            "RANK": str(dist.get_rank()),
            "WORLD_SIZE": str(dist.get_world_size()),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        self.root, torch_model = root / self.name, layers(size)
        self.width = torch_model[0].in_features
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(torch_model.parameters(), lr=1e-3)
        self.engine, *_ = deepspeed.initialize(model=torch_model, optimizer=optimizer, config=config)
        self.step()

    def step(self) -> None:
        self.engine.backward(self.engine(torch.ones(2, self.width)).square().sum())
        self.engine.step()

    def save(self, number: int) -> dict[str, float]:
        def act() -> None:
            self.engine.save_checkpoint(str(self.root), tag=str(number))
            mine = f"zero_pp_rank_{dist.get_rank()}_"
            for path in (self.root / str(number)).iterdir():
                if mine in path.name or (dist.get_rank() == 0 and "zero_pp_rank_" not in path.name):
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            dist.barrier()

        found = measured(act, "save")
        return found | {"stall_s": found["save_s"]}

    def load(self, number: int) -> dict[str, float]:
        return measured(lambda: self.engine.load_checkpoint(str(self.root), tag=str(number)), "load")


RIVALS = (Ours, OursAsync, Dcp, DcpAsync, *((DeepSpeed,) if importlib.util.find_spec("deepspeed") else ()))
SECONDS, PEAKS = ("stall_s", "save_s", "load_s", "verify_s", "step_s", "busy_s"), ("save_MiB", "load_MiB", "peak_MiB")


def rounds(size: int, number: int, root: str, names: Sequence[str] = ()) -> dict[str, list[dict[str, float]]]:
    """All rivals in turn, `number` times."""
    rivals = [kind(size, Path(root)) for kind in RIVALS if not names or kind.name in names]
    found: dict[str, list[dict[str, float]]] = {rival.name: [] for rival in rivals}
    for turn in range(number):
        for rival in rivals[turn % len(rivals) :] + rivals[: turn % len(rivals)]:
            row = rival.save(turn) | rival.load(turn)
            found[rival.name].append(row if rival.waits else row | rival.beside(number + turn))
            dist.barrier()
            if dist.get_rank() == 0:
                for path in rival.root.iterdir():
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else None
            dist.barrier()
    return found


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--size", type=int, default=60, help="million parameters")
    words.add_argument("--ranks", type=int, default=2)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--folder", default=None, help="where to write; a temporary folder")
    words.add_argument("--apart", action="store_true", help="one rival after the other")
    chosen = words.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for names in [[rival.name] for rival in RIVALS] if chosen.apart else [[]]:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as root, RankPool(chosen.ranks, timeout_s=3600.0) as pool:
            found |= pool.run(rounds, chosen.size, chosen.rounds, root, names)[0]
    table = {name: summary(rows) for name, rows in found.items()}
    tell("", table)
    tell("x DCP", over_dcp(table))


def summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians of seconds, the most of memory."""
    found = {column: statistics.median(row[column] for row in rows) for column in SECONDS if column in rows[0]}
    found |= {column: max(row[column] for row in rows) for column in PEAKS if column in rows[0]}
    return found | {"peak_MiB": max(value for row in rows for key, value in row.items() if key.endswith("_peak"))}


def over_dcp(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What of a table is DCP's too, divided by it."""
    found = {}
    for name, row in table.items():
        beside = table.get("dcp async" if "async" in name else "dcp", {})
        beside = beside | ({"stall_s": table["dcp"]["save_s"]} if "dcp" in table else {})
        found[name] = {column: value / beside[column] for column, value in row.items() if beside.get(column)}
    return found


def tell(title: str, table: dict[str, dict[str, float]]) -> None:
    print(f"{title:12}" + "".join(f"{column:>10}" for column in (*SECONDS, *PEAKS)))
    for name, row in table.items():
        cells = (f"{row[one]:10.3f}" if one in row else f"{'-':>10}" for one in (*SECONDS, *PEAKS))
        print(f"{name:12}" + "".join(cells))


if __name__ == "__main__":
    main()
