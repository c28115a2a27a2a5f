"""Documents packed into one row of a Hugging Face model: attention within each, and whether they stay apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = ["attend_in_documents", "borders_of", "call_in_documents", "follow_position_ids", "why_documents_mix"]

if TYPE_CHECKING:
    from weft.parallel.layers.documents.mixed_documents import why_documents_mix
    from weft.parallel.layers.documents.packed_attention import attend_in_documents, borders_of, call_in_documents
    from weft.parallel.layers.documents.position_borders import follow_position_ids

__getattr__ = loads(
    __name__,
    {
        "attend_in_documents": ".packed_attention",
        "borders_of": ".packed_attention",
        "call_in_documents": ".packed_attention",
        "follow_position_ids": ".position_borders",
        "why_documents_mix": ".mixed_documents",
    },
)
