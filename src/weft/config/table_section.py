"""The section [tables] of a run's config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.config.sections import Fraction, NonNegative, PositiveFloat, Section


class TableSection(Section):
    """Optimizer and memory of the embedding tables that `layout` shards over the data ranks."""

    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "lazy_adamw"] = "rowwise_adagrad"
    """It changes only rows that a step reads. rowwise_adagrad has one sum per row. lazy_adamw changes the moments of a
    row when it is read."""
    lr: PositiveFloat = 0.02
    """Peak learning rate; `schedule` applies to it too."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), strict=False)
    """lazy_adamw: decay rates of its moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the squared gradients."""
    weight_decay: NonNegative = 0.0
    """lazy_adamw: weight decay of rows that are read."""
    cache: PositiveFloat = Field(default=0.05, le=1)
    """Share of the rows that the device caches, for tables with style host."""
    folder: str = ""
    """Folder of a mapped file for each table with style host and each of its states. "": host memory."""
    prefetch: bool = False
    """Fetch the rows that the next microbatch looks up under this one's backward. It changes no number, and saves time
    if the ranks' connection is slow."""
