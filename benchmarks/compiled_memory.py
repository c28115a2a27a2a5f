"""What compiled blocks keep for backward, and what that costs: eager, torch.compile as it is, and compile=on.

    python benchmarks/compiled_memory.py
    torchrun --nproc-per-node 2 benchmarks/compiled_memory.py --plan "tp=2 sp=on"

Kept: bytes that autograd holds at the end of forward, parameters aside, that one more layer adds (from 2 layers and 3).
Time: forward and backward of --layers, the rivals in turns, medians over rounds, and the median of ratios in a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import weft
from weft.config.shapes.model_spec import decoder_spec
from weft.models.inspect.blocks import repeated_blocks
from weft.models.registry import build_decoder
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.live_memory import saved_bytes

RIVALS = ("eager", "torch.compile", "compile=on")


def _plainly(model: nn.Module) -> None:
    for block in repeated_blocks(model).values():
        block.compile()


class Rival:
    """A model of so many layers, under the plan, compiled by one of the rivals."""

    def __init__(self, how: str, layers: int, options: argparse.Namespace):
        torch._dynamo.reset()
        compiled = "off" if how == "eager" else "on"
        run = weft.init(f"{options.plan} precision={options.precision} compile={compiled}")
        spec = dataclasses.replace(decoder_spec(options.model), num_layers=layers)
        module = importlib.import_module("weft.parallel.parallelize")
        with mock.patch.object(module, "compile_blocks", _plainly if how == RIVALS[1] else module.compile_blocks):
            self.model = run.parallelize(build_decoder(spec, seed=0))
        ids = torch.randint(spec.vocab_size, (options.rows, options.seq_len))
        positions = torch.arange(options.seq_len).repeat(options.rows, 1)
        self.batch = {"input_ids": ids, "labels": ids, "positions": positions}
        self.seconds: list[float] = []
        self.run()
        self.run()

    def run(self) -> None:
        """Forward and backward of one microbatch."""
        start = time.perf_counter()
        token_cross_entropy(model_forward(self.model, self.batch), self.batch)[0].backward()
        self.last = time.perf_counter() - start

    def kept(self) -> int:
        """Bytes of what autograd keeps of one forward."""
        return saved_bytes(lambda: model_forward(self.model, self.batch), self.model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--plan", default="")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layer = {how: Rival(how, 3, options).kept() - Rival(how, 2, options).kept() for how in RIVALS}
    rivals = {how: Rival(how, options.layers, options) for how in RIVALS}
    for index in range(options.rounds):
        for how in RIVALS[index % 3 :] + RIVALS[: index % 3]:
            rivals[how].run()
            rivals[how].seconds.append(rivals[how].last)
    if os.environ.get("RANK", "0") != "0":
        return
    print("| blocks | kept by a layer | of torch.compile | time | of torch.compile |\n|---|---|---|---|---|")
    base = rivals[RIVALS[1]].seconds
    for how, one in rivals.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(one.seconds, base, strict=True))
        kept = f"{format_bytes(layer[how])} | {layer[how] / layer[RIVALS[1]]:.2f}"
        print(f"| {how} | {kept} | {1000 * statistics.median(one.seconds):.0f} ms | {ratio:.2f} |")


if __name__ == "__main__":
    main()
