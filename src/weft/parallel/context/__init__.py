"""Context parallelism: one sequence over several ranks, in three ways.

`apply_context` prepares a model. A step then cuts its batches (`cut_sequence`) and calls model and backward inside
`sequence_in_use`; outside of it the model takes whole sequences, as it did before. `dropped_attention` serves dropout
in attention, cut or not.
"""

from __future__ import annotations

from weft.parallel.context.apply import (
    apply_context,
    check_sequences,
    context_of,
    cut_sequence,
    hold_context,
    sequence_in_use,
)
from weft.parallel.context.context_mode import Context
from weft.parallel.context.dropped import AttentionDrop, dropped_attention

__all__ = [
    "AttentionDrop",
    "Context",
    "apply_context",
    "check_sequences",
    "context_of",
    "cut_sequence",
    "dropped_attention",
    "hold_context",
    "sequence_in_use",
]
