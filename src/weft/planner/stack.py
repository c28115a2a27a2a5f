"""What the software does that changes time or memory, by feature: kernels, overlap, number formats of states."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Features of a training stack. The defaults are what Weft's runtime does.

    flash: fused attention, no scores in memory. fused_norm, fused_mlp: one kernel for a norm, for activation x gate.
    fused_loss: the loss works in place on the logits (else fp32 copies of them). fused_adam: one kernel for the update.
    overlap_grads: gradients travel under backward. overlap_params: gathered parameters travel under compute.
    overlap_tp: tensor-parallel traffic hides under the matmuls. overlap_p2p: pipeline sends hide under compute.
    grad_bytes, main_bytes: of one gradient, and of master weight and states of one parameter (Adam in fp32: 12).
    weight_bytes: of one parameter as the forward reads it. regather_sp: sequence-parallel inputs are gathered again
    in backward (else the gathered copy is kept). dropout: masks are made and kept. cuda_graphs: no launch gaps.
    """

    name: str = "weft"
    flash: bool = True
    fused_norm: bool = False
    fused_mlp: bool = False
    fused_loss: bool = False
    fused_adam: bool = True
    overlap_grads: bool = True
    overlap_params: bool = True
    overlap_tp: bool = False
    overlap_p2p: bool = False
    grad_bytes: float = 4.0
    main_bytes: float = 12.0
    weight_bytes: float = 2.0
    regather_sp: bool = False
    dropout: bool = False
    cuda_graphs: bool = False
