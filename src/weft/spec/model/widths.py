"""A decoder as widths and counts, dense or with experts, and the number of parameters of each of its parts.

Weft's own decoders, configs of Hugging Face and rows of published tables all become these, and every count of a
decoder's parameters by formula is made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from weft.spec.model.decoder import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWidths:
    """Widths and counts of a decoder, in values (no bytes).

    head_dim: width of one head; heads x head_dim may differ from hidden. ffn: width of the feed-forward layer (0 where
    every layer is a mixture). gated: two matrices go up (SwiGLU), else one. num_experts, top_k, expert_ffn: of the
    mixture layers; shared_ffn: width that every token passes beside its experts. dense_layers: layers without experts.
    window: tokens that a windowed layer looks back (0: all); windowed_layers: how many layers have the window.
    q_rank, kv_rank: widths of the latent vectors of queries and of keys and values (0: none), where head_dim is the
    part of a head without positions and rope_dim the part with them.
    tied: the head shares the embedding's weight. biases: linear layers have biases.
    layer_norm: LayerNorm (always one kernel), else RMSNorm. learned_positions: rows of the
    position table (0: rotary or none).
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = True
    tied: bool = False
    biases: bool = False
    layer_norm: bool = False
    learned_positions: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    window: int = 0
    windowed_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0

    @classmethod
    def of_decoder(cls, spec: DecoderSpec) -> Self:
        """Return the shape of one of Weft's own decoders."""
        gpt2, mixture = spec.family == "gpt2", spec.num_experts > 0
        return cls(
            vocab=spec.vocab_size,
            hidden=spec.dim,
            layers=spec.num_layers,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            ffn=spec.ffn_dim,
            gated=not gpt2,
            tied=spec.tied,
            biases=gpt2,
            layer_norm=gpt2,
            learned_positions=spec.max_seq_len if gpt2 else 0,
            num_experts=spec.num_experts,
            top_k=spec.top_k if mixture else 0,
            expert_ffn=spec.expert_width if mixture else 0,
            shared_ffn=spec.num_shared_experts * spec.expert_width if mixture else 0,
            dense_layers=spec.num_layers - len(spec.moe_layers) if mixture else 0,
        )

    @property
    def moe_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        return self.layers - self.dense_layers if self.num_experts else 0

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's projections to queries, keys, values and from the heads."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.kv_rank:
            down = self.hidden * (self.q_rank + self.kv_rank + self.rope_dim)
            queries = (self.q_rank or self.hidden) * self.heads * (self.head_dim + self.rope_dim)
            return down + queries + 2 * self.kv_rank * width + width * self.hidden
        biases = (width + 2 * kv_width + self.hidden) if self.biases else 0
        return self.hidden * (2 * width + 2 * kv_width) + biases

    @property
    def norm_params(self) -> int:
        """Parameters of one layer's two norms."""
        return 2 * self.hidden * (2 if self.biases else 1)

    def mlp_params(self, width: int) -> int:
        """Return the number of parameters of a feed-forward part of the given width."""
        biases = (width + self.hidden) if self.biases else 0
        return (3 if self.gated else 2) * self.hidden * width + biases

    @property
    def dense_layer_params(self) -> int:
        """Parameters of one layer without experts."""
        return self.attention_params + self.norm_params + self.mlp_params(self.ffn)

    @property
    def moe_shared_params(self) -> int:
        """Parameters of one mixture layer outside of its experts."""
        router = self.hidden * self.num_experts
        return self.attention_params + self.norm_params + self.mlp_params(self.shared_ffn) + router

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return self.mlp_params(self.expert_ffn)

    @property
    def moe_layer_params(self) -> int:
        """Parameters of one mixture layer, all experts counted."""
        return self.moe_shared_params + self.num_experts * self.expert_params

    @property
    def idle_params(self) -> int:
        """Parameters of the experts that one token does not visit, over all layers."""
        return self.moe_layers * max(0, self.num_experts - self.top_k) * self.expert_params

    @property
    def table_params(self) -> int:
        """Parameters of the embedding, and as many of the head."""
        return self.vocab * self.hidden

    @property
    def last_norm_params(self) -> int:
        """Parameters of the norm before the head."""
        return self.norm_params // 2

    @property
    def num_params(self) -> int:
        """All parameters, each counted once."""
        ends = self.table_params * (1 if self.tied else 2) + self.learned_positions * self.hidden
        layers = (self.layers - self.moe_layers) * self.dense_layer_params + self.moe_layers * self.moe_layer_params
        return ends + layers + self.last_norm_params
