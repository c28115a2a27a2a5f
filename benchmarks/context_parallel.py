"""One attention layer over a long sequence, each way of context parallel, interleaved in one run.

    python benchmarks/context_parallel.py --ranks 2
    python benchmarks/context_parallel.py --ranks 4 --seq-len 8192 --heads 16 --kv-heads 4 --document 1024
    python benchmarks/context_parallel.py --ranks 2 --window 512
    torchrun --nproc-per-node 8 benchmarks/context_parallel.py --device cuda --seq-len 131072 --dtype bfloat16

Forward and backward of causal attention with grouped heads; projections are not in it. Beside the three ways: `masked`,
what is written by hand with torch.distributed (keys and values gathered, SDPA with a dense mask; it keeps the
gathered keys), and on CUDA `torch`, its experimental context_parallel (ring of all-gathered keys, its balancer), which
has no kernels for the CPU. Prints for each the median seconds, the median ratio to `masked` in the same round, and
the bytes that autograd keeps on a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from weft.comm.autograd import gather_from
from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh, build_mesh
from weft.config.plan import Plan
from weft.parallel.context.kernels import AttentionWindow, Borders, Scoring
from weft.parallel.context.modes import SequenceOrder, View, attend_sharded
from weft.verify.rank_pool import RankPool

MODES = ("gather", "ring", "ulysses")


def make_sides(mesh: Mesh, options: argparse.Namespace) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Name -> one forward and backward; it returns what autograd kept."""
    axis, seq_len = mesh["cp"], options.seq_len
    borders: tuple[Borders, ...] | None = None
    if options.document:
        borders = (((*range(0, seq_len, options.document), seq_len)),) * options.batch
    scoring = Scoring(options.width**-0.5, AttentionWindow(options.window - 1 if options.window else None, 0))
    sides: dict[str, Callable[[], list[torch.Tensor]]] = {}
    for mode in MODES:
        view = View(axis, SequenceOrder(mode, axis.size, axis.rank, seq_len), borders)
        sides[mode] = side(mesh, options, lambda q, k, v, view=view: attend_sharded(q, k, v, scoring, view))
    mask = dense_mask(SequenceOrder("gather", axis.size, axis.rank, seq_len), borders, options.window, mesh.device)
    sides["masked"] = side(mesh, options, lambda q, k, v: masked(q, k, v, mask, mesh))
    if mesh.device.type == "cuda" and not options.document and not options.window:
        sides["torch"] = torch_side(mesh, options)
    return sides


def dense_mask(
    order: SequenceOrder, borders: tuple[Borders, ...] | None, window: int, device: torch.device
) -> torch.Tensor:
    """(T, S): which keys, in order of the ranks' parts, this rank's queries see."""
    keys = torch.cat(
        [SequenceOrder(order.mode, order.cp, rank, order.seq_len).positions(device) for rank in range(order.cp)]
    )
    queries = order.positions(device)
    seen = queries[:, None] >= keys[None]
    if window:
        seen &= queries[:, None] - keys[None] < window
    if borders is not None:
        starts = torch.tensor(borders[0][1:-1], device=device)
        seen &= torch.bucketize(queries, starts, right=True)[:, None] == torch.bucketize(keys, starts, right=True)[None]
    return seen


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    k, v = (gather_from(x, mesh["cp"], 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1])


def side(mesh: Mesh, options: argparse.Namespace, attention: Callable[..., torch.Tensor]) -> Any:
    torch.manual_seed(mesh.rank)
    tokens, dtype = options.seq_len // mesh["cp"].size, getattr(torch, options.dtype)
    shapes = [(options.batch, heads, tokens, options.width) for heads in (options.heads, *(options.kv_heads,) * 2)]
    qkv = [torch.randn(shape, dtype=dtype, device=mesh.device, requires_grad=True) for shape in shapes]
    grad = torch.randn(shapes[0], dtype=dtype, device=mesh.device)

    def run() -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            out = attention(*qkv)
        out.backward(grad)
        return kept

    return run


def torch_side(mesh: Mesh, options: argparse.Namespace) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    device_mesh = DeviceMesh.from_group(mesh["cp"].group, mesh.device.type)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with context_parallel(device_mesh):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])

    return side(mesh, options, attention)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each side in each round, and the bytes it keeps."""
    torch.set_num_threads(1)
    device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", 0))) if options.device == "cuda" else "cpu"
    mesh = build_mesh(Plan(cp=options.ranks), device)
    sides = make_sides(mesh, options)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    kept_bytes = {}
    for turn in range(options.rounds + 1):
        names = list(sides) if turn % 2 else list(reversed(sides))
        for name in names:
            wait(mesh)
            start = time.perf_counter()
            kept = sides[name]()
            wait(mesh)
            seconds[name].append(time.perf_counter() - start)
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
            kept_bytes[name] = sum(storages.values())
    return {"seconds": {name: found[1:] for name, found in seconds.items()}, "kept_bytes": kept_bytes}


def wait(mesh: Mesh) -> None:
    all_reduce(torch.zeros(1, device=mesh.device), mesh["cp"])
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 2), ("seq-len", 4096), ("batch", 1), ("heads", 8), ("kv-heads", 8), ("width", 64),
                          ("rounds", 5), ("document", 0), ("window", 0)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        options.ranks = dist.get_world_size()
        result, first = measure(options), dist.get_rank() == 0
    else:
        with RankPool(options.ranks, timeout_s=1800) as pool:
            result, first = pool.run(measure, options)[0], True
    if first:
        seconds = result["seconds"]
        for name, found in seconds.items():
            ratio = statistics.median(ours / base for ours, base in zip(found, seconds["masked"], strict=True))
            mebibytes = result["kept_bytes"][name] / 2**20
            print(f"{name:8} {statistics.median(found):8.4f} s   {ratio:6.2f} x masked   keeps {mebibytes:8.2f} MiB")
        print(json.dumps({"options": vars(options), **result}))


if __name__ == "__main__":
    main()
