"""Tensor and sequence parallelism beside torch's `parallelize_module`: one model, all interleaved in one process group.

    python benchmarks/model_parallel.py --ranks 2                     step time of each variant, ratios to the first
    python benchmarks/model_parallel.py --ranks 4 --size large
    python benchmarks/model_parallel.py --mode memory                 what one forward keeps for backward, by variant
    python benchmarks/model_parallel.py --mode traffic                bytes of one step by axis and operation

Every variant does forward, mean cross-entropy, backward, global-norm clipping and AdamW on the same shapes, in fp32.
The order within a round rotates. Prints each variant's median step and the median of its ratios to the first one, round
by round, which drifts of the machine's speed do not touch. torch-tp-lp is torch-tp with `loss_parallel`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.units import format_bytes
from weft.verify.rank_pool import RankPool

SIZES = {
    "small": DecoderSpec(
        vocab_size=4096, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=704, max_seq_len=1024
    ),
    "large": DecoderSpec(
        vocab_size=8192, dim=512, num_layers=6, num_heads=8, num_kv_heads=4, ffn_dim=1408, max_seq_len=1024
    ),
}
DEFAULT_VARIANTS = "torch-tp,torch-tp-sp,torch-tp-lp,weft-tp,weft-tp-sp"
LR, CLIP = 3e-4, 1.0
Step = Callable[[int], None]


def batch_of(options: argparse.Namespace, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(SIZES[options.size].vocab_size, (options.rows, options.seq_len + 1), generator=generator)
    positions = torch.arange(options.seq_len).repeat(options.rows, 1)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(), "positions": positions}


def torch_model(options: argparse.Namespace, kind: str) -> nn.Module:
    """The decoder cut by torch's own styles, as its tutorial does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("tp",))
    model = build_decoder(SIZES[options.size], seed=0)
    sp, whole = kind == "torch-tp-sp", kind != "torch-tp-lp"
    tokens = Shard(1) if sp else Replicate()
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "head": ColwiseParallel(
            input_layouts=tokens, output_layouts=Replicate() if whole else Shard(-1), use_local_output=whole
        ),
    }
    if sp:
        ends["norm"] = SequenceParallel()
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        plan: dict[str, Any] = {
            **{f"attn.{name}": ColwiseParallel() for name in "qkv"},
            "attn.o": RowwiseParallel(output_layouts=tokens),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=tokens),
        }
        if sp:
            none = (None, None, None)
            gather: Any = {"input_layouts": (tokens, *none), "desired_input_layouts": (Replicate(), *none)}
            plan |= {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attn": PrepareModuleInput(**gather),
                "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(block, mesh, plan)
    return model


def loss_context(kind: str) -> Any:
    """What torch's vocabulary-parallel loss needs around forward and backward."""
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel() if kind == "torch-tp-lp" else contextlib.nullcontext()


def clip_by_hand(model: nn.Module) -> None:
    """The least that clipping costs: torch's own refuses gradients of which some are DTensors and some are not."""
    grads = [_local(param.grad) for param in model.parameters() if param.grad is not None]
    square = torch.stack(torch._foreach_norm(grads)).square().sum()
    torch.distributed.all_reduce(square)
    torch._foreach_mul_(grads, (CLIP / (square.sqrt() + 1e-6)).clamp(max=1.0))


def build_torch(options: argparse.Namespace, kind: str) -> tuple[nn.Module, Callable[[int], torch.Tensor], Step]:
    from torch.distributed.tensor import DTensor

    model = torch_model(options, kind)
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) == cut] for cut in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups if group], lr=LR, weight_decay=0.1, foreach=True
    )

    def forward(index: int) -> torch.Tensor:
        batch = batch_of(options, index)
        return F.cross_entropy(model_forward(model, batch).flatten(0, 1), batch["labels"].flatten())

    def step(index: int) -> None:
        with loss_context(kind):
            forward(index).backward()
        clip_by_hand(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, forward, step


def build_weft(
    options: argparse.Namespace, kind: str, ledger: Ledger | None = None
) -> tuple[nn.Module, Callable[[int], torch.Tensor], Step]:
    from weft.parallel.tensor.language_head import expect_labels

    plan = Plan(tp=options.ranks, sp=kind == "weft-tp-sp")
    mesh = build_mesh(plan, record=ledger.record) if ledger else build_mesh(plan)
    model = build_decoder(SIZES[options.size], seed=0)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, foreach=True)
    train_step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward, max_grad_norm=CLIP)

    def forward(index: int) -> torch.Tensor:
        batch = batch_of(options, index)
        with expect_labels(model, token_cross_entropy, batch):
            return token_cross_entropy(model_forward(model, batch), batch)[0]

    return model, forward, lambda index: train_step(batch_of(options, index)) and None


def build(options: argparse.Namespace, kind: str) -> tuple[nn.Module, Callable[[int], torch.Tensor], Step]:
    return (build_torch if kind.startswith("torch") else build_weft)(options, kind)


def measure_time(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step on this rank, by variant, one after another in each round."""
    steps = {kind: build(options, kind)[2] for kind in options.variants}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    names = list(steps)
    for index in range(options.warmup + options.rounds):
        for place in range(len(names)):
            kind = names[(place + index) % len(names)]
            torch.distributed.barrier()
            start = time.perf_counter()
            steps[kind](index)
            torch.distributed.barrier()
            if index >= options.warmup:
                seconds[kind].append(time.perf_counter() - start)
    return seconds


def measure_memory(options: argparse.Namespace) -> dict[str, int]:
    """Bytes that one forward keeps for backward on this rank, parameters left out, each storage once."""
    found: dict[str, int] = {}
    for kind in options.variants:
        model, forward, _ = build(options, kind)
        params = {_local(param).untyped_storage().data_ptr() for param in model.parameters()}
        kept: dict[int, int] = {}
        tensors: list[torch.Tensor] = []  # so that no storage is used again meanwhile

        def pack(tensor: torch.Tensor, params: Any = params, kept: Any = kept, tensors: Any = tensors) -> torch.Tensor:
            storage = _local(tensor).untyped_storage()
            if storage.data_ptr() not in params:
                kept[storage.data_ptr()] = storage.nbytes()
                tensors.append(tensor)
            return tensor

        with loss_context(kind), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(0)
        found[kind] = sum(kept.values())
        del loss
    return found


def _local(tensor: Any) -> torch.Tensor:
    """What a DTensor, or a collective under way, holds here."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor)


def measure_traffic(options: argparse.Namespace) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for kind in options.variants:
        if kind.startswith("weft"):
            ledger = Ledger()
            step = build_weft(options, kind, ledger)[2]
            step(0)
            ledger.clear()
            step(1)
            found[kind] = [
                f"{axis:12}{name:16}{entry.calls:>5} calls {format_bytes(entry.num_bytes):>12}"
                for axis, name, entry in ledger.rows()
            ]
    return found


def on_rank(options: argparse.Namespace) -> Any:
    torch.set_num_threads(1)
    return {"time": measure_time, "memory": measure_memory, "traffic": measure_traffic}[options.mode](options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mode", choices=("time", "memory", "traffic"), default="time")
    parser.add_argument("--variants", default=DEFAULT_VARIANTS, type=lambda text: text.split(","))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if isinstance(options.variants, str):
        options.variants = options.variants.split(",")
    with RankPool(options.ranks, timeout_s=400) as pool:
        result = pool.run(on_rank, options)[0]
    if options.json:
        print(json.dumps(result))
    elif options.mode == "time":
        first = result[options.variants[0]]
        for kind, seconds in result.items():
            ratio = statistics.median(own / base for own, base in zip(seconds, first, strict=True))
            print(f"{kind:14}{statistics.median(seconds) * 1e3:9.1f} ms  {ratio:5.2f}")
    elif options.mode == "memory":
        for kind, num_bytes in result.items():
            print(f"{kind:14}{format_bytes(num_bytes):>12}  {num_bytes / result[options.variants[0]]:5.2f}")
    else:
        for kind, lines in result.items():
            print(kind, *lines, sep="\n  ")


if __name__ == "__main__":
    main()
