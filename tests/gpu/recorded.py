"""Compare graphs=on with graphs=off: the same losses and gradients, and a faster step of a small model."""

from __future__ import annotations

import statistics
import time

import torch

from tests.gpu.cases import Case, Figures, Setting, require
from tests.gpu.correct import TOLERANCES
from tests.gpu.training import SMALL, Numbers, batch_of
from tests.parity.graph_cases import train
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.oracles import OpRecorder

#: GPT-2 with 124 M parameters.
GPT2 = DecoderSpec(
    family="gpt2", vocab_size=50_304, dim=768, num_layers=12, num_heads=12, num_kv_heads=12, ffn_dim=3072,
    max_seq_len=1024, tied=True,
)  # fmt: skip
PLANS = (
    "precision=fp64",
    "precision=fp32 accumulation=3",
    "precision=bf16",
    "precision=bf16 accumulation=2 recompute=full",
    "precision=bf16 recompute=selective",
    "precision=bf16 recompute=attention",
    "precision=fp16",
)
#: Generated code does not have the operators that replace graphs on a CPU.
COMPILED = "precision=bf16 compile=on"
#: Least speed with graphs, relative to the speed without.
LEAST_GAIN = 1.1


def same_with_graphs(setting: Setting) -> Figures:
    """A model with dropout, a changing learning rate and clipping: eight steps, recorded from the third on."""
    figures: dict[str, float | int | str] = {}
    for plan in PLANS[:2] if setting.small else (*PLANS, COMPILED):
        eager, graphs = (train(plan, graphs=on, steps=8, device=setting.device) for on in (False, True))
        numbers = [
            Numbers([one[0] for one in found.step_metrics], [one[1] for one in found.step_metrics])
            for found in (eager, graphs)
        ]
        figures[plan] = apart = numbers[1].distance(numbers[0])
        require(apart, TOLERANCES[Plan.parse(plan).precision], f"graphs=on {plan} is apart from graphs=off")
        if graphs.passes < 6:
            raise AssertionError(f"graphs=on {plan}: {graphs.passes} passes were replayed")
    return figures


def faster_with_graphs(setting: Setting) -> Figures:
    """GPT-2 with 124 M parameters at 1,024 tokens per step, for which the host takes longer than the GPU."""
    spec, tokens = (SMALL, 32) if setting.small else (GPT2, 1024)
    figures: dict[str, float | int | str] = {}
    plans = ("", "graphs=on") if setting.small else ("", "graphs=on", "compile=on", "compile=on graphs=on")
    for plan in plans:
        taken, peak = _step_s(f"precision=bf16 {plan}", spec, tokens, setting)
        figures |= {f"{plan or 'eager'} ms": taken * 1e3, f"{plan or 'eager'} GiB": peak / 2**30}
    for first, second in (("eager", "graphs=on"), ("compile=on", "compile=on graphs=on")):
        if f"{second} ms" in figures:
            figures[f"{second} gains"] = float(figures[f"{first} ms"]) / float(figures[f"{second} ms"])
    if setting.is_cuda:
        require(LEAST_GAIN, float(figures["graphs=on gains"]), "least speed with graphs, of that without")
    return figures


def _step_s(plan: str, spec: DecoderSpec, tokens: int, setting: Setting) -> tuple[float, int]:
    """Return the median seconds of ten steps, of three repeats, and the device's peak memory in bytes."""
    parsed = Plan.parse(plan)
    mesh, is_cuda = build_mesh(parsed, setting.device), setting.is_cuda
    model = parallelize(build_decoder(spec, seed=0), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    recorder = OpRecorder() if parsed.graphs and not is_cuda else None
    step = TrainStep(
        model, optimizer, token_cross_entropy, mesh, forward=model_forward, max_grad_norm=1.0, recorder=recorder
    )
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    batches = [batch_of(index, spec.vocab_size, 1, tokens) for index in range(4)]
    batches = [{**one, "positions": torch.arange(tokens)[None]} for one in batches]
    if is_cuda:
        batches = [{name: tensor.pin_memory() for name, tensor in one.items()} for one in batches]
    number = 2 if setting.small else 10
    for index in range(10):
        step(batches[index % 4])
    found: list[float] = []
    for _ in range(1 if setting.small else 3):
        step.finalize()
        begin = time.perf_counter()
        for index in range(number):
            step(batches[index % 4])
        step.finalize()  # waits for the last step's numbers
        if is_cuda:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / number)
    return statistics.median(found), torch.cuda.max_memory_allocated() if is_cuda else 0


CORRECT = [Case("correct", "graphs beside eager steps", same_with_graphs, 240)]
SPEED = [Case("speed", "graphs of a small model", faster_with_graphs, 200)]
