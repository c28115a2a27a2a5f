"""What the software does that changes time or memory, by feature: kernels, overlap, number formats of states."""

from __future__ import annotations

from dataclasses import dataclass

from weft.spec.shares import bucket_bytes


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
