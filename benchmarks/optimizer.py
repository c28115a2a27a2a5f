"""Optimizer steps on this machine, one after another in one run: Weft's pass beside torch's AdamW, and stacked Muon.

    python benchmarks/optimizer.py                       20 M parameters, one rank
    python benchmarks/optimizer.py --params 100e6 --rounds 20
    python benchmarks/optimizer.py --paper               kernels and bytes for each parameter, on the simulated GPU

Each variant scales gradients by a factor on the host, steps, and has rounded weights at the end where they are bf16:
what a training step asks of it. `torch foreach` and `torch fused` get the same flat tensors, in pieces as parameters
are. Times are medians over the rounds; a ratio is the median of the ratios to the first variant within
a round, since the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.gpu_sim.plans import script_on_paper
from weft.optim.muon import orthogonalise
from weft.optim.one_pass import AdamRule, Lane, step_lane

FACTOR, LR, BETAS, EPS, DECAY = 0.37, 1e-3, (0.9, 0.95), 1e-8, 0.1
#: A decoder's matrices: how many of one shape.
MUON = {"24 x 256 x 256": (24, 256, 256), "12 x 256 x 704": (12, 256, 704), "6 x 768 x 768": (6, 768, 768)}
PAPER = """
import json, sys
from weft.models import build_decoder
from tools.gpu_sim.decoder_plans import PaperModel, plan_report
from tools.gpu_sim.cuda import current_device

PARTS = ("parallel/zero/", "optim/", "comm/links/", "train/step/train_step.py", "train/step/update.py")
device = current_device()
subject = PaperModel(layers=int(sys.argv[1]), dim=2048, seq_len=256, vocab_size=32000, batch=1)
number, found = sum(param.numel() for param in build_decoder(subject.spec).parameters()), {}
for plan in ("precision=fp32", "precision=bf16", "dp_shard=8 zero=1 precision=bf16"):
    report = plan_report(plan, device, subject)
    lines = {line: size for line, size in device.counts.line_bytes.items() if line.startswith(PARTS)}
    kernels = sum(device.counts.kernel_lines[line] for line in lines)
    found[plan] = [number, kernels, sum(lines.values()) / number, report.step_s, sum(report.collectives.values())]
print(json.dumps(found))
"""


class Variant:
    """One way to take a step: its own copies of master, moments, gradient and weights."""

    def __init__(self, numel: int, compute: torch.dtype, num_pieces: int = 60):
        generator = torch.Generator().manual_seed(0)
        self.master = torch.randn(numel, generator=generator)
        self.grad = torch.randn(numel, generator=generator).to(compute)
        self.moments = torch.zeros(numel), torch.zeros(numel)
        self.weights = None if compute == torch.float32 else self.master.to(compute)
        self.pieces = [piece.requires_grad_() for piece in self.master.tensor_split(num_pieces)]
        self.seconds: list[float] = []
        self.count = 0

    def weft(self) -> None:
        """One pass."""
        self.count += 1
        rule = AdamRule(self.count, LR, *BETAS, EPS, DECAY, decoupled=True)
        step_lane(Lane(self.master, self.grad, self.moments, self.weights), rule, FACTOR)

    def torch(self, **kind: bool) -> Callable[[], None]:
        """What a loop without Weft does: scale, step, round."""
        optimizer = torch.optim.AdamW(self.pieces, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **kind)

        @torch.no_grad()
        def step() -> None:
            grad = self.grad.float().mul_(FACTOR) if self.grad.dtype != torch.float32 else self.grad.mul_(FACTOR)
            for piece, part in zip(self.pieces, grad.tensor_split(len(self.pieces)), strict=True):
                piece.grad = part
            optimizer.step()
            if self.weights is not None:
                self.weights.copy_(self.master)

        return step


def measure(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """By name: the median of its seconds, and of their ratios to the first one's."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if index:  # the first makes states
                seconds[name].append(time.perf_counter() - start)
    first = next(iter(seconds.values()))
    ratios = {name: [own / other for own, other in zip(found, first, strict=True)] for name, found in seconds.items()}
    return {name: (statistics.median(found), statistics.median(ratios[name])) for name, found in seconds.items()}


def tell(title: str, steps: dict[str, Callable[[], object]], rounds: int) -> None:
    print(title)
    for name, (median, ratio) in measure(steps, rounds).items():
        print(f"  {name:14} {median * 1e3:9.2f} ms   {ratio:5.2f}")


def on_paper(layers: int) -> None:
    """Print kernels and bytes of gradients, norm and step."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "count.py"
        script.write_text(PAPER)
        done = script_on_paper(script, str(layers))
    for plan, (number, kernels, each, step_s, collectives) in json.loads(done.stdout.splitlines()[-1]).items():
        print(
            f"{plan:36} {number / 1e6:.0f} M parameters: {kernels} kernels, {each:.2f} bytes a parameter beside "
            f"backward's own; {collectives} collectives, simulated step {step_s * 1e3:.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--params", type=float, default=20e6)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8, help="of the decoder on paper, 2048 wide")
    parser.add_argument("--paper", action="store_true")
    options = parser.parse_args()
    if options.paper:
        on_paper(options.layers)
        return
    torch.set_num_threads(options.threads)
    for compute in (torch.float32, torch.bfloat16):
        ways = {name: Variant(int(options.params), compute) for name in ("weft", "torch fused", "torch foreach")}
        steps: dict[str, Callable[[], object]] = {
            "weft": ways["weft"].weft,
            "torch fused": ways["torch fused"].torch(fused=True),
            "torch foreach": ways["torch foreach"].torch(foreach=True),
        }
        tell(f"AdamW, {options.params / 1e6:.0f} M parameters, gradients and weights {compute}", steps, options.rounds)
    for name, shape in MUON.items():
        stack = torch.randn(shape)
        both = {
            "stacked": lambda stack=stack: orthogonalise(stack),
            "one by one": lambda stack=stack: [orthogonalise(one) for one in stack],
        }
        tell(f"Muon's iteration, {name}", both, options.rounds)


if __name__ == "__main__":
    main()
