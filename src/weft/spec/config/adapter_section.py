"""[adapter]: what is trained in place of all weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.spec.config.section import Section
from weft.spec.config.setting_types import Fraction, PositiveFloat


class AdapterSection(Section):
    """An adapter beside frozen weights: low-rank matrices A and B for each of the chosen linear layers."""

    rank: Annotated[int, Field(ge=0, le=10**4)] = 0
    """Rank of A and B. 0: no adapter, all weights are trained."""
    alpha: PositiveFloat | None = None
    """The product of B and A is multiplied by alpha / rank, or by alpha / sqrt(rank) for rslora. By default twice the
    rank."""
    targets: tuple[str, ...] = Field(default=(), strict=False, examples=[["attn.q", "attn.v"]])
    """Layers with an adapter: patterns of paths or of their ends, such as "attn.q" or "blocks.0.*"; `*` matches any
    text. By default all linear layers but the head and the routers of experts."""
    dropout: Fraction = 0.0
    """Share of the adapter's inputs that training drops, chosen by position, so every plan drops the same."""
    kind: Literal["lora", "rslora", "dora"] = "lora"
    """lora; rslora: scaled by the root of the rank; dora: with a trained magnitude for each output."""
    base: Literal["stored", "int8", "nf4"] = "stored"
    """How frozen linear layers keep their weights. stored: as precision says; int8, nf4: rounded in blocks of 64, in
    1.06 and 0.56 byte a weight, and unpacked in each product (QLoRA)."""
