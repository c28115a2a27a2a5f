"""Shape of a decoder by layer, stage and rank, and the features of the training software."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.config import partitioning as shares
from weft.config.partitioning import bucket_bytes
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import DecoderWidths
from weft.config.shapes.traced_model import TracedLayer, TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(DecoderWidths):
    """Widths and counts of a decoder, in values (not bytes), and their shares on a rank."""

    @property
    def moe_share(self) -> float:
        """Share of the layers with experts."""
        return self.moe_layers / self.layers

    @property
    def dense_share(self) -> float:
        """Share of the layers without experts."""
        return (self.layers - self.moe_layers) / self.layers

    def sharded_widths(self, t: Any) -> tuple[Any, Any]:
        """Return the widths of queries and of keys on one of `t` tensor-parallel ranks (numbers or numpy arrays)."""
        return np.ceil(self.heads / t) * self.head_dim, np.ceil(self.kv_heads / t) * self.head_dim

    def ffn_widths(self, t: Any) -> tuple[Any, Any]:
        """Return the widths of one up projection (dense layers, experts) of an average layer on one of `t` ranks.

        The second includes the experts that a token is routed to and the shared experts.
        """
        return self.dense_share * self.ffn / t, self.moe_share * (self.top_k * self.expert_ffn + self.shared_ffn) / t

    @property
    def crossings(self) -> float:
        """Number of tensors per token that a pipeline stage sends to the next."""
        return 1.0

    @property
    def layer_weights(self) -> float:
        """Cost of a layer when the runtime divides layers into stages: the parameters of the most common kind."""
        mostly_mixtures = 2 * self.moe_layers >= self.layers
        return float(max(1, self.moe_layer_params if mostly_mixtures else self.dense_layer_params))

    @property
    def head_weights(self) -> float:
        """Cost of the head when the runtime divides layers into stages."""
        return float(self.table_params)

    def stage_layers(self, num_stages: int) -> tuple[int, ...]:
        """Return the number of layers of each stage, starting at the embedding, as the runtime divides them.

        Raises:
            ValueError: if there are too few layers.
        """
        return shares.divide_layers([1.0] * self.layers, num_stages, after=self.head_weights / self.layer_weights)


# Shape of a traced model.


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedShape(Shape):
    """Widths of a traced model, and its trace for all other sizes. Without sequences, a sample counts as a token."""

    traced: TracedModel

    @property
    def num_params(self) -> int:
        return self.traced.num_params

    @property
    def dense_layer_params(self) -> int:
        return round(self.mean(lambda layer: layer.num_params))

    @property
    def crossings(self) -> float:
        return self.traced.crossings

    @property
    def is_causal_decoder(self) -> bool:
        """True if the model has a vocabulary and causal attention."""
        attention = self.traced.attention
        return self.vocab > 0 and attention is not None and attention.causal

    def mean(self, value: Callable[[TracedLayer], Any]) -> Any:
        """Return the average of `value(layer)` over all layers."""
        return sum(layer.count * value(layer) for layer in self.traced.layers) / self.traced.num_layers

    @classmethod
    def of(cls, traced: TracedModel) -> TracedShape:
        """Return the shape of a traced model."""
        attention = traced.attention
        return cls(
            vocab=traced.vocab,
            hidden=traced.hidden,
            layers=traced.num_layers,
            heads=attention.heads if attention else 1,
            kv_heads=attention.kv_heads if attention else 1,
            head_dim=attention.head_dim if attention else 1,
            ffn=0,
            tied=traced.tied,
            traced=traced,
        )

    @staticmethod
    def as_rules_see_it(traced: TracedModel) -> DecoderSpec:
        """Return heads, widths and layers of a traced model for plan rules. `traced.limits` has other restrictions."""
        attention = traced.attention
        legal = math.lcm(*dict(traced.limits)["tp"].values) if "tp" in dict(traced.limits) else 1
        return DecoderSpec(
            vocab_size=max(1, traced.vocab),
            dim=traced.hidden,
            num_layers=traced.num_layers,
            num_heads=attention.heads if attention else legal,
            num_kv_heads=attention.kv_heads if attention else legal,
            ffn_dim=legal,
            max_seq_len=traced.max_seq_len,
            tied=traced.tied,
        )


# Features of the software that change time or memory: kernels, overlap, number formats of states.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Features of a training stack. The defaults describe Weft's runtime.

    Attributes:
        attention: kernel of attention: "best" (optimized for the device), "flash2" (FlashAttention 2, for Ampere),
            "flash1", or "unfused", with scores in memory and dropout.
        eager_pieces: blocks of context parallelism use FlashAttention 2, even if full sequences do not, and are merged
            by several kernels. If False, blocks use the same attention, and each is merged by one kernel.
        fused_norm: a norm is one kernel.
        fused: activation and gate, rotary positions, and the loss are one kernel each.
        fused_sums: weight gradients are accumulated inside their matmuls.
        residual_bytes: bytes of a value between layers and of embedding and head (PEFT uses a wider format on a
            quantized base).
        cut_loss: the head computes the loss in chunks of tokens if logits are large or under tensor parallelism.
        loss_bytes: peak bytes per logit of an unchunked loss. Compiled code needs 10.
        overlap_data: gradients are reduced during backward, and parameters gathered during compute.
        overlap_tp: tensor-parallel communication overlaps with matmuls.
        overlap_p2p: pipeline sends overlap with compute.
        overlap_ep: share of expert traffic that overlaps with other work.
        grad_bytes: bytes of a stored gradient.
        reduce_bytes: bytes of a gradient as communicated.
        main_bytes: bytes per parameter of master weight and optimizer states (Adam in fp32: 12).
        master: there is a master weight. If False, `main_bytes` counts only states, and the update changes the compute
            weights (pure bf16).
        step_bytes: temporary bytes per parameter of the update. Weft's kernel needs none. torch's foreach update copies
            a moment.
        weight_bytes: bytes of one parameter as forward reads it.
        gather_bytes: bytes of one parameter as zero=3 gathers it.
        dispatch_bytes: bytes of a value that is sent to an expert. Results have 2 bytes.
        dispatch: kernels that send tokens to experts: "each" sends one copy to each expert, "once" one to each node,
            "deepep" too, at a limited rate inside a node.
        torch_grouped: products of experts are torch's grouped matmuls, as in Weft.
        balanced_experts: experts receive equal numbers of tokens.
        selective_half: selective recompute recomputes every second matmul. If False, it saves all of them.
        selective_kernels: selective recompute repeats norms and activations from their saved inputs, as Megatron's
            does. If False, it repeats a layer's communication too.
        replay_stops: full recompute ends before a layer's last matmul and its reduction, whose result backward does not
            need. If False, it recomputes all of forward.
        host_ops: host operations per kernel call, relative to Weft's.
        fp8_inputs: with fp8, matmuls save their inputs for backward in fp8.
        half_wgrad: with fp8, weight gradients are computed in half precision, as in Weft.
        half_experts: with fp8, matmuls of stacked experts and of the router use half precision, as in Weft.
        row_scales: with fp8, each token and each output feature has its scale, as in Weft by default. If False, one
            scale per tensor.
        vocab_multiple: the vocabulary is padded to a multiple of this, times tp.
        bucket_params: number of parameters whose gradients are communicated together.
        bucket_params_per_rank: the same per data-parallel rank, if this gives a larger bucket.
    """

    name: str = "weft"
    attention: str = "best"
    eager_pieces: bool = True
    fused_norm: bool = False
    fused: bool = False
    fused_sums: bool = False
    residual_bytes: float = 2.0
    cut_loss: bool = True
    loss_bytes: float = 12.0
    overlap_data: bool = True
    overlap_tp: bool = False
    overlap_p2p: bool = False
    overlap_ep: float = 0.0
    grad_bytes: float = 4.0
    reduce_bytes: float = 4.0
    main_bytes: float = 12.0
    master: bool = True
    step_bytes: float = 0.0
    weight_bytes: float = 2.0
    gather_bytes: float = 2.0
    dispatch_bytes: float = 2.0
    dispatch: str = "each"
    torch_grouped: bool = True
    balanced_experts: bool = True
    selective_half: bool = False
    selective_kernels: bool = False
    replay_stops: bool = True
    host_ops: float = 1.0
    fp8_inputs: bool = False
    half_wgrad: bool = False
    half_experts: bool = False
    row_scales: bool = False
    vocab_multiple: int = 1
    bucket_params: float = bucket_bytes("gpu") // 4
    bucket_params_per_rank: float = 0.0

    @property
    def flash(self) -> bool:
        """True if attention keeps no scores in memory."""
        return self.attention != "unfused"
