"""What a model is made of, without torch: shapes of the known families, and parameter counts of any model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from weft.errors import ModelError, did_you_mean

FAMILIES = ("llama", "gpt2")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape of one decoder transformer.

    family: "llama" (RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases) or
    "gpt2" (learned positions, LayerNorm, GELU, biases).
    ffn_dim: width of the feed-forward hidden layer. num_kv_heads: key-value heads (num_heads = no grouping).
    max_seq_len: longest sequence; the size of the position table in the gpt2 family.
    tied: the output head shares the embedding's weight.
    """

    family: str = "llama"
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    max_seq_len: int
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One repeated block or single part of a model, by module path ("blocks.*" for a repeated one)."""

    path: str
    num_params: int  # parameters of one instance
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the planner knows of a model. Parameters shared by several modules are counted once."""

    name: str
    layers: tuple[LayerSpec, ...]
    shape: DecoderSpec | None = None

    @property
    def num_params(self) -> int:
        """All parameters, each counted once."""
        return sum(layer.num_params * layer.count for layer in self.layers)
