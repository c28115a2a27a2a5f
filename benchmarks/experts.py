"""A layer of experts beside its rivals, all interleaved: forward and backward of the experts for tokens already routed.

    python benchmarks/experts.py                              grouped, plain loop, transformers' eager and grouped_mm
    python benchmarks/experts.py --ranks 2                    all experts on each rank beside ep; time of the exchange
    python benchmarks/experts.py --tokens 4096 --dim 512 --width 512 --experts 32 --top-k 4

All variants hold the same stacked weights and do the same products; ratios are to the first, round by round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.experts import Experts
from weft.parallel.expert import distribute_experts
from weft.verify.rank_pool import RankPool

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def shape(options: argparse.Namespace) -> DecoderSpec:
    return DecoderSpec(
        vocab_size=8, dim=options.dim, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=options.width, max_seq_len=8,
        num_experts=options.experts, top_k=options.top_k,
    )  # fmt: skip


def inputs(options: argparse.Namespace, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and weights, as a router with some preference for low numbers gives them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(options.tokens, options.dim, generator=generator)
    logits = torch.randn(options.tokens, options.experts, generator=generator)
    weights, ids = (logits - torch.linspace(0, 1, options.experts)).softmax(-1).topk(options.top_k, -1)
    return x.requires_grad_(), ids, weights


class LoopExperts(nn.Module):
    """What one writes first: for each expert its tokens, a product, an index_add."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.gate_up, self.down = experts.gate_up, experts.down

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(self.gate_up.shape[0]):
            tokens, places = torch.where(ids == expert)
            gate, up = F.linear(x[tokens], self.gate_up[expert]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, self.down[expert])
            y.index_add_(0, tokens, out * weights[tokens, places, None])
        return y


def hugging_face(options: argparse.Namespace, experts: Experts, way: str) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=options.dim, intermediate_size=options.width, num_local_experts=options.experts,
        num_experts_per_tok=options.top_k,
    )  # fmt: skip
    config._experts_implementation = way
    theirs = MixtralExperts(config)
    theirs.gate_up_proj, theirs.down_proj = experts.gate_up, experts.down
    return theirs


def make_experts(options: argparse.Namespace) -> Experts:
    experts = Experts(shape(options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return experts


def timed(forward: Forward, batch: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> float:
    start = time.perf_counter()
    forward(*batch).backward(grad)
    return time.perf_counter() - start


def one_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    experts = make_experts(options)
    variants: dict[str, Any] = {
        "weft grouped": experts,
        "plain loop": LoopExperts(experts),
        "hf eager": hugging_face(options, experts, "eager"),
        "hf grouped_mm": hugging_face(options, experts, "grouped_mm"),
    }
    expected = experts(*inputs(options, 0))
    for name, module in variants.items():
        torch.testing.assert_close(module(*inputs(options, 0)), expected, rtol=1e-3, atol=1e-4, msg=name)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    grad = torch.randn_like(expected)
    for number in range(options.rounds + 2):
        batch = inputs(options, number)
        names = list(variants)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            experts.zero_grad()
            seconds[name].append(timed(variants[name], batch, grad))
    table({name: times[2:] for name, times in seconds.items()})


def on_ranks(options: argparse.Namespace) -> dict[str, list[float]]:
    """Whole experts on each rank, and ep over all ranks: the same tokens a rank."""
    torch.set_num_threads(1)
    ledger = Ledger()
    mesh = build_mesh(Plan.parse(f"dp_shard={options.ranks} ep={options.ranks}"), record=ledger.record)
    whole, spread = nn.Sequential(make_experts(options)), nn.Sequential(make_experts(options))
    distribute_experts(spread, mesh)
    seconds: dict[str, list[float]] = {"whole on each rank": [], f"ep={options.ranks}": [], "of it exchange": []}
    for number in range(options.rounds + 2):
        batch = inputs(options, number * 100 + mesh.rank)
        grad = torch.randn_like(batch[0])
        ledger.clear()
        seconds["whole on each rank"].append(timed(whole[0], batch, grad))
        seconds[f"ep={options.ranks}"].append(timed(spread[0], batch, grad))
        seconds["of it exchange"].append(sum(row.seconds for axis, _, row in ledger.rows() if axis == "ep"))
    return {name: times[2:] for name, times in seconds.items()}


def table(seconds: dict[str, list[float]]) -> None:
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(times, first, strict=True))
        print(f"{name:20} {1e3 * statistics.median(times):9.2f} ms   x {ratio:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("tokens", 2048), ("dim", 256), ("width", 256), ("experts", 16), ("top-k", 2), ("rounds", 20), ("threads", 1),
        ("ranks", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"{options.tokens} tokens, {options.experts} experts of {options.dim} x {options.width}, "
          f"{options.top_k} for each token, fp32, forward and backward")  # fmt: skip
    if options.ranks == 1:
        one_rank(options)
    else:
        with RankPool(options.ranks) as pool:
            table(pool.run(on_ranks, options)[0])


if __name__ == "__main__":
    main()
