"""Models for the parity matrix: Hugging Face decoders, a convolutional network, random module trees."""

from __future__ import annotations

import dataclasses
import os
import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.verify.parity import Case, DecoderCase

LLAMA = DecoderSpec(
    vocab_size=61, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32, tied=True
)
GPT2 = DecoderSpec(
    family="gpt2", vocab_size=61, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=64, max_seq_len=32
)


@dataclass(frozen=True)
class HuggingFaceCase(DecoderCase):
    """A Hugging Face decoder of a few thousand random parameters. kind: "llama" (tied), "qwen2" (not) or "gpt2"."""

    kind: str = "qwen2"

    def model(self) -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers

        torch.manual_seed(self.seed)
        vocab, dim = self.spec.vocab_size, self.spec.dim
        if self.kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=vocab, n_embd=dim, n_layer=2, n_head=self.spec.num_heads, n_positions=32,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )  # fmt: skip
            return transformers.GPT2LMHeadModel(config).double()
        of_kind = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        }
        config_of, model_of = of_kind[self.kind]
        config = config_of(
            vocab_size=vocab, hidden_size=dim, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=24, max_position_embeddings=32, tie_word_embeddings=self.kind == "llama",
        )  # fmt: skip
        return model_of(config).double()

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(input_ids=batch["input_ids"], position_ids=batch["positions"], use_cache=False).logits


@dataclass(frozen=True)
class PackedCase(HuggingFaceCase):
    """A transformers decoder with documents given by positions only, or with padding given by a mask."""

    padded: bool = False

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        batch = super().batch(step)
        if self.padded:
            batch["mask"] = torch.ones_like(batch["labels"])
            batch["mask"][:3, :5] = 0
            batch["mask"][1, -2:] = 0
            batch["labels"][batch["mask"] == 0] = -100
        return batch

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {"position_ids": batch["positions"]}
        if self.padded:
            inputs["attention_mask"] = batch["mask"]
        # With a cache, transformers ignores the document boundaries in positions.
        return model(input_ids=batch["input_ids"], use_cache=not self.documents, **inputs).logits


@dataclass(frozen=True)
class ImageCase:
    """A small convolutional network: channels_last weights, group norm, a frozen layer, one that is called twice."""

    num_steps: int = 3
    max_grad_norm: float = 0.5
    global_batch: int = 16
    norm: str = "group"

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return SmallConvNet(self.norm).double().to(memory_format=torch.channels_last)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(self.global_batch, 3, 9, 9, generator=generator, dtype=torch.float64)
        return {"x": images, "labels": torch.randint(5, (self.global_batch,), generator=generator)}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"])

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        logits = output if output.dtype == torch.float64 else output.float()
        return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(output)


class SmallConvNet(nn.Module):
    def __init__(self, norm: str):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.norm1 = nn.GroupNorm(2, 6) if norm == "group" else nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(6, 6, 1), nn.Tanh()) for _ in range(2))
        self.frozen = nn.Conv2d(6, 7, 1).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(7, 5)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.stem(x)).relu()
        x = self.twice(self.twice(x).relu()) + x
        for stage in self.stages:
            x = x + stage(x)
        return self.head(self.frozen(x).mean((2, 3))) * self.temperature


@dataclass(frozen=True)
class TreeCase:
    """A random module tree: shared modules, tied weights, frozen and unused parts, buffers, odd sizes."""

    seed: int
    num_steps: int = 3
    max_grad_norm: float = 1.0
    width: int = 5

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        tree = _grow(random.Random(self.seed), depth=3, width=self.width, known=[])
        ends = [nn.Linear(self.width, self.width) for _ in range(2)]
        middle = [Buffered(self.width)] if self.seed % 2 else []
        return nn.Sequential(ends[0], *middle, tree, ends[1]).double()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": rest}], lr=0.01, weight_decay=0)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        return {"x": torch.randn(8, self.width, generator=generator, dtype=torch.float64)}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"])

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return (output - batch["x"].roll(1, -1)).square().sum(), len(output)


class Branches(nn.Module):
    """Sum of its branches. The last branch is never called."""

    def __init__(self, branches: list[nn.Module]):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((branch(x) for branch in self.branches[:-1]), x)


class Buffered(nn.Module):
    """Buffers that forward reads (persistent, non-persistent and integer) and a scalar parameter."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, width), persistent=False)
        self.register_buffer("order", torch.arange(width - 1, -1, -1))
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., self.order] * self.scale * self.gain + self.shift


def _grow(draw: random.Random, depth: int, width: int, known: list[nn.Module]) -> nn.Module:
    kind = draw.choice(["leaf", "leaf", "sequence", "branches", "again", "tied"]) if depth else "leaf"
    if kind == "again" and known:
        return draw.choice(known)  # the same module twice in the tree
    if kind in ("sequence", "branches"):
        children = [_grow(draw, depth - 1, width, known) for _ in range(draw.randint(1, 3))]
        return nn.Sequential(*children) if kind == "sequence" else Branches(children)
    hidden = draw.choice([1, 3, 17])
    leaf = nn.Sequential(nn.Linear(width, hidden, bias=draw.random() < 0.5), nn.Tanh(), nn.Linear(hidden, width))
    if kind == "tied":
        twin = nn.Linear(width, hidden)
        twin.weight = leaf[0].weight
        leaf = nn.Sequential(leaf, twin, nn.Tanh(), nn.Linear(hidden, width))
    if draw.random() < 0.15:
        leaf.requires_grad_(False)
    known.append(leaf)
    return leaf


def cases() -> dict[str, Case]:
    """Return one case of each kind by name."""
    decoder = DecoderCase(LLAMA, global_batch=16)
    settings = {field.name: getattr(decoder, field.name) for field in dataclasses.fields(decoder)}
    return {
        "decoder": decoder,
        "hf-qwen2": HuggingFaceCase(**settings, kind="qwen2"),
        "hf-gpt2": HuggingFaceCase(**settings, kind="gpt2"),
        "cnn": ImageCase(),
    }


@dataclass(frozen=True)
class LoopedCase(ImageCase):
    """One layer called three times, each time inside a reentrant torch checkpoint.

    Each checkpoint runs a separate backward, so autograd delivers the layer's gradient in three parts.
    """

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return LoopedNet().double()


class LoopedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(27, 8)
        self.again = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x[:, :, :3, :3].flatten(1))
        for _ in range(3):
            x = x + checkpoint(self.again, x.tanh(), use_reentrant=True)
        return self.head(x)
