"""A ResNet with batch norm over the whole batch beside DDP's own norms, and what keeping a frozen encoder's work saves.

    python benchmarks/vision.py resnet                 # ResNet-18, pictures of 64 x 64, two ranks of one thread
    python benchmarks/vision.py cached FOLDER          # Debian's tuxpaint-stamps-default, unpacked

resnet: torch's DistributedDataParallel normalises on each rank by itself; Weft's groups span the ranks (norm_group is
the global batch), so its numbers are those of one process. Both take turns, step by step, on the same pictures.

cached: vlm-tiny learns captions with its picture encoder frozen (1,024 patches a picture: about two thirds of the
FLOPs), with and without data.cache_features, in turns. The seconds of the steps of the second epoch count, with what
they wait for data.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from learning import need, stamps, write
from torch import nn
from torch.nn import functional as F

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.models.vision import build_image_model
from weft.monitor.events import read_events
from weft.parallel.parallelize import parallelize
from weft.train.batches.microbatches import Microbatches
from weft.train.step.train_step import TrainStep
from weft.verify.rank_pool import RankPool

CLASSES, SIDE, RANKS = 100, 64, 2
FROZEN = 'optimizer.groups=[{match = "vision.*", lr = 0}]'


def steps_in_turns(batch: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each step of DDP and of Weft on this rank."""
    torch.set_num_threads(1)
    mesh = build_mesh(Plan.parse(f"dp_replicate={RANKS}"))
    draw = torch.Generator().manual_seed(mesh.rank)
    pictures = torch.randn(batch, 3, SIDE, SIDE, generator=draw)
    labels = torch.randint(CLASSES, (batch,), generator=draw)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    theirs = nn.parallel.DistributedDataParallel(build_image_model("resnet18", CLASSES, SIDE))
    optimizer = sgd(theirs)

    def by_ddp() -> None:
        F.cross_entropy(theirs(pictures), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    ours = parallelize(build_image_model("resnet18", CLASSES, SIDE), mesh, norm_group=batch * RANKS)
    step = TrainStep(ours, sgd(ours), _loss, mesh, forward=_forward)

    def by_weft() -> None:
        step(Microbatches([(pictures, labels)]))

    found: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for seconds, play in zip(found, (by_ddp, by_weft), strict=True):
            torch.distributed.barrier()
            began = time.perf_counter()
            play()
            seconds.append(time.perf_counter() - began)
    return found


def _loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def _forward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0])


def resnet(batch: int, rounds: int) -> None:
    """Print the medians and their ratio."""
    with RankPool(RANKS, timeout_s=900) as pool:
        ddp, weft = pool.run(steps_in_turns, batch, rounds)[0]
    late = slice(3, None)  # the first ones warm up
    pairs = [one / other for one, other in zip(weft[late], ddp[late], strict=True)]
    print(
        f"ResNet-18, {RANKS} x {batch} pictures of {SIDE} x {SIDE}: DDP {statistics.median(ddp[late]):.3f} s, "
        f"Weft, groups across ranks {statistics.median(weft[late]):.3f} s; median ratio of pairs "
        f"{statistics.median(pairs):.3f}"
    )


def cached(folder: Path | None, rounds: int) -> None:
    """Print seconds of a second epoch, with and without."""
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        write(root / "train.tar", stamps(need(folder))[True] * 4)  # few: each is encoded in each epoch
        for number in range(rounds):
            for keeps in (False, True):
                found[keeps].append(_second_epoch(root, f"run{number}{keeps}", keeps))
    plain, kept = (statistics.median(found[keeps]) for keeps in (False, True))
    print(f"second epoch with a frozen encoder: {plain:.2f} s, kept {kept:.2f} s: {plain / kept:.2f} times as fast")


def _second_epoch(root: Path, name: str, keeps: bool) -> float:
    words = [
        "task=caption", "task.options.model=vlm-tiny", "task.options.side=128", "task.options.grid=32",
        "task.options.augment=false",
        f"task.options.data={root / 'train.tar'}", "task.options.generate=1", "train.epochs=2", "train.global_batch=16",
        FROZEN, f"data.cache_features={str(keeps).lower()}", f"data.cache_dir={root / name}", f"run.dir={root}",
        f"run.name={name}", "eval.every=0", "checkpoint.every=0", "plan=dp_replicate=1", "launch.device=cpu",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "weft", "train", *words], check=True, stdout=sys.stderr)
    steps = [event for event in read_events(root / name / "events.jsonl") if event.get("event") == "step"]
    return sum(event["seconds"]["total"] for event in steps[len(steps) // 2 :])


def main() -> None:
    """Run one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["resnet", "cached"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--batch", type=int, default=16, help="pictures of a rank")
    parser.add_argument("--rounds", type=int, help="steps of each, or runs of each")
    options = parser.parse_args()
    if options.case == "resnet":
        resnet(options.batch, options.rounds or 20)
    else:
        cached(options.folder, options.rounds or 3)


if __name__ == "__main__":
    main()
