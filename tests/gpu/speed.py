"""Stage "speed": compare Weft with alternatives, by benchmarks/one_gpu.py."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.cases import Case, Figures, Setting, Skipped, require
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.tensor.head import LossChunking, token_loss
from weft.parallel.tensor.linear import SharedLayer

ROOT = Path(__file__).parents[2]
#: Least share of the best alternative's tokens/s, and the largest share of a step without a running kernel.
LEAST_SHARE, MOST_IDLE = 0.97, 0.03


def _compare_with_rivals(setting: Setting, model: str, length: int, variants: str) -> Figures:
    size = ["--models", "tiny", "--lengths", "32", "--warm", "1", "--steps", "1", "--repeats", "1", "--tokens", "64"]
    if not setting.small:
        size = ["--models", model, "--lengths", str(length)]
    command = [sys.executable, str(ROOT / "benchmarks" / "one_gpu.py"), "--device", setting.device.type, *size]
    done = subprocess.run([*command, "--variants", variants], capture_output=True, text=True, check=True)
    found = {one["variant"]: one for one in json.loads(done.stdout.splitlines()[-1])}
    broken = {name: one["error"] for name, one in found.items() if "error" in one and name.startswith("weft")}
    if broken:
        raise AssertionError(f"Weft did not run: {broken}")
    figures: dict[str, float | int | str] = {
        name: one.get("error", "") or round(one["tokens_per_s"]) for name, one in found.items()
    }
    if setting.is_cuda:
        figures["step ms"] = statistics.median(found["weft-compile"]["step_ms"])
        figures["idle"] = found["weft-compile"]["idle"]
        rivals = [
            one["tokens_per_s"] for name, one in found.items() if not name.startswith("weft") and "error" not in one
        ]
        figures["share of the best rival"] = found["weft-compile"]["tokens_per_s"] / max(rivals)
        require(LEAST_SHARE, float(figures["share of the best rival"]), "least share of the best rival's tokens/s")
        require(float(figures["idle"]), MOST_IDLE, "share of a step in which the GPU waits")
    return figures


def one_billion_4k(setting: Setting) -> Figures:
    """1 B, 8,192 tokens per step in rows of 4,096, compared with every alternative."""
    variants = "hand,weft" if setting.small else "hand-compile,fsdp2-compile,trainer,liger,weft,weft-compile"
    return _compare_with_rivals(setting, "1b", 4096, variants)


def one_billion_8k(setting: Setting) -> Figures:
    """1 B, one row of 8,192 tokens."""
    return _compare_with_rivals(
        setting, "1b", 8192, "weft" if setting.small else "hand-compile,fsdp2-compile,weft-compile"
    )


def eight_billion_8_layers(setting: Setting) -> Figures:
    """Eight of 8 B's layers, one row of 8,192 tokens."""
    return _compare_with_rivals(setting, "8b-cut", 8192, "weft" if setting.small else "hand-compile,weft-compile")


def heads_of_weft_and_torch(setting: Setting) -> Figures:
    """Compare a head's loss and gradients by Weft and by torch's chunked linear_cross_entropy: times and memory."""
    if not hasattr(F, "linear_cross_entropy"):
        raise Skipped("this needs torch 2.13 or newer")
    tokens, dim, vocab = (64, 16, 101) if setting.small else (8192, 2048, 128_256)
    dtype = torch.float32 if setting.small else torch.bfloat16
    torch.manual_seed(0)
    x = torch.randn(1, tokens, dim, dtype=dtype, device=setting.device, requires_grad=True)
    weight = (torch.randn(vocab, dim, dtype=dtype, device=setting.device) / dim**0.5).requires_grad_()
    labels = torch.randint(vocab, (1, tokens), device=setting.device)
    line = SharedLayer(build_mesh(Plan(), setting.device)["tp"])
    options = torch.nn.LinearCrossEntropyOptions()
    ways: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: F.linear_cross_entropy(x[0], weight, labels[0], reduction="sum", options=options),
        "weft": partial(
            _our_head, x, weight, labels, line, LossChunking.agreed(line.axis, setting.device, compiled=False)
        ),
    }
    if not setting.small:  # generating code takes longer than the rest
        compiled = LossChunking.agreed(line.axis, setting.device, compiled=True)
        ways["weft-compile"] = partial(_our_head, x, weight, labels, line, compiled)
    figures: dict[str, float | int | str] = {}
    for name, loss_of in ways.items():
        taken, peak = _timed(loss_of, [x, weight], setting, 1 if setting.small else 10)
        figures |= {f"{name} ms": taken * 1e3, f"{name} GiB": peak / 2**30}
    figures["faster"] = min(ways, key=lambda name: float(figures[f"{name} ms"]))
    return figures


def _our_head(x: Tensor, weight: Tensor, labels: Tensor, line: SharedLayer, way: LossChunking) -> Tensor:
    return token_loss(x, weight, None, labels, line, len(weight), -100, way)


def _timed(loss_of: Callable[[], Tensor], leaves: list[Tensor], setting: Setting, times: int) -> tuple[float, int]:
    """Return the median seconds of forward and backward, and the additional peak memory in bytes."""
    taken, peak = [], 0
    for index in range(times + 1):
        for leaf in leaves:
            leaf.grad = None
        if setting.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        loss_of().backward()
        if setting.is_cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        if index:  # the first run compiles, and makes cached values
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken), peak


CASES = [
    Case("speed", "heads compared with torch's", heads_of_weft_and_torch, 200),
    Case("speed", "1 B at 4k", one_billion_4k, 580),
    Case("speed", "1 B at 8k", one_billion_8k, 400),
    Case("speed", "8 B cut to 8 layers at 8k", eight_billion_8_layers, 300),
]
