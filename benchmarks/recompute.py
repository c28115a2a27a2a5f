"""What each recompute policy keeps and costs: bytes alive, and time of forward and backward, interleaved in one run.

    python benchmarks/recompute.py                                   the tiny decoder on this CPU
    python benchmarks/recompute.py --model gpt2-tiny --documents     its attention gets a mask
    python benchmarks/recompute.py --device cuda --model gpt2 --precision bf16 --compile

Bytes are those of live tensors, parameters and gradients aside: kept, at the end of forward with the loss; peak, at
any moment of forward and backward. The time is the median over rounds of one microbatch, and its ratio to none the
median of the ratios within a round. With --compile, bytes are read off the CUDA allocator, else from the eager model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from weft.config.plan import Plan
from weft.config.shapes.model_spec import decoder_spec
from weft.memory.recompute import Recompute, apply_recompute
from weft.models.inspect.blocks import repeated_blocks
from weft.models.registry import build_decoder
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.live_memory import LiveTensors

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Candidate:
    """One model under one setting."""

    def __init__(self, setting: str, options: argparse.Namespace, batch: dict[str, torch.Tensor]):
        self.model = build_decoder(decoder_spec(options.model), seed=0).to(options.device, _DTYPES[options.precision])
        self.recompute: Recompute = apply_recompute(self.model, Plan(recompute=setting))
        self.batch = batch
        self.seconds: list[float] = []
        self.run()
        self.kept, self.peak = self._bytes(options)
        if options.compile:
            for block in repeated_blocks(self.model).values():
                block.compile()
            self.run()
            self.run()
            if options.device == "cuda":
                self.kept, self.peak = self._cuda_bytes()

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        """Forward and backward of one microbatch."""
        loss, _ = token_cross_entropy(model_forward(self.model, self.batch), self.batch)
        after_forward()
        loss.backward()

    def time(self) -> None:
        """Add the seconds of one run."""
        start = time.perf_counter()
        self.run()
        if self.batch["input_ids"].is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)

    def _bytes(self, options: argparse.Namespace) -> tuple[int, int]:
        kept = []
        known: list[nn.Parameter | torch.Tensor] = [*self.model.parameters()]
        known += [param.grad for param in self.model.parameters() if param.grad is not None]
        with LiveTensors(known) as live:
            self.run(lambda: kept.append(live.now))
        return kept[0], live.peak

    def _cuda_bytes(self) -> tuple[int, int]:
        kept = []
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(lambda: kept.append(torch.cuda.memory_allocated() - before))
        return kept[0], torch.cuda.max_memory_allocated() - before


def make_batch(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    spec = decoder_spec(options.model)
    shape = (options.rows, options.seq_len)
    ids = torch.randint(spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(options.seq_len).repeat(options.rows, 1)
    batch = {"input_ids": ids, "labels": ids, "positions": positions}
    if options.documents:
        batch["document_ids"] = (positions >= options.seq_len // 3).long()
    return {name: tensor.to(options.device) for name, tensor in batch.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=_DTYPES)
    parser.add_argument("--documents", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--settings", default="none,attention,selective,full,75%,50%,25%")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = make_batch(options)
    candidates = {setting: Candidate(setting, options, batch) for setting in options.settings.split(",")}
    names = list(candidates)
    for index in range(options.rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            candidates[name].time()
    none = candidates[names[0]]
    print(f"| recompute | kept | of {names[0]} | peak | of {names[0]} | time | of {names[0]} |")
    print("|---|---|---|---|---|---|---|")
    for name, one in candidates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(one.seconds, none.seconds, strict=True))
        print(
            f"| `{name}` | {format_bytes(one.kept)} | {one.kept / none.kept:.2f} | {format_bytes(one.peak)} | "
            f"{one.peak / none.peak:.2f} | {1000 * statistics.median(one.seconds):.0f} ms | {ratio:.2f} |"
        )
    for one in candidates.values():
        if one.recompute.is_budget:
            print(one.recompute.describe())


if __name__ == "__main__":
    main()
