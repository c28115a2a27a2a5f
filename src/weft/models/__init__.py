"""Decoder transformers in plain PyTorch: build, initialise, sample. No file here knows of ranks."""

from __future__ import annotations

from weft.models.cache import Cache
from weft.models.generate import generate
from weft.models.initialise import initialise, initialise_parameter
from weft.models.moe import Experts, MoE, Router, routers
from weft.models.registry import build_decoder
from weft.models.shapes import as_shapes
from weft.models.transformer import Block, Decoder

__all__ = [
    "Block",
    "Cache",
    "Decoder",
    "Experts",
    "MoE",
    "Router",
    "as_shapes",
    "build_decoder",
    "generate",
    "initialise",
    "initialise_parameter",
    "routers",
]
