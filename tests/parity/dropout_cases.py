"""Models with dropout: after embeddings, inside attention, between the layers of an MLP, and after both."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.families import FAMILIES, Family, FamilyCase
from weft.verify.parity import Case, ParityResult, train_cases
from weft.verify.verifier import Float64Throughout

#: Settings of families with dropout. Eager attention calls F.dropout; otherwise dropout is inside torch's attention.
DROPPING: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3}),
    "gpt2-eager": ("gpt2", {"resid_pdrop": 0.2, "attn_pdrop": 0.3, "attn_implementation": "eager"}),
    "gpt2-sdpa": ("gpt2", {"resid_pdrop": 0.2, "attn_pdrop": 0.3, "attn_implementation": "sdpa"}),
    "bert": ("bert", {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}),
    "llama": ("llama", {"attention_dropout": 0.3}),
    "gemma2": ("gemma2", {"attention_dropout": 0.3}),
}


@dataclasses.dataclass(frozen=True)
class DroppingFamily(FamilyCase):
    """One family with dropout."""

    @property
    def family(self) -> Family:
        name, settings = DROPPING[self.name]
        family = FAMILIES[name]
        return dataclasses.replace(family, settings={**family.settings, **settings})


@dataclasses.dataclass(frozen=True)
class FlatFamily(FamilyCase):
    """OPT, whose blocks flatten (batch, tokens, features) to (batch * tokens, features) before their MLP."""

    @property
    def family(self) -> Family:
        sizes = {"vocab_size": 61, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip
        return Family("OPTForCausalLM", "OPTConfig", {**sizes, "dropout": 0.2, "attention_dropout": 0.3}, kv_heads=4)


class Block(nn.Module):
    """Pre-norm attention and MLP in plain PyTorch. The MLP has dropout between its layers, where tp shards features."""

    def __init__(self, dim: int, heads: int, rate: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads, rate)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(rate), nn.Linear(2 * dim, dim))
        self.drop = nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))  # the same module called twice: another mask


class SelfAttention(nn.Module):
    """Causal attention with dropout inside torch's attention function."""

    def __init__(self, dim: int, heads: int, rate: float):
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = heads, dim // heads, rate
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        rate = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class PlainModel(nn.Module):
    """Embedding, two blocks, head."""

    def __init__(self, vocab: int, dim: int, heads: int, rate: float):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, rate) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclasses.dataclass(frozen=True)
class PlainCase(FamilyCase):
    """A plain PyTorch model that belongs to no family."""

    @property
    def family(self) -> Family:
        return FAMILIES["llama"]

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return PlainModel(61, 16, 4, 0.25).double()

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["input_ids"])


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    families = {name: DroppingFamily(name, num_steps=2) for name in DROPPING if name != "gpt2-sdpa"}
    return {**families, "plain": PlainCase("plain", num_steps=2)}


def train_throughout(plan: str, chosen: dict[str, Case]) -> dict[str, ParityResult]:
    """Train several cases under one plan, with float64 also in backward, where blocks are recomputed."""
    with Float64Throughout():
        return train_cases(plan, chosen)
