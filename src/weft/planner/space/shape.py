"""A decoder's shape as the planner asks it: by layer, by stage and by rank."""

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
    """Widths and counts of a decoder, in values (no bytes), and what a division of it gives a rank."""

    @property
    def moe_share(self) -> float:
        """Of the layers, those with experts."""
        return self.moe_layers / self.layers

    @property
    def dense_share(self) -> float:
        """Of the layers, those without experts."""
        return (self.layers - self.moe_layers) / self.layers

    def sharded_widths(self, t: Any) -> tuple[Any, Any]:
        """Return the widths of queries and of keys on one of `t` tensor-parallel ranks (numbers or numpy arrays)."""
        return np.ceil(self.heads / t) * self.head_dim, np.ceil(self.kv_heads / t) * self.head_dim

    def ffn_widths(self, t: Any) -> tuple[Any, Any]:
        """Return the columns of one product that goes up, of a mean layer on one of `t` tensor-parallel ranks.

        Those of dense feed-forward parts, and those of the experts that a token visits with the shared ones.
        """
        return self.dense_share * self.ffn / t, self.moe_share * (self.top_k * self.expert_ffn + self.shared_ffn) / t

    @property
    def crossings(self) -> float:
        """Tensors of a token that go from a stage of a pipeline to the next."""
        return 1.0

    @property
    def layer_weights(self) -> float:
        """What the runtime weighs a layer with to divide layers into stages: the parameters of the commonest kind."""
        mostly_mixtures = 2 * self.moe_layers >= self.layers
        return float(max(1, self.moe_layer_params if mostly_mixtures else self.dense_layer_params))

    @property
    def head_weights(self) -> float:
        """The same of the head."""
        return float(self.table_params)

    def stage_layers(self, num_stages: int) -> tuple[int, ...]:
        """Return the layers of each stage, from the embedding on, as the runtime divides them.

        Raises:
            ValueError: for too few layers.
        """
        return shares.divide_layers([1.0] * self.layers, num_stages, after=self.head_weights / self.layer_weights)


# The shape of a model that was traced: the widths that it has, and the trace that says all else.


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedShape(Shape):
    """The widths that a traced model has, and the trace that says all else. Without a sequence, a sample is a token."""

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
        """Return the shape of a description."""
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
        """Return heads, widths and layers of a traced model; what else it forbids is in its limits."""
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


# What the software does that changes time or memory, by feature: kernels, overlap, number formats of states.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Features of a training stack. The defaults are what Weft's runtime does.

    flash: fused attention, no scores in memory. flash_version: 3, the kernels made for the device; 2, FlashAttention 2,
    made for Ampere; 1, the first. attn_gain: speed of its attention kernels over those of that version.
    eager_pieces: pieces of a cut sequence go through FlashAttention 2, whatever whole ones go through, and are joined
    by single kernels (else through the same attention, and each is joined by one kernel).
    cp_sum_bytes: of a key's gradient as it travels between the ranks of a sequence.
    fused_softmax: without flash, one kernel scales, masks and normalises the scores (else several, in fp32).
    fused_norm, fused_mlp, fused_rope: one kernel for a norm, for activation and gate, for rotary positions.
    fused_loss: the loss works in place on the logits (else fp32 copies of them).
    fused_sums: weight gradients are added to the sum of former passes inside their matmuls.
    cut_loss: where logits would be large, and under tensor parallelism, the head gives the loss a few tokens at a time.
    loss_bytes: peak memory of a loss of whole logits by logit, beside which compiled code needs 10 and a fused loss 6.
    adam_bytes: memory traffic of the update by parameter. overlap_grads: gradients travel under backward.
    overlap_params: gathered parameters travel under compute. overlap_tp: tensor-parallel traffic hides under matmuls.
    overlap_tp_backward: in backward alone, where the weight gradients need none of it.
    overlap_p2p: pipeline sends hide under compute. grad_bytes: of one gradient as it is kept.
    reduce_bytes: as it travels. short_summands: gradients of half formats that are not added up first travel in them to
    other ranks of the node, as in Weft. travel_once: under ZeRO 1 and 2 gradients leave bucket by bucket, after the
    last pass of a step (else those of ZeRO 1 stay whole, and those of ZeRO 2 leave after every pass).
    main_bytes: master weight and states of one parameter (Adam in fp32: 12).
    weight_bytes: of one parameter as forward reads it. gather_bytes: as zero=3 gathers it.
    regather_sp: sequence-parallel inputs are gathered again in backward (else the gathered copy is kept).
    lean_graphs: compiled blocks keep no input of a product that element-wise operations make from what is kept too: a
    norm's output, the product of a gated layer. Backward makes it again (else it is kept).
    wide_router: what chooses experts reads its input in fp32, and keeps it.
    opaque_experts: compiled blocks hold experts as one operator, which runs as it stands, and of which selective
    recompute sees nothing (else they are like the other layers).
    selective_half: selective recompute makes every second product again (else none: it keeps them all).
    replay_stops: full recompute ends before a layer's last product, whose result backward does not ask for, and the sum
    after it (else it makes the whole forward again).
    own_groups: communicators are those that Weft's ranks make, lanes between stages among them (else one for all ranks
    and one for each axis in use).
    dropout: masks are made and kept. cuda_graphs: no launch gaps. host_gain: speed of its host code over the table's.
    scatter_p2p: tensor-parallel ranks send a slice each between stages. fold_experts: experts lie over the
    tensor-parallel ranks too (else each expert is split over them). once_per_node: a token goes to a node once, however
    many of its experts are there. fp8_inputs: with fp8, products keep their inputs for backward in fp8.
    fp8_gather: with fp8, weights that are gathered travel in it too. half_wgrad: with fp8, gradients of weights are
    products of the half format, as in Weft. half_experts: with fp8, products of stacked experts, and what chooses them,
    are of the half format, as in Weft. row_scales: with fp8, each token and each output feature has a scale of its own,
    as in Weft by default (else one scale a tensor). vocab_multiple: the vocabulary is padded to it, times tp.
    balanced_stages: layers are split over a pipeline so that embedding and head count as the layers that they cost.
    bucket_params: parameters whose gradients travel together, or bucket_params_per_rank for each rank that shares them
    where that is more. bucket_bytes: buffers beside the gradients, in which they and the parameters travel under ZeRO 1
    and 2.
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
