"""Models for tests of tracing, as returned by functions that a user names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

NOT_A_FUNCTION = 5


class Perceptron(nn.Module):
    """A model without repeated blocks and without a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Residual(nn.Module):
    """A residual block. The first one of a stage halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.norm = nn.GroupNorm(4, outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.second(torch.relu(self.first(x)))) + self.short(x))


class Network(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, 2, 3)
        self.stages = nn.Sequential(
            nn.Sequential(Residual(16, 16, 1), Residual(16, 16, 1)),
            nn.Sequential(Residual(16, 32, 2), Residual(32, 32, 1)),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class Choosing(nn.Module):
    """Control flow depends on values, so it cannot run on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * 2 if y.sum().item() > 0 else y


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    return Perceptron(), torch.zeros(4, 64)


def network() -> tuple[nn.Module, Callable[[int, int], Any]]:
    return Network(), lambda step, size: {"x": torch.zeros(size, 3, 32, 32), "labels": torch.zeros(size)}


def choosing() -> tuple[nn.Module, torch.Tensor]:
    return Choosing(), torch.zeros(2, 8)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoder(layer, 3), nn.Linear(32, 5)), torch.zeros(2, 16, 8)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=224, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=512, max_position_embeddings=256)
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32,
                  patch_size=8)
    )  # fmt: skip


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=2, num_local_experts=4, vocab_size=256, max_position_embeddings=128)
    )  # fmt: skip


def number() -> int:
    return 3


def needs_one(size: int) -> nn.Module:
    return nn.Linear(size, size)
