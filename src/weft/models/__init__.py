"""Decoder transformers in plain PyTorch: build, initialise, sample. No file here knows of ranks."""

from __future__ import annotations

from weft.models.cache import Cache
from weft.models.generate import generate
from weft.models.initialise import initialise
from weft.models.moe import MoE
from weft.models.registry import build_decoder
from weft.models.shapes import as_shapes
from weft.models.transformer import Decoder

__all__ = ["Cache", "Decoder", "MoE", "as_shapes", "build_decoder", "generate", "initialise"]
