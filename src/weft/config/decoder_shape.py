"""The shape of one decoder transformer."""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = ("llama", "gpt2")
ROUTERS = ("softmax", "sigmoid")
BALANCES = ("aux_loss", "bias", "none")
#: Fields that mean something only in a model with experts.
EXPERT_FIELDS = (
    "top_k", "expert_ffn_dim", "num_shared_experts", "first_moe_layer", "moe_every", "router", "normalise_top_k",
    "route_scale", "balance", "balance_rate", "capacity_factor",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape of one decoder transformer.

    family: "llama" (RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases) or "gpt2" (learned positions, LayerNorm,
    GELU, biases).
    ffn_dim: width of the feed-forward hidden layer. num_kv_heads: key-value heads (num_heads = no grouping).
    max_seq_len: longest sequence; the size of the position table in the gpt2 family.
    tied: the output head shares the embedding's weight.
    rope_theta: base of the rotary frequencies (llama family).
    rope_scale: factor by which the low rotary frequencies are stretched, as Llama 3.1 does from a context of 8192
    tokens; 1 leaves them unchanged.
    norm_eps: added to the mean square (or the variance) inside the norms.

    With experts (llama family), some feed-forward layers are a router and `num_experts` SwiGLU layers:
    num_experts: 0 for a dense model. top_k: experts per token.
    expert_ffn_dim: hidden width of one expert; 0: ffn_dim. num_shared_experts: number of experts that all tokens use.
    first_moe_layer, moe_every: layer i has experts from first_moe_layer on, every moe_every-th; the others are dense.
    router: scores are the "softmax" over the experts, or a "sigmoid" each. normalise_top_k: the chosen scores are
    divided by their sum. route_scale: factor on the scores after that.
    balance: "aux_loss" adds balance_rate times the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, eq. 17);
    "bias" moves each expert's selection bias by balance_rate a step (arXiv 2408.15664); "none".
    capacity_factor: an expert accepts at most this many times its even share of a sequence, and later tokens skip it;
    0: no token is dropped.
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
    rope_scale: float = 1.0
    norm_eps: float = 1e-5
    num_experts: int = 0
    top_k: int = 2
    expert_ffn_dim: int = 0
    num_shared_experts: int = 0
    first_moe_layer: int = 0
    moe_every: int = 1
    router: str = "softmax"
    normalise_top_k: bool = True
    route_scale: float = 1.0
    balance: str = "aux_loss"
    balance_rate: float = 0.001
    capacity_factor: float = 0.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @property
    def expert_width(self) -> int:
        """Hidden width of one expert."""
        return self.expert_ffn_dim or self.ffn_dim

    @property
    def moe_layers(self) -> range:
        """The layers that have experts; none in a dense model."""
        return range(self.first_moe_layer, self.num_layers if self.num_experts else 0, self.moe_every)
