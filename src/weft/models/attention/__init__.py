"""Causal attention, attention within borders, rotary positions, and the keys and values that sampling keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Attention",
    "Cache",
    "LayerCache",
    "Rotation",
    "SdpaCore",
    "Visible",
    "bordered_attention",
    "document_attention",
    "find_starts",
    "ids_of",
    "repeat_heads",
    "rotate",
    "rotation",
    "see_causally",
    "takes_groups",
]

if TYPE_CHECKING:
    from weft.models.attention.by_documents import bordered_attention, document_attention, find_starts, ids_of
    from weft.models.attention.cache import Cache, LayerCache
    from weft.models.attention.causal import Attention, SdpaCore, Visible, repeat_heads, see_causally, takes_groups
    from weft.models.attention.rotary import Rotation, rotate, rotation

__getattr__ = loads(
    __name__,
    {
        "Attention": ".causal",
        "Cache": ".cache",
        "LayerCache": ".cache",
        "Rotation": ".rotary",
        "SdpaCore": ".causal",
        "Visible": ".causal",
        "bordered_attention": ".by_documents",
        "document_attention": ".by_documents",
        "find_starts": ".by_documents",
        "ids_of": ".by_documents",
        "repeat_heads": ".causal",
        "rotate": ".rotary",
        "rotation": ".rotary",
        "see_causally": ".causal",
        "takes_groups": ".causal",
    },
)
