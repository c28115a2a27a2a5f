"""Shape of a decoder by layer, stage and rank, and the features of the training software."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.config import partitioning as shares
from weft.config.decoder_shape import DecoderSpec
from weft.config.model_spec import DecoderWidths
from weft.config.partitioning import bucket_bytes
from weft.config.traced_model import TracedLayer, TracedModel


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
        """Return the widths of one up projection (dense layers, experts) of a mean layer on one of `t` ranks.

        The second includes the experts that a token is routed to and the shared experts.
        """
        return self.dense_share * self.ffn / t, self.moe_share * (self.top_k * self.expert_ffn + self.shared_ffn) / t

    @property
    def crossings(self) -> float:
        """Tensors per token that are sent from a pipeline stage to the next."""
        return 1.0

    @property
    def layer_weights(self) -> float:
        """Weight of a layer when the runtime divides layers into stages: the parameters of the most common kind."""
        mostly_mixtures = 2 * self.moe_layers >= self.layers
        return float(max(1, self.moe_layer_params if mostly_mixtures else self.dense_layer_params))

    @property
    def head_weights(self) -> float:
        """Weight of the head when the runtime divides layers into stages."""
        return float(self.table_params)

    def stage_layers(self, num_stages: int) -> tuple[int, ...]:
        """Return the layers of each stage, starting with the embedding's, as the runtime divides them.

        Raises:
            ValueError: if there are too few layers.
        """
        return shares.divide_layers([1.0] * self.layers, num_stages, after=self.head_weights / self.layer_weights)


# Shape of a traced model.


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedShape(Shape):
    """Widths of a traced model, and its trace for everything else. Without sequences, a sample counts as a token."""

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

    def mean(self, value: Callable[[TracedLayer], Any]) -> Any:
        """Return the mean of a number over all layers."""
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
        """Return heads, widths and layers of a traced model for plan rules. Its limits have all other restrictions."""
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


# Software features that change time or memory: kernels, overlap, number formats of states.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Features of a training stack. The defaults describe Weft's runtime.

    Attributes:
        flash: fused attention without scores in memory.
        flash_version: 3 for kernels made for the device, 2 for FlashAttention 2 (made for Ampere), 1 for the first.
        attn_gain: speed of the attention kernels relative to this version.
        eager_pieces: blocks of context parallelism use FlashAttention 2, even if full sequences do not, and are merged
            by several kernels. If False, blocks use the same attention, and each is merged by one kernel.
        cp_sum_bytes: bytes of a key's gradient as communicated between context-parallel ranks.
        fused_softmax: without flash, one kernel scales, masks and normalises the scores. If False, several in fp32.
        fused_norm, fused_mlp, fused_rope: one kernel for a norm, for activation and gate, for rotary positions.
        fused_loss: the loss works in place on the logits. If False, it makes fp32 copies.
        fused_sums: weight gradients are accumulated inside their matmuls.
        cut_loss: for large logits, and under tensor parallelism, the head computes the loss in chunks of tokens.
        loss_bytes: peak bytes per logit of an unchunked loss. Compiled code needs 10, a fused loss 6.
        adam_bytes: memory traffic of the update per parameter.
        overlap_grads: gradient communication overlaps with backward.
        overlap_params: parameter gathering overlaps with compute.
        overlap_tp: tensor-parallel communication overlaps with matmuls.
        overlap_tp_backward: it does so only in backward, during weight gradients that do not need it.
        overlap_p2p: pipeline sends overlap with compute.
        grad_bytes: bytes of a stored gradient.
        reduce_bytes: bytes of a gradient as communicated.
        short_summands: gradients in half formats that are not accumulated are sent in that format to other ranks of the
            node, as in Weft.
        travel_once: under ZeRO 1 and 2 gradients are communicated bucket by bucket, after the last pass of a step. If
            False, full gradients are stored under ZeRO 1, and reduced after every pass under ZeRO 2.
        main_bytes: bytes of master weight and states of one parameter (Adam in fp32: 12).
        weight_bytes: bytes of one parameter as forward reads it.
        gather_bytes: bytes of one parameter as zero=3 gathers it.
        regather_sp: sequence-parallel inputs are gathered again in backward. If False, the gathered copy is saved.
        lean_graphs: compiled blocks do not save a matmul input that element-wise operations compute from saved tensors,
            such as a norm's output or the product of a gated layer. Backward recomputes it. If False, it is saved.
        wide_router: the router reads its input in fp32, and saves it.
        opaque_experts: compiled blocks contain experts as one operator that is not compiled, and that selective
            recompute does not look into. If False, experts are like other layers.
        selective_half: selective recompute recomputes every second matmul. If False, it saves all of them.
        replay_stops: full recompute ends before a layer's last matmul and its reduction, whose result backward does not
            need. If False, it recomputes all of forward.
        own_groups: communicators as Weft's ranks create them, including pairs of stages. If False, one for all ranks
            and one for each axis in use.
        dropout: masks are computed and saved.
        cuda_graphs: no launch gaps.
        host_gain: speed of its host code relative to the table.
        scatter_p2p: tensor-parallel ranks each send one slice between stages.
        fold_experts: experts are distributed over the tensor-parallel ranks too. If False, each expert is sharded over
            them.
        once_per_node: a token is sent to a node once, however many of its experts are on it.
        fp8_inputs: with fp8, matmuls save their inputs for backward in fp8.
        fp8_gather: with fp8, gathered weights are communicated in fp8 too.
        half_wgrad: with fp8, weight gradients are computed in the half format, as in Weft.
        half_experts: with fp8, matmuls of stacked experts and of the router use the half format, as in Weft.
        row_scales: with fp8, each token and each output feature has its scale, as in Weft by default. If False, one
            scale per tensor.
        vocab_multiple: the vocabulary is padded to a multiple of this, times tp.
        balanced_stages: layers are divided over a pipeline with embedding and head counted as the layers that they
            cost.
        bucket_params: parameters whose gradients are communicated together.
        bucket_params_per_rank: the same for each rank that shares them, if this gives more.
        bucket_bytes: communication buffers for gradients and parameters under ZeRO 1 and 2, in addition to the
            gradients.
    """

    name: str = "weft"
    flash: bool = True
    flash_version: int = 3
    attn_gain: float = 1.0
    eager_pieces: bool = True
    cp_sum_bytes: float = 4.0
    fused_softmax: bool = True
    fused_norm: bool = False
    fused_mlp: bool = False
    fused_rope: bool = False
    fused_loss: bool = False
    fused_sums: bool = False
    cut_loss: bool = True
    loss_bytes: float = 12.0
    adam_bytes: float = 30.0
    overlap_grads: bool = True
    overlap_params: bool = True
    overlap_tp: bool = False
    overlap_tp_backward: bool = False
    overlap_p2p: bool = False
    grad_bytes: float = 4.0
    reduce_bytes: float = 4.0
    short_summands: bool = True
    travel_once: bool = True
    main_bytes: float = 12.0
    weight_bytes: float = 2.0
    gather_bytes: float = 2.0
    regather_sp: bool = True
    lean_graphs: bool = True
    wide_router: bool = True
    opaque_experts: bool = True
    selective_half: bool = False
    replay_stops: bool = True
    own_groups: bool = True
    dropout: bool = False
    cuda_graphs: bool = False
    host_gain: float = 1.0
    scatter_p2p: bool = False
    fold_experts: bool = True
    once_per_node: bool = False
    fp8_inputs: bool = False
    fp8_gather: bool = False
    half_wgrad: bool = False
    half_experts: bool = False
    row_scales: bool = False
    vocab_multiple: int = 1
    balanced_stages: bool = False
    bucket_params: float = bucket_bytes("cuda") // 4
    bucket_params_per_rank: float = 0.0
    bucket_bytes: float = 0.0
