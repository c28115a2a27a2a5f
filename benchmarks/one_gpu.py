"""One device, one model file, every way that people train it: tokens/s, MFU, peak memory, kernels and idle time.

    python benchmarks/one_gpu.py                                  1 B, 4k and 8k tokens, all variants
    python benchmarks/one_gpu.py --models 8b-cut --lengths 8192 --variants hand-compile,weft-compile
    python benchmarks/one_gpu.py --device cpu --models tiny --lengths 64 --repeats 1      proves the script

The model is transformers' Llama, built from a config, the same weights for all. Variants, each in a process of its own:

    hand            a loop written by hand: bf16 autocast, fused AdamW, clipping
    hand-compile    the same with torch.compile
    fsdp2-compile   fully_shard with bf16 parameters and each block compiled, as torchtitan lays it out
    trainer         transformers' Trainer with bf16=True and its own defaults
    trainer-compile the same with torch_compile=True
    liger           hand-compile's loop with the kernels of liger-kernel, where it is installed
    weft            plan "precision=bf16";   weft-compile: with compile=on

Prints medians over `--repeats` rounds of `--steps` steps after `--warm` steps, timed by events of the device.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

#: Sizes by name: fields of transformers' LlamaConfig.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "1b": {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "8b-cut": {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
LR, CLIP = 3e-4, 1.0

#: One training step on a batch of (rows, length + 1) tokens that lie on the host, pinned where there is a GPU.
Step = Callable[[torch.Tensor], Any]


def build(size: str, length: int) -> nn.Module:
    """The model in fp32, on the CPU."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = SIZES[size]
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=length, use_cache=False, tie_word_embeddings=False, attn_implementation="sdpa"
    )
    return transformers.LlamaForCausalLM(config)


def hand(model: nn.Module, device: torch.device, *, compiled: bool = False) -> Step:
    """The loop that people write by hand."""
    model.to(device)
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits = called(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def liger(model: nn.Module, device: torch.device) -> Step:
    """The hand-written loop over liger-kernel's layers, with its fused linear cross-entropy."""
    importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(device, non_blocking=True)[:, :-1]
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def fsdp2(model: nn.Module, device: torch.device) -> Step:
    """fully_shard on one rank, block by block, each block compiled."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model.to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.get_submodule("model.layers"):  # pyright: ignore[reportGeneralTypeIssues]
        block.compile(fullgraph=True)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    cross_entropy = torch.compile(lambda logits, labels: F.cross_entropy(logits.float(), labels))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(device, non_blocking=True)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def weft_step(model: nn.Module, device: torch.device, *, plan: str) -> Step:
    """Weft's six lines."""
    import weft

    run = weft.init(plan, device=device.type)
    run.parallelize(model)

    def loss_of(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
        labels = batch["labels"]
        logits = output.logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()

    step = run.train_step(model, torch.optim.AdamW, loss_of, lr=LR, fused=True, max_grad_norm=CLIP)
    return lambda tokens: step({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})


STEPS: dict[str, Callable[[nn.Module, torch.device], Step]] = {
    "hand": hand,
    "hand-compile": lambda model, device: hand(model, device, compiled=True),
    "fsdp2-compile": fsdp2,
    "liger": liger,
    "weft": lambda model, device: weft_step(model, device, plan="precision=bf16"),
    "weft-compile": lambda model, device: weft_step(model, device, plan="precision=bf16 compile=on"),
}
VARIANTS = ("hand", "hand-compile", "fsdp2-compile", "trainer", "trainer-compile", "liger", "weft", "weft-compile")


def batches(size: str, rows: int, length: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Random tokens without end, pinned for a GPU."""
    draw = torch.Generator().manual_seed(0)
    vocab = SIZES[size]["vocab_size"]
    kept = [torch.randint(vocab, (rows, length + 1), generator=draw) for _ in range(4)]
    if device.type == "cuda":
        kept = [batch.pin_memory() for batch in kept]
    while True:
        yield from kept


def time_steps(
    step: Step, source: Iterator[torch.Tensor], device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of a step in each round, peak memory, and what a profiler sees of three steps."""
    for _ in range(options.warm):
        step(next(source))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    rounds = []
    for _ in range(options.repeats):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(options.steps):
            step(next(source))
        _wait(device)
        rounds.append((time.perf_counter() - begin) / options.steps * 1e3)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"step_ms": rounds, "peak_gib": peak / 2**30, **_profile(step, source, device)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _profile(step: Step, source: Iterator[torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Kernels of a step and the share of time in which none ran; empty without a GPU."""
    if device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    count = 3
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(count):
            step(next(source))
        _wait(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return {}
    busy, end = 0.0, spans[0][0]
    for begin, stop in spans:
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return {"kernels": len(spans) // count, "idle": 1 - busy / (end - spans[0][0])}


def time_trainer(
    model: nn.Module,
    size: str,
    rows: int,
    length: int,
    device: torch.device,
    options: argparse.Namespace,
    compiled: bool,
) -> dict[str, Any]:
    """transformers' Trainer, timed by a callback at the ends of its steps."""
    transformers = importlib.import_module("transformers")
    source = batches(size, 1, length, torch.device("cpu"))
    rounds: list[float] = []
    total = options.warm + options.repeats * options.steps
    samples = [{"input_ids": (one := next(source)[0, :-1]), "labels": one} for _ in range(rows * total)]

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            done = state.global_step - options.warm
            if done >= 0 and done % options.steps == 0:
                _wait(device)
                rounds.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=rows, max_steps=total, bf16=True, report_to=[],
            save_strategy="no", learning_rate=LR, torch_compile=compiled, use_cpu=device.type == "cpu",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[Clock()])
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.train()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    spans = [(b - a) / options.steps * 1e3 for a, b in itertools.pairwise(rounds)]
    return {"step_ms": spans, "peak_gib": peak / 2**30}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One variant of one model at one length, in this process."""
    size, length, variant = options.models[0], options.lengths[0], options.variants[0]
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    rows = max(1, options.tokens // length)
    model = build(size, length)
    params = sum(param.numel() for name, param in model.named_parameters() if "embed_tokens" not in name)
    if variant.startswith("trainer"):
        found = time_trainer(model, size, rows, length, device, options, compiled=variant == "trainer-compile")
    else:
        step = STEPS[variant](model, device)
        found = time_steps(step, batches(size, rows, length, device), device, options)
    sizes = SIZES[size]
    flops = 6 * params + 12 * sizes["num_hidden_layers"] * sizes["hidden_size"] * length
    tokens_per_s = rows * length / (statistics.median(found["step_ms"]) / 1e3)
    return {
        "model": size,
        "length": length,
        "variant": variant,
        "tokens_per_s": tokens_per_s,
        "tflops": flops * tokens_per_s / 1e12,
        **found,
    }


def peak_tflops() -> float | None:
    """The device's dense bf16 peak from Weft's table; None where it has none."""
    from weft.config.cluster import device_by_torch_name

    known = device_by_torch_name(torch.cuda.get_device_name())
    return dict(known.peaks)["bf16"] / 1e12 if known else None


def main() -> None:
    """Measure each variant in a process of its own and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["1b"])
    parser.add_argument("--lengths", type=lambda text: [int(one) for one in text.split(",")], default=[4096, 8192])
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=8192, help="of a step; a row at least")
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=300)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        Path(options.one).write_text(json.dumps(measure(options)))
        return
    peak = peak_tflops() if options.device == "cuda" else None
    print(
        f"{'model':8}{'length':>7}  {'variant':16}{'step ms':>9}{'tokens/s':>10}"
        f"{'MFU':>7}{'GiB':>7}{'kernels':>9}{'idle':>7}"
    )
    rows = []
    for size in options.models:
        for length in options.lengths:
            for variant in options.variants:
                found = _apart(size, length, variant, options)
                rows.append(found)
                print(_line(found, peak), flush=True)
    print(json.dumps(rows))


def _apart(size: str, length: int, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "found.json"
        words = ["--one", str(told), "--models", size, "--lengths", str(length), "--variants", variant]
        words += ["--device", options.device, "--tokens", str(options.tokens), "--warm", str(options.warm)]
        words += ["--steps", str(options.steps), "--repeats", str(options.repeats)]
        try:
            done = subprocess.run(
                [sys.executable, __file__, *words], capture_output=True, text=True, timeout=options.limit_s
            )
        except subprocess.TimeoutExpired:
            return {"model": size, "length": length, "variant": variant, "error": f"no end in {options.limit_s:.0f} s"}
        if done.returncode or not told.exists():
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            return {"model": size, "length": length, "variant": variant, "error": last}
        return json.loads(told.read_text())


def _line(found: dict[str, Any], peak: float | None) -> str:
    head = f"{found['model']:8}{found['length']:7}  {found['variant']:16}"
    if "error" in found:
        return f"{head}  {found['error'][:90]}"
    mfu = f"{100 * found['tflops'] / peak:6.1f}%" if peak else f"{'-':>7}"
    idle = f"{100 * found['idle']:6.1f}%" if "idle" in found else f"{'-':>7}"
    step_ms = statistics.median(found["step_ms"])
    rest = f"{mfu}{found['peak_gib']:7.1f}{found.get('kernels', '-'):>9}{idle}"
    return f"{head}{step_ms:9.2f}{found['tokens_per_s']:10.0f}{rest}"


if __name__ == "__main__":
    main()
