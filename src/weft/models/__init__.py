"""Decoder transformers in plain PyTorch: build, initialise, sample. No file here knows of ranks."""

from __future__ import annotations

from weft.models.attention import Cache
from weft.models.experts import MoE
from weft.models.initialise import BATCH_NORMS, initialise, initialise_parameter
from weft.models.meta_models import as_shapes
from weft.models.registry import build_decoder
from weft.models.sampling import generate
from weft.models.transformer import Block, Decoder

__all__ = [
    "BATCH_NORMS",
    "Block",
    "Cache",
    "Decoder",
    "MoE",
    "as_shapes",
    "build_decoder",
    "generate",
    "initialise",
    "initialise_parameter",
]
