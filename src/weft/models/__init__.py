"""Decoders, encoders, experts and adapters in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "BATCH_NORMS",
    "Block",
    "Cache",
    "Decoder",
    "MoE",
    "as_shapes",
    "build_decoder",
    "initialise",
    "initialise_parameter",
]

if TYPE_CHECKING:
    from weft.models.decoder import Block, Decoder, as_shapes
    from weft.models.experts import MoE
    from weft.models.initialize import BATCH_NORMS, initialise, initialise_parameter
    from weft.models.kv_cache import Cache
    from weft.models.registry import build_decoder

__getattr__ = loads(
    __name__,
    {
        "BATCH_NORMS": ".initialize",
        "Block": ".decoder",
        "Cache": ".kv_cache",
        "Decoder": ".decoder",
        "MoE": ".experts",
        "as_shapes": ".decoder",
        "build_decoder": ".registry",
        "initialise": ".initialize",
        "initialise_parameter": ".initialize",
    },
)
