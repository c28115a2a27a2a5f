"""Short trainings under a plan on any device, with the numbers that cases compare."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.gpu.cases import Setting, Skipped
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep

SMALL = DecoderSpec(
    vocab_size=101, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64, max_seq_len=64, tied=True
)
#: Wide enough for flash attention, and deep enough for recompute and offload.
LARGE = DecoderSpec(
    vocab_size=32_000, dim=1024, num_layers=8, num_heads=16, num_kv_heads=8, ffn_dim=2816, max_seq_len=2048
)
#: Every position has a label in these batches.
_NO_LABEL = -100

Model = Callable[[], nn.Module]


@dataclass(slots=True)
class Numbers:
    """Mean loss and gradient norm of each step. peak_bytes: peak device memory; 0 on a CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def distance(self, other: Numbers) -> float:
        """Return the largest relative difference of any loss or norm."""
        pairs = [*zip(self.losses, other.losses, strict=True), *zip(self.norms, other.norms, strict=True)]
        found = [abs(ours - theirs) / max(abs(theirs), 1e-30) for ours, theirs in pairs]
        return float(torch.tensor(found, dtype=torch.float64).max())  # keeps NaN


def decoder(spec: DecoderSpec, dtype: torch.dtype = torch.float32) -> Model:
    """Return a factory of a decoder with the same weights each time."""
    return lambda: build_decoder(spec, dtype=dtype, seed=0)


def foreign(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    """Return a factory of a small transformers model: "Llama", "Qwen3Moe". Skip if transformers is missing."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise Skipped("transformers is not installed") from None
    sizes = {
        "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})

    def build() -> nn.Module:
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)

    return build


def batch_of(step: int, vocab: int, rows: int = 4, seq_len: int = 32) -> dict[str, torch.Tensor]:
    """Return tokens and labels of one step, on the CPU. They depend only on the step."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(vocab, (rows, seq_len + 1), generator=draw)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(batch["input_ids"])
    return output if isinstance(output, torch.Tensor) else output.logits


def loss_of(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    exact = logits if logits.dtype == torch.float64 else logits.float()
    labels = batch["labels"]
    total = nn.functional.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=_NO_LABEL)
    return total, labels.numel()


def step_of(
    plan_text: str, model: nn.Module, device: torch.device, *, max_grad_norm: float = 1.0, lr: float = 1e-3
) -> TrainStep:
    """Return the step of a model on a mesh of one rank, on the device."""
    mesh = build_mesh(Plan.parse(plan_text), device)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    return TrainStep(model, optimizer, loss_of, mesh, forward=forward, max_grad_norm=max_grad_norm)


def train(
    plan_text: str, model: Model, device: torch.device, *, vocab: int, steps: int = 5, rows: int = 4, seq_len: int = 32
) -> Numbers:
    """Train a new model for a few steps."""
    step = step_of(plan_text, model(), device)
    numbers = Numbers()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for index in range(steps):
        metrics = step(batch_of(index, vocab, rows, seq_len))
        numbers.losses.append(metrics.loss)
        numbers.norms.append(metrics.grad_norm)
    if device.type == "cuda":
        numbers.peak_bytes = torch.cuda.max_memory_allocated(device)
    return numbers


def shape_of(setting: Setting) -> tuple[DecoderSpec, int, int]:
    """Return decoder, rows and length of a case about speed, memory or compiled graphs."""
    return (SMALL, 4, 32) if setting.small else (LARGE, 4, 2048)
