"""Bytes of a rank: of a layer's activations, of weights and their states, of the loss, at the fullest moment."""

from __future__ import annotations

from weft.planner.cost.memory.host_memory import is_offloaded
from weft.planner.cost.memory.layer_memory import TWO_LOGITS, LayerBytes, layer_bytes
from weft.planner.cost.memory.loss_memory import cut_loss_bytes, is_loss_cut
from weft.planner.cost.memory.memory_cost import CLASSES, memory_bytes, rank_bytes
from weft.planner.cost.memory.state_memory import stays_loose

__all__ = [
    "CLASSES",
    "LayerBytes",
    "TWO_LOGITS",
    "cut_loss_bytes",
    "is_loss_cut",
    "is_offloaded",
    "layer_bytes",
    "memory_bytes",
    "rank_bytes",
    "stays_loose",
]
